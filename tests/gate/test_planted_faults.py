"""Every planted fault ends a gate with the right exit code and is named.

Fake workers have the fault; everything else is the gate's own code, without git, torch or a clock.
"""

import datetime as dt
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate import waivers
from esbench.gate.decision import Evidence, decide
from esbench.gate.gate import REPLICATES
from esbench.gate.records import ARMS, MORE, SAME, Message, Opening, Orders, Replicate, Settings, Surveyed
from tests.gate.gate_cases import ABLE, BAKER, CELLS, DOG, evidence, fake_gate, replay, surveyed, surveys
from tests.gate.gate_cases import CONTROLS as MEASURED

PASS, FAIL, USAGE, INVALID = 0, 1, 2, 3
LAST_DAY = dt.date.today() + dt.timedelta(days=300)  # noqa: DTZ011  a waiver's last day is a local date
WAIVER = f'[[accept]]\ncell = "*"\nmetric = "latency_ns"\nreason = "meant to be so"\nexpires = {LAST_DAY}\n'
WITHOUT_DOG = surveys(CELLS, msgspec.structs.replace(surveyed(DOG, "head"), timed=False))
"""Surveys of which the times of a cell are not compared."""


def changed(status: str = "ok", **more: float) -> Evidence:
    """Return evidence in which a row of head has another status or counts."""
    return evidence(rows=surveys(CELLS, surveyed(BAKER, "head", status, "it is off", **more)))


def outcome(
    measured: Evidence, folder: Path, gate_toml: str = "", dies_in: str = "", *, whole: bool = True
) -> tuple[int, str]:
    """Run a gate on fake workers; return its exit code and its messages other than "PASS"."""
    folder.mkdir()
    (folder / waivers.FILE).write_text(gate_toml, encoding="utf-8")
    try:
        accepted = waivers.read(folder, dt.datetime.now(dt.UTC).date())
        found = fake_gate(folder, replay(measured, dies_in)).run(folder)
    except UserError as error:
        return USAGE, str(error)
    decision = decide(found, Settings(), accepted, whole=whole)
    messages = [
        f"{row.status} {row.cell} {row.metric} {row.reason} {row.accepted}"
        for row in decision.verdicts
        if row.status != "PASS"
    ]
    return decision.exit_code, "; ".join([*messages, *decision.invalid, *decision.unused]) or "PASS"


@pytest.mark.parametrize(
    ("measured", "code", "words"),
    [
        (evidence(), PASS, "PASS"),
        (evidence({BAKER.name: 0.02}), FAIL, f"FAIL {BAKER.name} latency_ns"),
        (evidence({cell.name: 0.012 for cell in CELLS}, noise=0.02), FAIL, "FAIL geometric mean latency_ns"),
        (changed("unavailable"), FAIL, f"FAIL {BAKER.name} row missing: it is off"),
        (changed("failed"), FAIL, f"FAIL {BAKER.name} output it is off"),
        (changed(peak_bytes=1001.0), FAIL, f"FAIL {BAKER.name} peak_bytes"),
        (changed(launches=8.0), FAIL, f"FAIL {BAKER.name} launches"),
        (changed(graphs=2.0), FAIL, f"FAIL {BAKER.name} graphs"),
        (evidence(controls={**MEASURED, f"{MORE} | host": 0.0}), INVALID, "2 % more work was not found"),
        (evidence(controls={**MEASURED, f"{SAME} | host": 0.03}), INVALID, "equal work differs"),
        (evidence(controls={**MEASURED, f"{SAME} | host": -0.03}), INVALID, "equal work differs"),
        (evidence(noise=1.0), INVALID, "INCONCLUSIVE"),
        (evidence(rows=[surveyed(ABLE, "head")]), INVALID, "no cell was meas"),
    ],
)
def test_a_fault_ends_with_its_exit_code_and_is_named(
    measured: Evidence, code: int, words: str, tmp_path: Path
) -> None:
    """An unchanged revision passes; a fault needs both its exit code and its name in the output."""
    exit_code, messages = outcome(measured, tmp_path / "gate")
    assert (exit_code, "\n" in messages) == (code, False), messages
    assert words in messages


