"""The plots of sweeps over population and width."""

import msgspec
import pytest
from matplotlib.axes import Axes

from esbench.report.plots.sweeps import BOUND, CROSS, POPULATION, WIDTH, share_grids, sweep
from esbench.schema import Measurement, Row, Run, Variant
from tests import synthetic
from tests.report import ranking_cases
from tests.report.plots.figures import FLIPPED, SPARSE, along, drawn, grid, named
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant, working

ENDS = f"{CROSS}: no number for a larger case"


def over_members(*populations: int) -> list[Row]:
    """Return variants over populations; dense noise has no number above 256 members."""
    rows: list[Row] = []
    for members in populations:
        case = linear(256, members=members)
        for place, v in enumerate((SPARSE, FLIPPED, BASE, NAIVE)):
            rows.append(time_row(v, case, (place + 1) * members / 100, (place + 1) * members / 80))
        rows += [bytes_row(v, case, "peak_bytes", 1000 * members) for v in (SPARSE, BASE)]
        fits = members <= 256
        rows += [time_row(DENSE, case, members, members)] if fits else [skipped(DENSE, case, "out of memory")]
    return rows


def growing(*variants: Variant) -> list[Row]:
    """Return variants over three populations, each slower than the one before."""
    cases = [linear(256, members=members) for members in (1, 2, 4)]
    return [time_row(v, case, place + 1) for place, v in enumerate(variants) for case in cases]


def crosses(axes: Axes) -> list[tuple[float, float]]:
    """Return the places where lines of a panel end early."""
    return [(along(one)[0], along(one, "y")[0]) for one in axes.lines if one.get_marker() == "x"]


def test_time_and_memory_over_the_population() -> None:
    """Both axes are logarithmic, in the unit of the table."""
    for suffix, unit, value in (("_ns", "ms", 0.72), ("_bytes", "MB", 0.064)):
        figure = drawn(sweep(grid(over_members(64, 256, 1024), suffix), POPULATION))
        (axes,) = figure.axes
        assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", unit)
        assert axes.get_xlabel() == "members"
        assert figure.title.startswith("Linear, (256, 256): ")
        line = named(axes)["SparsePerturbed(k=1)"]
        assert along(line) == [64, 256, 1024]
        assert along(line, "y")[0] == pytest.approx(value)


def test_time_over_the_width() -> None:
    """Square layers that differ only in width share a panel, as do convolutions of one kernel and input."""
    cases = [linear(width) for width in (128, 256, 512)]
    odd = msgspec.structs.replace(linear(), in_channels=7)
    rows = [
        time_row(v, case, case.out_channels / f)
        for case in (*cases, odd)
        for v, f in ((DENSE, 9), (BASE, 99))
    ]
    figure = drawn(sweep(grid(rows), WIDTH))
    assert along(named(figure.axes[0])["Perturbed"]) == [128, 256, 512]
    assert figure.axes[0].get_xlabel() == "channels in and out"
    assert figure.title == "Linear, 1024 members: time of the forward against the width"
    assert sweep(grid(rows), POPULATION) is None
    assert sweep(grid(rows[:4]), WIDTH) is None
    convolutions = [synthetic.conv2d(width, size) for size in (32, 64) for width in (16, 32, 64)]
    rows = [time_row(DENSE, case, case.out_channels / 10) for case in convolutions]
    figure = drawn(sweep(grid(rows, operator="Conv2d"), WIDTH))
    assert sorted(axes.get_title("left") for axes in figure.axes) == [
        "1024 members, kernel (3, 3), input (32, 32)",
        "1024 members, kernel (3, 3), input (64, 64)",
    ]


def test_a_line_that_ends_early_has_a_cross_and_a_reason() -> None:
    """A single reason has no names, several have; variants without any number have a note."""
    figure = drawn(sweep(grid(over_members(64, 256, 1024)), POPULATION))
    line = named(figure.axes[0])[f"Perturbed {CROSS}"]
    assert crosses(figure.axes[0]) == [(along(line)[-1], along(line, "y")[-1])] == [(256, 256)]
    assert figure.notes == [f"{ENDS}, out of memory"]
    whole = drawn(sweep(grid(over_members(64, 128, 256)), POPULATION))
    assert whole.notes == []
    assert crosses(whole.axes[0]) == []
    last = linear(256, members=512)
    rows = [row for row in over_members(64, 128, 256, 512) if (row.variant, row.case) != (SPARSE, last)]
    rows.append(skipped(SPARSE, last, "time budget: 4 s"))
    rows += [skipped(variant("Hadamard"), linear(256, members=n), "no power of 2") for n in (64, 128)]
    assert sorted(drawn(sweep(grid(rows), POPULATION)).notes) == [
        "No number, no power of 2: Hadamard",
        f"{ENDS}, out of memory: Perturbed",
        f"{ENDS}, time budget: SparsePerturbed(k=1)",
    ]


