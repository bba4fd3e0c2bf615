"""The plot of gain against cost of variants."""

import itertools
from dataclasses import replace

import msgspec
from matplotlib.text import Text

from esbench.report.analysis.ranking import RankedVariant, rankings
from esbench.report.plots.hero import best_of_each_scheme
from esbench.report.plots.pareto import Point, finding, front, pareto
from esbench.report.plots.style import Figure
from esbench.schema import Measurement, Row, Run, Variant
from tests.report import ranking_cases
from tests.report.plots import figures
from tests.report.plots.figures import along, drawn
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, STEPS, rows
from tests.synthetic import DENSE, bytes_row, linear, variant

BYTES = {FLIPPED: 10**6, CORES: 2 * 10**6, LOW_RANK: 3 * 10**6, HADAMARD: 4 * 10**6, DENSE: 5 * 10**6}
"""Peak memory of a step per variant, in the order of the gains."""


def of(run: Run) -> Figure:
    """Draw the plot of Linear."""
    (found,) = rankings(run, "Linear")
    return drawn(pareto(found))


def stepped(kappas: dict[Variant, float] | None = None, bytes_: dict[Variant, int] | None = None) -> Run:
    """Return a ranking whose variants have these kappas and peaks of a step."""
    found = rows(kappas={**KAPPAS, **(kappas or {})}, steps={**STEPS, LOW_RANK: 4.8, CORES: 4.02})
    kept = [row for row in found if getattr(row, "metric", "") != "peak_bytes"]
    peaks = [
        bytes_row(one, SQUARE, "peak_bytes", size, phase="step") for one, size in (bytes_ or BYTES).items()
    ]
    return ranking_cases.run([*kept, *peaks])


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
    assert front([]) == []
    fast, slow = point(1, 0.99, half=0.01), point(20, 1.0, half=0.01)
    assert front([fast, slow]) == [fast]
    assert front([point(1, 0.9, half=0.01), slow])[1:] == [slow]
    best, near = point(2, 1.0, half=0.05), point(2, 0.98, half=0.05)
    poor, large = point(2, 0.8, half=0.05), point(3, 1.0, half=0.05)
    assert front([best, near, large, poor]) == [best]


def test_rate_against_memory() -> None:
    """Each scheme has a labelled point, the front has stairs, and a variant without a number its reason."""
    run = ranking_cases.run()
    figure = of(run)
    (axes,) = figure.axes
    (found,) = rankings(run, "Linear")
    schemes = best_of_each_scheme(found.of(SQUARE))
    assert set(figures.points(axes)) == {((one.peak_bytes or 0) / 1e6, one.rate) for one in schemes}
    expected = {"Perturbed (dense noise)" if one.variant == DENSE else one.variant.name for one in schemes}
    assert set(named(figure)) == expected
    assert "No number, out of memory: SparsePerturbed(k=1)" in figure.notes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert "peak memory of a step (MB)" in axes.get_xlabel()

    (stairs,) = [line for line in of(stepped()).axes[0].lines if line.get_linestyle() == "--"]
    assert along(stairs) == sorted(along(stairs))
    assert along(stairs, "y") == sorted(along(stairs, "y"))
    assert len(along(stairs)) > 1
    assert stairs.get_drawstyle() == "steps-post"


def test_names_cover_no_other_name_and_no_point() -> None:
    """With few points, and also with some that nearly coincide."""
    for bytes_ in (BYTES, {**BYTES, LOW_RANK: 4 * 10**6 - 1}):
        figure = of(stepped({LOW_RANK: 0.0}, bytes_))
        (axes,) = figure.axes
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text()]
        assert len(boxes) > 3
        for box, other in itertools.combinations(boxes, 2):
            assert not box.overlaps(other)
        places = axes.transData.transform(figures.points(axes)).tolist()
        assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in boxes for x, y in places)


def test_the_title_names_the_best_scheme_and_one_with_less_memory() -> None:
    """It states how much less memory a scheme needs, and for which share of the best rate."""
    fast, frugal, useless = point(8, 1.0), point(2, 0.5), point(1, 0.01)
    names = {id(fast): "LowRank", id(frugal): "Flipped", id(useless): "DropoutBlocks"}
    best = [
        replace(one, ranked=RankedVariant(variant(names[id(one)]), SQUARE)) for one in (useless, frugal, fast)
    ]
    assert (
        finding(best)
        == "LowRank gives the most n_eff per ms; Flipped needs 4.00x less memory for 50% of its rate"
    )
    assert finding(best[2:]) == "LowRank gives the most n_eff per ms and needs little memory"


def test_an_exact_estimate_is_an_arrow() -> None:
    """Its n_eff is infinite; of a shape with several populations the largest is shown."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    exact = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    exact += [bytes_row(ranking_cases.ORTHOGONAL, case, "peak_bytes", 10**6, phase="step") for case in cases]
    figure = of(ranking_cases.run(exact))
    assert "Orthogonal: exact" in named(figure)
    assert "4096 x 1" in figure.origin


def test_variants_without_memory_or_quality_have_no_point() -> None:
    """Without memory there is no figure; a quality that is not a number has no point."""
    without = [row for row in rows() if getattr(row, "metric", "") != "peak_bytes"]
    (found,) = rankings(ranking_cases.run(without), "Linear")
    assert pareto(found) is None
    broken: list[Row] = []
    for row in rows():
        value = {LOW_RANK: float("nan"), HADAMARD: -3.0}.get(row.variant)
        odd = isinstance(row, Measurement) and row.metric == "effective_members" and value is not None
        broken.append(msgspec.structs.replace(row, samples=((value,),)) if odd else row)
    assert "Hadamard" not in named(of(ranking_cases.run(broken)))
