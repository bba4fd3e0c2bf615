"""Suites drawn from the replicates of a study: what the gate says of them, and what it finds."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esbench.gate.decision import Evidence, kept, time_verdicts
from esbench.gate.protocol import Cell
from esbench.gate.records import SAME, Replicate, Settings, Stage, Timed
from esbench.report import resampling
from esbench.report.gate_arrays import Floats, Logs, arrays
from esbench.report.resampling import Draw, alarms, draws, each, everywhere, judged, planted, seen, shifted
from esbench.schema import Case, Variant
from tests.gate_study_cases import CELLS, replicates, study_of

SETTINGS = Settings()
SUITES = 60
CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)


def logs_of(rows: Floats, names: tuple[str, ...] = ()) -> Logs:
    """Make cells of logs."""
    return Logs(
        names or tuple(f"cell {place}" for place in range(len(rows))), rows, np.zeros_like(rows), rows
    )


def normal(spread: float, cells: int = 6, count: int = 16, mean: float = 0.0) -> Logs:
    """Make cells whose replicates are normal."""
    return logs_of(np.random.default_rng(0).normal(mean, spread, (cells, count)))


@given(count=st.integers(13, 40), swapped=st.booleans())
def test_a_suite_takes_no_replicate_twice(count: int, *, swapped: bool) -> None:
    """Neither inside a stage nor in both; the same suites come each time, and signs are all that differs."""
    found, again = (list(draws(3, count, SETTINGS, swapped=swapped)) for _ in range(2))
    for one, other in zip(found, again, strict=True):
        taken = [*one.screen, *one.confirm]
        assert len(set(taken)) == len(taken) == 13
        assert set(taken) <= set(range(count))
        assert set(one.signs) <= ({-1.0, 1.0} if swapped else {1.0})
        assert all(np.array_equal(getattr(one, part), getattr(other, part)) for part in Draw.__annotations__)


def test_arms_are_swapped_half_of_the_time() -> None:
    """In all suites together."""
    signs = np.array([one.signs for one in draws(500, 20, SETTINGS)])
    assert abs(signs.mean()) < 0.05


def test_a_suite_is_judged_as_a_gate_judges_what_it_measured() -> None:
    """The same replicates, their arms really swapped, as a gate's evidence have the same verdicts."""
    names = [Cell(variant=Variant(scheme=name), case=CASE, phase="forward", method="host") for name in "ABCD"]
    spreads = (0.0, 0.002, 0.004, 0.03)
    cells = {
        cell.name: {"between": spread, "slower": 0.012 * (place == 1)}
        for place, (cell, spread) in enumerate(zip(names, spreads, strict=True))
    }
    study = study_of(*replicates(16, cells))
    found = arrays(study, SETTINGS.trim).cells
    kept_cells = set()
    for draw in draws(20, 16, SETTINGS):
        evidence = Evidence(
            replicates=_measured(study.replicates, "screen", draw, {cell.name for cell in names})
        )
        again = {cell.name for cell in kept(evidence, names, SETTINGS)}
        evidence.replicates += _measured(study.replicates, "confirm", draw, again)
        screen, confirm = (evidence.estimates(stage, SETTINGS.trim) for stage in ("screen", "confirm"))
        verdicts, mean = time_verdicts(screen, confirm, SETTINGS)
        suite = judged(draw, found, SETTINGS)
        assert mean is not None
        for one, other in zip([*suite.verdicts, suite.mean], [*verdicts, mean], strict=True):
            assert (one.cell, one.status, one.code) == (other.cell, other.status, other.code)
            assert one.bounds is not None
            assert other.bounds is not None
            assert one.bounds.effect == pytest.approx(other.bounds.effect, abs=1e-12)
            assert one.bounds.replicates == other.bounds.replicates
        assert suite.kept == len(again)
        kept_cells |= again
    assert len(kept_cells) > 1


def _measured(found: Sequence[Replicate], stage: Stage, draw: Draw, names: set[str]) -> list[Replicate]:
    """The replicates of a stage as a gate would have measured them."""
    places = draw.screen if stage == "screen" else draw.confirm
    return [
        msgspec.structs.replace(
            found[place],
            stage=stage,
            cells=tuple(
                _swapped(_short(one, stage), draw.signs[place])
                for one in found[place].cells
                if one.cell in names
            ),
        )
        for place in places
    ]


def _short(timed: Timed, stage: Stage) -> Timed:
    """What a screen would have measured of it: the first third of a study's rounds."""
    if stage != "screen":
        return timed
    rounds = len(timed.first) // 3
    return msgspec.structs.replace(
        timed, first=timed.first[:rounds], base=timed.base[: 2 * rounds], head=timed.head[: 2 * rounds]
    )


def _swapped(timed: Timed, sign: float) -> Timed:
    return timed if sign > 0 else msgspec.structs.replace(timed, base=timed.head, head=timed.base)


def test_where_nothing_differs_nothing_fails() -> None:
    """Every comparison is counted; hardly a cell is kept."""
    found = alarms(normal(0.002), SETTINGS, SUITES)
    assert (found.suites, found.comparisons) == (SUITES, 6 * SUITES)
    assert (found.alarmed, found.by_mean, found.failed, found.inconclusive, found.unclear) == (0,) * 5
    assert found.kept < 2
    assert found.most == pytest.approx(1 - 0.05 ** (1 / SUITES))


