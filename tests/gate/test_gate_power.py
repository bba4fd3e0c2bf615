"""The study of the gate: what is stored of it, what resampled suites find, and its page."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from esbench.errors import UserError
from esbench.gate.protocol import ARMS
from esbench.gate.records import MORE, SAME, SCHEMA, STUDY_CONTROLS, Opening, Replicate, Settings, Timed
from esbench.gate.worktree import Revision
from esbench.studies import gate_power
from esbench.studies.gate_power import CellLogs, Logs
from tests.study_cases import HERE

ROUNDS = 20
NAMES = tuple(f"Variant{number} | Linear(4, 4) | forward | host" for number in range(6))


def timed(rng: np.random.Generator, cell: str, *, slower: float = 0.0) -> Timed:
    """Make the visits of a cell in one replicate: three launches each, of known median."""
    arms = []
    for ratio in (1.0, 1 + slower):
        visits = 1e5 * ratio * np.exp(rng.normal(0, 0.01, 2 * ROUNDS))
        arms.append(tuple(map(tuple, (visits[:, None] * np.array([1.0, 0.999, 1.5])).tolist())))
    return Timed(cell=cell, first=ARMS[:1] * ROUNDS, base=arms[0], head=arms[1])


def raw_study(folder: Path, replicates: int = 16, offset: float = 0.0) -> Path:
    """Write the raw file of a study of six cells and the usual controls, cut off in its last line.

    In head, every cell takes longer by ``offset``.
    """
    rng = np.random.default_rng(0)
    opening = Opening(
        schema=SCHEMA,
        gate_id="20261121T000000Z-gate-0000",
        started="2026-11-21T00:00:00+00:00",
        seed=7,
        suite="gate",
        revisions={arm: Revision(asked="HEAD", commit="a" * 40) for arm in ARMS},
        environment=HERE,
        code={arm: {} for arm in ARMS},
        harness="h",
    )
    lines: list[Opening | Replicate] = [opening]
    for number in range(1, replicates + 1):
        cells = [timed(rng, name, slower=offset) for name in NAMES]
        cells += [timed(rng, f"{name} | host", slower=more) for name, more in STUDY_CONTROLS.items()]
        if number == 1:
            cells.append(timed(rng, "gone | Linear(4, 4) | forward | host"))
        lines.append(Replicate(stage="study", number=number, cells=tuple(cells), wall_s=60.0))
    path = folder / HERE.slug / gate_power.FOLDER / f"{opening.gate_id}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b'{"record": "repl')
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store a study; return the folder of results."""
    results = tmp_path_factory.mktemp("results")
    raw = raw_study(results)
    path = gate_power.summarise(raw, trim=0.25)
    assert path.exists()
    assert not raw.exists()
    return results


def study(results: Path) -> gate_power.GateStudy:
    """Read the one study of a folder of results."""
    (path,) = gate_power.newest_of_each(results)
    return gate_power.read(path)


def test_a_summary_holds_the_log_ratios_of_cells_that_are_in_each_replicate(stored: Path) -> None:
    """A cell with a gap is left out by name; a control reads as its planted slowdown."""
    found = study(stored)
    assert tuple(one.name for one in found.cells) == NAMES
    assert found.left_out == ("gone | Linear(4, 4) | forward | host",)
    assert found.replicates == 16
    for control in found.controls:
        planted = math.log1p(STUDY_CONTROLS[control.name.removesuffix(" | host")])
        assert abs(np.mean(control.confirm) - planted) < 0.002
        assert np.std(control.screen) > np.std(control.confirm)  # a third of the rounds tells less


def test_resampled_suites_find_what_is_planted_and_nothing_else() -> None:
    """Unchanged suites raise no alarm; power grows with the slowdown, and no unchanged cell is named."""
    rng = np.random.default_rng(1)
    draws = rng.normal(0, 0.004, (40, 16))
    cells = Logs.of([CellLogs(f"cell {k}", tuple(row), tuple(row)) for k, row in enumerate(draws.tolist())])
    settings = Settings()
    alarms = gate_power.alarms(cells, settings, 60)
    assert (alarms.alarmed, alarms.failed, alarms.comparisons) == (0, 0, 60 * 40)
    assert 0.04 < alarms.upper < 0.06  # 1 - 0.05 ** (1 / 60)
    powers = [gate_power.slower_cell(cells, settings, slower, 40) for slower in (0.005, 0.02, 0.1)]
    assert powers[0].share == 0
    assert powers[0].share < powers[1].share <= powers[2].share == 1
    assert all(power.others == 0 for power in powers)
    assert gate_power.slower_everywhere(cells, settings, 0.02, 40).share == 1
    slow = CellLogs("control", tuple((draws[0] + 0.05).tolist()), tuple((draws[0] + 0.05).tolist()))
    assert gate_power.slower_control(cells, slow, settings, 40).share > 0.9
    shifted = Logs(cells.names, cells.confirm + 0.05, cells.screen + 0.05)
    assert gate_power.alarms(shifted, settings, 20, swapped=False).rate == 1  # arms that differ are seen
    noisy = gate_power.alarms(normal_logs(0.3, [0.0] * 6), settings, 60)
    assert noisy.failed <= 0.01 * noisy.comparisons
    assert noisy.inconclusive > 0.9 * noisy.comparisons
    assert noisy.alarmed + noisy.unclear == 60


