"""The plot of members evaluated per ms and n_eff per ms."""

import msgspec
import pytest

from esbench.report.analysis.ranking import rankings
from esbench.report.plots.hero import best_of_each_scheme, finding, hero
from esbench.report.plots.style import BLACK, Figure
from esbench.schema import Run, Skipped
from esbench.units import format_multiplier
from tests.report import ranking_cases
from tests.report.plots.figures import along, drawn, texts
from tests.report.ranking_cases import SQUARE, rows
from tests.synthetic import DENSE


def of(run: Run) -> Figure:
    """Return the plot of Linear."""
    (found,) = rankings(run, "Linear")
    return drawn(hero(found))


def test_a_row_is_evaluated_members_and_effective_members_per_ms() -> None:
    """Each scheme has one row, best first; the markers are at its two rates, and the text has its share."""
    run = ranking_cases.run()
    (found,) = rankings(run, "Linear")
    expected = best_of_each_scheme(found.of(SQUARE))
    figure = of(run)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [
        "Perturbed (dense noise)" if one.variant == DENSE else one.variant.name for one in expected
    ]
    assert len({one.variant.scheme for one in expected}) == len(expected) == len(names)
    rates = [one.rate for one in expected]
    assert rates == sorted(rates, key=lambda rate: -(rate or 0.0))
    circles = {along(line, "y")[0]: along(line)[0] for line in axes.lines if line.get_color() == BLACK}
    filled = {
        along(line, "y")[0]: along(line)[0]
        for line in axes.lines
        if line.get_linestyle() == "None" and line.get_color() != BLACK
    }
    for place, one in enumerate(expected):
        assert circles[place] == pytest.approx(SQUARE.members / ((one.step_ns or 0.0) / 1e6))
        assert filled[place] == pytest.approx(one.rate)
    shown = [text for text, _ in texts(figure)]
    assert "100 % kept" in shown
    assert "one step" in shown


def test_an_exact_estimate_is_an_arrow() -> None:
    """Its n_eff is infinite: it has no second marker, is the first row, and is not the title's winner."""
    exact = [*rows(SQUARE), *ranking_cases.orthogonal(SQUARE)]
    figure = of(ranking_cases.run(exact))
    (axes,) = figure.axes
    assert axes.get_yticklabels()[0].get_text() == "Orthogonal"
    assert sum(along(line, "y") == [0] for line in axes.lines) == 1
    assert "exact" in [text for text, _ in texts(figure)]
    assert not figure.title.startswith("Orthogonal")


def test_the_title_compares_the_fastest_scheme_with_the_best() -> None:
    """A fast scheme that loses most members is contrasted with the best; a single round gives no multiple."""
    (found,) = rankings(ranking_cases.run(), "Linear")
    ranked = found.of(SQUARE)
    text = finding(ranked)
    best = next(one for one in ranked if one.rate is not None)
    times = best.times(next(one for one in ranked if one.variant == DENSE))
    assert times
    assert f"{format_multiplier(times)} the n_eff per ms of dense noise" in text
    fastest = min((one for one in ranked if one.rate), key=lambda one: one.step_ns or 0.0)
    assert (fastest.share or 0.0) < 0.5
    assert text.startswith("The fastest step keeps ")
    single = [
        msgspec.structs.replace(row, samples=row.samples[:1])
        if not isinstance(row, Skipped) and row.variant == DENSE
        else row
        for row in ranking_cases.run().rows
    ]
    (found,) = rankings(ranking_cases.run(single), "Linear")
    assert "dense noise" not in finding(found.of(SQUARE))


def test_a_single_scheme_is_not_drawn() -> None:
    """Nothing is drawn of a run with dense noise and base only."""
    kept = [row for row in rows(SQUARE) if row.variant == DENSE or row.variant.baseline]
    (found,) = rankings(ranking_cases.run(kept), "Linear")
    assert hero(found) is None
