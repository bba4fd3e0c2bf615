"""Every planted fault ends a gate with its exit code and is named; a broken rule misses the fault it is for.

Fake workers have the fault; everything else is the gate's own code, without git, torch and a clock.
"""

import datetime as dt
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate import decision, gate, waivers
from esbench.gate.gate import REPLICATES, Gate
from esbench.gate.protocol import ARMS, Opened, Orders, Visited
from esbench.gate.records import Timed
from esbench.gate.worker_process import WorkerError, WorkerProcess, start_workers
from esbench.gate.worktree import Revision
from esbench.schema import Environment
from tests.gate.fake_worker import PROGRAM, VICTIM, in_process

PASS, FAIL, USAGE, INVALID = 0, 1, 2, 3
HUNG_S = 1.0
PROCESS_FAULTS = {"killed", "ended", "hung"}
"""Faults that need a process; the others are planted in fake workers in this process."""
NOWHERE = Environment(
    device="cpu",
    device_name="fake",
    cpu="fake",
    threads=1,
    memory_bytes=1,
    platform="",
    python="",
    torch="",
    esbench="",
)


def waiver(expires: str = "2999-01-01") -> str:
    """Return a gate.toml that waives all slowdowns of cells."""
    lines = ["[[accept]]", 'cell = "*"', 'metric = "latency_ns"', 'reason = "planted, meant to be"']
    return "\n".join([*lines, f"expires = {expires}\n"])


class Plant(NamedTuple):
    """A fault, the exit code that it must end with, and words that must be said of it."""

    fault: str
    code: int
    words: str
    gate_toml: str = ""

    @property
    def name(self) -> str:
        """What a failing test calls it."""
        return f"{self.fault}, {self.words}"


PLANTS = (
    Plant("none", PASS, "PASS"),
    Plant("slower", FAIL, VICTIM),  # one cell is slower by 2 %
    Plant("everywhere", FAIL, "geometric mean"),  # every cell is slower by 1.2 %
    Plant("missing", FAIL, VICTIM),  # a variant was removed
    Plant("dropped", FAIL, "no longer has it"),  # a row was taken out of the suite
    Plant("wrong", FAIL, "oracle"),
    Plant("peak_bytes", FAIL, "peak_bytes"),  # one byte more
    Plant("noise_bytes", FAIL, "noise_bytes"),
    Plant("launches", FAIL, "launches"),
    Plant("nan", INVALID, "no valid answer"),
    Plant("null", INVALID, "no valid answer"),
    Plant("negative", INVALID, "no valid answer"),
    Plant("zero", INVALID, "no valid answer"),
    Plant("fewer", INVALID, "times for"),  # a launch has no time
    Plant("killed", INVALID, "signal 9"),
    Plant("ended", INVALID, "exit code 0"),  # as if it were done
    Plant("hung", INVALID, "did not answer"),
    Plant("garbage", INVALID, "no valid answer"),
    Plant("half", INVALID, "no valid answer"),
    Plant("swapped", INVALID, "answered another question"),  # the answer of the other arm
    Plant("late", INVALID, "answered another question"),
    Plant("deaf", INVALID, "2 % more work was not found"),
    Plant("biased", INVALID, "equal work differs"),
    Plant("noisy", INVALID, "too noisy"),
    Plant("new", INVALID, "no cell was measured"),  # no cell is in both arms
    Plant("empty", USAGE, "no suite"),
    Plant("unloadable", USAGE, "cannot load"),
    Plant("older", USAGE, "protocol 0"),
    Plant("elsewhere", USAGE, "but not from that of head"),
    Plant("installed", USAGE, "no package of variants comes from this repository"),
    Plant("slower", PASS, "meant to be", waiver()),
    Plant("none", USAGE, "applies to nothing", waiver()),
    Plant("slower", USAGE, "expired", waiver("2001-01-01")),
    Plant("slower", USAGE, "twice", 2 * waiver()),
    Plant("slower", USAGE, "gate.toml", "[[accept]]\ncell = 3\n"),
    Plant("full disk", USAGE, "No space left"),
)


def outcome(plant: Plant) -> tuple[int, str]:
    """Run a gate on fake workers with a fault; return its exit code and what it says beyond "PASS"."""
    with tempfile.TemporaryDirectory(prefix="esbench-gate-test-") as name:
        folder = Path(name)
        if plant.gate_toml:
            (folder / waivers.FILE).write_text(plant.gate_toml, encoding="utf-8")
        if plant.fault == "full disk":
            (folder / REPLICATES).symlink_to("/dev/full")
        orders = {
            arm: Orders(arm=arm, root=str(folder / arm), device="cpu", threads=1, seed=0, suite="gate")
            for arm in ARMS
        }
        for one in orders.values():
            Path(one.root).mkdir()
        try:
            accepted = waivers.read(folder, dt.datetime.now(dt.UTC).date())
            found = Gate(
                orders=orders,
                revisions={arm: Revision(asked=arm, commit="0" * 40) for arm in ARMS},
                environment=NOWHERE,
                threads=1,
                folder=folder,
                silence_s=HUNG_S if plant.fault == "hung" else 60.0,
                start=partial(start_workers, program=(*PROGRAM, plant.fault))
                if plant.fault in PROCESS_FAULTS
                else partial(in_process, fault=plant.fault),
            ).run()
            found = waivers.apply(found, accepted)
        except (UserError, OSError) as error:
            return USAGE, str(error)
    rows = [one for one in (*found.verdicts, found.mean) if one and one.code != "no-sign"]
    words = [f"{one.status} {one.code} {one.cell} {one.metric} {one.reason} {one.accepted}" for one in rows]
    return found.exit_code, "; ".join([*words, *found.invalid, *found.unused]) or "PASS"


