"""The study of the gate: its stored data, its drawn suites and its page."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from esbench.errors import UserError
from esbench.gate.decision import Evidence
from esbench.gate.records import Settings
from esbench.studies import gate_power, newest_files
from esbench.studies.gate_power import ALL_CELLS, NOTHING, ONE_CELL, CellLogs, GateStudy
from tests.gate.gate_cases import ABLE, CELLS, evidence, fake_gate, replay, surveyed

SETTINGS = Settings()


def study(results: Path, measured: Evidence) -> GateStudy:
    """Measure a study on fake workers; store it and read it back."""
    path = gate_power.measure(fake_gate(results, replay(measured)), results, 3, 12)
    assert newest_files(results, gate_power.FOLDER) == [path]
    return msgspec.json.decode(path.read_bytes(), type=GateStudy)


def cells(spread: float, count: int, between: float = 0.0) -> list[CellLogs]:
    """Return cells with normal log ratios in twelve processes, each with its own offset."""
    rng = np.random.default_rng(0)
    logs = rng.normal(0, spread, (count, 12, 56)) + rng.normal(0, between, (count, 12, 1))
    return [
        CellLogs(f"cell {index}", tuple(map(tuple, of_cell.tolist()))) for index, of_cell in enumerate(logs)
    ]


def test_drawn_suites_find_planted_slowdowns_and_nothing_else() -> None:
    """Unchanged suites raise no alarm, power grows with the slowdown, and only changed cells fail."""
    quiet, noisy = cells(0.02, 20), cells(1.5, 3)
    unchanged = gate_power.judge_suites(quiet, SETTINGS, NOTHING, 0.0, 40)
    assert (unchanged.found, unchanged.others, unchanged.inconclusive) == (0, 0, 0)
    assert 20 * SETTINGS.looks[0] < unchanged.replicates < 20 * SETTINGS.looks[1]
    results = [
        gate_power.judge_suites(quiet, SETTINGS, ONE_CELL, slower, 30) for slower in (0.005, 0.02, 0.05)
    ]
    assert results[0].found < 6
    assert 20 < results[1].found <= results[2].found == 30
    assert all(result.others == 0 for result in results)
    assert gate_power.judge_suites(quiet, SETTINGS, ALL_CELLS, 0.015, 30).found == 30
    unclear = gate_power.judge_suites(noisy, SETTINGS, NOTHING, 0.0, 20)
    assert (unclear.inconclusive, unclear.found) == (20, 0)


def test_the_variance_is_split_between_replicates_and_processes() -> None:
    """Each part is that of the invented cells."""
    for between in (0.0, 0.02):
        replicates, processes = gate_power.variances(cells(0.03, 200, between), SETTINGS.trim)
        assert replicates == pytest.approx(0.03**2, rel=0.2)
        assert processes == pytest.approx(between**2, abs=0.03**2 / 100)


def test_a_page_has_the_results_of_the_newest_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study stores the log ratios of all replicates; its page shows its results.

    A study without cells, or a file of another kind, is reported.
    """
    monkeypatch.setattr(
        gate_power, "PLANTED", ((NOTHING, 0.0, 60), (ONE_CELL, 0.05, 20), (ALL_CELLS, 0.01, 20))
    )
    measured = study(tmp_path, evidence())
    assert [row.name for row in measured.cells] == [cell.name for cell in CELLS]
    assert {(len(row.log_ratios), *map(len, row.log_ratios)) for row in measured.cells} == {(3, 12, 12, 12)}
    (path,) = gate_power.render(tmp_path, tmp_path / "out")
    text = path.read_text(encoding="utf-8")
    assert text == gate_power.page([measured])
    rows = [[cell.strip() for cell in line.split("|")[1:8]] for line in text.splitlines() if "|" in line]
    assert ["nothing", "0 %", "60", "0 %", "0 % to 5.96 %", "at most 1.00 %", "0"] in rows
    assert ["one cell", "5.00 %", "20", "100 %"] in [row[:4] for row in rows]
    assert re.search(
        r"have a standard deviation of 0\.01\d+ %; processes add -?[.\d]+ % of all variance", text
    )
    with pytest.raises(UserError, match="no variant of the suite is computed correctly"):
        study(tmp_path / "new", evidence(rows=[surveyed(ABLE, "head")]))
    assert gate_power.render(tmp_path / "empty", tmp_path) == []
    newest_files(tmp_path, gate_power.FOLDER)[0].write_text("{}")
    with pytest.raises(UserError, match=r"not a study of the gate: .*missing required field"):
        gate_power.render(tmp_path, tmp_path / "out")
