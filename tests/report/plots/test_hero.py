"""The plot of members evaluated per ms and n_eff per ms."""

import re

import pytest

from esbench.report.analysis.ranking import Rankings, best_of_each_scheme
from esbench.report.plots.hero import finding, hero
from esbench.report.plots.style import BLACK
from esbench.schema import Row
from tests.report import ranking_cases
from tests.report.plots.figures import along, drawn, texts
from tests.report.ranking_cases import FLIPPED, SQUARE, STEPS, quality_row, rows
from tests.report.table_examples import without
from tests.synthetic import DENSE, time_row, variant


def ranking(stored: list[Row]) -> Rankings:
    """Return the ranking of a run with these rows."""
    return ranking_cases.one_ranking(ranking_cases.run(stored))


def test_a_row_is_evaluated_members_and_effective_members_per_ms() -> None:
    """Each scheme and the fastest variant have a row with markers at their two rates, and their share."""
    ranked = ranking(rows()).of(SQUARE)
    best = best_of_each_scheme(ranked)
    expected = [entry for entry in ranked if entry in best or entry.variant == FLIPPED]
    figure = drawn(hero(ranking(rows())))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "Perturbed (dense noise)" if entry.variant == DENSE else entry.variant.name for entry in expected
    ]
    assert len({entry.variant.scheme for entry in expected}) == len(expected) - 1
    rates = [entry.rate or 0.0 for entry in expected]
    assert rates == sorted(rates, reverse=True)
    circles = {along(line, "y")[0]: along(line)[0] for line in axes.lines if line.get_color() == BLACK}
    points = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_color() != BLACK]
    filled = {along(line, "y")[0]: along(line)[0] for line in points}
    assert filled == pytest.approx(dict(enumerate(rates)))
    evaluated = {index: SQUARE.members / STEPS[entry.variant] for index, entry in enumerate(expected)}
    assert circles == pytest.approx(evaluated)
    assert {"100 %", "members kept"} <= {text for text, _ in texts(figure)}


def test_an_exact_estimate_is_an_arrow() -> None:
    """A scheme of infinite n_eff has no second marker, is the first row, and is not in the title."""
    figure = drawn(hero(ranking([*rows(), *ranking_cases.orthogonal(SQUARE)])))
    (axes,) = figure.axes
    assert axes.get_yticklabels()[0].get_text() == "Orthogonal"
    assert sum(along(line, "y") == [0] for line in axes.lines) == 1
    assert "exact" in [text for text, _ in texts(figure)]
    assert " Hadamard keeps all members" in figure.title


def test_the_title_compares_the_fastest_scheme_with_the_best() -> None:
    """A fast scheme that loses most members is contrasted with the best; a single round gives no multiple."""
    text = finding(ranking(rows()).of(SQUARE))
    assert text.startswith("Flipped is fastest but keeps only ")
    assert "40.0x the n_eff per ms of dense noise" in text
    single = time_row(DENSE, SQUARE, STEPS[DENSE], phase="step")
    text = finding(ranking([*without(rows(), DENSE, "latency_ns"), single]).of(SQUARE))
    assert "dense noise" not in text


def test_the_title_names_a_tie() -> None:
    """A scheme whose interval overlaps that of the best is named, also after an exact estimate."""
    tied_variant = variant("FlippedSign")
    times = [4.9, 5.0, 5.0, 5.0, 5.0, 5.3]
    tied = [*rows(), time_row(tied_variant, SQUARE, *times, phase="step")]
    tied.append(quality_row(tied_variant, SQUARE, "effective_members", "linear fitness", 1024.0, 1024.0))
    for more in ([], ranking_cases.orthogonal(SQUARE)):
        text = finding(ranking([*tied, *more]).of(SQUARE))
        assert re.search(r"(Hadamard, tied with FlippedSign|FlippedSign, tied with Hadamard), keeps", text)


def test_a_single_scheme_is_not_drawn() -> None:
    """Nothing is drawn of a run with dense noise and base only."""
    assert hero(ranking([row for row in rows() if row.variant == DENSE or row.variant.baseline])) is None
