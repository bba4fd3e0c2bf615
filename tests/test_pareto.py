"""The pictures of quality."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from esbench.records import Row, Run
from esbench.report import drawing, spectra, sweeps
from esbench.report.estimates import Worth
from esbench.report.grid import quality_grids
from esbench.report.pages import render_reports
from esbench.report.pareto import Point, alike, front, pareto, points
from esbench.report.ranking import Standing, rankings
from esbench.statistics import Ratio
from tests import ranking_cases
from tests.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, STEPS, rows, sweep
from tests.report_cases import store
from tests.synthetic import DENSE, linear


def of(run: Run) -> Figure:
    """The Pareto picture of Linear."""
    (found,) = rankings(run, "Linear")
    return drawn(pareto(found))


def drawn(figure: Figure | None) -> Figure:
    """A figure that there is."""
    assert figure is not None
    return figure


def names(figure: Figure, panel: int = 0) -> list[str]:
    """What is written at the right edge of a panel."""
    return sorted(text.get_text() for text in figure.axes[panel].texts if isinstance(text, Annotation))


def point(x: float, y: float, half: float | None = None) -> Point:
    """A point in the plane; ``half`` is how far its share may be off."""
    off = half or 0.0
    effective = Worth(y * 1024, (y - off) * 1024, (y + off) * 1024, 4)
    return Point(Standing(DENSE, SQUARE, effective=effective), x, y)


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
        standing = dataclasses.replace(one.standing, multiplier=Ratio(one.x, "inside rounds", 9, low, high))
        return one._replace(standing=standing)

    best = between(point(2, 1.0, half=0.05), 1.9, 2.1)
    near = between(point(2.05, 0.98, half=0.05), 1.95, 2.15)
    slow = between(point(3, 1.0, half=0.05), 2.9, 3.1)
    poor = between(point(2.05, 0.8, half=0.05), 1.95, 2.15)
    assert front([best, near, slow, poor]) == [best]
    assert alike([best, near, slow, poor]) == [near]


def test_picture_says_who_is_not_told_apart() -> None:
    """The legend names who may stand on the front, and has no such line where nobody may."""
    assert not any("told apart" in text.get_text() for text in of(ranking_cases.run()).legends[0].get_texts())
    near = rows(kappas={**KAPPAS, LOW_RANK: 0.001}, steps={**STEPS, LOW_RANK: 5.0})
    fitted = ranking_cases.run(ranking_cases.without_forms(near))
    words = [text.get_text() for text in of(fitted).legends[0].get_texts()]
    assert words[-1] == "not told apart from the front: LowRankLinear(rank=1)"


def test_exact_estimate_has_no_place_and_is_named() -> None:
    """No share of the members equals it: the legend says so, and its line over the population has a gap."""
    cases = [linear(64, members=members) for members in (1024, 4096)]
    found = [row for case in cases for row in [*rows(case), *ranking_cases.orthogonal(case)]]
    figure = of(ranking_cases.run(found))
    assert "OrthogonalLinear" not in names(figure)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[-1] == "exact, above any share: OrthogonalLinear"
    (grid,) = spectra.kept_grids(ranking_cases.run(found), "Linear")
    assert not any(variant == ranking_cases.ORTHOGONAL for variant, _, _ in grid.cells)


def test_picture_names_the_front() -> None:
    """Time is against base and logarithmic, the front is named, and everything has a mark."""
    figure = of(ranking_cases.run())
    axes = figure.axes[0]
    assert names(figure) == ["FlippedLinear", "FlippedLinear(cores=8)", "HadamardLinear"]
    assert (axes.get_xscale(), axes.get_title()) == ("log", "(64, 64)")
    marks = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert sorted(float(np.asarray(line.get_xdata())[0]) for line in marks) == [4, 4.5, 5, 6, 200]
    (stairs,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(np.asarray(stairs.get_xdata())) == [4, 4.5, 5]
    assert stairs.get_drawstyle() == "steps-post"
    assert "time(base)" in axes.get_xlabel()


def test_size_of_a_mark_is_its_noise() -> None:
    """More noise is a larger mark, none the smallest, and the legend has examples."""
    figure = of(ranking_cases.run())
    (found,) = rankings(ranking_cases.run(), "Linear")
    xs = {one.x: one.standing.noise_bytes or 0.0 for one in points(found.of(SQUARE))}
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    sizes = {xs[float(np.asarray(line.get_xdata())[0])]: line.get_markersize() for line in lines}
    assert [sizes[noise] for noise in sorted(sizes)] == sorted(sizes.values())
    assert len(set(sizes.values())) == 5
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"Flipped", "Hadamard", "noise of 0 B", "noise of 4.00 GB"} <= set(words)


def test_panel_for_each_shape_with_its_largest_population() -> None:
    """Shapes have a panel each; of one with several populations the largest is shown."""
    cases = [linear(64, members=64), linear(64, members=256), linear(128)]
    figure = of(ranking_cases.run([row for case in cases for row in rows(case)]))
    assert [axes.get_title() for axes in figure.axes] == ["(64, 64)", "(128, 128)"]
    assert "256 x 1, 1024 x 1" in figure.get_suptitle()


def test_without_a_base_there_is_no_picture() -> None:
    """Without the plain layer there is no time to compare with."""
    (found,) = rankings(ranking_cases.run([row for row in rows() if row.variant.mode == "batched"]), "Linear")
    assert pareto(found) is None


def test_what_is_kept_falls_with_the_population() -> None:
    """One core and several have a line each over the number of members, in percent."""
    run = ranking_cases.run(sweep(64, 256, 1024))
    (grid,) = spectra.kept_grids(run, "Linear")
    figure = drawn(sweeps.against(grid, sweeps.POPULATION))
    assert names(figure) == ["FlippedLinear", "FlippedLinear(cores=8)", "PerturbedLinear"]
    shown = [
        list(np.asarray(line.get_ydata())) for line in figure.axes[0].lines if line.get_marker() != "None"
    ]
    assert shown[0] == pytest.approx([100.0, 100.0, 100.0])
    assert shown[1] == pytest.approx([100 / (1 + 65 * n / 4096) for n in (64, 256, 1024)])
    assert figure.get_suptitle().startswith(
        "Linear: effective members as a share of all against the population"
    )
    assert figure.axes[0].get_ylabel() == "%"


def test_spectrum_ends_at_the_rank() -> None:
    """Singular values stand over their place; those that are rounding are left out."""
    (grid,) = quality_grids(ranking_cases.run(), "Linear", spectra.SPECTRUM, spectra.ONE)
    figure = drawn(spectra.spectrum(grid))
    assert names(figure) == ["FlippedLinear", "LowRankLinear(rank=1)", "PerturbedLinear"]
    lengths = sorted(len(np.asarray(line.get_xdata())) for line in figure.axes[0].lines)
    assert lengths == [1, 64, 64]
    assert figure.get_suptitle().startswith("Linear(64, 64): singular values of one perturbation")


def test_unusable_qualities_break_no_picture() -> None:
    """A quality that is no number, or no positive one, has no mark, and the others have theirs."""
    broken: list[Row] = []
    for row in rows():
        metric = getattr(row, "metric", "")
        value = {LOW_RANK: float("nan"), HADAMARD: -3.0}.get(row.variant)
        odd = metric in {"effective_members", "singular_values"} and value is not None
        broken.append(msgspec.structs.replace(row, samples=((value,),)) if odd else row)
    run = ranking_cases.run(broken)
    assert names(of(run)) == ["FlippedLinear", "FlippedLinear(cores=8)", "PerturbedLinear"]
    (grid,) = quality_grids(run, "Linear", spectra.SPECTRUM, spectra.ONE)
    assert names(drawn(spectra.spectrum(grid))) == ["FlippedLinear", "PerturbedLinear"]
    nothing = [row for row in rows() if row.variant == LOW_RANK]
    assert quality_grids(ranking_cases.run(nothing[:1]), "Linear", spectra.SPECTRUM, spectra.ONE) == []


def test_pages_have_the_pictures_of_quality(tmp_path: Path) -> None:
    """A run with qualities has its pictures and tables on its page, the headline before the times."""
    store(tmp_path, ranking_cases.run([*rows(), *sweep(64, 256, 4096)]))
    written, problems = render_reports(tmp_path / "results", tmp_path / "reports")
    assert problems == []
    found = {path.name for path in written if path.suffix == ".svg"}
    assert {"linear-pareto.svg", "linear-kept-population.svg", "linear-spectrum.svg"} <= found
    page = (tmp_path / "reports/test-cpu/quality/tables.md").read_text(encoding="utf-8")
    assert "![linear-pareto](linear-pareto.svg)" in page
    headline = "## Linear (64, 64) members=1024: effective members per millisecond"
    assert 0 < page.index(headline) < page.index("## Linear, step: time")


def test_same_run_same_bytes(tmp_path: Path) -> None:
    """Drawn twice, the front has the same bytes."""
    for name in ("a", "b"):
        drawing.save(of(ranking_cases.run()), tmp_path / name)
    first, second = (sorted(tmp_path.glob(f"{name}*")) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_cores_are_told_apart() -> None:
    """A variant with several cores has a name and a place of its own."""
    (found,) = rankings(ranking_cases.run(), "Linear")
    places = {one.standing.variant: one.y for one in points(found.of(SQUARE))}
    assert places[CORES] > 5 * places[FLIPPED]