def is_met(plant: Plant) -> bool:
    """Whether the gate ends as it must: the right exit code for another reason is not enough."""
    code, said = outcome(plant)
    assert "\n" not in said
    assert "Traceback" not in said
    return code == plant.code and plant.words in said


@pytest.mark.parametrize("code", [PASS, FAIL, USAGE, INVALID])
def test_a_fault_ends_with_its_exit_code_and_is_named(code: int) -> None:
    """A revision against itself passes; nothing else does, unless it was waived."""
    plants = [plant for plant in PLANTS if plant.code == code]
    assert len(plants) >= 2
    assert [plant.name for plant in plants if not is_met(plant)] == []


class Break(NamedTuple):
    """A rule, what replaces it, and the exit codes of planted faults, by name, that it then misses."""

    module: Any
    name: str
    broken: Callable[..., Any]
    missed: tuple[str, ...]


def trusting(ask: Callable[..., object]) -> Callable[..., object]:
    """Take any answer for the one that was asked for."""

    def believe(self: WorkerProcess, question: object, kind: type, silence_s: float) -> object:
        try:
            return ask(self, question, kind, silence_s)
        except WorkerError:
            if kind is Opened:
                return Opened(number=0, arm=self.arm, launch_ns=1e5)
            return Visited(number=0, arm=self.arm, samples=(1e5,) * 2)

    return believe


def one_arm(
    timed: Timed, trim: float, original: Callable[..., float] = decision.replicate_log_ratio
) -> float:
    """Compare base with itself."""
    return original(msgspec.structs.replace(timed, head=timed.base), trim)


def lenient(*arguments: Any, original: Callable[..., object] = decision.decide, **others: Any) -> object:
    """Tolerate twice the time."""
    opening, found, settings = arguments
    return original(opening, found, msgspec.structs.replace(settings, margin=1.0), **others)


def sharp(*arguments: Any, original: Callable[..., Any] = decision.bounds, **others: Any) -> object:
    """Report that everything could have been detected."""
    return msgspec.structs.replace(original(*arguments, **others), mde=0.0)


def blind(*arguments: Any, original: Callable[..., Any] = gate.survey_row) -> object:
    """Store a failed row as an absent one."""
    row = original(*arguments)
    return msgspec.structs.replace(row, status="absent", reason="") if row.status == "failed" else row


def unexpired(folder: Path, _: dt.date, original: Callable[..., object] = waivers.read) -> object:
    """Read waivers as if it were long ago."""
    return original(folder, dt.date.min)


BREAKS = (
    Break(decision, "exit_code", lambda *_: PASS, ("wrong", "killed", "deaf")),
    Break(gate, "decide", lenient, ("slower",)),
    Break(decision, "control_verdicts", lambda *_: ((), []), ("deaf", "biased")),
    Break(decision, "_incomplete", lambda *_: (), ("new",)),
    Break(decision, "_count_verdicts", lambda *_: (), ("peak_bytes",)),
    Break(decision, "exact_verdicts", lambda _: [], ("missing",)),
    Break(gate, "survey_row", blind, ("wrong",)),
    Break(gate, "cells_to_confirm", lambda *_: [], ("slower",)),
    Break(decision, "geometric_mean", lambda found: [0.0] * len(next(iter(found.values()))), ("everywhere",)),
    Break(decision, "replicate_log_ratio", one_arm, ("slower",)),
    Break(decision, "bounds", sharp, ("noisy",)),
    Break(WorkerProcess, "ask", trusting(WorkerProcess.ask), ("garbage", "swapped")),
    Break(
        Gate,
        "_time",
        lambda _self, _workers, name, *_: Timed(
            cell=name, first=("base",), base=((1.0,),) * 2, head=((1.0,),) * 2
        ),
        ("fewer",),
    ),
    Break(gate, "_check_packages", lambda *_: None, ("elsewhere", "installed")),
    Break(waivers, "_was_measured", lambda *_: False, ("none, applies to nothing",)),
    Break(waivers, "read", unexpired, ("slower, expired",)),
)


def test_a_broken_rule_misses_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule is needed: without it the gate ends otherwise than it must."""
    for rule in BREAKS:
        for missed in rule.missed:
            plant = next(one for one in PLANTS if missed in {one.fault, one.name})
            with monkeypatch.context() as broken:
                broken.setattr(rule.module, rule.name, rule.broken)
                if rule.name == "exit_code":
                    broken.setattr(waivers, "exit_code", rule.broken)
                if rule.name == "bounds":  # the controls would notice as well
                    broken.setattr(decision, "control_verdicts", lambda *_: ((), []))
                assert not is_met(plant), (rule.name, plant.name)
