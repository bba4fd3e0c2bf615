"""Faults planted into workers, waivers and the disk, with the exit code that the gate must end with.

Fake workers show the fault; all from starting them to the exit code is the gate's own code, except git,
torch and the clock.
"""

import datetime as dt
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from esbench.errors import UserError
from esbench.gate import waivers
from esbench.gate.proceedings import EVIDENCE, Proceedings
from esbench.gate.protocol import ARMS, Orders
from esbench.gate.records import Decision
from esbench.gate.referee import Referee
from esbench.gate.worktree import Revision
from esbench.schema import Environment
from tests.gate.fake_worker import VICTIM

PASS, FAIL, USAGE, INVALID = 0, 1, 2, 3
SILENCE_S = 60.0
"""A stand-in that says nothing for so long hangs: a machine may be slow, and nobody waits for who answers."""
HUNG_S = 4.0
"""The one that is known to hang is not waited for as long."""
FULL = Path("/dev/full")
"""A disk without room, where the system has one."""
TOGETHER = 4
"""So many faults are tried at the same time: nothing is timed."""
ACCEPT = """
[[accept]]
cell = "{cell}"
metric = "latency_ns"
reason = "planted, and meant to be"
expires = {expires}
"""


class Plant(NamedTuple):
    """A fault, the exit code that it must end with, and a word that must be said of it."""

    fault: str
    code: int
    word: str
    meaning: str
    gate_toml: str = ""


class Trial(NamedTuple):
    """What the gate made of a fault: its exit code, and what it said."""

    plant: Plant
    code: int
    said: str

    @property
    def holds(self) -> bool:
        """Whether it is what must be."""
        return self.code == self.plant.code and self.plant.word in self.said


PLANTS = (
    Plant("none", PASS, "PASS", "a revision against itself"),
    Plant("slower", FAIL, VICTIM, "one cell is slower by 2 %"),
    Plant("everywhere", FAIL, "geometric mean", "every cell is slower by 1.2 %"),
    Plant("missing", FAIL, VICTIM, "a variant was removed"),
    Plant("dropped", FAIL, "no longer", "a row was taken out of the suite"),
    Plant("wrong", FAIL, "oracle", "an output is wrong"),
    Plant("peak_bytes", FAIL, "peak_bytes", "a call holds one byte more"),
    Plant("noise_bytes", FAIL, "noise_bytes", "the noise holds one byte more"),
    Plant("launches", FAIL, "launches", "a call launches one kernel more"),
    Plant("nan", INVALID, "no usable answer", "a time is NaN"),
    Plant("null", INVALID, "no usable answer", "a time is missing"),
    Plant("negative", INVALID, "no usable answer", "a time is negative"),
    Plant("zero", INVALID, "no usable answer", "a time is zero"),
    Plant("fewer", INVALID, "times for", "a launch has no time"),
    Plant("killed", INVALID, "signal 9", "a worker is killed"),
    Plant("ended", INVALID, "exit code 0", "a worker ends as if it were done"),
    Plant("hung", INVALID, "said nothing", "a worker hangs"),
    Plant("garbage", INVALID, "no usable answer", "a worker prints garbage"),
    Plant("half", INVALID, "no usable answer", "a worker writes half a line"),
    Plant("swapped", INVALID, "was not asked", "an answer is that of the other arm"),
    Plant("late", INVALID, "was not asked", "an answer is that to another question"),
    Plant("deaf", INVALID, "2 % that were planted", "the planted 2 % do not show"),
    Plant("biased", INVALID, "not alike", "the same work takes longer in one arm"),
    Plant("noisy", INVALID, "too noisy", "the machine is too noisy to see anything"),
    Plant("new", INVALID, "no cell was measured", "no cell is in both arms"),
    Plant("empty", USAGE, "no suite", "there are no cells"),
    Plant("unloadable", USAGE, "cannot load", "the base cannot be loaded"),
    Plant("older", USAGE, "protocol", "a worker speaks another protocol"),
    Plant("elsewhere", USAGE, "of its own", "a package is not the tree's own"),
    Plant(
        "slower",
        PASS,
        "meant to be",
        "what is slower is accepted",
        ACCEPT.format(cell="*", expires="2999-01-01"),
    ),
    Plant(
        "none",
        USAGE,
        "nothing is accepted",
        "an acceptance that accepts nothing",
        ACCEPT.format(cell="*", expires="2999-01-01"),
    ),
    Plant(
        "slower",
        USAGE,
        "expired",
        "an acceptance that has expired",
        ACCEPT.format(cell="*", expires="2001-01-01"),
    ),
    Plant(
        "slower",
        USAGE,
        "twice",
        "an acceptance that stands there twice",
        2 * ACCEPT.format(cell="*", expires="2999-01-01"),
    ),
    Plant("slower", USAGE, "gate.toml", "an acceptance that cannot be read", "[[accept]]\ncell = 3\n"),
    Plant("full disk", USAGE, "No space left", "the disk is full"),
)


def trials() -> Iterator[Trial]:
    """Try every fault; yield what the gate made of it, in their order."""
    plants = [plant for plant in PLANTS if plant.fault != "full disk" or FULL.exists()]
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield from pool.map(trial, plants)


def trial(plant: Plant) -> Trial:
    """Run a gate on stand-ins with a fault."""
    with tempfile.TemporaryDirectory(prefix="esbench-gate-test-") as name:
        folder = Path(name)
        if plant.gate_toml:
            (folder / waivers.FILE).write_text(plant.gate_toml, encoding="utf-8")
        if plant.fault == "full disk":
            (folder / EVIDENCE).symlink_to(FULL)
        try:
            judgement = _judged(plant.fault, folder)
        except (UserError, OSError) as error:
            return Trial(plant, USAGE, str(error))
    return Trial(plant, judgement.exit_code, _said(judgement))


def _judged(fault: str, folder: Path) -> Decision:
    accepted = waivers.read(folder, dt.datetime.now(dt.UTC).date())
    roots = {arm: folder / arm for arm in ARMS}
    for root in roots.values():
        root.mkdir()
    orders = {
        arm: Orders(arm=arm, root=str(roots[arm]), device="cpu", threads=1, seed=0, suite="gate")
        for arm in ARMS
    }
    program = ("-P", "-m", "tests.gate.fake_worker", fault)
    proceedings = Proceedings(
        referee=Referee(orders, HUNG_S if fault == "hung" else SILENCE_S, program),
        revisions={arm: Revision(asked=arm, commit="0" * 40) for arm in ARMS},
        environment=_NOWHERE,
        threads=1,
        folder=folder,
    )
    return waivers.apply(proceedings.conduct(), accepted)


def _said(judgement: Decision) -> str:
    """Return what a judgement says beyond its exit code."""
    rows = [one for one in (*judgement.verdicts, judgement.mean) if one and one.code != "no-sign"]
    words = [f"{one.status} {one.code} {one.cell} {one.metric} {one.reason} {one.accepted}" for one in rows]
    return "; ".join([*words, *judgement.invalid, *judgement.unused]) or "PASS"


_NOWHERE = Environment(
    device="cpu",
    device_name="stand-in",
    cpu="stand-in",
    threads=1,
    memory_bytes=1,
    platform="",
    python="",
    torch="",
    esbench="",
)
