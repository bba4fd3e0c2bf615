"""The plot of the distribution of samples."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from esbench.report.plots.distributions import samples
from tests.report.plots.figures import along, drawn, grid, legend
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant

if TYPE_CHECKING:
    from esbench.schema import Row


def test_a_line_rises_at_every_sample() -> None:
    """The left panel has all samples, with a dotted median; the right panel is relative to the median."""
    figure = drawn(samples(grid([time_row(BASE, linear(), 4, 1, 2, 3), time_row(DENSE, linear(), 2.0)])))
    left, right = figure.axes
    line = next(line for line in left.lines if len(along(line)) == 5)
    assert along(line) == [1, 1, 2, 3, 4]
    assert along(line, "y") == [0, 0.25, 0.5, 0.75, 1]
    assert line.get_drawstyle() == "steps-post"
    assert 2.5 in [along(one)[0] for one in left.lines if one.get_linestyle() == ":"]
    assert left.get_xlabel() == "time (ms)"
    spread = next(line for line in right.lines if len(along(line)) == 5)
    assert along(spread) == pytest.approx([-60, -60, -20, 20, 60])
    assert sorted(legend(figure)) == ["Base", "Perturbed"]


def test_a_sample_far_out_is_counted_and_not_dropped() -> None:
    """An outlier is in the left panel, and a note counts it for the right one."""
    figure = drawn(samples(grid([time_row(BASE, linear(), *np.linspace(0.99, 1.01, 200), 50.0)])))
    assert figure.axes[0].get_xlim()[1] > 50
    assert figure.axes[1].get_xlim()[1] < 10
    assert figure.notes[1] == "(256, 256): beyond the edges of the right panel Base 1 of 201"


def test_the_axis_of_values_has_their_unit_and_suits_their_range() -> None:
    """The axis is logarithmic if variants differ by a factor; bytes are in MB."""
    near = drawn(samples(grid([time_row(one, linear(), 1, 1.1) for one in (BASE, DENSE)])))
    far = drawn(samples(grid([time_row(BASE, linear(), 1, 1.1), time_row(DENSE, linear(), 90, 99)])))
    assert (near.axes[0].get_xscale(), far.axes[0].get_xscale()) == ("linear", "log")
    memory = drawn(samples(grid([bytes_row(BASE, linear(), "peak_bytes", 10**7)], "_bytes")))
    assert memory.axes[0].get_xlabel() == "peak memory (MB)"
    assert along(memory.axes[0].lines[0])[0] == pytest.approx(10)


def test_what_is_not_shown_is_said() -> None:
    """Notes name variants without samples and their reasons, and what exceeds six variants or four cases."""
    dead = msgspec.structs.replace(time_row(NAIVE, linear(), 1.0), samples=((float("nan"),),))
    rows: list[Row] = [dead, skipped(DENSE, linear(), "out of memory: 9 GB")]
    figure = drawn(samples(grid([time_row(BASE, linear(), 1, 2), *rows])))
    assert sorted(figure.notes[1:]) == [
        "(256, 256): no samples, no usable samples: Naive",
        "(256, 256): no samples, out of memory: Perturbed",
    ]
    assert samples(grid(rows)) is None
    many = [time_row(variant(f"V{v}"), linear(2**k), 1, 2) for v in range(8) for k in range(5)]
    figure = drawn(samples(grid(many)))
    assert len(figure.axes) == 8
    assert len(legend(figure)) == 6
    assert figure.notes[1:] == [
        "6 of 8 variants: choose with --variants",
        "4 of 5 cases: choose with --cases",
    ]
