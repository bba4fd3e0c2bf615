"""The pictures of quality."""

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text

from esbench.records import Row, Run
from esbench.report import spectra, sweeps
from esbench.report.grid import quality_grids
from esbench.report.pages import render_reports
from esbench.report.pareto import MEMORY, TIME, Plane, Point, alike, front, pareto, points
from esbench.report.ranking import Standing, rankings
from esbench.report.sheets import Sheet
from tests import ranking_cases
from tests.picture_cases import along, drawn, named
from tests.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, STEPS, rows, sweep
from tests.report_cases import store
from tests.synthetic import DENSE, linear


def of(run: Run, plane: Plane = TIME) -> Sheet:
    """The picture of Linear."""
    (found,) = rankings(run, "Linear")
    return drawn(pareto(found, plane))


def names(sheet: Sheet, panel: int = 0) -> list[str]:
    """The front of a panel, by its numbers."""
    legend = sheet.axes[panel].get_legend()
    assert legend is not None
    return [text.get_text().partition(" ")[2] for text in legend.get_texts()]


def marks(sheet: Sheet) -> list[Line2D]:
    """The marks of the first panel."""
    return [line for line in sheet.axes[0].lines if line.get_linestyle() == "None"]


def point(x: float, y: float, half: float | None = None) -> Point:
    """A point in the plane; ``half`` is how far its share may be off."""
    off = half or 0.0
    return Point(Standing(DENSE, SQUARE), x, y, (x, x), (y - off, y + off))


def test_front_is_what_nothing_beats() -> None:
    """The fastest and the one that keeps most stand on it; who is slower and keeps no more does not."""
    fast, good, slow, bad = point(1, 0.1), point(2, 1.0), point(3, 1.0), point(2.5, 0.05)
    assert front([slow, bad, good, fast]) == [fast, good]
    assert front([]) == []


def test_what_replicates_leave_open_is_no_reason_to_stand_on_the_front() -> None:
    """A slower variant that keeps more by less than the intervals is beaten; by more, it is not."""
    fast, slow = point(1, 0.99, half=0.01), point(20, 1.0, half=0.01)
    assert front([fast, slow]) == [fast]
    assert front([point(1, 0.9, half=0.01), slow])[1:] == [slow]


def test_who_may_stand_on_the_front_is_named() -> None:
    """One that is slower by no more than the intervals and keeps as much is not told apart from the front."""

    def between(one: Point, low: float, high: float) -> Point:
        return dataclasses.replace(one, xs=(low, high))

    best = between(point(2, 1.0, half=0.05), 1.9, 2.1)
    near = between(point(2.05, 0.98, half=0.05), 1.95, 2.15)
    slow = between(point(3, 1.0, half=0.05), 2.9, 3.1)
    poor = between(point(2.05, 0.8, half=0.05), 1.95, 2.15)
    assert front([best, near, slow, poor]) == [best]
    assert alike([best, near, slow, poor]) == [near]


def test_picture_says_who_is_not_told_apart() -> None:
    """A note names who may stand on the front, and there is none where nobody may."""
    assert not any("told apart" in note for note in of(ranking_cases.run()).notes)
    near = rows(kappas={**KAPPAS, LOW_RANK: 0.001}, steps={**STEPS, LOW_RANK: 5.0})
    fitted = ranking_cases.run(ranking_cases.without_forms(near))
    assert "Not told apart from the front: LowRank(rank=1)" in of(fitted).notes


