"""Synthetic runs for each plot, and functions that read data from a figure."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from esbench.report.analysis.history import history as history_of
from esbench.report.analysis.pivot import TIMES, Grid, grids
from esbench.report.plots import catalog
from esbench.report.plots.catalog import PlotRequest
from esbench.report.plots.history import history, panels
from esbench.report.plots.style import COLUMN, Figure
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
        for timed, times in ((BASE, 1.0), (NAIVE, 30.0), (SPARSE, 1.4), (PERMUTED, 2.5), (DENSE, 16.0)):
            if (timed, case) == (DENSE, linear(512)):
                rows.append(skipped(DENSE, case, "out of memory: tried to allocate 9 GB"))
                continue
            samples = (size * times * value for value in (rounds if timed == BASE else rounds[::-1]))
            rows.append(working(time_row(timed, case, *samples), 5e6 * size * times**0.5, 1e5))
    return synthetic.run(rows, synthetic.peaks())


def swept(field: str = "members") -> Run:
    """Return times over populations or widths; dense noise ends early, and one variant has no number."""
    rows: list[Row] = []
    for size in (64, 128, 256, 512, 1024):
        case = linear(256, members=size) if field == "members" else linear(size)
        for index, timed_variant in enumerate((SPARSE, PERMUTED, FLIPPED, DENSE, BASE, NAIVE)):
            if timed_variant == DENSE and size > 256:
                rows.append(skipped(timed_variant, case, "out of memory: tried to allocate 9 GB"))
                continue
            time = size * (index + 1.5) / 100
            rows.append(working(time_row(timed_variant, case, time, 1.1 * time), 9e4 * size, 10 * size))
            rows.append(bytes_row(timed_variant, case, "peak_bytes", int(1000 * size * (index + 1.3))))
        rows.append(skipped(variant("Hadamard"), case, "its width is no power of 2"))
    return synthetic.run(rows, synthetic.peaks())


def ranked() -> Run:
    """Return quality, steps and memory over three populations."""
    cases = [linear(64, members=members) for members in (256, 1024, 4096)]
    rows = [row for case in cases for row in [*ranking_cases.rows(case), *ranking_cases.orthogonal(case)]]
    return ranking_cases.run(rows)


RUNS = {
    "hero": [ranked()],
    "pareto": [ranked()],
    "multipliers": [multiplied()],
    "time-population": [swept()],
    "time-width": [swept("width")],
    "roofline": [multiplied()],
    "kappa": [ranked()],
    "kept-population": [ranked()],
    "history": history_cases.over_days(3.0, 3.01, 2.99, 3.0, 3.3, 3.31, 3.29, 3.3),
}
"""Plot -> runs from which it can be drawn."""


def draw(name: str, runs: Sequence[Run] | None = None, request: PlotRequest | None = None) -> Figure:
    """Draw a plot, as wide as a column, of the given runs or its usual ones."""
    runs, request = RUNS[name] if runs is None else runs, request or PlotRequest(width=COLUMN)
    if name != "history":
        return catalog.draw(name, runs, request)
    runs_history = history_of(runs)
    return history(runs_history, panels(runs_history), request.width)


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
        variant = row.variant
        called = (
            variant
            if variant.baseline
            else msgspec.structs.replace(variant, scheme=f"{variant.scheme}{name}")
        )
        case: Case = msgspec.structs.replace(row.case, operator=name, padding_mode=name)
        row = msgspec.structs.replace(row, variant=called, case=case)
        return msgspec.structs.replace(row, reason=f"{name}: {row.reason}") if hasattr(row, "reason") else row

    here = msgspec.structs.replace(run.header.environment, device_name=name or "?", commit=name)
    header = msgspec.structs.replace(run.header, environment=here, suite=name)
    return msgspec.structs.replace(run, header=header, rows=tuple(map(row_named, run.rows)))


def texts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Return every visible text with its position in pixels."""
    figure.draw_without_rendering()
    ticks = {
        label: low <= tick <= high
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for low, high in [sorted(axis.get_view_interval())]
        for which in (False, True)
        for label, tick in zip(axis.get_ticklabels(minor=which), axis.get_ticklocs(minor=which), strict=True)
    }
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip() and ticks.get(text, True):
            yield text.get_text(), Text.get_window_extent(text)


def legend(figure: Figure) -> list[str]:
    """Return the names in the legends, those of panels first."""
    legends = [axes.get_legend() for axes in figure.axes] + list(figure.legends)
    return [text.get_text() for box in legends if box for text in box.get_texts()]


def along(line: Line2D, axis: str = "x") -> list[float]:
    """Return the coordinates of a line."""
    return [float(value) for value in np.asarray(line.get_xdata() if axis == "x" else line.get_ydata())]


def points(axes: Axes) -> list[tuple[float, float]]:
    """Return the unconnected points of a panel."""
    return [(along(line)[0], along(line, "y")[0]) for line in axes.lines if line.get_linestyle() == "None"]
