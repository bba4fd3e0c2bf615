"""A run as views: the rows of one metric on one case, with the numbers to draw and the texts to show.

The texts come from the functions that fill the tables, so that page and tables have the same values.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from esbench.report import captions
from esbench.report.analysis.pivot import PEAK, TIMES, Grid, grids, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, effective, estimate, replicates
from esbench.report.analysis.ranking import Bounds, RankedVariant, Rankings, dense, rankings
from esbench.report.analysis.roofline import bound_ns
from esbench.report.tables import table
from esbench.report.tables.measured import BYTES, SPEED, TIME, Multiplier, median_number, multiple
from esbench.report.tables.ranking import (
    COST,
    KEPT,
    PEAK_MEMORY,
    RATE,
    RELATIVE_RATE,
    STEP,
    ranking_texts,
    rate_cell,
)
from esbench.report.tables.table import INTERVAL, CellNumber, Footnotes, n_eff_cell, n_eff_interval_cell
from esbench.schema import DENSE, QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.stats import median
from esbench.units import format_cell, format_multiplier, format_number, quantity

RATE_METRIC = "n_eff_per_ms"
"""Effective population per ms of a step: a value of rankings, not the metric of a stored row."""
EXACT, AT_LEAST = "exact", "at least"
"""Kinds of a value that is above every number, or of which only a lower bound is known."""
_UNSHOWN = {
    *("bias", "process_bytes", "singular_values", "stable_rank", "largest_change"),
    *("dot_mean", "dot_variance", "correlation"),
}
"""Metrics that only the tables show."""
_LAW = {("kappa", "closed form"), ("kappa", "unseen")}


class Marks(NamedTuple):
    """The numbers of a row to draw: its value, the ends of its interval, and members evaluated per ms."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    evaluated: float | None = None


class Row(NamedTuple):
    """A variant in a view.

    Attributes:
        marks: the numbers to draw; only a ranking has members evaluated per ms.
        kind: ``EXACT``, ``AT_LEAST`` or empty.
        reason: why there is no value.
        bounds: in a ranking, the bounds that decide on a tie.
    """

    variant: Variant
    marks: Marks = Marks()
    texts: tuple[str, ...] = ()
    kind: str = ""
    reason: str = ""
    remark: str = ""
    bounds: Bounds | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the value is above every number."""
        return self.kind == EXACT

    @property
    def is_known(self) -> bool:
        """Whether there is a value, possibly an exact one."""
        return self.is_exact or self.marks.value is not None

    @property
    def ends(self) -> tuple[float, ...]:
        """The value and the known ends of its interval."""
        value, low, high, _ = self.marks
        ends = tuple(end for end in (value, low, high) if end is not None)
        return (*ends, math.inf) if self.kind in {EXACT, AT_LEAST} else ends


class View(NamedTuple):
    """One metric of a run on one case, best row first; the table shows the first ``shown`` columns."""

    phase: str
    metric: str
    method: str
    case: Case
    columns: tuple[str, ...]
    shown: int
    rows: tuple[Row, ...]


EVALUATED = "evaluated / ms"
RATE_COLUMNS = {
    RATE: "n_eff / ms",
    EVALUATED: EVALUATED,
    RELATIVE_RATE: "x dense noise",
    COST: "x plain layer",
    KEPT: "kept (%)",
    STEP: "step (ms)",
    PEAK_MEMORY: "memory (MB)",
    "interval": "interval",
    "n_eff": "n_eff",
    INTERVAL: "interval of n_eff",
    "kappa": "kappa",
    "noise (MB)": "noise (MB)",
}
"""Columns of a ranking's table -> their headings here; only details of a variant have those after memory."""


