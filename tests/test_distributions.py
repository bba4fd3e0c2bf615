"""The picture of samples."""

import msgspec
import numpy as np
import pytest

from esbench.records import Row
from esbench.report.distributions import distributions
from esbench.report.grid import LATENCY, MEMORY, Grid, grids
from tests import synthetic
from tests.picture_cases import along, drawn, key, named
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant


def grid(*rows: Row, suffix: str = LATENCY) -> Grid:
    """The forward of a run."""
    return grids(synthetic.run(rows), "Linear", suffix)[0]


def test_a_line_goes_up_at_every_sample() -> None:
    """Of four samples a quarter is at most the first, all are at most the last; dotted is the median."""
    sheet = drawn(distributions(grid(time_row(BASE, linear(), 4, 1, 2, 3), time_row(DENSE, linear(), 2.0))))
    left, right = sheet.axes
    line = next(line for line in left.lines if len(along(line)) == 5)
    assert along(line) == [1, 1, 2, 3, 4]
    assert along(line, "y") == [0, 0.25, 0.5, 0.75, 1]
    assert line.get_drawstyle() == "steps-post"
    assert 2.5 in [along(one)[0] for one in left.lines if one.get_linestyle() == ":"]
    assert "time (ms)" in left.get_xlabel()
    spread = next(line for line in right.lines if len(along(line)) == 5)
    assert along(spread) == pytest.approx([-60, -60, -20, 20, 60])
    assert sorted(key(sheet)) == ["Base", "Perturbed"]


def test_lines_differ_without_colour() -> None:
    """Two variants have other marks, other lines, and one is lighter."""
    rows = [time_row(one, linear(), 1, 2, 3) for one in (BASE, DENSE)]
    one, other = [line for line in drawn(distributions(grid(*rows))).axes[0].lines if len(along(line)) > 2]
    assert one.get_marker() != other.get_marker()
    assert one.get_linestyle() != other.get_linestyle()


def test_many_samples_have_few_points_and_keep_their_ends() -> None:
    """A line of ten thousand samples has some hundred points, the smallest and the largest among them."""
    values = np.random.default_rng(0).lognormal(0, 1, 10_000)
    row = msgspec.structs.replace(time_row(BASE, linear()), samples=(tuple(1e6 * values),))
    line = max(drawn(distributions(grid(row))).axes[0].lines, key=lambda one: len(along(one)))
    assert len(along(line)) < 400
    assert (along(line)[0], along(line)[-1]) == pytest.approx((values.min(), values.max()))
    exact = np.searchsorted(np.sort(values), along(line), side="right") / len(values)
    assert along(line, "y")[1:] == pytest.approx(list(exact)[1:], abs=2e-4)


def test_a_sample_far_out_is_counted_and_not_dropped() -> None:
    """The left panel has it; the right one, which compares spreads, says how many are beyond its edges."""
    rows = time_row(BASE, linear(), *np.linspace(0.99, 1.01, 200), 50.0)
    sheet = drawn(distributions(grid(rows)))
    assert sheet.axes[0].get_xlim()[1] > 50
    assert sheet.axes[1].get_xlim()[1] < 10
    assert sheet.notes[1] == "(256, 256): beyond the edges of the right panel Base 1 of 201"


def test_values_far_apart_stand_on_a_logarithmic_axis() -> None:
    """Two variants whose times differ by a factor have both room."""
    near = drawn(distributions(grid(*(time_row(one, linear(), 1, 1.1) for one in (BASE, DENSE)))))
    far = drawn(distributions(grid(time_row(BASE, linear(), 1, 1.1), time_row(DENSE, linear(), 90, 99))))
    assert (near.axes[0].get_xscale(), far.axes[0].get_xscale()) == ("linear", "log")


def test_who_has_no_samples_is_named() -> None:
    """Unusable samples and reasons stand below; without any samples there is no picture."""
    dead = msgspec.structs.replace(time_row(NAIVE, linear(), 1.0), samples=((float("nan"),),))
    rows: list[Row] = [dead, skipped(DENSE, linear(), "out of memory: 9 GB")]
    sheet = drawn(distributions(grid(time_row(BASE, linear(), 1, 2), *rows)))
    assert sorted(sheet.notes[1:]) == [
        "(256, 256): no samples, no usable samples: Naive",
        "(256, 256): no samples, out of memory: Perturbed",
    ]
    assert distributions(grid(*rows)) is None


def test_more_than_can_be_told_apart_is_said() -> None:
    """Six variants and four shapes are shown; how many more there are is said."""
    variants = [variant(f"V{k}") for k in range(8)]
    rows = [time_row(one, linear(2**k), 1, 2) for one in variants for k in range(5)]
    sheet = drawn(distributions(grid(*rows)))
    assert len(sheet.axes) == 8
    assert len(key(sheet)) == 6
    assert sheet.notes[1:] == [
        "6 of 8 variants: choose with --variants",
        "4 of 5 shapes: choose with --cases",
    ]


def test_bytes_have_their_unit() -> None:
    """Whatever was measured stands in the unit of its table."""
    sheet = drawn(distributions(grid(bytes_row(BASE, linear(), "peak_bytes", 10**7), suffix=MEMORY)))
    assert sheet.axes[0].get_xlabel() == "peak memory (MB)"
    assert along(sheet.axes[0].lines[0])[0] == pytest.approx(10)
    assert named(sheet.axes[0]) == {}
