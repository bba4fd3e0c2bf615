"""Figures of a quality that are no part of the law: what a workload says of itself, one table for each case.

Whatever a workload yields in the phase ``quality`` is shown, in the unit of its metric's name.
"""

from esbench.report.cells import Cell, Reading, one
from esbench.report.columns import Column, section, table
from esbench.report.footnotes import Footnotes
from esbench.report.grid import Grid, by_size
from esbench.report.qualities import Qualities
from esbench.report.tables import Block, Section
from esbench.schema import QUALITY, Case, Run, Skipped, Variant
from esbench.units import quantity

LAW = frozenset(
    {
        *("kappa", "effective_members", "dot_mean", "dot_variance", "correlation"),
        *("stable_rank", "singular_values", "cosine"),
    }
)
"""What has tables of its own."""


def figure_sections(qualities: Qualities, case: Case) -> list[Section]:
    """The table of a case's own figures, if it has some."""
    keys = [
        (metric, method) for metric in _metrics(qualities, case) for method in qualities.methods(case, metric)
    ]
    if not keys:
        return []
    notes, methods = Footnotes(), {method for _, method in keys}
    columns = [
        _column(qualities, case, metric, method, is_alone=len(qualities.methods(case, metric)) == 1)
        for metric, method in keys
    ]

    def reason(variant: Variant) -> Skipped | None:
        return qualities.reason(variant, case, methods)

    filled = table(case, qualities.variants(case), columns, reason, notes)
    grid = Grid(qualities.run, case.operator, case.dtype, case.antithetic, QUALITY, *keys[0])
    block = Block(
        "Figures", ": means of replicates, ± half of their 95 % interval where there are several.", filled
    )
    return [section(grid, case, "figures", block, [*notes, *qualities.remarks(case)])]


def sections(run: Run, operator: str) -> list[Section]:
    """The tables of an operator's cases, by size."""
    qualities = Qualities(run)
    cases = sorted((case for case in qualities.cases if case.operator == operator), key=by_size)
    return [one for case in cases for one in figure_sections(qualities, case)]


def _metrics(qualities: Qualities, case: Case) -> list[str]:
    rows = (row for row in qualities.run.measurements if row.case == case and row.phase == QUALITY)
    return [metric for metric in dict.fromkeys(row.metric for row in rows) if metric not in LAW]


def _column(qualities: Qualities, case: Case, metric: str, method: str, *, is_alone: bool) -> Column:
    symbol = quantity(metric).column.symbol
    words = metric.rpartition("_")[0].replace("_", " ") or metric
    heading = f"{words}{f' ({symbol})' if symbol else ''}{'' if is_alone else f', {method}'}"

    def cell(variant: Variant) -> Cell | None:
        found = qualities.estimate(variant, case, metric, method)
        if found is None:
            return None
        low, high = (found.mean - found.half, found.mean + found.half) if found.half else (None, None)
        trace = qualities.trace(variant, case, metric, method)
        return one(Reading(metric, found.mean, trace, low, high, is_between=True))

    return Column(heading, cell)
