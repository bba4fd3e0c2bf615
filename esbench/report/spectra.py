"""The pictures of one perturbation's singular values, and of what is kept of a growing population."""

import math

import msgspec
from matplotlib.axes import Axes

from esbench.records import QUALITY, Case, Measurement, Row, Run, Skipped
from esbench.report.drawing import PAGE, Paper, drawable, plain_ticks, styled
from esbench.report.estimates import Worth
from esbench.report.facets import Line, draw, facets
from esbench.report.grid import Grid, headings, quality_grids
from esbench.report.qualities import EFFECTIVE, LINEAR, Qualities
from esbench.report.sheets import Sheet, origin, titled

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


def spectrum(grid: Grid, paper: Paper = PAGE) -> Sheet | None:
    """The singular values of one perturbation, over their root mean square, of the largest weight of a run.

    A flat line is a perturbation that moves all directions alike; one of low rank ends early. ``None`` where
    nothing has any.
    """
    case = max((case for _, case, _ in grid.cells), key=_entries, default=None)
    held = [(variant, _values(row)) for variant, one, row in grid.cells if one == case]
    lines = [Line(variant, values) for variant, values in held if values]
    if case is None or not lines:
        return None
    with styled(paper):
        sheet = Sheet(paper)
        every = [y for line in lines for _, y in line.points]

        def scale(axes: Axes, _: float, height: float) -> None:
            axes.set_yscale("log")
            axes.set_xlim(0, 100)
            axes.set_ylim(min(every) / _MARGIN, max(every) * _MARGIN)
            axes.set_xticks([0, 50, 100])
            plain_ticks(axes.yaxis, height)

        labels = ("place, the largest first (%)", "value / rms")
        body = draw(sheet, facets(lines), scale, labels, marked=False)
        (name,) = headings([case])
        title = titled(grid, f"{grid.operator}{name}: singular values of one perturbation")
        sheet.finish(body, title, origin(grid, [case]))
    return sheet


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


def _values(row: Measurement) -> tuple[tuple[float, float], ...]:
    """The place of each singular value in percent, and the value, as far as they are more than rounding."""
    values = [sample for visit in row.samples for sample in visit if drawable(sample)]
    least = _NEGLIGIBLE * max(values, default=0.0)
    return tuple((100 * (place + 1) / len(values), y) for place, y in enumerate(values) if y > least)


def _entries(case: Case) -> int:
    return case.out_channels * case.in_channels * math.prod(case.kernel_size)