def views(run: Run, operator: str, history: Iterable[Run] = ()) -> Iterator[View]:
    """Yield the views of an operator: rankings, times, memory and other metrics, quality.

    ``history`` are other runs of the page, with which base is compared to find load.
    """
    ranked = rankings(run, operator, history)
    for ranking in ranked:
        for case in ranking.cases:
            yield _ranked_view(ranking, case)
    not_times = (grid for grid in grids(run, operator, "") if not grid.metric.endswith(TIMES))
    for grid in (*grids(run, operator, TIMES), *not_times):
        if grid.metric not in _UNSHOWN:
            yield from (_measured_view(grid, case) for case in grid.cases)
    for metric, method in _quality_metrics(run, operator, is_ranked=bool(ranked)):
        for grid in quality_grids(run, operator, metric, method):
            yield from (_quality(grid, case) for case in grid.cases)


def _ranked_view(ranking: Rankings, case: Case) -> View:
    ranked_variants = ranking.of(case)
    shown_variants = (entry for entry in ranked_variants if entry.step or not entry.variant.baseline)
    rows = [_ranked_row(ranking.grid, ranked, dense(ranked_variants)) for ranked in shown_variants]
    columns = tuple(RATE_COLUMNS.values())
    shown = columns.index("memory (MB)") + 1
    return View("step", RATE_METRIC, ranking.grid.method, case, columns, shown, tuple(rows))


def _ranked_row(grid: Grid, ranked: RankedVariant, reference: RankedVariant | None) -> Row:
    notes = Footnotes()
    texts = ranking_texts(grid, ranked, reference, notes)
    evaluated = ranked.evaluated_per_ms or None
    texts[EVALUATED] = format_number(evaluated) if evaluated else ""
    rate = rate_cell(ranked)
    texts["interval"] = _half(rate.numbers[0]) if rate and rate.numbers else ""
    low, high = ranked.rate_interval or (None, None)
    is_bound = ranked.effective is not None and ranked.effective.is_bound and ranked.rate is not None
    return Row(
        ranked.variant,
        Marks(None if ranked.is_exact else ranked.rate, low, high, evaluated),
        tuple(texts[name] for name in RATE_COLUMNS),
        kind=EXACT if ranked.is_exact else AT_LEAST if is_bound else "",
        reason=f"{ranked.skipped.status}: {ranked.skipped.reason}" if ranked.skipped else "",
        remark="; ".join(notes.notes),
        bounds=ranked.bounds,
    )


def _measured_view(grid: Grid, case: Case) -> View:
    """Return times with their multiples, or another metric that is a median of samples."""
    base = grid.reference("base")
    plain = "x plain layer" if base is None or base.variant.scheme == "Base" else f"x {base.variant.name}"
    shown, details = [_title(grid)], ["interval"]
    if grid.metric.endswith(TIMES):
        shown += [plain, "faster than naive", "faster than dense", "memory (MB)"]
        details.append("roofline bound (ms)")
    elif grid.metric == PEAK:
        shown.append(plain)
    cells = ((variant, grid.at(variant, case)) for variant in grid.variants)
    rows = [_row(variant, row, partial(_median, grid, variant, case)) for variant, row in cells if row]
    sorted_rows = _sort_rows(grid.metric, rows)
    columns = (*shown, *details)
    return View(grid.phase, grid.metric, grid.method, case, columns, len(shown), sorted_rows)


def metric_title(metric: str) -> str:
    """Return the name of a metric in a heading, without its unit."""
    if metric == RATE_METRIC:
        return "n_eff per ms"
    if metric in captions.METRICS:
        return captions.short_metric(metric)
    return captions.without_suffix(metric)


def _title(grid: Grid) -> str:
    return captions.with_unit(metric_title(grid.metric), grid.metric)


def _row(
    variant: Variant,
    row: Measurement | Skipped,
    number_and_texts: Callable[[Measurement], tuple[CellNumber, list[str]]],
) -> Row:
    if isinstance(row, Skipped):
        return Row(variant, reason=f"{row.status}: {row.reason}")
    number, texts = number_and_texts(row)
    if number.value is None:
        return Row(variant, reason=table.EMPTY_NOTE)
    unit = quantity(number.name).column.size
    marks = (None if mark is None else mark / unit for mark in (number.value, number.low, number.high))
    return Row(variant, Marks(*marks), tuple(texts), remark="; ".join(row.labels))


