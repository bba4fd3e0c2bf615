"""The plot of gain against cost of variants."""

import itertools
from dataclasses import replace

import pytest
from matplotlib.text import Text

from esbench.report.analysis.ranking import RankedVariant, rankings
from esbench.report.plots.hero import best_of_each_scheme
from esbench.report.plots.pareto import Point, finding, front, pareto
from esbench.report.plots.style import Figure
from esbench.schema import Run
from tests.report import ranking_cases
from tests.report.plots import figures
from tests.report.plots.figures import along, drawn
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, LOW_RANK, ORTHOGONAL, SQUARE, STEPS, rows
from tests.report.table_examples import without
from tests.synthetic import DENSE, bytes_row, linear, variant

BYTES = {FLIPPED: 10**6, CORES: 2 * 10**6, LOW_RANK: 4 * 10**6 - 1, HADAMARD: 4 * 10**6, DENSE: 5 * 10**6}
"""Peak memory of a step per variant, in the order of the gains; two are nearly equal."""


def of(run: Run) -> Figure:
    """Draw the plot of Linear."""
    (ranking,) = rankings(run, "Linear")
    return drawn(pareto(ranking))


def stepped() -> Run:
    """Return a ranking whose variants differ in gain and in peak memory."""
    ranked = rows(steps={**STEPS, LOW_RANK: 4.8, CORES: 4.02})
    ranked = [row for row in ranked if getattr(row, "metric", "") != "peak_bytes"]
    peaks = [bytes_row(one, SQUARE, "peak_bytes", size, phase="step") for one, size in BYTES.items()]
    return ranking_cases.run([*ranked, *peaks])


def named(figure: Figure) -> list[str]:
    """Return the labels of the points."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def point(x: float, y: float, half: float = 0.0) -> Point:
    """Return a point; ``half`` is half the interval of its gain."""
    return Point(RankedVariant(DENSE, SQUARE), x, y, (y - half, y + half))


def test_the_front_has_the_points_that_no_other_dominates() -> None:
    """A variant that costs more is dominated if its gain is within the intervals."""
    fast, good, slow, bad = point(1, 0.1), point(2, 1.0), point(3, 1.0), point(2.5, 0.05)
    assert front([slow, bad, good, fast]) == [fast, good]
    cheap, dear = point(1, 0.99, half=0.01), point(20, 1.0, half=0.01)
    assert front([cheap, dear]) == [cheap]
    assert front([point(1, 0.9, half=0.01), dear])[1:] == [dear]
    best, near = point(2, 1.0, half=0.05), point(2, 0.98, half=0.05)
    assert front([best, near, point(3, 1.0, half=0.05), point(2, 0.8, half=0.05)]) == [best]


def test_rate_against_memory() -> None:
    """Each scheme has a labelled point, the front has stairs, and a variant without a number its reason."""
    run = ranking_cases.run()
    figure = of(run)
    (axes,) = figure.axes
    (ranking,) = rankings(run, "Linear")
    schemes = best_of_each_scheme(ranking.of(SQUARE))
    assert set(figures.points(axes)) == {((one.peak_bytes or 0) / 1e6, one.rate) for one in schemes}
    expected = {"Perturbed (dense noise)" if one.variant == DENSE else one.variant.name for one in schemes}
    assert set(named(figure)) == expected
    assert "No number, out of memory: SparsePerturbed(k=1)" in figure.notes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    (stairs,) = [line for line in of(stepped()).axes[0].lines if line.get_linestyle() == "--"]
    assert along(stairs) == sorted(along(stairs))
    assert along(stairs, "y") == sorted(along(stairs, "y"))
    assert len(along(stairs)) > 1
    assert stairs.get_drawstyle() == "steps-post"


def test_names_cover_no_other_name_and_no_point() -> None:
    """This holds for points that nearly coincide."""
    figure = of(stepped())
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text()]
    assert len(boxes) > 3
    assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))
    places = axes.transData.transform(figures.points(axes)).tolist()
    assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in boxes for x, y in places)


def test_the_title_names_the_best_scheme_and_one_with_less_memory() -> None:
    """It states how much less memory a scheme needs, and for which share of the best rate."""
    useless, frugal, fast = (
        replace(place, ranked=RankedVariant(variant(name), SQUARE))
        for name, place in (("Dropout", point(1, 0.01)), ("Flipped", point(2, 0.5)), ("Best", point(8, 1.0)))
    )
    title = "Best gives the most n_eff per ms; Flipped needs 4.00x less memory for 50% of its rate"
    assert finding([useless, frugal, fast]) == title
    assert finding([fast]) == "Best gives the most n_eff per ms and needs little memory"


def test_an_exact_estimate_is_an_arrow() -> None:
    """Its n_eff is infinite; of a shape with several populations the largest is shown."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    exact = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    exact += [bytes_row(ORTHOGONAL, case, "peak_bytes", 10**6, phase="step") for case in cases]
    figure = of(ranking_cases.run(exact))
    assert "Orthogonal: exact" in named(figure)
    assert "4096 x 1" in figure.origin


@pytest.mark.parametrize("value", [float("nan"), -3.0])
def test_variants_without_memory_or_quality_have_no_point(value: float) -> None:
    """Without memory there is no figure; a quality that is not a positive number has no point."""
    no_peaks = [row for row in rows() if getattr(row, "metric", "") != "peak_bytes"]
    (ranking,) = rankings(ranking_cases.run(no_peaks), "Linear")
    assert pareto(ranking) is None
    odd = ranking_cases.figure(HADAMARD, SQUARE, "effective_members", "linear fitness", value)
    broken = ranking_cases.run([*without(rows(), HADAMARD, "effective_members"), odd])
    assert "Hadamard" not in named(of(broken))
    assert "LowRank(rank=1)" in named(of(broken))
