"""Every planted fault ends a gate with the right exit code and is named.

Fake workers have the fault; everything else is the gate's own code, without git, torch or a clock.
"""

import datetime as dt
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate import waivers
from esbench.gate.gate import REPLICATES
from esbench.gate.records import ARMS, CONTROLS, Line, Replicate, Settings, Surveyed
from tests.gate.fake_worker import NAMES, UNTIMED, VICTIM, fake_gate

PASS, FAIL, USAGE, INVALID = 0, 1, 2, 3
LAST_DAY = dt.date.today() + dt.timedelta(days=300)  # noqa: DTZ011  a waiver's last day is a local date
WAIVER = f'[[accept]]\ncell = "*"\nmetric = "latency_ns"\nreason = "meant to be so"\nexpires = {LAST_DAY}\n'


def outcome(fault: str, folder: Path, gate_toml: str = "") -> tuple[int, str]:
    """Run a gate on fake workers with a fault; return its exit code and its messages other than "PASS"."""
    folder.mkdir()
    (folder / waivers.FILE).write_text(gate_toml, encoding="utf-8")
    gate = fake_gate(folder, fault)
    try:
        accepted = waivers.read(folder, dt.datetime.now(dt.UTC).date())
        decision = waivers.apply(gate.run(folder), accepted)
    except UserError as error:
        return USAGE, str(error)
    messages = [
        f"{row.status} {row.cell} {row.metric} {row.reason} {row.accepted}"
        for row in decision.all_verdicts
        if row.status != "PASS"
    ]
    return decision.exit_code, "; ".join([*messages, *decision.invalid, *decision.unused]) or "PASS"


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("none", PASS, "PASS"),
        ("slower", FAIL, VICTIM),  # one cell is slower by 2 %
        ("sometimes", FAIL, VICTIM),  # a tenth of the calls of one cell are slower by 30 %
        ("everywhere", FAIL, "geometric mean"),  # every cell is slower by 1.2 %
        ("missing", FAIL, VICTIM),  # a variant was removed
        ("wrong", FAIL, "wrong result"),  # the output of head is wrong
        ("peak_bytes", FAIL, f"{UNTIMED}Linear | Linear(4, 4) members=8 | forward | host peak_bytes"),
        ("launches", FAIL, "launches"),  # one more launch
        ("graphs", FAIL, "graphs"),  # one more compiled graph
        ("dies", INVALID, "the worker ended with signal 9; not all replicates were measured: Able"),
        ("deaf", INVALID, "2 % more work was not found"),  # control work takes the same time in both arms
        ("biased", INVALID, "equal work differs"),  # control work is 3 % slower in head
        ("fast", INVALID, "equal work differs"),  # control work is 3 % faster in head
        ("noisy", INVALID, "too noisy"),  # set-ups differ by 50 %
        ("new", INVALID, "no cell was measured"),  # no cell is in both arms
        ("empty", USAGE, "no suite of that name (base is base, 000"),  # neither revision has the suite
        ("unloadable", USAGE, "head cannot be loaded after base"),
    ],
)
def test_a_fault_ends_with_its_exit_code_and_is_named(
    fault: str, code: int, words: str, tmp_path: Path
) -> None:
    """An unchanged revision passes; a fault needs both its exit code and its name in the output."""
    exit_code, messages = outcome(fault, tmp_path / "gate")
    assert (exit_code, "\n" in messages) == (code, False), messages
    assert words in messages
    if fault == "slower":  # only the victim fails, and it passes if waived
        assert messages.count("FAIL") == 1
        exit_code, messages = outcome(fault, tmp_path / "waived", WAIVER)
        assert exit_code == PASS
        assert "meant to be" in messages
    if fault == "none":
        exit_code, messages = outcome(fault, tmp_path / "unused", WAIVER)
        assert exit_code == USAGE
        assert "applies to nothing" in messages


def test_every_sample_is_on_disk(tmp_path: Path) -> None:
    """All timed cells are in the first look, only undecided ones in later looks; counts are of all cells."""
    looks = Settings().looks
    outcome("unclear", tmp_path / "gate")
    lines = (tmp_path / "gate" / REPLICATES).read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=Line) for line in lines]
    rows = [record for record in records if isinstance(record, Surveyed)]
    assert [(row.cell.variant.scheme, row.arm) for row in rows] == [
        (name, arm) for name in (*NAMES, UNTIMED) for arm in ARMS
    ]
    replicates = [record for record in records if isinstance(record, Replicate)]
    first = [replicate for replicate in replicates if replicate.look == 0]
    assert Counter(replicate.cell.split("Linear")[0] for replicate in first) == {
        **dict.fromkeys(NAMES, looks[0]),
        **{f"{control} | host": looks[0] for control in CONTROLS},
    }
    assert {replicate.process for replicate in first} == {*range(Settings().processes)}
    later = Counter(replicate.cell.split("Linear")[0] for replicate in replicates if replicate.look)
    assert later.keys() == {VICTIM}
    assert later[VICTIM] in {count - looks[0] for count in looks[1:]}
