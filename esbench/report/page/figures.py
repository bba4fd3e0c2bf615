"""What the page says of a run: its figures, panel by panel, by the same code as the tables."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from esbench.report.analysis.pivot import LARGEST, LATENCY, PEAK, TIMES, Grid, grids, operators, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, Estimate, Worth, effective, estimate
from esbench.report.analysis.ranking import Rankings, rankings
from esbench.report.analysis.roofline import floor_ns
from esbench.report.tables.table import EMPTY_NOTE
from esbench.schema import QUALITY, Case, Measurement, Run, Skipped, Variant, Work
from esbench.stats import Ratio, interval, median, round_medians
from esbench.units import format_value

RATE = "n_eff_per_ms"
"""Effective members per millisecond of a step: what ranks variants, and no metric of a row."""
SPECTRUM = "singular_values"
"""Its samples are one spectrum, and not replicates of one figure."""

EXACT, AT_LEAST = "exact", "at least"
"""What a figure is where it is no plain number: better than any, or only its lower end."""

_NS_PER_MS = 1e6


class Quantity(NamedTuple):
    """What a panel shows: a phase's metric by a method."""

    phase: str
    metric: str
    method: str


@dataclass(frozen=True)
class Figure:
    """A variant's figure on a case, in the unit of the metric, or the reason why there is none.

    ``low`` and ``high`` are its 95 % interval. ``worth`` and ``kappa`` stand behind a rate.
    """

    variant: Variant
    value: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str = ""
    floor: float | None = None
    speed: Ratio | None = None
    time: Ratio | None = None
    work: Work | None = None
    worth: Worth | None = None
    kappa: Estimate | None = None
    reason: str = ""
    remark: str = ""


class Panel(NamedTuple):
    """The figures of a quantity on a case, in the order of the tables."""

    quantity: Quantity
    case: Case
    figures: tuple[Figure, ...]


def panels(run: Run, *, thinned: bool = False) -> Iterator[Panel]:
    """Yield everything that the page holds of a run.

    Args:
        run: with rows.
        thinned: only times, peaks and rates, as of older runs where there is no room.

    """
    for operator in operators(run):
        timed = grids(run, operator, TIMES)
        others = [grid for grid in grids(run, operator, "") if not grid.metric.endswith(TIMES)]
        for grid in [*timed, *others]:
            if not thinned or grid.metric in {LATENCY, PEAK}:
                yield from _measured(grid)
        for ranking in rankings(run, operator):
            yield from _ranked(ranking)
        if not thinned:
            yield from _qualities(run, operator)


def _measured(grid: Grid) -> Iterator[Panel]:
    quantity = Quantity(grid.phase, grid.metric, grid.method)
    for case in grid.cases:
        cells = [(variant, grid.at(variant, case)) for variant in grid.variants]
        yield Panel(quantity, case, tuple(_figure(grid, variant, case, row) for variant, row in cells if row))


def _figure(grid: Grid, variant: Variant, case: Case, row: Measurement | Skipped) -> Figure:
    if isinstance(row, Skipped):
        return Figure(variant, reason=f"{row.status}: {row.reason}{_fits(grid, variant, case)}")
    value = median(row)
    if value is None:
        return Figure(variant, reason=EMPTY_NOTE)
    sure = interval([one for one in round_medians(row) if one is not None])
    timed, compared = grid.metric.endswith(TIMES), grid.metric == PEAK or grid.metric.endswith(TIMES)
    return Figure(
        variant,
        value,
        sure.low if sure else None,
        sure.high if sure else None,
        floor=floor_ns(grid.run, case.dtype, row.work) if timed else None,
        speed=grid.multiplier(variant, case, "naive") if timed else None,
        time=grid.multiplier(variant, case, "base") if compared else None,
        work=row.work if timed else None,
        remark="; ".join(row.labels),
    )


def _fits(grid: Grid, variant: Variant, case: Case) -> str:
    """The largest population that fits, where it was searched for."""
    largest = grid.largest(variant, case)
    if largest is None:
        return ""
    # A search that its budget ended has not tried what lies above.
    bound = "at least " if largest.stop == "budget" else ""
    return f", {bound}{format_value(LARGEST, median(largest))} members fit"


def _ranked(found: Rankings) -> Iterator[Panel]:
    quantity = Quantity(found.grid.phase, RATE, found.grid.method)
    for case in found.cases:
        figures = []
        for one in found.of(case):
            if one.variant.baseline and one.rate is None:
                continue  # a plain layer keeps no members
            low, high = ((end[0] * _NS_PER_MS) for end in one.reach) if one.reach else (None, None)
            bound = one.effective is not None and one.effective.is_bound
            figures.append(
                Figure(
                    one.variant,
                    None if one.is_exact else one.rate,
                    low,
                    high,
                    kind=EXACT if one.is_exact else AT_LEAST if bound and one.rate is not None else "",
                    time=one.multiplier,
                    worth=one.effective,
                    kappa=one.kappa,
                    reason=f"{one.skipped.status}: {one.skipped.reason}" if one.skipped else "",
                )
            )
        yield Panel(quantity, case, tuple(figures))


def _qualities(run: Run, operator: str) -> Iterator[Panel]:
    told = dict.fromkeys(
        (row.metric, row.method)
        for row in run.measurements
        if row.phase == QUALITY and row.case.operator == operator and row.metric != SPECTRUM
    )
    for metric, method in told:
        for grid in quality_grids(run, operator, metric, method):
            for case in grid.cases:
                rows = [(variant, grid.at(variant, case)) for variant in grid.variants]
                figures = tuple(_quality(variant, row) for variant, row in rows if row)
                yield Panel(Quantity(QUALITY, metric, method), case, figures)


def _quality(variant: Variant, row: Measurement | Skipped) -> Figure:
    if isinstance(row, Skipped):
        return Figure(variant, reason=f"{row.status}: {row.reason}")
    if row.metric == EFFECTIVE:
        try:
            worth = effective(row)
        except ValueError as error:
            return Figure(variant, reason=str(error))
        kind = EXACT if worth.is_exact else AT_LEAST if worth.is_bound else ""
        return Figure(variant, None if worth.is_exact else worth.value, worth.low, worth.high, kind)
    mean = estimate([sample for visit in row.samples for sample in visit])
    if mean is None or not math.isfinite(mean.mean):
        return Figure(variant, reason=EMPTY_NOTE)
    if mean.half is None:
        return Figure(variant, mean.mean)
    return Figure(variant, mean.mean, mean.mean - mean.half, mean.mean + mean.half)