def normal_logs(spread: float, means: Sequence[float], names: Sequence[str] = ()) -> Logs:
    """Draw 16 replicates of cells with these mean log ratios."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, spread, (len(means), 16)) + np.array(means)[:, None]
    return Logs(tuple(names) or tuple(f"cell {k}" for k in range(len(means))), rows, rows)


def test_controls_that_misbehave_are_counted_by_kind() -> None:
    """More work that is not found, and equal work that differs in either direction, are told apart."""
    names = [f"{name} | host" for name in (SAME, MORE)]
    for kind, same, more, expected in (
        ("good", 0.0, 0.02, (0, 0)),
        ("deaf", 0.0, 0.0, (60, 0)),
        ("slower", 0.02, 0.02, (0, 60)),
        ("faster", -0.02, 0.02, (0, 60)),
    ):
        controls = normal_logs(0.001, [same, more], names)
        assert gate_power.misbehaving_controls(controls, Settings(), 60) == expected, kind


def test_the_page_says_what_was_found(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has a verdict for each goal and the same bytes each time; too few replicates are said."""
    monkeypatch.setattr(gate_power, "SUITES", 60)
    monkeypatch.setattr(gate_power, "TRIALS", 20)
    monkeypatch.setattr(gate_power, "MIN_COMPARISONS", 120)
    path = gate_power.render(stored, tmp_path)
    assert path is not None
    text = path.read_text()
    assert "0 in 60 suites, 0 in 360 comparisons" in text
    assert text.count(" met |") + text.count("**not met**") == 5
    assert text == gate_power.page([study(stored)])
    assert alarm_lines(text)[0].endswith(" met |")
    raw = raw_study(tmp_path / "offset", offset=0.02)
    offset = gate_power.page([gate_power.read(gate_power.summarise(raw, trim=0.25))])
    (shares,) = (line for line in offset.splitlines() if "share of suites with a FAIL" in line)
    assert [cell.strip() for cell in shares.split("|")][3] == "100 %"  # the arms as measured
    assert re.search(r"head / base is \+(1\.9|2\.0)\d* %", offset)
    real = gate_power.alarms
    monkeypatch.setattr(
        gate_power, "alarms", lambda *args, **kwargs: replace(real(*args, **kwargs), alarmed=1, failed=1)
    )
    (goal,) = alarm_lines(gate_power.page([study(stored)]))
    assert "1 in 60 suites, 1 in 360 comparisons" in goal
    assert goal.endswith("**not met** |")
    few = msgspec.structs.replace(
        study(stored),
        cells=tuple(CellLogs(one.name, one.confirm[:12], one.screen[:12]) for one in study(stored).cells),
    )
    assert "No suite can be drawn: 6 complete cells, 12 replicates." in gate_power.page([few])
    assert gate_power.render(tmp_path / "empty", tmp_path) is None


def alarm_lines(page: str) -> list[str]:
    """Return the lines of the goal on false alarms."""
    return [line.strip() for line in page.splitlines() if "alarms in unchanged suites" in line]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{}", "missing required field"), (b"\xff", "cannot be read"), (b"[" * 100_000, "cannot be read")],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that holds no study ends in one line that names it."""
    path = tmp_path / "study.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"study\.json: .*{message}"):
        gate_power.read(path)


def test_a_broken_raw_file_is_refused_and_kept(tmp_path: Path) -> None:
    """A raw file with a foreign line or an arm that was not visited names its place, and is not removed."""
    raw = raw_study(tmp_path, replicates=1)
    text = raw.read_bytes()
    raw.write_bytes(text.replace(b'"record":"replicate"', b'"record":"other"'))
    with pytest.raises(UserError, match=r"jsonl:2: "):
        gate_power.summarise(raw, trim=0.25)
    lines = text.split(b"\n")
    replicate = msgspec.json.decode(lines[1])
    replicate["cells"][0]["head"].pop()
    raw.write_bytes(b"\n".join([lines[0], msgspec.json.encode(replicate), b""]))
    with pytest.raises(UserError, match=r"replicate 1 of Variant0.*not visited twice a round"):
        gate_power.summarise(raw, trim=0.25)
    assert raw.exists()
