"""The pictures of sweeps."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from esbench.records import Row, Run
from esbench.report import drawing
from esbench.report.grid import MEMORY, TIMES, Grid, grids
from esbench.report.labels import spaced
from esbench.report.sweeps import POPULATION, WIDTH_OF_LAYER, Sweep, against
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant, working

SPARSE = variant("SparsePerturbed", k=1)
FLIPPED = variant("Flipped")


def sweep(*populations: int) -> Run:
    """Variants over populations; dense noise has no number above 256 members."""
    rows: list[Row] = []
    for members in populations:
        case = linear(256, members=members)
        for place, v in enumerate((SPARSE, FLIPPED, BASE, NAIVE)):
            rows.append(time_row(v, case, (place + 1) * members / 100, (place + 1) * members / 80))
        rows += [bytes_row(v, case, "peak_bytes", 1000 * members) for v in (SPARSE, BASE)]
        fits = members <= 256
        rows += [time_row(DENSE, case, members, members)] if fits else [skipped(DENSE, case, "out of memory")]
    return synthetic.run(rows)


def grid(run: Run, suffix: str = TIMES, operator: str = "Linear") -> Grid:
    """The first grid of the forward."""
    return grids(run, operator, suffix)[0]


def drawn(figure: Figure | None) -> Figure:
    """A figure that there is."""
    assert figure is not None
    return figure


def along(line: Line2D, axis: str = "x") -> list[float]:
    """The coordinates of a line's points."""
    return [float(value) for value in np.asarray(line.get_xdata() if axis == "x" else line.get_ydata())]


def named(figure: Figure) -> dict[str, Line2D]:
    """The lines of the first panel by the names that point at their ends."""
    axes = figure.axes[0]
    ends = {(along(line)[-1], along(line, "y")[-1]): line for line in axes.lines if marked(line)}
    return {text.get_text(): ends[text.xy] for text in axes.texts if isinstance(text, Annotation)}


def marked(line: Line2D) -> bool:
    """Whether a line is a series: neither a cross nor the floor."""
    return line.get_marker() not in {"None", "x"}


def legend(figure: Figure) -> list[str]:
    """The names in the legend, nothing where there is none."""
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


@pytest.mark.parametrize(("suffix", "unit", "value"), [(TIMES, "ms", 0.72), (MEMORY, "MB", 0.064)])
def test_a_line_over_the_population(suffix: str, unit: str, value: float) -> None:
    """Time and memory stand over the number of members, on two logarithmic axes, in the table's unit."""
    figure = drawn(against(grid(sweep(64, 256, 1024), suffix), POPULATION))
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", unit)
    assert axes.get_title() == "(256, 256)"
    line = next(line for line in axes.lines if line.get_marker() == "o")
    assert along(line) == [64, 256, 1024]
    assert along(line, "y")[0] == pytest.approx(value)


def test_a_line_over_the_width() -> None:
    """Square layers that differ in nothing but their width have a line, two widths alone have none."""
    cases = [linear(width) for width in (128, 256, 512)]
    odd = msgspec.structs.replace(linear(), in_channels=7)
    rows = [
        time_row(v, case, case.out_channels / f)
        for case in (*cases, odd)
        for v, f in ((DENSE, 9), (BASE, 99))
    ]
    figure = drawn(against(grid(synthetic.run(rows)), WIDTH_OF_LAYER))
    assert along(named(figure)["PerturbedLinear"]) == [128, 256, 512]
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_title()) == (
        "channels in and out",
        "1024 members",
    )
    assert "against the width" in figure.get_suptitle()
    assert against(grid(synthetic.run(rows)), POPULATION) is None
    assert against(grid(synthetic.run(rows[:4])), WIDTH_OF_LAYER) is None


def test_convolutions_say_kernel_and_input() -> None:
    """Widths of convolutions meet only for one kernel and input, which the panel names."""
    cases = [synthetic.conv2d(width, size) for size in (32, 64) for width in (16, 32, 64)]
    run = synthetic.run(time_row(DENSE, case, case.out_channels / 10) for case in cases)
    figure = drawn(against(grid(run, operator="Conv2d"), WIDTH_OF_LAYER))
    assert sorted(axes.get_title() for axes in figure.axes) == [
        "1024 members, kernel (3, 3), input (32, 32)",
        "1024 members, kernel (3, 3), input (64, 64)",
    ]


def test_a_line_that_breaks_off_ends_in_a_cross() -> None:
    """The last population that a variant could do is marked, and the legend says why it is the last."""
    figure = drawn(against(grid(sweep(64, 256, 1024)), POPULATION))
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert along(cross) == [256]
    assert legend(figure) == ["a larger one has no number: out of memory"]
    assert legend(drawn(against(grid(sweep(64, 128, 256)), POPULATION))) == []