def test_times_have_the_roofline_bound_of_the_plain_layer() -> None:
    """A note says where calls exceed the peak of arithmetic; memory has no bound."""
    rows: list[Row] = []
    for members in (64, 128, 256):
        case = linear(256, members=members)
        for v in (BASE, DENSE):
            rows.append(working(time_row(v, case, members), 1e4 * members, 10 * members))
            rows.append(bytes_row(v, case, "peak_bytes", 8000 * members))
    figure = drawn(sweep(grid(rows, peaks=True), POPULATION))
    text = "Roofline bound: the plain layer's minimum work at the measured peaks of the device"
    assert figure.notes == [text]
    bound = along(named(figure.axes[0])[BOUND], "y")
    assert bound == pytest.approx([0.064, 0.128, 0.256])
    low, high = figure.axes[0].get_ylim()
    assert low < min(bound) < max(bound) < high
    assert drawn(sweep(grid(rows, "_bytes", peaks=True), POPULATION)).notes == []
    faster = working(time_row(SPARSE, linear(256), 1.0), 1e8, 10)
    (note,) = drawn(sweep(grid([*rows, faster], peaks=True), POPULATION)).notes
    assert note.startswith(f"{text}; some calls are faster")


def test_lines_are_spread_over_panels() -> None:
    """Variants of a scheme share a panel; the plain layer is in all panels, other panels' lines are pale."""
    family = [variant("Permuted", in_sparsity=k / 10) for k in range(9)]
    figure = drawn(sweep(grid(growing(*family, SPARSE, FLIPPED, BASE)), POPULATION))
    names = [set(named(axes)) for axes in figure.axes]
    assert all("Base" in one for one in names)
    assert [sorted(one - {"Base"}) for one in names] == [
        [one.name for one in family[:4]],
        sorted([*(one.name for one in family[4:]), SPARSE.name]),
        [FLIPPED.name],
    ]
    for axes in figure.axes:
        assert {along(line, "y")[-1] for line in axes.lines} == {float(k) for k in range(1, 13)}


def test_shapes_have_panels() -> None:
    """Panels are titled by shape; of too many shapes only some are shown."""
    cases = [linear(width, members=n) for width in range(1, 27) for n in (1, 2, 4)]
    rows = [time_row(DENSE, case, 1.0) for case in cases]
    figure = drawn(sweep(grid(rows[:6]), POPULATION))
    assert [axes.get_title("left") for axes in figure.axes] == ["(1, 1)", "(2, 2)"]
    figure = drawn(sweep(grid(rows), POPULATION))
    assert len(figure.axes) == 24
    assert figure.notes == ["24 of 26 panels: the table has all"]


def test_without_three_cases_or_without_a_number_there_is_no_figure() -> None:
    """Samples of zero or without a median are left out of a line."""
    cases = [linear(members=members) for members in (1, 2, 3)]
    for few in (
        [time_row(DENSE, linear(), 1.0)],
        [skipped(DENSE, case, "no") for case in cases],
        [time_row(DENSE, case, 0.0) for case in cases],
    ):
        assert sweep(grid(few), POPULATION) is None
        assert sweep(grid(few), WIDTH) is None
    samples: dict[int, tuple[tuple[float, ...], ...]] = {64: (), 128: ((0.0,),)}
    rows = [
        msgspec.structs.replace(row, samples=samples.get(row.case.members, row.samples))
        for row in over_members(64, 128, 256)
        if isinstance(row, Measurement)
    ]
    lines = named(drawn(sweep(grid(rows), POPULATION)).axes[0]).values()
    assert [along(line) for line in lines] == [[256]] * 5


def shares(run: Run) -> dict[str, list[float]]:
    """Return the lines of the effective population over the number of members."""
    (found,) = share_grids(run, "Linear")
    figure = drawn(sweep(found, POPULATION))
    assert figure.axes[0].get_ylabel() == "%"
    assert figure.title.startswith(
        "Linear, (64, 64): effective members as a share of all against the population"
    )
    return {name: along(line, "y") for name, line in named(figure.axes[0]).items()}


def test_the_share_of_effective_members_falls_with_the_population() -> None:
    """Each variant has a line, in percent, except for exact estimates, which have no such share."""
    found = shares(ranking_cases.run(ranking_cases.sweep(64, 256, 1024)))
    assert set(found) == {"Perturbed", "Flipped", "Flipped(cores=8)"}
    assert found["Perturbed"] == pytest.approx([100.0, 100.0, 100.0])
    assert found["Flipped"] == pytest.approx([100 / (1 + 65 * n / 4096) for n in (64, 256, 1024)])
    cases = [linear(64, members=members) for members in (1024, 4096)]
    rows = [row for case in cases for row in [*ranking_cases.rows(case), *ranking_cases.orthogonal(case)]]
    (exact,) = share_grids(ranking_cases.run(rows), "Linear")
    assert not any(one == ranking_cases.ORTHOGONAL for one, _, _ in exact.cells)
