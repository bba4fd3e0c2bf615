"""The picture of multipliers."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from esbench.records import Row
from esbench.report import plots
from esbench.report.grid import TIMES, Grid, grids
from tests import synthetic
from tests.picture_cases import drawn, key
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, working

SPARSE = synthetic.variant("SparsePerturbed", k=1)


def forward(rows: Iterable[Row], suite: str = "quick") -> Grid:
    """The first grid of a run's forward times."""
    return grids(synthetic.run(rows, suite=suite), "Linear", TIMES)[0]


def some(*populations: int) -> list[Row]:
    """Three variants over populations."""
    return [
        time_row(v, linear(256, members=members), members / 100, members / 88.888888888888888)
        for members in populations
        for v in (SPARSE, BASE, NAIVE)
    ]


def bars(axes: Axes) -> list[list[Rectangle]]:
    """The bars of each shape."""
    return [list(group.patches) for group in axes.containers if isinstance(group, BarContainer)]


def segments(axes: Axes, name: str) -> list[list[tuple[float, float]]]:
    """The ends of the lines of that name."""
    return [
        [(float(x), float(y)) for x, y in np.asarray(ends)]
        for one in axes.collections
        if isinstance(one, LineCollection) and one.get_label() == name
        for ends in one.get_segments()
    ]


def test_multipliers_have_a_row_for_each_variant_and_a_bar_for_each_shape() -> None:
    """Every variant but the plain layer is a row; a bar goes from 1, the plain layer, to the multiplier."""
    factors = {DENSE: 3.0, BASE: 1.0, NAIVE: 0.5}
    rows = [
        time_row(v, linear(width), width * factor) for width in (256, 512) for v, factor in factors.items()
    ]
    sheet = drawn(plots.multipliers(forward([*rows, skipped(SPARSE, linear(256), "no room")])))
    axes = sheet.axes[0]
    assert [one.get_text() for one in axes.get_yticklabels()] == [
        "Perturbed",
        "SparsePerturbed(k=1)",
        "Naive",
    ]
    assert key(sheet) == ["(256, 256)", "(512, 512)"]
    small, large = bars(axes)
    assert [(one.get_x(), one.get_x() + one.get_width()) for one in small] == [(1, 3), (1, 0.5)]
    assert all(one.get_y() < other.get_y() for one, other in zip(small, large, strict=True))
    assert axes.get_xscale() == "log"


def test_what_has_no_number_has_its_reason_in_its_place() -> None:
    """The reason in short stands where the bar of that variant and shape would be."""
    case, other = linear(256), linear(512)
    rows: list[Row] = [time_row(v, c, 1.0) for v, c in ((BASE, case), (BASE, other), (DENSE, case))]
    sheet = drawn(plots.multipliers(forward([*rows, skipped(DENSE, other, "out of memory: 9 GB")])))
    (words,) = sheet.axes[0].texts
    assert isinstance(words, Annotation)
    assert words.get_text() == "out of memory"
    ((bar,), _) = bars(sheet.axes[0])
    assert words.xy[0] == 1
    assert words.xy[1] > bar.get_y() + bar.get_height()


def test_multipliers_show_the_largest_population_that_most_could_do() -> None:
    """A shape that was measured with several populations has one bar, and the last line says which."""
    sheet = drawn(plots.multipliers(forward(some(64, 128))))
    assert key(sheet) == ["(256, 256)"]
    assert "128 x 1 (members x repeats)" in sheet.origin
    huge = linear(256, members=4096)
    others = [skipped(v, huge, "out of memory") for v in (SPARSE, NAIVE)]
    sheet = drawn(plots.multipliers(forward([*some(64, 128), time_row(BASE, huge, 1.0), *others])))
    assert "128 x 1 (members x repeats)" in sheet.origin


def test_multipliers_show_their_interval() -> None:
    """A line through the end of a bar goes from the low to the high end of its ratio's interval."""
    rows = [time_row(BASE, linear(), *[1.0] * 6), time_row(DENSE, linear(), 1.5, 2, 2, 2, 2, 3)]
    sheet = drawn(plots.multipliers(forward(rows)))
    (((low, height), (high, _)),) = segments(sheet.axes[0], plots.INTERVALS)
    assert (low, high) == (1.5, 3.0)
    ((bar,),) = bars(sheet.axes[0])
    assert bar.get_y() < height < bar.get_y() + bar.get_height()
    assert key(sheet) == ["(256, 256)", "95 % interval"]


