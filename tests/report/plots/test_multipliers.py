"""The plot of time multipliers."""

from typing import TYPE_CHECKING

import msgspec
import pytest

from esbench.report.plots.multipliers import multipliers
from tests.report.plots.figures import FLIPPED, PERMUTED, SPARSE, drawn, grid, points
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, working

if TYPE_CHECKING:
    from esbench.schema import Row


def test_a_row_per_family_and_a_dot_per_variant() -> None:
    """Rows are sorted by their cheapest variant, which is named; a missing number has its reason."""
    factors = {DENSE: 16.0, SPARSE: 1.1, PERMUTED: 2.5, FLIPPED: 2.0, BASE: 1.0, NAIVE: 5.0}
    rows: list[Row] = [time_row(v, linear(), f) for v, f in factors.items() if v != FLIPPED]
    rows.append(time_row(FLIPPED, linear(), 2.0))
    figure = drawn(multipliers(grid(rows)))
    (axes,) = figure.axes
    assert [one.get_text() for one in axes.get_yticklabels()] == [
        "sparse",
        "shared core",
        "Naive",
        "dense noise",
    ]
    assert sorted(points(axes)) == [(1.1, 0), (2.0, 1), (2.5, 1), (5.0, 2), (16.0, 3)]
    assert [one.get_text() for one in axes.texts] == [
        "SparsePerturbed(k=1) 1.10x",
        "Flipped 2.00x",
        "Naive 5.00x",
        "Perturbed 16.0x",
    ]
    title = "Linear, forward: SparsePerturbed(k=1) takes 1.10x the plain layer's time, Perturbed 16.0x"
    assert figure.title == title
    rows[0] = skipped(DENSE, linear(), "out of memory: 9 GB")
    assert "No number, out of memory: Perturbed" in drawn(multipliers(grid(rows))).notes


def test_intervals_and_roofline_bounds() -> None:
    """A line is the interval of a ratio; a tick is the minimum work at the peaks, over the time of base."""
    rows = [
        working(time_row(BASE, linear(), *[1.0] * 6), 1e7, 1e3),
        working(time_row(DENSE, linear(), 1.5, 2, 2, 2, 2, 3), 4e6, 1e3),
    ]
    figure = drawn(multipliers(grid(rows, peaks=True)))
    (axes,) = figure.axes
    segments = [ends.tolist() for one in axes.collections for ends in one.get_segments()]  # type: ignore[attr-defined]  # lines
    assert [[1.5, 0.0], [3.0, 0.0]] in segments
    (tick,) = [ends for ends in segments if ends[0][0] == ends[1][0]]
    assert tick[0][0] == pytest.approx(0.4)  # 4e6 flops at 1e7 per ms
    assert figure.notes[0] == "Lines: 95 % intervals"
    assert figure.notes[1].startswith(
        "Roofline bound: tick, minimum work of the cheapest variant at the measured"
    )
    few = [time_row(v, linear(), 1.0) for v in (BASE, DENSE)]
    assert drawn(multipliers(grid(few, peaks=True))).notes == []


def test_the_case_with_the_most_numbers_is_shown() -> None:
    """Of equals it is the largest."""
    rows: list[Row] = [
        time_row(v, linear(members=members), 1.0) for members in (64, 128) for v in (SPARSE, BASE, NAIVE)
    ]
    assert "128 x 1 (members x repeats)" in drawn(multipliers(grid(rows))).origin
    huge = linear(members=4096)
    rows += [time_row(BASE, huge, 1.0), *(skipped(v, huge, "out of memory") for v in (SPARSE, NAIVE))]
    assert "128 x 1 (members x repeats)" in drawn(multipliers(grid(rows))).origin


def test_without_anything_to_compare_there_is_no_figure() -> None:
    """There is nothing to draw without the plain layer, without other variants, or without usable samples."""
    dead = msgspec.structs.replace(time_row(DENSE, linear(), 1.0), samples=((float("nan"),), ()))
    for rows in (
        [time_row(BASE, linear(), 1.0)],
        [time_row(DENSE, linear(), 1.0)],
        [skipped(DENSE, linear(), "no")],
        [time_row(BASE, linear(), 1.0), dead],
    ):
        assert multipliers(grid(rows)) is None
    figure = drawn(multipliers(grid([*(time_row(v, linear(), 1.0) for v in (BASE, NAIVE)), dead])))
    assert "No number, no usable samples: Perturbed" in figure.notes


def test_published_figures_are_marked() -> None:
    """Their origin names neither a commit nor a run."""
    rows = [msgspec.structs.replace(time_row(v, linear(), 1.0), method="published") for v in (DENSE, BASE)]
    figure = drawn(multipliers(grid(rows)))
    assert "Test CPU, published by others (quick), float32" in figure.origin
    assert "commit" not in figure.origin
    assert "run " not in figure.origin