def test_arms_that_are_unlike_are_an_alarm_as_measured() -> None:
    """By the cells and by the mean; swapping them at random would have hidden it."""
    found = normal(0.001, mean=0.02)
    measured = alarms(found, SETTINGS, SUITES, swapped=False)
    assert (measured.rate, measured.failed, measured.by_mean) == (1.0, measured.comparisons, SUITES)
    assert measured.kept == 6
    assert alarms(found, SETTINGS, SUITES).rate < 0.1


def test_too_much_noise_is_inconclusive_and_no_alarm() -> None:
    """Each cell by itself, and the suite that holds it."""
    found = alarms(normal(0.3), SETTINGS, SUITES)
    assert found.failed <= 0.01 * found.comparisons
    assert found.alarmed + found.unclear == SUITES
    assert found.inconclusive > 0.9 * found.comparisons


def test_a_slowdown_is_found_in_the_cell_that_has_it_and_in_no_other() -> None:
    """From well beyond the margin on; one of the size of the margin is not."""
    powers = {slower: shifted(normal(0.001), SETTINGS, slower, SUITES) for slower in (0.003, 0.01, 0.02)}
    assert [one.share for one in powers.values()] == [0.0, 1.0, 1.0]
    assert {one.others for one in powers.values()} == {0}
    assert {one.suites for one in powers.values()} == {SUITES}


def test_a_larger_slowdown_is_found_no_less_often() -> None:
    """The suites are the same ones for each."""
    found = [shifted(normal(0.004), SETTINGS, slower, SUITES).found for slower in (0.005, 0.01, 0.02, 0.03)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_what_all_cells_share_is_found_by_their_mean() -> None:
    """Where each of them is too noisy to be named."""
    power = everywhere(normal(0.006, cells=40), SETTINGS, 0.01, SUITES)
    assert power.found == SUITES
    assert everywhere(normal(0.006, cells=40), SETTINGS, 0.0, SUITES).found == 0
    assert shifted(normal(0.006, cells=40), SETTINGS, 0.01, SUITES).share < 0.5


def test_planted_work_is_found_though_the_arms_of_cells_are_swapped() -> None:
    """All of it but what is within the margin; no cell beside it is named."""
    found = arrays(study_of(*replicates(16, between=0.0005, within=0.003)), SETTINGS.trim)
    assert sorted(found.controls) == [0.0, 0.005, 0.01, 0.02, 0.03]
    powers = {
        more: planted(found.cells, control, SETTINGS, more, SUITES)
        for more, logs in found.controls.items()
        for control in each(logs)
    }
    assert [one.share for one in powers.values()] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert {one.others for one in powers.values()} == {0}


@pytest.mark.parametrize(
    ("same", "more", "expected"),
    [(0.0, 0.02, (0, 0)), (0.0, 0.0, (SUITES, 0)), (0.02, 0.02, (0, SUITES)), (-0.02, 0.02, (0, SUITES))],
    ids=["well", "deaf", "slower", "faster"],
)
def test_controls_that_misbehave_are_told_apart(same: float, more: float, expected: tuple[int, int]) -> None:
    """A gate that finds nothing, and one whose arms are unlike in whichever direction."""
    names = (f"{SAME} | host", "control: 2 % more work | host")
    controls = [
        logs_of(normal(0.001, 1, mean=mean).logs, (name,))
        for name, mean in zip(names, (same, more), strict=True)
    ]
    found = resampling.misbehaved(controls, SETTINGS, SUITES)
    assert (found.deaf, found.unlike) == expected


def test_what_could_have_been_seen_follows_from_the_spread() -> None:
    """At the screen and after confirmation, for each cell by itself."""
    spreads = np.array([0.001, 0.004])
    rows = np.random.default_rng(1).normal(0, 1, (2, 400))
    rows = (rows - rows.mean(axis=1, keepdims=True)) / rows.std(axis=1, ddof=1, keepdims=True)
    found = seen(logs_of(rows * spreads[:, None]), SETTINGS, 400)
    for spread, screen, confirm in zip(spreads, found.screen, found.confirm, strict=True):
        t2, t9 = stats.t(2), stats.t(9)
        middle = spread * math.sqrt(stats.chi2(2).median() / 2)
        expected = (t2.ppf(0.95) + t2.ppf(0.8)) * middle / math.sqrt(3)
        assert screen == pytest.approx(math.expm1(expected), rel=0.15)
        expected = math.log(1.005) + (t9.ppf(0.99) + t9.ppf(0.8)) * spread * 0.96 / math.sqrt(10)
        assert confirm == pytest.approx(math.expm1(expected), rel=0.1)


@given(total=st.integers(1, 3000), share=st.floats(0, 1))
def test_the_upper_bound_is_exact(total: int, share: float) -> None:
    """At it, so few or fewer have a probability of 5 %."""
    count = round(share * total)
    found = resampling.upper(count, total)
    assert count / total <= found <= 1
    if count < total:
        assert stats.binom(total, found).cdf(count) == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize(("cells", "count", "expected"), [(6, 13, True), (6, 12, False), (0, 13, False)])
def test_a_suite_takes_thirteen_replicates_of_a_cell(cells: int, count: int, *, expected: bool) -> None:
    """With the gate's own settings."""
    assert resampling.enough(normal(0.001, cells, count), SETTINGS) == expected


def test_cells_of_a_study_are_told_from_its_controls() -> None:
    """By their names."""
    found = arrays(study_of(*replicates(13)), SETTINGS.trim)
    assert found.cells.names == tuple(sorted(CELLS))
    assert found.cells.logs.shape == (6, 13)
