"""The pictures of one perturbation's singular values, and of what is kept of a growing population."""

import math

import msgspec
from matplotlib.figure import Figure

from esbench.records import QUALITY, Case, Measurement, Row, Run, Skipped
from esbench.report import sweeps
from esbench.report.drawing import WIDTH, entitle, plain_ticks, styled
from esbench.report.estimates import Worth
from esbench.report.grid import Grid, headings, quality_grids
from esbench.report.labels import LABEL_INCHES, Named, name_points
from esbench.report.qualities import EFFECTIVE, LINEAR, Qualities
from esbench.report.words import label

SPECTRUM, ONE = "singular_values", "one perturbation"
KEPT = "kept_percent"

_NEGLIGIBLE = 1e-4
"""Below this part of the largest a singular value is rounding."""
_MARGIN = 1.3


def kept_grids(run: Run, operator: str) -> list[Grid]:
    """Effective members as a percentage of all, as tables have them; an exact estimate has no place."""
    qualities = Qualities(run)
    rows = tuple(kept for row in run.rows if (kept := _kept(row, qualities)))
    return quality_grids(msgspec.structs.replace(run, rows=rows), operator, KEPT, LINEAR)


def spectrum(grid: Grid) -> Figure | None:
    """The singular values of one perturbation, over their root mean square, of the largest weight of a run.

    A flat line is a perturbation that moves all directions alike; one of low rank ends early. ``None`` where
    nothing has any.
    """
    case = max((case for _, case, _ in grid.cells), key=_entries, default=None)
    lines = [(v, _values(row)) for v, one, row in grid.cells if one == case]
    lines = [(variant, values) for variant, values in lines if values]
    if case is None or not lines:
        return None
    looks = sweeps.looks([variant for variant, _ in lines])
    inches = max(3.0, LABEL_INCHES * len(lines) + 0.4)
    with styled():
        figure = Figure(figsize=(WIDTH, 1.3 + inches), layout="constrained")
        axes = figure.subplots()
        named = []
        for variant, values in lines:
            look = looks[variant]
            xs, ys = [x for x, _ in values], [y for _, y in values]
            alone = look.mark if len(values) == 1 else "none"
            axes.plot(xs, ys, color=look.color, linestyle=look.line, marker=alone, linewidth=1.3)
            named.append(Named(label(variant.label(grid.operator)), values[-1], look.color))
        axes.set_yscale("log")
        every = [y for _, values in lines for _, y in values]
        axes.set_xlim(0, 100)
        axes.set_ylim(min(every) / _MARGIN, max(every) * _MARGIN)
        plain_ticks(axes.yaxis)
        axes.set_xlabel("place among the singular values, the largest first (%)")
        axes.set_ylabel("singular value / root mean square")
        name_points(axes, named, inches)
        (name,) = headings([case])
        entitle(figure, grid, [case], f"{grid.operator}{name}: singular values of one perturbation")
    return figure


def _kept(row: Row, qualities: Qualities) -> Row | None:
    """A row of effective members as a percentage; reasons as they are; nothing of the rest."""
    if isinstance(row, Skipped):
        return row if row.phase in {None, QUALITY} else None
    if (row.phase, row.metric, row.method) != (QUALITY, EFFECTIVE, LINEAR):
        return None
    found = qualities.law(row.variant, row.case).effective
    if not isinstance(found, Worth) or found.is_exact:
        return None
    return msgspec.structs.replace(row, metric=KEPT, samples=((100 * found.value / row.case.members,),))


def _values(row: Measurement) -> list[tuple[float, float]]:
    """The place of each singular value in percent, and the value, as far as they are more than rounding."""
    values = [sample for visit in row.samples for sample in visit if math.isfinite(sample)]
    least = _NEGLIGIBLE * max(values, default=0.0)
    return [(100 * (place + 1) / len(values), y) for place, y in enumerate(values) if y > least]


def _entries(case: Case) -> int:
    return case.out_channels * case.in_channels * math.prod(case.kernel_size)
