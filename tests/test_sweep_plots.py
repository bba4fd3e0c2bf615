"""The pictures of sweeps."""

import itertools

import msgspec
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from esbench.records import Row, Run, Variant
from esbench.report.facets import CROSS
from esbench.report.grid import MEMORY, TIMES, Grid, grids
from esbench.report.sheets import Sheet
from esbench.report.sweeps import POPULATION, WIDTH_OF_LAYER, Sweep, against
from tests import synthetic
from tests.picture_cases import along, drawn, named
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant, working

SPARSE = variant("SparsePerturbed", k=1)
FLIPPED = variant("Flipped")
ENDS = f"{CROSS}: a larger one has no number"


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


def over(run: Run, suffix: str = TIMES) -> Sheet:
    """The picture over the population."""
    return drawn(against(grid(run, suffix), POPULATION))


def growing(*variants: Variant) -> Run:
    """Variants over three populations, each slower than the one before."""
    cases = [linear(256, members=members) for members in (1, 2, 4)]
    return synthetic.run(time_row(v, case, place + 1) for place, v in enumerate(variants) for case in cases)


def crosses(axes: Axes) -> list[tuple[float, float]]:
    """Where lines of a panel break off."""
    return [(along(one)[0], along(one, "y")[0]) for one in axes.lines if one.get_marker() == "x"]


@pytest.mark.parametrize(("suffix", "unit", "value"), [(TIMES, "ms", 0.72), (MEMORY, "MB", 0.064)])
def test_a_line_over_the_population(suffix: str, unit: str, value: float) -> None:
    """Time and memory stand over the number of members, on two logarithmic axes, in the table's unit."""
    sheet = over(sweep(64, 256, 1024), suffix)
    axes = sheet.axes[0]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", unit)
    assert sheet.heading.startswith("Linear, (256, 256): ")
    line = named(axes)["SparsePerturbed(k=1)"]
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
    sheet = drawn(against(grid(synthetic.run(rows)), WIDTH_OF_LAYER))
    assert along(named(sheet.axes[0])["Perturbed"]) == [128, 256, 512]
    assert sheet.axes[0].get_xlabel() == "channels in and out"
    assert sheet.heading == "Linear, 1024 members: time of the forward against the width"
    assert against(grid(synthetic.run(rows)), POPULATION) is None
    assert against(grid(synthetic.run(rows[:4])), WIDTH_OF_LAYER) is None


def test_convolutions_say_kernel_and_input() -> None:
    """Widths of convolutions meet only for one kernel and input, which the panel names."""
    cases = [synthetic.conv2d(width, size) for size in (32, 64) for width in (16, 32, 64)]
    run = synthetic.run(time_row(DENSE, case, case.out_channels / 10) for case in cases)
    sheet = drawn(against(grid(run, operator="Conv2d"), WIDTH_OF_LAYER))
    assert sorted(axes.get_title("left") for axes in sheet.axes) == [
        "1024 members, kernel (3, 3), input (32, 32)",
        "1024 members, kernel (3, 3), input (64, 64)",
    ]


def test_a_line_that_breaks_off_ends_in_a_cross() -> None:
    """The last population that a variant could do is marked, its name has a cross, and a note says why."""
    sheet = over(sweep(64, 256, 1024))
    line = named(sheet.axes[0])[f"Perturbed {CROSS}"]
    assert crosses(sheet.axes[0]) == [(along(line)[-1], along(line, "y")[-1])] == [(256, 256)]
    assert sheet.notes == [f"{ENDS}, out of memory"]
    whole = over(sweep(64, 128, 256))
    assert whole.notes == []
    assert crosses(whole.axes[0]) == []


