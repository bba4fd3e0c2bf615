"""Every planted fault ends a gate with the right exit code and is named.

Fake workers have the fault; everything else is the gate's own code, without git, torch or a clock.
"""

import datetime as dt
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate import waivers
from esbench.gate.gate import REPLICATES
from esbench.gate.records import ARMS, Line, Replicate
from tests.gate.fake_worker import VICTIM, FakeWorkers, fake_gate

PASS, FAIL, USAGE, INVALID = 0, 1, 2, 3
LAST_DAY = dt.date.today() + dt.timedelta(days=300)  # noqa: DTZ011  a waiver's last day is a local date
WAIVER = f'[[accept]]\ncell = "*"\nmetric = "latency_ns"\nreason = "meant to be so"\nexpires = {LAST_DAY}\n'


def outcome(fault: str | FakeWorkers, folder: Path, gate_toml: str = "") -> tuple[int, str]:
    """Run a gate on fake workers with a fault; return its exit code and its messages other than "PASS"."""
    folder.mkdir()
    (folder / waivers.FILE).write_text(gate_toml, encoding="utf-8")
    gate = fake_gate(folder, FakeWorkers(fault) if isinstance(fault, str) else fault)
    try:
        accepted = waivers.read(folder, dt.datetime.now(dt.UTC).date())
        decision = waivers.apply(gate.run(folder), accepted)
    except UserError as error:
        return USAGE, str(error)
    messages = [
        f"{row.status} {row.code} {row.cell} {row.metric} {row.reason} {row.accepted}"
        for row in decision.all_verdicts
        if row.code != "no-sign"
    ]
    return decision.exit_code, "; ".join([*messages, *decision.invalid, *decision.unused]) or "PASS"


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("none", PASS, "PASS"),
        ("slower", FAIL, VICTIM),  # one cell is slower by 2 %
        ("everywhere", FAIL, "geometric mean"),  # every cell is slower by 1.2 %
        ("missing", FAIL, VICTIM),  # a variant was removed
        ("dropped", FAIL, "no longer has it"),  # a row was removed from the suite
        ("wrong", FAIL, "wrong result"),  # the output of head is wrong
        ("peak_bytes", FAIL, "peak_bytes"),  # one more byte
        ("dies", INVALID, "the worker of head ended"),  # while a cell is timed
        ("deaf", INVALID, "2 % more work was not found"),  # control work takes the same time in both arms
        ("biased", INVALID, "equal work differs"),  # control work is 3 % slower in head
        ("noisy", INVALID, "too noisy"),  # processes differ by 30 %
        ("new", INVALID, "no cell was measured"),  # no cell is in both arms
        ("empty", USAGE, "no suite"),  # neither revision has the suite
        ("unloadable", USAGE, "the worker of base ended (base is base, 000"),  # base cannot be imported
        ("elsewhere", USAGE, "head does not contain the variant package impls"),
        ("installed", USAGE, "no variant package is part of this repository"),  # in neither revision
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
    """All cells have three replicates; suspects and controls have ten, with three times the rounds."""
    workers = FakeWorkers("none")
    outcome(workers, tmp_path / "gate")
    lines = (tmp_path / "gate" / REPLICATES).read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=Line) for line in lines]
    replicates = [record for record in records if isinstance(record, Replicate)]
    assert [replicate.stage for replicate in replicates] == ["screen"] * 3 + ["confirm"] * 10
    assert {len(replicate.cells) for replicate in replicates[:3]} == {6}
    assert {timed.cell.split()[0] for timed in replicates[3].cells} == {"control:"}
    for replicate, rounds in ((replicates[0], 20), (replicates[3], 60)):
        for timed in replicate.cells:
            assert len(timed.first) == rounds
            assert len(timed.base) == len(timed.head) == 2 * rounds
            assert {*timed.first} == {*ARMS}
    rounds_of_visits = zip(*(workers.visited[index::4] for index in range(4)), strict=True)
    assert set(rounds_of_visits) == {("base", "head", "head", "base"), ("head", "base", "base", "head")}
    orders = [[timed.cell for timed in replicate.cells] for replicate in replicates[:3]]
    assert orders[0] != orders[1] or orders[1] != orders[2]  # at least one order was shuffled