def test_floor_of_the_plain_layer_is_drawn() -> None:
    """Time has the floor of base's least work at the ceilings, memory the bytes that it returns."""
    rows: list[Row] = []
    for members in (64, 128, 256):
        case = linear(256, members=members)
        for v in (BASE, DENSE):
            row = time_row(v, case, members)
            rows.append(working(row, 1e4 * members, 10 * members, 4000 * members))
            rows.append(bytes_row(v, case, "peak_bytes", 8000 * members))
    run = synthetic.run(rows, ceilings=synthetic.ceilings())
    for suffix, floor, name in (
        (TIMES, [0.064, 0.128, 0.256], "its least work at the device's ceilings"),
        (MEMORY, [0.256, 0.512, 1.024], "bytes of what it returns"),
    ):
        figure = drawn(against(grid(run, suffix), POPULATION))
        assert legend(figure) == [f"floor of the plain layer: {name}"]
        assert along(figure.axes[0].lines[0], "y") == pytest.approx(floor)
        low, high = figure.axes[0].get_ylim()
        assert low < min(floor)
        assert high > max(floor)


def test_floor_that_arithmetic_beats_is_said_to_be_too_high() -> None:
    """Where a call is faster than the matrix product allows, the legend says that the floor is wrong."""
    rows = [
        working(time_row(v, linear(256, members=members), members / 1000), 1e5 * members, 10)
        for members in (64, 128, 256)
        for v in (BASE, DENSE)
    ]
    run = synthetic.run(rows, ceilings=synthetic.ceilings())
    (name,) = legend(drawn(against(grid(run), POPULATION)))
    assert "too high: arithmetic beats it, that ceiling was measured while something disturbed it" in name


def test_every_line_is_named_and_names_do_not_touch() -> None:
    """Each variant's name points at the end of its line and stands apart from the others."""
    figure = drawn(against(grid(sweep(64, 128, 256)), POPULATION))
    assert set(named(figure)) == {
        "SparsePerturbedLinear(k=1)",
        "FlippedLinear",
        "PerturbedLinear",
        "Base",
        "Naive",
    }
    places = sorted(text.get_position()[1] for text in figure.axes[0].texts)
    assert all(after - before > 0.03 for before, after in itertools.pairwise(places))


def test_series_differ_without_colour() -> None:
    """No two series share a mark, and the shades of schemes run from dark to light."""
    figure = drawn(against(grid(sweep(64, 128, 256)), POPULATION))
    lines = [line for line in figure.axes[0].lines if marked(line)]
    assert len({line.get_marker() for line in lines}) == len(lines) == 5
    shades = [sum(to_rgb(line.get_color())) for line in lines[:3]]
    assert shades == sorted(set(shades))


def test_variants_of_a_scheme_share_its_colour() -> None:
    """A scheme has one colour, its variants differ in mark and line; the plain layer is black."""
    variants = [SPARSE, variant("SparsePerturbed", k=2), FLIPPED, BASE]
    cases = [linear(256, members=members) for members in (1, 2, 4)]
    rows = [time_row(v, case, place + 1) for place, v in enumerate(variants) for case in cases]
    one, two, other, base = drawn(against(grid(synthetic.run(rows)), POPULATION)).axes[0].lines[1:]
    assert to_rgb(one.get_color()) == to_rgb(two.get_color())
    assert to_rgb(one.get_color()) != to_rgb(other.get_color())
    assert one.get_marker() != two.get_marker()
    assert one.get_linestyle() != two.get_linestyle()
    assert to_rgb(base.get_color()) == (0, 0, 0)


@pytest.mark.parametrize(
    "rows",
    [
        [time_row(DENSE, linear(), 1.0)],
        [skipped(DENSE, linear(members=members), "no") for members in (1, 2, 3)],
        [time_row(DENSE, linear(members=members), 0.0) for members in (1, 2, 3)],
    ],
)
@pytest.mark.parametrize("kind", [POPULATION, WIDTH_OF_LAYER])
def test_nothing_to_draw_is_no_figure(rows: list[Row], kind: Sweep) -> None:
    """Without three cases that grow, or without a number, there is no picture."""
    assert against(grid(synthetic.run(rows)), kind) is None


def test_unusable_samples_leave_a_gap() -> None:
    """A row without a median, or of zero, is left out of a line and breaks no plot."""
    run = sweep(64, 128, 256)
    samples: dict[int, tuple[tuple[float, ...], ...]] = {64: (), 128: ((0.0,),)}
    rows = [
        msgspec.structs.replace(row, samples=samples.get(row.case.members, row.samples))
        for row in run.measurements
    ]
    figure = drawn(against(grid(synthetic.run(rows)), POPULATION))
    assert [along(line) for line in figure.axes[0].lines[1:]] == [[256]] * 5


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_labels_are_spread_and_stay_inside(wanted: list[float]) -> None:
    """Places ascend by at least the gap, stay within the axis, and do not move where there is room."""
    places = spaced(sorted(wanted), 0.05)
    assert all(after - before >= 0.05 - 1e-9 for before, after in itertools.pairwise(places))
    assert min(places) >= 0
    assert max(places) <= 1 + 1e-9
    assert spaced(places, 0.05) == pytest.approx(places)


def test_same_run_same_bytes(tmp_path: Path) -> None:
    """Drawn twice, a figure has the same bytes as SVG and as PNG."""
    for name in ("a", "b"):
        drawing.save(drawn(against(grid(sweep(64, 256, 1024)), POPULATION)), tmp_path / name)
    first, second = (sorted(tmp_path.glob(f"{name}*")) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
