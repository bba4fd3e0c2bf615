"""The plot of gain against cost of variants."""

import math

import msgspec
from matplotlib.text import Annotation, Text

from esbench.report.analysis.ranking import RankedVariant, rankings
from esbench.report.plots.pareto import Point, front, pareto, tied
from esbench.report.plots.style import Figure
from esbench.schema import Measurement, Row, Run, Variant
from tests.report import ranking_cases
from tests.report.plots import figures
from tests.report.plots.figures import along, drawn
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, STEPS, rows
from tests.synthetic import DENSE, bytes_row, linear

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


def names(figure: Figure, panel: int = 0) -> list[str]:
    """Return the Pareto front of a panel, from its legend."""
    legend = figure.axes[panel].get_legend()
    assert legend is not None
    return [text.get_text().partition(" ")[2] for text in legend.get_texts()]


def point(x: float, y: float, half: float = 0.0) -> Point:
    """Return a point; ``half`` is half the interval of its gain."""
    return Point(RankedVariant(DENSE, SQUARE), x, y, (y - half, y + half))


def test_the_front_is_what_nothing_dominates() -> None:
    """A variant that costs more and gains less than the interval allows is dominated, and may be tied."""
    fast, good, slow, bad = point(1, 0.1), point(2, 1.0), point(3, 1.0), point(2.5, 0.05)
    assert front([slow, bad, good, fast]) == [fast, good]
    assert front([]) == []
    fast, slow = point(1, 0.99, half=0.01), point(20, 1.0, half=0.01)
    assert front([fast, slow]) == [fast]
    assert front([point(1, 0.9, half=0.01), slow])[1:] == [slow]
    best, near = point(2, 1.0, half=0.05), point(2, 0.98, half=0.05)
    poor, large = point(2, 0.8, half=0.05), point(3, 1.0, half=0.05)
    assert front([best, near, large, poor]) == [best]
    assert tied([best, near, large, poor]) == [near]


def test_rate_against_memory() -> None:
    """Variants have markers, the front has steps, numbers and names; other variants have reasons or notes."""
    run = ranking_cases.run()
    figure = of(run)
    (axes,) = figure.axes
    (found,) = rankings(run, "Linear")
    expected = {
        ((one.peak_bytes or 0) / 1e6, one.rate) for one in found.of(SQUARE) if one.rate and one.peak_bytes
    }
    assert set(figures.points(axes)) == expected
    assert len(expected) == 5
    assert names(figure) == ["Hadamard"]
    assert "No number, out of memory: SparsePerturbed(k=1)" in figure.notes
    assert not any(note.startswith("Tied") for note in figure.notes)
    assert (axes.get_xscale(), axes.get_title("left")) == ("log", "(64, 64)")
    assert "peak memory (MB)" in axes.get_xlabel()

    figure = of(stepped())
    assert names(figure)[0] == "Flipped"
    (stairs,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert along(stairs)[:2] == [1, 2]
    assert along(stairs, "y") == sorted(along(stairs, "y"))
    assert stairs.get_drawstyle() == "steps-post"


def test_numbers_are_beside_their_markers() -> None:
    """No number hides a marker, each is nearest to its own, and numbers of close points are joined."""
    joined = []
    for kappa, near in ((64.0, 1.001), (64.0, 2.0), (30.0, 2.0)):
        bytes_ = {**BYTES, CORES: int(near * 10**6)}
        figure = of(stepped({CORES: kappa, LOW_RANK: 0.0}, bytes_))
        (axes,) = figure.axes
        figure.draw_without_rendering()
        places = axes.transData.transform(figures.points(axes)).tolist()
        numbers = []
        for text in axes.texts:
            assert isinstance(text, Annotation)
            box = Text.get_window_extent(text)
            middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
            nearest = min(math.dist(middle, place) for place in places)
            assert math.dist(middle, axes.transData.transform(text.xy)) < nearest + 3
            assert nearest < 16 * figure.dpi / 72
            assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for x, y in places)
            numbers += text.get_text().split(",")
            joined.append("," in text.get_text())
        assert numbers == [str(number + 1) for number in range(len(names(figure)))]
    assert set(joined) == {True, False}


def test_notes_name_ties_and_exact_estimates() -> None:
    """An exact estimate cannot be placed; a shape is shown at its largest population."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    exact = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    figure = of(ranking_cases.run(exact))
    assert "Orthogonal" not in names(figure)
    assert "Exact, n_eff is infinite: Orthogonal" in figure.notes
    near = rows(kappas={**KAPPAS, LOW_RANK: 0.001}, steps={**STEPS, LOW_RANK: 5.0})
    near = [
        msgspec.structs.replace(row, samples=((7.0,),)) if getattr(row, "metric", "") == "peak_bytes" else row
        for row in near
    ]
    assert (
        "Tied with the front: LowRank(rank=1)"
        in of(ranking_cases.run(ranking_cases.without_forms(near))).notes
    )
    cases = [linear(64, members=64), linear(64, members=256), linear(128)]
    figure = of(ranking_cases.run([row for case in cases for row in rows(case)]))
    assert [axes.get_title("left") for axes in figure.axes] == ["(64, 64)", "(128, 128)"]
    assert "256 x 1, 1024 x 1" in figure.origin


def test_what_has_no_place() -> None:
    """Without memory there is no figure; a quality that is not a number has no marker."""
    without = [row for row in rows() if getattr(row, "metric", "") != "peak_bytes"]
    (found,) = rankings(ranking_cases.run(without), "Linear")
    assert pareto(found) is None
    broken: list[Row] = []
    for row in rows():
        value = {LOW_RANK: float("nan"), HADAMARD: -3.0}.get(row.variant)
        odd = isinstance(row, Measurement) and row.metric == "effective_members" and value is not None
        broken.append(msgspec.structs.replace(row, samples=((value,),)) if odd else row)
    shown = of(ranking_cases.run(broken))
    assert len(figures.points(shown.axes[0])) == 3
    assert "Hadamard" not in names(shown)
