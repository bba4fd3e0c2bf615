"""The study of the gate: its stored data, its resampled suites and its page."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from esbench.errors import UserError
from esbench.gate.gate import Gate
from esbench.gate.protocol import ARMS, Orders
from esbench.gate.records import MORE, SAME, Settings
from esbench.gate.worktree import Revision
from esbench.studies import gate_power, newest_files
from esbench.studies.gate_power import CONTROLS, CellLogs, GateStudy, Logs
from tests import synthetic
from tests.gate.fake_worker import NAMES, FakeWorkers

SETTINGS = Settings()


def study(results: Path, replicates: int = 16, fault: str = "none") -> GateStudy:
    """Measure a study of four cells on fake workers; store it and read it back."""
    gate = Gate(
        orders=Orders(device="cpu", threads=1, seed=0, suite="gate"),
        folders={arm: results / arm for arm in ARMS},
        revisions={arm: Revision(asked="HEAD", commit="0" * 40) for arm in ARMS},
        environment=synthetic.environment(),
        start=FakeWorkers(fault),
    )
    path = gate_power.measure(gate, replicates, results)
    assert newest_files(results, gate_power.FOLDER) == [path]
    return msgspec.json.decode(path.read_bytes(), type=GateStudy)


def test_a_study_holds_the_log_ratios_of_all_replicates(tmp_path: Path) -> None:
    """A control measures as its planted slowdown; with a third of the rounds it is less certain."""
    found = study(tmp_path)
    assert [one.name.split("Linear")[0] for one in found.cells] == [*NAMES]
    assert {len(logs) for one in found.cells for logs in (one.confirm, one.screen)} == {16}
    assert len(found.controls) == len(CONTROLS)
    for control in found.controls:
        planted = math.log1p(CONTROLS[control.name.removesuffix(" | host")])
        assert abs(np.mean(control.confirm) - planted) < 0.002
    every = [*found.cells, *found.controls]
    assert sum(np.var(one.screen) for one in every) > sum(np.var(one.confirm) for one in every)


def normal_logs(spread: float, means: Sequence[float], names: Sequence[str] = ()) -> Logs:
    """Draw 16 replicates of cells with these mean log ratios."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, spread, (len(means), 16)) + np.array(means)[:, None]
    return Logs(tuple(names) or tuple(f"cell {k}" for k in range(len(means))), rows, rows)


def test_resampled_suites_find_what_is_planted_and_nothing_else() -> None:
    """Unchanged suites raise no alarm, power grows with the slowdown, and only changed cells are named."""
    cells = normal_logs(0.004, [0.0] * 40)
    alarms = gate_power.alarms(cells, SETTINGS, 60)
    assert (alarms.alarmed, alarms.failed, alarms.suites, alarms.cells) == (0, 0, 60, 40)
    assert list(alarms.interval) == pytest.approx([0, 1 - 0.025 ** (1 / 60)])
    powers = [gate_power.slower_cell(cells, SETTINGS, slower, 40) for slower in (0.005, 0.02, 0.1)]
    assert powers[0].share == 0
    assert powers[0].share < powers[1].share <= powers[2].share == 1
    assert all(power.others == 0 for power in powers)
    assert gate_power.slower_everywhere(cells, SETTINGS, 0.02, 40).share == 1
    logs = tuple((cells.confirm[0] + 0.05).tolist())
    slow = CellLogs("control", logs, logs)
    assert gate_power.slower_control(cells, slow, SETTINGS, 40).share > 0.9
    shifted = Logs(cells.names, cells.confirm + 0.05, cells.screen + 0.05)
    assert gate_power.alarms(shifted, SETTINGS, 20).alarmed == 0  # the arms are swapped at random
    noisy = gate_power.alarms(normal_logs(0.3, [0.0] * 6), SETTINGS, 60)
    assert noisy.failed <= 0.01 * 60 * 6
    assert noisy.inconclusive > 0.9 * 60 * 6
    assert noisy.alarmed + noisy.unclear == 60


def test_controls_that_misbehave_are_counted_by_kind() -> None:
    """Undetected extra work and equal work that differs, in either direction, have separate counts."""
    names = [f"{name} | host" for name in (SAME, MORE)]
    for kind, same, more, expected in (
        ("good", 0.0, 0.02, (0, 0)),
        ("deaf", 0.0, 0.0, (60, 0)),
        ("slower", 0.02, 0.02, (0, 60)),
        ("faster", -0.02, 0.02, (0, 60)),
    ):
        controls = normal_logs(0.001, [same, more], names)
        assert gate_power.misbehaving_controls(controls, SETTINGS, 60) == expected, kind


def goals(page: str) -> list[str]:
    """Return the lines of the goals."""
    return [line.strip(" |") for line in page.splitlines() if re.search(r" (met|\*\*not met\*\*) *\|$", line)]


def test_the_page_says_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has a verdict for each goal, and the false-alarm rate with its count and interval.

    The page of a study whose arms differ says so. Too few replicates or a file of another kind are errors.
    """
    monkeypatch.setattr(gate_power, "SUITES", 60)
    monkeypatch.setattr(gate_power, "TRIALS", 20)
    monkeypatch.setattr(gate_power, "MIN_COMPARISONS", 120)
    found = study(tmp_path)
    path, picture = gate_power.render(tmp_path, tmp_path / "out")
    assert "The gate finds" in picture.read_text()
    text = path.read_text(encoding="utf-8")
    assert text == gate_power.page([found], tmp_path)
    assert len(goals(text)) == 5
    assert "| 0 of 60 suites: 0 % (95 % interval 0 % to 5.96 %)" in goals(text)[0]
    assert goals(text)[0].endswith("  met")
    # The mean of the cells is slower by 1.2 % in head: the arms differ as measured.
    offset = gate_power.page([study(tmp_path / "offset", fault="everywhere")], tmp_path)
    assert re.search(r"head / base is \+1\.[12]\d* %", offset)
    monkeypatch.setattr(gate_power, "MAX_ALARM_RATE", -1.0)
    assert goals(gate_power.page([found], tmp_path))[0].endswith("**not met**")
    assert "No suite can be drawn: 4 cells, 12 replicates." in gate_power.page(
        [study(tmp_path / "few", 12)], tmp_path
    )
    assert gate_power.render(tmp_path / "empty", tmp_path) == []
    (newest_files(tmp_path, gate_power.FOLDER)[0]).write_text("{}")
    with pytest.raises(UserError, match=r"not a study of the gate: .*missing required field"):
        gate_power.render(tmp_path, tmp_path / "out")
