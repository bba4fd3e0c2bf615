"""The plots of what variants give for what they cost."""

import dataclasses
import math

import msgspec
from matplotlib.text import Annotation, Text

from esbench.report.analysis.ranking import RankedVariant, rankings
from esbench.report.plots.pareto import MEMORY, TIME, Plane, Point, front, pareto, points, tied
from esbench.report.plots.style import Figure
from esbench.schema import Row, Run
from tests.report import ranking_cases
from tests.report.plots import figures
from tests.report.plots.figures import along, drawn
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, STEPS, rows
from tests.synthetic import DENSE, linear


def of(run: Run, plane: Plane = TIME) -> Figure:
    """The plot of Linear."""
    (found,) = rankings(run, "Linear")
    return drawn(pareto(found, plane))


def names(figure: Figure, panel: int = 0) -> list[str]:
    """The front of a panel, by its legend."""
    legend = figure.axes[panel].get_legend()
    assert legend is not None
    return [text.get_text().partition(" ")[2] for text in legend.get_texts()]


def point(x: float, y: float, half: float = 0.0) -> Point:
    """A point in the plane; ``half`` is half the interval of its gain."""
    return Point(RankedVariant(DENSE, SQUARE), x, y, (x, x), (y - half, y + half))


def test_the_front_is_what_nothing_dominates() -> None:
    """A slower variant that gives more by less than the intervals is dominated, and may be tied."""
    fast, good, slow, bad = point(1, 0.1), point(2, 1.0), point(3, 1.0), point(2.5, 0.05)
    assert front([slow, bad, good, fast]) == [fast, good]
    assert front([]) == []
    fast, slow = point(1, 0.99, half=0.01), point(20, 1.0, half=0.01)
    assert front([fast, slow]) == [fast]
    assert front([point(1, 0.9, half=0.01), slow])[1:] == [slow]

    def between(one: Point, low: float, high: float) -> Point:
        return dataclasses.replace(one, x_interval=(low, high))

    best = between(point(2, 1.0, half=0.05), 1.9, 2.1)
    near = between(point(2.05, 0.98, half=0.05), 1.95, 2.15)
    slow = between(point(3, 1.0, half=0.05), 2.9, 3.1)
    poor = between(point(2.05, 0.8, half=0.05), 1.95, 2.15)
    assert front([best, near, slow, poor]) == [best]
    assert tied([best, near, slow, poor]) == [near]


def test_the_front_is_drawn_numbered_and_named() -> None:
    """Every variant has a marker, the front has stairs; time is in multiples of base."""
    figure = of(ranking_cases.run())
    (axes,) = figure.axes
    assert names(figure) == ["Flipped", "Flipped(cores=8)", "Hadamard"]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    assert (axes.get_xscale(), axes.get_title("left")) == ("log", "(64, 64)")
    assert sorted(x for x, _ in figures.points(axes)) == [4, 4.5, 5, 6, 200]
    (stairs,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert along(stairs) == [4, 4.5, 5]
    assert stairs.get_drawstyle() == "steps-post"
    assert "time(base)" in axes.get_xlabel()
    places = {
        one.ranked.variant: one.y
        for one in points(rankings(ranking_cases.run(), "Linear")[0].of(SQUARE), TIME)
    }
    assert places[CORES] > 5 * places[FLIPPED]


def test_numbers_stand_beside_their_markers() -> None:
    """No number hides a marker, each is nearest to its own; those of close points are joined."""
    steps = {**STEPS, LOW_RANK: 5.0, HADAMARD: 4.5, CORES: 4.02, FLIPPED: 4.0}
    joined = []
    for kappa in (64.0, 30.0, 1.0):
        figure = of(ranking_cases.run(rows(kappas={**KAPPAS, LOW_RANK: 0.0, CORES: kappa}, steps=steps)))
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


def test_rate_against_memory() -> None:
    """Effective members per ms of a step over the largest memory of its phases."""
    run = ranking_cases.run()
    figure = of(run, MEMORY)
    (found,) = rankings(run, "Linear")
    standings = [one for one in found.of(SQUARE) if one.rate and one.peak_bytes]
    expected = {((one.peak_bytes or 0) / 1e6, one.rate) for one in standings}
    assert set(figures.points(figure.axes[0])) == expected
    assert len(expected) == 5
    assert names(figure) == ["Hadamard"]
    assert "No number, out of memory: SparsePerturbed(k=1)" in figure.notes


def test_notes_name_who_is_tied_or_exact() -> None:
    """An exact estimate has no place; without ties there is no note of them."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    exact = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    figure = of(ranking_cases.run(exact))
    assert "Orthogonal" not in names(figure)
    assert "Exact, n_eff is infinite: Orthogonal" in figure.notes
    assert not any(note.startswith("Tied") for note in of(ranking_cases.run()).notes)
    near = rows(kappas={**KAPPAS, LOW_RANK: 0.001}, steps={**STEPS, LOW_RANK: 5.0})
    fitted = ranking_cases.run(ranking_cases.without_forms(near))
    assert "Tied with the front: LowRank(rank=1)" in of(fitted).notes


def test_a_panel_per_shape_with_its_largest_population() -> None:
    """Of one with several populations the largest is shown."""
    cases = [linear(64, members=64), linear(64, members=256), linear(128)]
    figure = of(ranking_cases.run([row for case in cases for row in rows(case)]))
    assert [axes.get_title("left") for axes in figure.axes] == ["(64, 64)", "(128, 128)"]
    assert "256 x 1, 1024 x 1" in figure.origin


def test_what_has_no_place() -> None:
    """Without the plain layer there is no multiplier; a quality that is no number has no marker."""
    (found,) = rankings(ranking_cases.run([row for row in rows() if row.variant.mode == "batched"]), "Linear")
    assert pareto(found, TIME) is None
    broken: list[Row] = []
    for row in rows():
        value = {LOW_RANK: float("nan"), HADAMARD: -3.0}.get(row.variant)
        odd = getattr(row, "metric", "") == "effective_members" and value is not None
        broken.append(msgspec.structs.replace(row, samples=((value,),)) if odd else row)
    assert names(of(ranking_cases.run(broken))) == ["Flipped", "Flipped(cores=8)", "Perturbed"]