def test_the_floor_is_a_tick_across_its_bar() -> None:
    """It stands at the variant's least work at the ceilings, over the plain layer's time."""
    rows = [
        working(time_row(BASE, linear(), 2.0), 1e7, 1e3),
        working(time_row(DENSE, linear(), 8.0), 4e7, 1e3),
    ]
    (grid,) = grids(synthetic.run(rows, synthetic.ceilings()), "Linear", TIMES)
    sheet = drawn(plots.multipliers(grid))
    (((at, low), (also, high)),) = segments(sheet.axes[0], plots.FLOORS)
    assert at == also == pytest.approx(2)  # 4e7 flops at 1e7 in a ms are 4 ms, the plain layer takes 2
    ((bar,),) = bars(sheet.axes[0])
    assert (low, high) == pytest.approx((bar.get_y(), bar.get_y() + bar.get_height()))
    assert "floor" in key(sheet)
    unsure, floor = sheet.notes
    assert unsure == "95 % intervals: 0 of 1; else fewer than 6 rounds were shared with base"
    assert floor.startswith("Floor: least work that a variant declares, at the device's ceilings")
    left, right = sheet.axes[0].get_xlim()
    assert left < at < right


def test_many_shapes_are_spread_over_what_has_room() -> None:
    """Of more shapes than hatches can tell apart the first, the last and some between are drawn."""
    rows = [time_row(v, linear(2**k), 1.0) for k in range(3, 14) for v in (BASE, DENSE)]
    sheet = drawn(plots.multipliers(forward(rows)))
    assert key(sheet) == [f"({2**k}, {2**k})" for k in (3, 5, 7, 9, 11, 13)]
    assert sheet.notes[-1] == "6 of 11 shapes: the table has all"


def test_missing_floors_and_intervals_are_explained() -> None:
    """A picture without ticks says why: no ceilings, none of that type, or no declared work."""
    rows = [time_row(v, linear(), *[1.0] * 6) for v in (BASE, DENSE)]
    assert drawn(plots.multipliers(forward(rows))).notes == [
        "No floor: the run did not measure the device's ceilings"
    ]
    (grid,) = grids(synthetic.run(rows, synthetic.ceilings()), "Linear", TIMES)
    assert drawn(plots.multipliers(grid)).notes == [
        "No floor: no variant declares its least work in this phase"
    ]


def test_nothing_to_compare_with_is_no_figure() -> None:
    """Without a plain layer, or with nothing else, there are no multipliers."""
    assert plots.multipliers(forward([time_row(BASE, linear(), 1.0)])) is None
    assert plots.multipliers(forward([time_row(DENSE, linear(), 1.0)])) is None
    assert plots.multipliers(forward([skipped(DENSE, linear(), "no")])) is None


def test_unusable_samples_have_a_reason() -> None:
    """A row without a median has no bar, says so, and breaks no plot; of such rows alone there is none."""
    dead = msgspec.structs.replace(time_row(DENSE, linear(), 1.0), samples=((float("nan"),), ()))
    sheet = drawn(plots.multipliers(forward([*(time_row(v, linear(), 1.0) for v in (BASE, NAIVE)), dead])))
    assert [one.get_text() for one in sheet.axes[0].texts] == ["no usable samples"]
    assert plots.multipliers(forward([time_row(BASE, linear(), 1.0), dead])) is None


def test_published_figures_are_labelled_in_the_picture() -> None:
    """A picture of figures of others says so, and names no commit and no run."""
    rows = [msgspec.structs.replace(time_row(v, linear(), 1.0), method="published") for v in (DENSE, BASE)]
    sheet = drawn(plots.multipliers(forward(rows, suite="A paper")))
    assert sheet.origin.startswith("Test CPU, published by others (A paper), float32")
    assert "commit" not in sheet.origin
    assert "run " not in sheet.origin


def test_nothing_global_is_left_behind(tmp_path: Path) -> None:
    """Drawing neither loads pyplot nor changes a person's own matplotlib settings."""
    # Reading the setting `backend` would load pyplot.
    script = (
        "import sys, matplotlib\n"
        "from pathlib import Path\n"
        "from tests.picture_cases import picture\n"
        "def settings(): return [matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend']\n"
        "before = settings()\n"
        "picture('multipliers').write(Path(sys.argv[1]) / 'a.png')\n"
        "picture('time-population').write(Path(sys.argv[1]) / 'a.svg')\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parent.parent, check=True
    )
