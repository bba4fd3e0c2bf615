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
    factors = {DENSE: 16.0, SPARSE: 1.1, PERMUTED: 2.5, BASE: 1.0, NAIVE: 5.0, FLIPPED: 2.0}
    figure = drawn(multipliers(grid(time_row(v, linear(), factor) for v, factor in factors.items())))
    (axes,) = figure.axes
    families = [label.get_text() for label in axes.get_yticklabels()]
    assert families == ["sparse", "shared core", "Naive", "dense noise"]
    assert sorted(points(axes)) == [(1.1, 0), (2.0, 1), (2.5, 1), (5.0, 2), (16.0, 3)]
    names = [label.get_text() for label in axes.texts]
    assert names == ["SparsePerturbed(k=1) 1.10x", "Flipped 2.00x", "Naive 5.00x", "Perturbed 16.0x"]
    title = "Linear, forward: SparsePerturbed(k=1) takes 1.10x the plain layer's time, dense noise 16.0x"
    assert figure.title == title


def test_intervals_and_roofline_bounds() -> None:
    """A line is the interval of a ratio; a tick is the minimum work at the peaks, over the time of base."""
    rows = [
        working(time_row(BASE, linear(), *[1.0] * 6), 1e7, 1e3),
        working(time_row(DENSE, linear(), 1.5, 2, 2, 2, 2, 3), 4e6, 1e3),
    ]
    figure = drawn(multipliers(grid(rows, peaks=True)))
    (axes,) = figure.axes
    segments = [ends.tolist() for collection in axes.collections for ends in collection.get_segments()]  # type: ignore[attr-defined]  # lines
    assert [[1.5, 0.0], [3.0, 0.0]] in segments
    (tick,) = [ends for ends in segments if ends[0][0] == ends[1][0]]
    assert tick[0][0] == pytest.approx(0.4)  # 4e6 flops at 1e7 per ms
    lines, bound = figure.notes
    assert lines == "Lines: 95 % intervals"
    assert bound.startswith("Roofline bound: tick, minimum work of the cheapest variant at the measured")
    few = [time_row(v, linear(), 1.0) for v in (BASE, DENSE)]
    assert drawn(multipliers(grid(few, peaks=True))).notes == []


def test_the_case_with_the_most_numbers_is_shown() -> None:
    """Of equals the largest is shown, not a larger case at which variants ran out of memory."""
    shapes = [linear(members=members) for members in (64, 128)]
    rows: list[Row] = [time_row(v, case, 1.0) for case in shapes for v in (SPARSE, BASE, NAIVE)]
    big = linear(members=4096)
    lost: list[Row] = [time_row(BASE, big, 1.0), *(skipped(v, big, "out of memory") for v in (SPARSE, NAIVE))]
    assert "128 x 1 (members x repeats)" in drawn(multipliers(grid([*rows, *lost]))).origin


def test_without_anything_to_compare_there_is_no_figure() -> None:
    """There is nothing to draw without the plain layer, without other variants, or without usable samples."""
    base, naive, dense = (time_row(v, linear(), 1.0) for v in (BASE, NAIVE, DENSE))
    dead = msgspec.structs.replace(dense, samples=((float("nan"),), ()))
    memory = skipped(DENSE, linear(), "out of memory: 9 GB")
    nothing: list[list[Row]] = [[base], [dense], [memory], [base, dead], [base, memory]]
    for rows in nothing:
        assert multipliers(grid(rows)) is None
    reasons: dict[str, Row] = {"no usable samples": dead, "out of memory": memory}
    for reason, row in reasons.items():
        assert f"No number, {reason}: Perturbed" in drawn(multipliers(grid([base, naive, row]))).notes


def test_published_values_are_marked() -> None:
    """The origin of published values names neither a commit nor a run."""
    rows = [msgspec.structs.replace(time_row(v, linear(), 1.0), method="published") for v in (DENSE, BASE)]
    origin = drawn(multipliers(grid(rows))).origin
    assert "Test CPU, published by others (quick), float32" in origin
    assert not any(word in origin for word in ("commit", "run "))
