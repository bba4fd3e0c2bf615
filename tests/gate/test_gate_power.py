"""The study of the gate: its stored data, its resampled suites and its page."""

import math
import re
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from esbench.errors import UserError
from esbench.gate.decision import MEAN
from esbench.gate.records import Settings
from esbench.report.plots.style import FAMILIES
from esbench.studies import gate_power, newest_files
from esbench.studies.gate_power import CONTROLS, CellLogs, GateStudy, Power
from tests.gate.fake_worker import NAMES, FakeWorkers, fake_gate

SETTINGS = Settings()


@pytest.fixture(autouse=True)
def few_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resample few suites, because thousands take seconds."""
    monkeypatch.setattr(gate_power, "SUITES", 60)
    monkeypatch.setattr(gate_power, "TRIALS", 20)


def study(results: Path, replicates: int = 16, fault: str = "none") -> GateStudy:
    """Measure a study of four cells on fake workers; store it and read it back."""
    path = gate_power.measure(fake_gate(results, FakeWorkers(fault)), replicates, results)
    assert newest_files(results, gate_power.FOLDER) == [path]
    return msgspec.json.decode(path.read_bytes(), type=GateStudy)


def test_a_study_holds_the_log_ratios_of_all_replicates(tmp_path: Path) -> None:
    """A control measures as its planted slowdown; with a third of the rounds it is less certain."""
    measured = study(tmp_path)
    assert [row.name.split("Linear")[0] for row in measured.cells] == [*NAMES]
    assert {len(logs) for row in measured.cells for logs in (row.confirm, row.screen)} == {16}
    assert len(measured.controls) == len(CONTROLS)
    for control in measured.controls:
        planted = math.log1p(CONTROLS[control.name.removesuffix(" | host")])
        assert abs(np.mean(control.confirm) - planted) < 0.002
    every = [*measured.cells, *measured.controls]
    assert sum(np.var(row.screen) for row in every) > sum(np.var(row.confirm) for row in every)


def normal_study(spread: float, cells: int, offset: float = 0.0) -> GateStudy:
    """Return a study of 16 replicates of cells, and of control work that is 5 % slower."""
    rng = np.random.default_rng(0)
    rows = rng.normal(offset, spread, (cells, 16))

    def logs(name: str, row: np.ndarray) -> CellLogs:
        return CellLogs(name, tuple(row.tolist()), tuple(row.tolist()))

    return GateStudy(
        schema=gate_power.SCHEMA,
        opening=Mock(),
        wall_s=0.0,
        cells=tuple(logs(f"cell {k}", row) for k, row in enumerate(rows)),
        controls=(logs("control", rows[0] + 0.05),),
    )


def test_resampled_suites_find_planted_slowdowns_and_nothing_else() -> None:
    """Unchanged suites raise no alarm, power grows with the slowdown, and only changed cells fail."""
    quiet = normal_study(0.004, 40)
    alarms = gate_power.count_alarms(quiet, SETTINGS, 60)
    assert (alarms.alarmed, alarms.failed, alarms.suites, alarms.cells) == (0, 0, 60, 40)

    def power(slower: float, target: str) -> Power:
        return gate_power.count_detections(quiet, SETTINGS, "", slower, [target] * 40)

    powers = [power(slower, "cell 7") for slower in (0.005, 0.02, 0.1)]
    assert powers[0].share == 0
    assert powers[0].share < powers[1].share <= powers[2].share == 1
    assert all(detected.others == 0 for detected in powers)
    everywhere = power(0.02, MEAN)
    assert everywhere.share == everywhere.by_mean / 40 == 1
    assert power(0.0, "control").share > 0.9
    # The arms are swapped at random, so an offset between them raises no alarm.
    assert gate_power.count_alarms(normal_study(0.004, 40, offset=0.05), SETTINGS, 20).alarmed == 0
    noisy = gate_power.count_alarms(normal_study(0.3, 6), SETTINGS, 60)
    assert noisy.failed <= 0.01 * 60 * 6
    assert noisy.inconclusive > 0.9 * 60 * 6
    assert noisy.alarmed + noisy.inconclusive_suites == 60


def test_the_page_shows_the_results_of_the_newest_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has the false-alarm rate with its interval, the power, and a picture.

    Too few replicates or a file of another kind are reported.
    """
    measured = study(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gate-power-another-device.svg").touch()  # of an earlier call
    path, picture = gate_power.render(tmp_path, tmp_path / "out")
    drawn = picture.read_text()
    assert re.search(r"The gate finds .* and raises no false alarm in 60 unchanged suites", drawn)
    assert FAMILIES["low rank"].color.lower() in drawn  # the palette of all plots
    text = path.read_text(encoding="utf-8")
    assert text == gate_power.page([measured], tmp_path)
    assert "goal: at most 1.00 % | 0 %: met" in text
    assert "| 0 % to 5.96 %" in text
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if "|" in line]
    assert ["one cell", "10.0 %", "20"] in rows
    assert sum(row[0] == gate_power.CONTROL_WORK for row in rows) == len(CONTROLS)
    monkeypatch.setattr(gate_power, "MAX_ALARM_RATE", -1.0)
    assert "0 %: not met" in gate_power.page([measured], tmp_path)
    with pytest.raises(UserError, match="no variant of the suite is computed correctly"):
        study(tmp_path / "new", fault="new")
    few = gate_power.page([study(tmp_path / "few", 12)], tmp_path)
    assert "No results: 4 cells with 12 replicates are too few to draw random suites from." in few
    assert gate_power.render(tmp_path / "empty", tmp_path) == []
    newest_files(tmp_path, gate_power.FOLDER)[0].write_text("{}")
    with pytest.raises(UserError, match=r"not a study of the gate: .*missing required field"):
        gate_power.render(tmp_path, tmp_path / "out")