def test_a_slower_cell_fails_alone_and_can_be_waived(tmp_path: Path) -> None:
    """A waiver that applies to nothing is an error. Only times of the suite's timed cells count."""
    measured = evidence({ABLE.name: -0.02, BAKER.name: 0.02, DOG.name: 0.02}, rows=WITHOUT_DOG)
    exit_code, messages = outcome(measured, tmp_path / "gate")
    assert (exit_code, messages.count("FAIL")) == (FAIL, 1)
    exit_code, messages = outcome(measured, tmp_path / "waived", WAIVER)
    assert (exit_code, "meant to be" in messages) == (PASS, True)
    exit_code, messages = outcome(evidence(), tmp_path / "unused", WAIVER)
    assert (exit_code, "applies to nothing" in messages) == (USAGE, True)
    assert outcome(evidence(), tmp_path / "part", WAIVER, whole=False) == (PASS, "PASS")


def test_a_worker_that_dies_or_leaves_a_replicate_out_makes_a_gate_invalid(tmp_path: Path) -> None:
    """If it dies before anything is timed, nothing can be compared; each error is one line."""
    died = "the worker ended with signal 9"
    exit_code, messages = outcome(evidence(), tmp_path / "gate", dies_in="look")
    assert (exit_code, messages) == (INVALID, died)
    measured = evidence()
    measured.log_ratios[BAKER.name][0].pop()
    exit_code, messages = outcome(measured, tmp_path / "one less")
    assert (exit_code, messages) == (INVALID, f"not all replicates were measured: {BAKER.name}")
    zeros = 12 * "0"
    expected = (USAGE, f"{died} (base is base, {zeros}, head is head, {zeros})")
    assert outcome(evidence(), tmp_path / "survey", dies_in="survey") == expected


def test_every_sample_is_on_disk(tmp_path: Path) -> None:
    """All timed cells are in the first look, only undecided ones in later looks; counts are of all cells."""
    measured = evidence({BAKER.name: 0.01}, rows=WITHOUT_DOG)
    measured.log_ratios[BAKER.name] = evidence({BAKER.name: 0.01}, noise=0.06).log_ratios[BAKER.name]
    outcome(measured, tmp_path / "gate")
    lines = (tmp_path / "gate" / REPLICATES).read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=Opening | Surveyed | Replicate) for line in lines]
    rows = [record for record in records if isinstance(record, Surveyed)]
    assert {(row.cell, row.arm) for row in rows} == {(cell, arm) for cell in CELLS for arm in ARMS}
    assert len(rows) == 2 * len(CELLS)
    replicates = [record for record in records if isinstance(record, Replicate)]
    assert Counter((replicate.cell, replicate.look) for replicate in replicates) == {
        **{(name, 0): 36 for name in (ABLE.name, *MEASURED)},
        **{(BAKER.name, look): count for look, count in enumerate((36, 72, 108))},
    }
    assert {replicate.process for replicate in replicates} == {*range(Settings().processes)}


def test_no_process_starts_after_all_cells_are_decided(tmp_path: Path) -> None:
    """Two survey, and four measure the first look."""
    measured, started = evidence(), list[Orders]()

    def start(orders: Sequence[Orders], folder: Path) -> Generator[Message]:
        started.extend(orders)
        yield from replay(measured)(orders, folder)

    fake_gate(tmp_path, start).run(tmp_path)
    assert [(orders.process, orders.processes, bool(orders.names)) for orders in started] == [
        *((number, 2, False) for number in range(2)),
        *((number, 4, True) for number in range(4)),
    ]


def test_pairs_of_processes_are_replicates_of_arms_that_are_imported_separately(tmp_path: Path) -> None:
    """Each look starts as many pairs as it adds replicates; a replicate is the mean of its pair's set-ups."""
    measured, started = evidence({BAKER.name: 0.01}, noise=0.06), list[Orders]()

    def start(orders: Sequence[Orders], folder: Path) -> Generator[Message]:
        started.extend(orders)
        yield from replay(measured)(orders, folder)

    gate = fake_gate(tmp_path, start)
    gate.settings = Settings.of(0.005, separate=True)
    found = gate.run(tmp_path).log_ratios[BAKER.name]
    assert [len(look) for look in found] == [12, 24, 36]
    looks = [orders for orders in started if orders.names]
    assert Counter((orders.look, orders.processes, orders.replicates) for orders in looks) == {
        (0, 12, 36): 12,
        (1, 24, 72): 24,
        (2, 36, 108): 36,
    }
    assert found[0][1] == pytest.approx(fmean(measured.log_ratios[BAKER.name][0][1::12]))


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """Every sample must be stored, so the gate ends; the error names the file."""
    (tmp_path / REPLICATES).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / REPLICATES}'"):
        fake_gate(tmp_path, replay(evidence())).run(tmp_path)