def test_exact_estimate_has_no_place_and_is_named() -> None:
    """No share of the members equals it: a note says so, and its line over the population has a gap."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    found = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    figure = of(ranking_cases.run(found))
    assert "Orthogonal" not in names(figure)
    assert "Exact, above any rate: Orthogonal" in figure.notes
    (grid,) = spectra.kept_grids(ranking_cases.run(found), "Linear")
    assert not any(variant == ranking_cases.ORTHOGONAL for variant, _, _ in grid.cells)


def test_picture_names_the_front() -> None:
    """Time is against base and logarithmic, the front is numbered and named, and everything has a mark."""
    sheet = of(ranking_cases.run())
    axes = sheet.axes[0]
    assert names(sheet) == ["Flipped", "Flipped(cores=8)", "Hadamard"]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    assert (axes.get_xscale(), axes.get_title("left")) == ("log", "(64, 64)")
    assert sorted(along(mark)[0] for mark in marks(sheet)) == [4, 4.5, 5, 6, 200]
    (stairs,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert along(stairs) == [4, 4.5, 5]
    assert stairs.get_drawstyle() == "steps-post"
    assert "time(base)" in axes.get_xlabel()


def test_numbers_of_a_crowded_front_stand_at_their_own_marks() -> None:
    """The nearest mark of each number is its own, or a line leads to it, however near variants are."""
    steps = {**STEPS, LOW_RANK: 4.1, HADAMARD: 4.15, CORES: 4.05, FLIPPED: 4.0}
    kappas = {**KAPPAS, LOW_RANK: 40.0, HADAMARD: 20.0, CORES: 60.0, FLIPPED: 65.0}
    sheet = of(ranking_cases.run(rows(kappas=kappas, steps=steps)))
    axes = sheet.axes[0]
    places = [axes.transData.transform((along(line)[0], along(line, "y")[0])) for line in marks(sheet)]
    numbers = [text for text in axes.texts if isinstance(text, Annotation)]
    assert len(numbers) > 3
    sheet.draw_without_rendering()
    for number in numbers:
        box = Text.get_window_extent(number)
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        nearest = min(places, key=lambda place: math.dist(place, middle))
        own = axes.transData.transform(number.xy)
        assert number.arrow_patch is not None or math.dist(nearest, own) < 0.1, number.get_text()


def test_rate_stands_against_memory() -> None:
    """Effective members per ms of a step over the most memory of its phases: the front wants both."""
    run = ranking_cases.run()
    sheet = of(run, MEMORY)
    places = {(along(mark)[0], along(mark, "y")[0]) for mark in marks(sheet)}
    (found,) = rankings(run, "Linear")
    standings = [one for one in found.of(SQUARE) if one.rate and one.peak_bytes]
    assert places == {((one.peak_bytes or 0) / 1e6, one.rate) for one in standings}
    assert len(places) == 5
    assert names(sheet) == ["Hadamard"]
    assert "No number, out of memory: SparsePerturbed(k=1)" in sheet.notes


def test_size_of_a_mark_is_its_noise() -> None:
    """More noise is a larger mark, none the smallest, and the key has examples."""
    sheet = of(ranking_cases.run())
    (found,) = rankings(ranking_cases.run(), "Linear")
    xs = {one.x: one.standing.noise_bytes or 0.0 for one in points(found.of(SQUARE), TIME)}
    sizes = {xs[along(line)[0]]: line.get_markersize() for line in marks(sheet)}
    assert [sizes[noise] for noise in sorted(sizes)] == sorted(sizes.values())
    assert len(set(sizes.values())) == 5
    words = [text.get_text() for text in sheet.legends[0].get_texts()]
    assert {"Flipped", "Hadamard", "noise of 0 B", "noise of 4.00 GB"} <= set(words)
    assert len({line.get_markersize() for line in marks(of(ranking_cases.run(), MEMORY))}) == 1


def test_panel_for_each_shape_with_its_largest_population() -> None:
    """Shapes have a panel each; of one with several populations the largest is shown."""
    cases = [linear(64, members=64), linear(64, members=256), linear(128)]
    figure = of(ranking_cases.run([row for case in cases for row in rows(case)]))
    assert [axes.get_title("left") for axes in figure.axes] == ["(64, 64)", "(128, 128)"]
    assert "256 x 1, 1024 x 1" in figure.origin


def test_without_a_base_there_is_no_picture() -> None:
    """Without the plain layer there is no time to compare with."""
    (found,) = rankings(ranking_cases.run([row for row in rows() if row.variant.mode == "batched"]), "Linear")
    assert pareto(found, TIME) is None


def test_what_is_kept_falls_with_the_population() -> None:
    """One core and several have a line each over the number of members, in percent."""
    run = ranking_cases.run(sweep(64, 256, 1024))
    (grid,) = spectra.kept_grids(run, "Linear")
    figure = drawn(sweeps.against(grid, sweeps.POPULATION))
    lines = named(figure.axes[0])
    assert set(lines) == {"Perturbed", "Flipped", "Flipped(cores=8)"}
    assert along(lines["Perturbed"], "y") == pytest.approx([100.0, 100.0, 100.0])
    assert along(lines["Flipped"], "y") == pytest.approx([100 / (1 + 65 * n / 4096) for n in (64, 256, 1024)])
    assert figure.heading == "Linear, (64, 64): effective members as a share of all against the population"
    assert figure.axes[0].get_ylabel() == "%"


def test_spectrum_ends_at_the_rank() -> None:
    """Singular values stand over their place; those that are rounding are left out."""
    (grid,) = quality_grids(ranking_cases.run(), "Linear", spectra.SPECTRUM, spectra.ONE)
    figure = drawn(spectra.spectrum(grid))
    lengths = {name: len(along(line)) for name, line in named(figure.axes[0]).items()}
    assert lengths == {"Flipped": 64, "LowRank(rank=1)": 1, "Perturbed": 64}
    assert figure.heading == "Linear(64, 64): singular values of one perturbation"


def test_unusable_qualities_break_no_picture() -> None:
    """A quality that is no number, or no positive one, has no mark, and the others have theirs."""
    broken: list[Row] = []
    for row in rows():
        metric = getattr(row, "metric", "")
        value = {LOW_RANK: float("nan"), HADAMARD: -3.0}.get(row.variant)
        odd = metric in {"effective_members", "singular_values"} and value is not None
        broken.append(msgspec.structs.replace(row, samples=((value,),)) if odd else row)
    run = ranking_cases.run(broken)
    assert names(of(run)) == ["Flipped", "Flipped(cores=8)", "Perturbed"]
    (grid,) = quality_grids(run, "Linear", spectra.SPECTRUM, spectra.ONE)
    assert set(named(drawn(spectra.spectrum(grid)).axes[0])) == {"Flipped", "Perturbed"}
    nothing = [row for row in rows() if row.variant == LOW_RANK]
    assert quality_grids(ranking_cases.run(nothing[:1]), "Linear", spectra.SPECTRUM, spectra.ONE) == []


def test_pages_have_the_pictures_of_quality(tmp_path: Path) -> None:
    """A run with qualities has its pictures and tables on its page, the headline before the times."""
    store(tmp_path, ranking_cases.run([*rows(), *sweep(64, 256, 4096)]))
    written, problems = render_reports(tmp_path / "results", tmp_path / "reports")
    assert problems == []
    found = {path.name for path in written if path.suffix == ".svg"}
    assert {"linear-pareto.svg", "linear-kept-population.svg", "linear-kappa.svg"} <= found
    assert "linear-spectrum.svg" not in found
    page = (tmp_path / "reports/test-cpu/quality/tables.md").read_text(encoding="utf-8")
    alternative = "Linear: effective members per millisecond of a step, against its peak memory"
    assert f'<img src="linear-pareto.svg" alt="{alternative}" width="900">' in page
    headline = "## Linear (64, 64) members=1024: effective members per millisecond"
    assert 0 < page.index(headline) < page.index("## Linear, step: time")


def test_cores_are_told_apart() -> None:
    """A variant with several cores has a name and a place of its own."""
    (found,) = rankings(ranking_cases.run(), "Linear")
    places = {one.standing.variant: one.y for one in points(found.of(SQUARE), TIME)}
    assert places[CORES] > 5 * places[FLIPPED]
