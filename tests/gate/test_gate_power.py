"""The study of the gate: its stored data, its drawn suites and its page."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from esbench.errors import UserError
from esbench.gate.records import Settings
from esbench.report.plots.style import FAMILIES
from esbench.studies import gate_power, newest_files
from esbench.studies.gate_power import ALL_CELLS, ONE_CELL, CellLogs, GateStudy
from tests.gate.fake_worker import NAMES, fake_gate

SETTINGS = Settings()


def study(results: Path, fault: str = "none") -> GateStudy:
    """Measure a study of four cells on fake workers; store it and read it back."""
    path = gate_power.measure(fake_gate(results, fault), 3, 8, results)
    assert newest_files(results, gate_power.FOLDER) == [path]
    return msgspec.json.decode(path.read_bytes(), type=GateStudy)


def cells(spread: float, count: int, between: float = 0.0) -> list[CellLogs]:
    """Return cells with normal log ratios in twelve processes, each with its own offset."""
    rng = np.random.default_rng(0)
    logs = rng.normal(0, spread, (count, 12, 56)) + rng.normal(0, between, (count, 12, 1))
    return [
        CellLogs(f"cell {index}", tuple(map(tuple, of_cell.tolist())), spread**2 / 10)
        for index, of_cell in enumerate(logs)
    ]


def test_drawn_suites_find_planted_slowdowns_and_nothing_else() -> None:
    """Unchanged suites raise no alarm, power grows with the slowdown, and only changed cells fail."""
    quiet = cells(0.03, 20)
    alarms = gate_power.count_alarms(quiet, SETTINGS, 40)
    assert (alarms.alarmed, alarms.failed, alarms.suites, alarms.cells) == (0, 0, 40, 20)
    assert 20 * SETTINGS.looks[0] < alarms.replicates < 20 * SETTINGS.looks[1]
    powers = [
        gate_power.count_detections(quiet, SETTINGS, ONE_CELL, slower, 30) for slower in (0.005, 0.02, 0.05)
    ]
    assert powers[0].share < 0.2
    assert 0.7 < powers[1].share <= powers[2].share == 1
    assert all(power.others == 0 for power in powers)
    everywhere = gate_power.count_detections(quiet, SETTINGS, ALL_CELLS, 0.015, 30)
    assert everywhere.share == everywhere.by_mean / 30 == 1
    noisy = gate_power.count_alarms(cells(1.5, 3), SETTINGS, 20)
    assert (noisy.inconclusive_suites, noisy.alarmed) == (20, 0)


def test_the_variance_is_split_between_rounds_set_ups_and_processes() -> None:
    """Each part is that of the invented cells, also if a few replicates were disturbed."""
    for between in (0.0, 0.02):
        parts = gate_power.shares_of_variance(cells(0.03, 200, between), SETTINGS.trim)
        assert parts.rounds == pytest.approx(0.03**2 / 10)
        assert parts.set_ups == pytest.approx(0.9 * 0.03**2, rel=0.2)
        assert parts.processes == pytest.approx(between**2, abs=0.03**2 / 100)


def test_a_page_has_the_results_of_the_newest_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study stores the log ratios of all replicates; its page and plot show its results.

    A study without cells, or a file of another kind, is reported.
    """
    monkeypatch.setattr(gate_power, "SUITES", 60)
    monkeypatch.setattr(gate_power, "TRIALS", 20)
    measured = study(tmp_path)
    assert [row.name.split("Linear")[0] for row in measured.cells] == [*NAMES]
    assert {(len(row.log_ratios), *map(len, row.log_ratios)) for row in measured.cells} == {(3, 8, 8, 8)}
    path, picture = gate_power.render(tmp_path, tmp_path / "out")
    drawn = picture.read_text()
    assert re.search(r"The gate finds .* and raises no false alarm in 60 unchanged suites", drawn)
    assert FAMILIES["low rank"].color.lower() in drawn  # the palette of all plots
    text = path.read_text(encoding="utf-8")
    assert text == gate_power.page([measured], tmp_path)
    assert "goal: at most 1.00 % | 0 %: met" in text
    assert "| 0 % to 5.96 %" in text
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if "|" in line]
    assert ["one cell", "5.00 %", "20"] in rows
    assert {"rounds", "set-ups", "processes"} <= {row[0] for row in rows}
    monkeypatch.setattr(gate_power, "MAX_ALARM_RATE", -1.0)
    assert "0 %: not met" in gate_power.page([measured], tmp_path)
    with pytest.raises(UserError, match="no variant of the suite is computed correctly"):
        study(tmp_path / "new", fault="new")
    assert gate_power.render(tmp_path / "empty", tmp_path) == []
    newest_files(tmp_path, gate_power.FOLDER)[0].write_text("{}")
    with pytest.raises(UserError, match=r"not a study of the gate: .*missing required field"):
        gate_power.render(tmp_path, tmp_path / "out")