def test_who_ends_for_which_reason_is_said() -> None:
    """Where reasons differ each has its names; a variant without any number is named with its reason too."""
    last = linear(256, members=512)
    rows = [row for row in sweep(64, 128, 256, 512).rows if (row.variant, row.case) != (SPARSE, last)]
    rows.append(skipped(SPARSE, last, "time budget: 4 s"))
    rows += [skipped(variant("Hadamard"), linear(256, members=n), "no power of 2") for n in (64, 128)]
    assert sorted(over(synthetic.run(rows)).notes) == [
        "No number, no power of 2: Hadamard",
        f"{ENDS}, out of memory: Perturbed",
        f"{ENDS}, time budget: SparsePerturbed(k=1)",
    ]


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
    for suffix, floor, words in (
        (TIMES, [0.064, 0.128, 0.256], "the plain layer's least work at the device's ceilings"),
        (MEMORY, [0.256, 0.512, 1.024], "bytes of what the plain layer returns"),
    ):
        sheet = over(run, suffix)
        assert sheet.notes == [f"Floor: {words}"]
        assert along(named(sheet.axes[0])["floor"], "y") == pytest.approx(floor)
        low, high = sheet.axes[0].get_ylim()
        assert low < min(floor)
        assert high > max(floor)


def test_floor_that_arithmetic_beats_is_said_to_be_too_high() -> None:
    """Where a call is faster than the matrix product allows, a note says that the floor is wrong."""
    rows = [
        working(time_row(v, linear(256, members=members), members / 1000), 1e5 * members, 10)
        for members in (64, 128, 256)
        for v in (BASE, DENSE)
    ]
    (words,) = over(synthetic.run(rows, ceilings=synthetic.ceilings())).notes
    assert "too high, arithmetic beats it: that ceiling was measured while something disturbed it" in words


def test_every_line_is_named_once() -> None:
    """Variants of a scheme stand together, each in one panel's key; the plain layer in all of them."""
    family = [variant("Permuted", in_sparsity=k / 10) for k in range(9)]
    sheet = over(growing(*family, SPARSE, FLIPPED, BASE))
    keys = [set(named(axes)) for axes in sheet.axes]
    assert all("Base" in names for names in keys)
    assert [sorted(names - {"Base"}) for names in keys] == [
        [one.name for one in family[:4]],
        sorted([*(one.name for one in family[4:]), SPARSE.name]),
        [FLIPPED.name],
    ]


def test_other_lines_stand_pale_behind() -> None:
    """A panel shows all lines, so that its own can be compared with the others."""
    sheet = over(growing(*(variant(f"V{k}") for k in range(9)), BASE))
    assert len(sheet.axes) == 2
    for axes in sheet.axes:
        assert {along(line, "y")[-1] for line in axes.lines} == {float(k) for k in range(1, 11)}


def test_lines_of_a_panel_differ_without_colour() -> None:
    """No two lines of a panel share a mark, neighbours differ in their dashes, and shades go to light."""
    sheet = over(sweep(64, 128, 256))
    lines = list(named(sheet.axes[0]).values())
    assert [line.get_label() for line in lines] == [
        "Base",
        "SparsePerturbed(k=1)",
        "Flipped",
        "Perturbed",
        "Naive",
    ]
    assert len({line.get_marker() for line in lines}) == len(lines)
    assert all(one.get_linestyle() != other.get_linestyle() for one, other in itertools.pairwise(lines[1:]))
    shades = [sum(to_rgb(line.get_color())) for line in lines]
    assert shades == sorted(set(shades))
    assert shades[0] == 0


def test_shapes_have_panels_of_their_own() -> None:
    """Of several families each panel's title says which it is."""
    cases = [linear(width, members=n) for width in (64, 128) for n in (1, 2, 4)]
    sheet = over(synthetic.run(time_row(DENSE, case, 1.0) for case in cases))
    assert [axes.get_title("left") for axes in sheet.axes] == ["(64, 64)", "(128, 128)"]


def test_more_panels_than_a_picture_has_room_for_are_counted() -> None:
    """The note says how many are shown."""
    cases = [linear(width, members=n) for width in range(1, 31) for n in (1, 2, 4)]
    sheet = over(synthetic.run(time_row(DENSE, case, 1.0) for case in cases))
    assert len(sheet.axes) == 24
    assert sheet.notes == ["24 of 30 panels: the table has all"]


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
    sheet = over(synthetic.run(rows))
    assert [along(line) for line in named(sheet.axes[0]).values()] == [[256]] * 5
