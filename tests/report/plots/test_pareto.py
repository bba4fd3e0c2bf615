"""The plot of gain against cost of variants."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from esbench.report.analysis.quality import EffectiveSize
from esbench.report.analysis.ranking import RankedVariant, best_of_each_scheme, rankings
from esbench.report.plots.pareto import Point, _point, finding, front, pareto
from esbench.report.plots.style import BLACK, Figure
from esbench.schema import Run
from tests.report import ranking_cases
from tests.report.plots import figures
from tests.report.plots.figures import along, drawn
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, LOW_RANK, ORTHOGONAL, SQUARE, STEPS, rows
from tests.report.table_examples import without
from tests.synthetic import DENSE, bytes_row, linear

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
    peaks = [bytes_row(variant, SQUARE, "peak_bytes", size, phase="step") for variant, size in BYTES.items()]
    return ranking_cases.run([*ranked, *peaks])


def named(figure: Figure) -> list[str]:
    """Return the labels of the points."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def test_the_front_has_the_points_that_no_other_dominates() -> None:
    """A point is dominated by one that is at least as good in both numbers and better in one."""
    places = ((1, 0.1), (2, 1.0), (3, 1.0), (2.5, 0.05), (0.5, 0.01))
    fast, good, slow, bad, cheap = (Point(RankedVariant(DENSE, SQUARE), *place) for place in places)
    assert front([slow, bad, good, cheap, fast]) == [cheap, fast, good]


def test_rate_against_memory() -> None:
    """Each scheme has a labelled point, the front has stairs, and a variant without a number its reason."""
    run = ranking_cases.run()
    figure = of(run)
    (axes,) = figure.axes
    (ranking,) = rankings(run, "Linear")
    schemes = best_of_each_scheme(ranking.of(SQUARE))
    assert set(figures.points(axes)) == {((entry.peak_bytes or 0) / 1e6, entry.rate) for entry in schemes}
    names = {"Perturbed (dense noise)" if entry.variant == DENSE else entry.variant.name for entry in schemes}
    assert set(named(figure)) == names
    assert "No number, out of memory: SparsePerturbed(k=1)" in figure.notes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    (area,) = [shape for shape in of(stepped()).axes[0].collections if isinstance(shape, PolyCollection)]
    xs, ys = np.asarray(area.get_paths()[0].vertices).T
    assert {round(float(x), 2) for x in xs} >= {2.0, 4.0}  # MB of the schemes on the front
    assert len(set(ys)) > 2  # their rates and the lower end of the axis


def test_names_cover_no_other_name_and_no_point() -> None:
    """Names of points that nearly coincide do not overlap each other or a point."""
    figure = of(stepped())
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text()]
    assert len(boxes) > 2
    assert not any(box.overlaps(second) for box, second in itertools.combinations(boxes, 2))
    places = axes.transData.transform(figures.points(axes)).tolist()
    assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in boxes for x, y in places)


def test_the_title_compares_the_best_scheme_with_dense_noise() -> None:
    """The title has the ratio of rates, and that of memory if the best scheme needs less or more."""
    title = of(stepped()).title
    assert title == "LowRank(rank=1) gives 41.7x the n_eff per ms of dense noise with 1.25x less memory"
    points = [point for entry in rankings(stepped(), "Linear")[0].of(SQUARE) if (point := _point(entry))]
    dearer = [replace(point, x=8.0) if point.ranked.variant == LOW_RANK else point for point in points]
    assert finding(dearer).endswith("of dense noise with 1.60x the memory")
    bound = EffectiveSize(4096.0, 4096.0, math.inf, 5)
    open_points = [replace(point, ranked=replace(point.ranked, effective=bound)) for point in points]
    assert " gives at least 41.7x " in finding(open_points)
    alone = [point for point in points if point.ranked.variant != DENSE]
    assert finding(alone) == "LowRank(rank=1) gives the most n_eff per ms"


def test_an_exact_estimate_is_an_arrow() -> None:
    """An exact estimate has infinite n_eff; of a shape with several populations the largest is shown."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    exact = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    exact += [bytes_row(ORTHOGONAL, case, "peak_bytes", 10**6, phase="step") for case in cases]
    figure = of(ranking_cases.run(exact))
    assert "Orthogonal: exact" in named(figure)
    edges = [line.get_markeredgecolor() for line in figure.axes[0].lines if along(line) == [1.0]]
    assert BLACK in edges  # the exact estimate with the least memory is on the front
    assert "4096 x 1" in figure.origin


@pytest.mark.parametrize("value", [float("nan"), -3.0])
def test_variants_without_memory_or_quality_have_no_point(value: float) -> None:
    """Without memory there is no figure; a quality that is not a positive number has no point."""
    no_peaks = [row for row in rows() if getattr(row, "metric", "") != "peak_bytes"]
    (ranking,) = rankings(ranking_cases.run(no_peaks), "Linear")
    assert pareto(ranking) is None
    odd = ranking_cases.quality_row(HADAMARD, SQUARE, "effective_members", "linear fitness", value)
    broken = ranking_cases.run([*without(rows(), HADAMARD, "effective_members"), odd])
    assert "Hadamard" not in named(of(broken))
    assert "LowRank(rank=1)" in named(of(broken))
