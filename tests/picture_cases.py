"""Runs to draw, one for each kind of picture, and what tests ask of what was drawn."""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text

from esbench.records import Case, Row, Run, Variant
from esbench.report import pictures
from esbench.report.drawing import COLUMN, styled
from esbench.report.pictures import PICTURES
from esbench.report.sheets import Sheet
from esbench.report.wishes import Source, Wish, by_start
from tests import history_cases, ranking_cases, synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant, working

SPARSE = variant("SparsePerturbed", k=1)
PERMUTED = variant("Permuted", side="out", in_sparsity=0.5)
FLIPPED = variant("Flipped")
ROUNDS = (0.97, 0.99, 1.0, 1.0, 1.0, 1.01, 1.02, 1.05)
ODD = (
    "$\\frac$ $x$ & 50 % #1 {a} \\alpha ^_ --></svg><script>alert(1)</script>",
    "a\x00b\x1b\ufffe\nc pipe|`tick`|*bold* \N{ROCKET}\N{FAMILY} \u4e2d\u6587",
    "x" * 200,
    "",
)
"""Names that a foreign run can carry."""


def multiplied() -> Run:
    """Two shapes with intervals, floors and baselines; on the larger one dense noise has no room."""
    rows: list[Row] = []
    for case, size in ((linear(256), 1.0), (linear(512), 2.0)):
        for one, times in ((BASE, 1.0), (NAIVE, 30.0), (SPARSE, 1.4), (PERMUTED, 2.5), (DENSE, 16.0)):
            rounds = ROUNDS if one == BASE else ROUNDS[::-1]
            row = time_row(one, case, *(size * times * value for value in rounds))
            rows.append(working(row, 5e6 * size * times**0.5, 1e5))
    rows = [row for row in rows if (row.variant, row.case) != (DENSE, linear(512))]
    rows.append(skipped(DENSE, linear(512), "out of memory: tried to allocate 9 GB"))
    return synthetic.run(rows, synthetic.ceilings())


def swept(field: str = "members") -> Run:
    """Times and memory over populations or widths; dense noise ends early, one variant has no number."""
    rows: list[Row] = []
    for size in (64, 128, 256, 512, 1024):
        case = linear(256, members=size) if field == "members" else linear(size)
        for place, one in enumerate((SPARSE, PERMUTED, FLIPPED, DENSE, BASE, NAIVE)):
            if one == DENSE and size > 256:
                rows.append(skipped(one, case, "out of memory: tried to allocate 9 GB"))
                continue
            time = size * (place + 1.5) / 100
            work = working(time_row(one, case, time, 1.1 * time), 9e4 * size, 10 * size, 1000 * size)
            rows += [work, bytes_row(one, case, "peak_bytes", int(1000 * size * (place + 1.3)))]
        rows.append(skipped(variant("Hadamard"), case, "its width is no power of 2, or it has none"))
    return synthetic.run(rows, synthetic.ceilings())


def sampled() -> Run:
    """Forty rounds of two variants with a tail, the same in every process."""
    random = np.random.default_rng(7)
    rows = [
        time_row(one, linear(), *(scale * random.lognormal(0, width, 40)).tolist())
        for one, scale, width in ((BASE, 1.0, 0.02), (DENSE, 16.0, 0.06))
    ]
    return synthetic.run(rows)


def ranked() -> Run:
    """Quality, steps and memory over three populations, and what fits have to say of kappa."""
    cases = [linear(64, members=members) for members in (256, 1024, 4096)]
    found = [row for case in cases for row in [*ranking_cases.rows(case), *ranking_cases.orthogonal(case)]]
    return ranking_cases.run(found)


HISTORY = history_cases.over_days(3.0, 3.01, 2.99, 3.0, 3.3, 3.31, 3.29, 3.3)
RUNS = {
    "pareto": (ranked(),),
    "multipliers": (multiplied(),),
    "time-population": (swept(),),
    "time-width": (swept("width"),),
    "memory-population": (swept(),),
    "memory-width": (swept("width"),),
    "roofline": (multiplied(),),
    "kappa": (ranked(),),
    "kept-population": (ranked(),),
    "spectrum": (ranked(),),
    "kept-time": (ranked(),),
    "samples": (sampled(),),
    "history": tuple(HISTORY),
}
"""Picture -> runs that it can be drawn from."""
ANYTHING = Wish(paper=COLUMN)


def picture(name: str, runs: Iterable[Run] | None = None, wish: Wish = ANYTHING) -> Sheet:
    """The picture of that name, of its usual runs where none are given."""
    source = Source(by_start(RUNS[name] if runs is None else runs))
    return pictures.drawn(PICTURES[name], source, wish)


def drawn(sheet: Sheet | None) -> Sheet:
    """A sheet that there is."""
    assert sheet is not None
    return sheet


def renamed(run: Run, name: str) -> Run:
    """The run with this name wherever a foreign run can have one: variants, cases, device, suite, reasons."""

    def row_named(row: Row) -> Row:
        one = row.variant
        called = one if one.baseline else msgspec.structs.replace(one, scheme=f"{one.scheme}{name}")
        case: Case = msgspec.structs.replace(row.case, operator=name, padding_mode=name)
        row = msgspec.structs.replace(row, variant=called, case=case)
        return msgspec.structs.replace(row, reason=f"{name}: {row.reason}") if hasattr(row, "reason") else row

    here = msgspec.structs.replace(run.header.environment, device_name=name or "?", commit=name)
    header = msgspec.structs.replace(run.header, environment=here, suite=name)
    assert run.end is not None
    end = msgspec.structs.replace(run.end)
    return msgspec.structs.replace(run, header=header, rows=tuple(map(row_named, run.rows)), end=end)


class Words(NamedTuple):
    """A text in a picture, and where it is, in pixels: left, bottom, right, top."""

    text: str
    extent: tuple[float, float, float, float]


def placed(sheet: Sheet) -> Iterator[Words]:
    """Every text that can be seen, as it is laid out."""
    with styled(sheet.paper):
        sheet.savefig(io.BytesIO(), format="png", dpi=sheet.dpi)
        yield from list(_placed(sheet))


def _placed(sheet: Sheet) -> Iterator[Words]:
    ticks = set()
    for axes in sheet.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks |= set(axis.get_ticklabels(which="both"))  # also those beyond the axis, which nobody sees
            box = axis.get_tightbbox()
            if box is not None and axes.axison:
                yield Words(axis.axis_name, box.extents)
    for one in sheet.findobj(Text):
        assert isinstance(one, Text)
        if one.get_visible() and one.get_text().strip() and one not in ticks:
            yield Words(one.get_text(), one.get_window_extent().extents)


def key(sheet: Sheet) -> list[str]:
    """The names in the keys, those of panels first."""
    legends = [axes.get_legend() for axes in sheet.axes] + list(sheet.legends)
    return [text.get_text() for one in legends if one for text in one.get_texts()]


def along(line: Line2D, axis: str = "x") -> list[float]:
    """The coordinates of a line's points."""
    return [float(value) for value in np.asarray(line.get_xdata() if axis == "x" else line.get_ydata())]


def named(axes: Axes) -> dict[str, Line2D]:
    """The lines of a panel by the names in its key."""
    return {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def only(rows: Iterable[Row], variants: Sequence[Variant]) -> list[Row]:
    """The rows of these variants."""
    return [row for row in rows if row.variant in variants]