def _median(grid: Grid, variant: Variant, case: Case, row: Measurement) -> tuple[CellNumber, list[str]]:
    """Return the median of a measured row, and the texts of the columns of :func:`_measured_view`."""
    number = median_number(row)

    def times(multiplier: Multiplier) -> str:
        multiple_of_reference = multiple(grid, variant, case, multiplier)
        return multiple_of_reference.text() if multiple_of_reference else ""

    if not grid.metric.endswith(TIMES):
        return number, [number.text(), *([times(BYTES)] if grid.metric == PEAK else []), _half(number)]
    dense_row = grid.at(Variant(scheme=DENSE), case)
    reference = median(dense_row) if isinstance(dense_row, Measurement) else None
    faster = format_multiplier(reference / number.value) if reference and number.value else ""
    peak = median_number(peak_row).text() if (peak_row := grid.peaks.get((variant, case))) else ""
    bound = bound_ns(grid.run, case.dtype, row.work)
    texts = [number.text(), times(TIME), times(SPEED), faster, peak, _half(number)]
    return number, [*texts, format_cell(grid.metric, bound) if bound else ""]


def _half(number: CellNumber) -> str:
    """Return half the width of the interval: ``± 0.02``."""
    _, sign, half = number.text(intervals=True).partition("±")
    return f"{sign}{half}"


def _quality_metrics(run: Run, operator: str, *, is_ranked: bool) -> list[tuple[str, str]]:
    """Return metrics and methods of the phase quality, without kappa and n_eff if a ranking has them."""
    rows = (row for row in run.measurements if row.phase == QUALITY and row.case.operator == operator)
    keys = dict.fromkeys((row.metric, row.method) for row in rows)
    ranked = {"kappa", EFFECTIVE} if is_ranked else set()
    return [key for key in keys if key[0] not in _UNSHOWN | ranked and key not in _LAW]


def _quality(grid: Grid, case: Case) -> View:
    rows = [_quality_row(variant, row) for variant in grid.variants if (row := grid.at(variant, case))]
    sorted_rows = _sort_rows(grid.metric, rows)
    return View(grid.phase, grid.metric, grid.method, case, (_title(grid), "interval"), 1, sorted_rows)


def _quality_row(variant: Variant, row: Measurement | Skipped) -> Row:
    if isinstance(row, Measurement) and row.metric == EFFECTIVE:
        try:
            n_eff = effective(row)
        except ValueError as error:
            return Row(variant, reason=str(error))
        cells = n_eff_cell(EFFECTIVE, n_eff), n_eff_interval_cell(n_eff)
        marks = (mark if math.isfinite(mark) else None for mark in (n_eff.value, n_eff.low, n_eff.high))
        kind = EXACT if n_eff.is_exact else AT_LEAST if n_eff.is_bound else ""
        return Row(variant, Marks(*marks), tuple(cell.text() if cell else "" for cell in cells), kind)
    return _row(variant, row, _mean)


def _mean(row: Measurement) -> tuple[CellNumber, list[str]]:
    number = table.mean_number(row.metric, estimate(replicates(row)), ())
    return number, [number.text(), _half(number)]


def better(metric: str) -> int:
    """Return 1 if higher values of a metric are better, -1 if lower ones are, 0 if neither."""
    if metric in {RATE_METRIC, EFFECTIVE, "largest_members", "cosine", "accuracy"}:
        return 1
    is_cost = metric.endswith((TIMES, "_bytes", "_j", "_over_largest"))
    return -1 if is_cost or metric in {"launches", "kappa", "alive_count"} else 0


def _sort_rows(metric: str, rows: list[Row]) -> tuple[Row, ...]:
    """Return rows best first; those without a value come last."""
    sign = better(metric) or 1

    def key(row: Row) -> tuple[bool, float]:
        if row.is_exact:
            return False, -math.inf
        return row.marks.value is None, -sign * (row.marks.value or 0.0)

    return tuple(sorted(rows, key=key))
