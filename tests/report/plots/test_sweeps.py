"""The plots of sweeps over population and width."""

import msgspec
import pytest
from matplotlib.axes import Axes

from esbench.report.analysis.pivot import Grid, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, LINEAR
from esbench.report.plots import sweeps
from esbench.report.plots.sweeps import POPULATION, WIDTH, Line, cheapest_of_each_family, kept_members, times
from esbench.schema import Row
from tests import synthetic
from tests.report import ranking_cases
from tests.report.plots.figures import FLIPPED, PERMUTED, SPARSE, along, drawn, grid
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, variant


def over_members(*populations: int) -> list[Row]:
    """Return times of variants over populations; dense noise has no number above 256 members."""
    rows: list[Row] = []
    for members in populations:
        case = linear(256, members=members)
        for v, factor in ((SPARSE, 1.1), (FLIPPED, 2.2), (PERMUTED, 2.0), (BASE, 1.0), (NAIVE, 30.0)):
            rows.append(time_row(v, case, factor * members, factor * members))
        fits = members <= 256
        rows += [time_row(DENSE, case, 12.0 * members)] if fits else [skipped(DENSE, case, "out of memory")]
    return rows


def labels(axes: Axes) -> list[str]:
    """Return the labels of the lines, from top to bottom."""
    return [label.get_text() for label in sorted(axes.texts, key=lambda label: -label.get_window_extent().y0)]


def test_the_cheapest_of_each_family_as_a_multiple_of_base() -> None:
    """A line is time(variant) / time(base), labelled at its end; dense noise is always there."""
    figure = drawn(times(grid(over_members(64, 256, 1024)), POPULATION))
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "members")
    assert labels(axes) == [
        "Perturbed (to 256)",
        "Permuted(side=out, in_sparsity=0.5)",
        "SparsePerturbed(k=1)",
    ]
    points = {tuple(along(line, "y")): along(line) for line in axes.lines}
    assert points == {
        (1.1, 1.1, 1.1): [64, 256, 1024],
        (2.0, 2.0, 2.0): [64, 256, 1024],
        (12.0, 12.0): [64, 256],
    }
    assert figure.notes == [
        "No line, not among the measured variants: low rank, dropout",
        "No number for a larger case, out of memory: Perturbed",
    ]
    assert figure.title == (
        "Linear 256 -> 256, forward: at 1,024 members SparsePerturbed(k=1) takes 1.10x the time of the "
        "plain layer, dense noise 12.0x (at 256)"
    )


def test_families_without_a_line_are_named() -> None:
    """A family that was measured at too few cases is named; a run without families has no such note."""
    rows = over_members(64, 256, 1024)
    few = [time_row(variant("DropoutMask"), linear(256, members=64), 1.0)]
    notes = drawn(times(grid([*rows, *few]), POPULATION)).notes
    assert notes[:2] == [
        "No line, not among the measured variants: low rank",
        "No line, a number for fewer than two cases: dropout",
    ]
    others = [
        time_row(v, row.case, 1.0) for row in rows for v in (BASE, variant("Sorting")) if row.variant == BASE
    ]
    assert drawn(times(grid(others), POPULATION)).notes == []


def test_the_line_that_reaches_the_largest_case_is_drawn() -> None:
    """Of a family a cheaper variant that ends at a smaller case is not its cheapest."""
    early = Line(FLIPPED, ((64.0, 1.0),), "out of memory")
    reaching = Line(PERMUTED, ((64.0, 2.0), (256.0, 2.0)), "")
    assert cheapest_of_each_family([early, reaching]) == [reaching]
    cheap = Line(SPARSE, ((64.0, 1.0),), "time budget")
    assert cheapest_of_each_family([cheap, reaching]) == [reaching, cheap]  # the title names the first


def test_time_over_the_width() -> None:
    """Cases are square layers that differ only in their width; of several families the longest is drawn."""
    cases = [linear(width) for width in (128, 256, 512)]
    odd = msgspec.structs.replace(linear(), in_channels=7)
    rows = [time_row(v, case, f) for case in (*cases, odd) for v, f in ((DENSE, 9), (BASE, 3))]
    figure = drawn(times(grid(rows), WIDTH))
    (line,) = figure.axes[0].lines
    assert (along(line), along(line, "y")) == ([128, 256, 512], [3, 3, 3])
    assert figure.axes[0].get_xlabel() == "channels in and out"
    assert times(grid(rows), POPULATION) is None
    assert times(grid(rows[:4]), WIDTH) is None
    convolutions = [synthetic.conv2d(width, size) for size in (32, 64) for width in (16, 32, 64)]
    last = synthetic.conv2d(128, 64)
    rows = [time_row(v, case, 1.0) for case in (*convolutions, last) for v in (DENSE, BASE)]
    assert sweeps.longest_sweep(grid(rows, operator="Conv2d"), WIDTH) == [*convolutions[3:], last]


def test_without_three_cases_or_without_a_number_there_is_no_figure() -> None:
    """Neither reasons nor samples of zero are points of a line."""
    cases = [linear(members=members) for members in (1, 2, 3)]
    for few in (
        [time_row(DENSE, linear(), 1.0)],
        [skipped(DENSE, case, "no") for case in cases],
        [time_row(DENSE, case, 1.0) for case in cases],
        [time_row(v, case, 0.0) for case in cases for v in (DENSE, BASE)],
    ):
        assert times(grid(few), POPULATION) is None
        assert times(grid(few), WIDTH) is None


def test_the_share_of_effective_members_falls_with_the_population() -> None:
    """Shares are percentages, and a line of the first variant of each scheme."""
    (shares,) = shares_of(ranking_cases.sweep(64, 256, 1024))
    figure = drawn(kept_members(shares))
    assert figure.axes[0].get_ylabel() == "members kept (%)"
    assert labels(figure.axes[0]) == ["Perturbed", "Flipped"]
    dense, losing = (along(line, "y") for line in figure.axes[0].lines)
    assert dense == pytest.approx([100.0, 100.0, 100.0])
    flipped = [100 / (1 + 65 * n / 4096) for n in (64, 256, 1024)]
    assert losing == pytest.approx(flipped)
    kept = f"{1024 * flipped[-1] / 100:.3g}"
    title = f"Linear 64 -> 64: 1 scheme keeps all members, Flipped keeps {kept} of 1,024 members"
    assert figure.title == title


def test_an_exact_estimate_is_an_arrow_above_all_members() -> None:
    """An exact estimate, whose share is infinite, is an arrow with a name and not a line."""
    cases = [linear(64, members=members) for members in (256, 1024, 4096)]
    rows = [row for case in cases for row in [*ranking_cases.rows(case), *ranking_cases.orthogonal(case)]]
    (shares,) = shares_of(rows)
    figure = drawn(kept_members(shares))
    assert labels(figure.axes[0])[0] == "Orthogonal: exact"
    assert "4 schemes keep all members" in figure.title


def shares_of(measured_rows: list[Row]) -> list[Grid]:
    """Return the grids of n_eff of a run."""
    return quality_grids(ranking_cases.run(measured_rows), "Linear", EFFECTIVE, LINEAR)
