"""Synthetic runs for each plot, and functions that read data from a figure."""

import io
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from esbench.report.analysis.pivot import TIMES, Grid, grids
from esbench.report.plots import catalog
from esbench.report.plots.catalog import PlotRequest
from esbench.report.plots.style import COLUMN, Figure, styled
from esbench.schema import Case, Row, Run
from tests import synthetic
from tests.report import history_cases, ranking_cases
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant, working

SPARSE = variant("SparsePerturbed", k=1)
PERMUTED = variant("Permuted", side="out", in_sparsity=0.5)
FLIPPED = variant("Flipped")
ODD = {
    "markup": "$\\frac$ $x$ & 50 % #1 {a} \\alpha ^_ --></svg><script>alert(1)</script>\n"
    "a\x00b\x1b\ufffe pipe|`tick`|*bold* \N{ROCKET}\N{FAMILY} \u4e2d\u6587" + "x" * 200,
    "empty": "",
}
"""Names that may occur in a foreign run."""


def multiplied() -> Run:
    """Return two shapes with intervals, bounds and baselines; dense noise does not fit at the larger one."""
    rounds = (0.97, 0.99, 1.0, 1.0, 1.0, 1.01, 1.02, 1.05)
    rows: list[Row] = []
    for case, size in ((linear(256), 1.0), (linear(512), 2.0)):
        for one, times in ((BASE, 1.0), (NAIVE, 30.0), (SPARSE, 1.4), (PERMUTED, 2.5), (DENSE, 16.0)):
            if (one, case) == (DENSE, linear(512)):
                rows.append(skipped(DENSE, case, "out of memory: tried to allocate 9 GB"))
                continue
            samples = (size * times * value for value in (rounds if one == BASE else rounds[::-1]))
            rows.append(working(time_row(one, case, *samples), 5e6 * size * times**0.5, 1e5))
    return synthetic.run(rows, synthetic.peaks())


def swept(field: str = "members") -> Run:
    """Return times over populations or widths; dense noise ends early, and one variant has no number."""
    rows: list[Row] = []
    for size in (64, 128, 256, 512, 1024):
        case = linear(256, members=size) if field == "members" else linear(size)
        for place, one in enumerate((SPARSE, PERMUTED, FLIPPED, DENSE, BASE, NAIVE)):
            if one == DENSE and size > 256:
                rows.append(skipped(one, case, "out of memory: tried to allocate 9 GB"))
                continue
            time = size * (place + 1.5) / 100
            rows.append(working(time_row(one, case, time, 1.1 * time), 9e4 * size, 10 * size))
            rows.append(bytes_row(one, case, "peak_bytes", int(1000 * size * (place + 1.3))))
        rows.append(skipped(variant("Hadamard"), case, "its width is no power of 2"))
    return synthetic.run(rows, synthetic.peaks())


def ranked() -> Run:
    """Return quality, steps and memory over three populations."""
    cases = [linear(64, members=members) for members in (256, 1024, 4096)]
    found = [row for case in cases for row in [*ranking_cases.rows(case), *ranking_cases.orthogonal(case)]]
    return ranking_cases.run(found)


def changed() -> list[Run]:
    """Return eight runs with a change point in the middle."""
    return history_cases.over_days(3.0, 3.01, 2.99, 3.0, 3.3, 3.31, 3.29, 3.3)


RUNS = {
    "hero": [ranked()],
    "pareto": [ranked()],
    "multipliers": [multiplied()],
    "time-population": [swept()],
    "time-width": [swept("width")],
    "roofline": [multiplied()],
    "kappa": [ranked()],
    "kept-population": [ranked()],
    "history": changed(),
}
"""Plot -> runs from which it can be drawn."""


def draw(name: str, runs: Iterable[Run] | None = None, request: PlotRequest | None = None) -> Figure:
    """Draw a plot, as wide as a column, of the given runs or its usual ones."""
    return catalog.draw(name, RUNS[name] if runs is None else runs, request or PlotRequest(width=COLUMN))


def drawn(figure: Figure | None) -> Figure:
    """Check that a figure exists, and return it."""
    assert figure is not None
    return figure


def grid(rows: Iterable[Row], suffix: str = TIMES, *, peaks: bool = False, operator: str = "Linear") -> Grid:
    """Return the first grid of a run, with peaks of a device with 1 GB/s and 10 GFLOP/s."""
    return grids(synthetic.run(rows, synthetic.peaks() if peaks else ()), operator, suffix)[0]


def renamed(run: Run, name: str) -> Run:
    """Return the run with this name for each variant, case, device, suite and reason."""

    def row_named(row: Row) -> Row:
        one = row.variant
        called = one if one.baseline else msgspec.structs.replace(one, scheme=f"{one.scheme}{name}")
        case: Case = msgspec.structs.replace(row.case, operator=name, padding_mode=name)
        row = msgspec.structs.replace(row, variant=called, case=case)
        return msgspec.structs.replace(row, reason=f"{name}: {row.reason}") if hasattr(row, "reason") else row

    here = msgspec.structs.replace(run.header.environment, device_name=name or "?", commit=name)
    header = msgspec.structs.replace(run.header, environment=here, suite=name)
    return msgspec.structs.replace(run, header=header, rows=tuple(map(row_named, run.rows)))


def texts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Return every visible text with its position in pixels."""
    with styled():
        figure.savefig(io.BytesIO(), format="png", dpi=figure.dpi)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
                low, high = sorted(axis.get_view_interval())
                for tick in axis.get_major_ticks():
                    if low <= tick.get_loc() <= high and tick.label1.get_visible():
                        yield tick.label1.get_text(), tick.label1.get_window_extent()
        ticks = {
            label
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for label in axis.get_ticklabels(which="both")
        }
        for one in figure.findobj(Text):
            assert isinstance(one, Text)
            if one not in ticks and one.get_visible():
                yield one.get_text(), Text.get_window_extent(one)


def legend(figure: Figure) -> list[str]:
    """Return the names in the legends, those of panels first."""
    found = [axes.get_legend() for axes in figure.axes] + list(figure.legends)
    return [text.get_text() for one in found if one for text in one.get_texts()]


def along(line: Line2D, axis: str = "x") -> list[float]:
    """Return the coordinates of a line."""
    return [float(value) for value in np.asarray(line.get_xdata() if axis == "x" else line.get_ydata())]


def named(axes: Axes) -> dict[str, Line2D]:
    """Return the lines of a panel by their names in its legend."""
    return {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def points(axes: Axes) -> list[tuple[float, float]]:
    """Return the unconnected points of a panel."""
    return [(along(one)[0], along(one, "y")[0]) for one in axes.lines if one.get_linestyle() == "None"]
