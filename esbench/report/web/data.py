"""The data of the report page: the figures of some runs as plain JSON records.

Figures are computed by the same functions as the tables and are in the unit of their column. Each one belongs
to a run, a quantity (phase, metric, method), a case and a variant, so that it can be traced to the samples of
that row; the samples themselves are not in the page.
"""

import math
import re
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import LARGEST, PEAK, TIMES, Grid, grids, operators, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, effective, estimate
from esbench.report.analysis.ranking import Rankings, rankings
from esbench.report.analysis.roofline import bound_ns
from esbench.report.analysis.run_selection import flaws
from esbench.report.tables.recommendation import expression
from esbench.report.tables.table import EMPTY_NOTE
from esbench.report.text import one_line
from esbench.schema import QUALITY, Case, Measurement, Run, SchemeDoc, Skipped, Variant
from esbench.stats import Ratio, interval, median, round_medians
from esbench.units import format_value, quantity

RATE = "n_eff_per_ms"
"""Effective population per millisecond of a step: a ranking's figure, not the metric of a stored row."""
EXACT, AT_LEAST = "exact", "at least"
"""Kinds of a figure that is not a plain number: above every number, or a lower bound."""
SPECTRUM = "singular_values"
"""A metric whose samples are one spectrum, and not replicates of one figure."""
MAX_TEXT = 400
"""Characters of a name or a reason in the page; a run from elsewhere may have longer ones."""

_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=(?:Memory|Work|Quality)\s\s)")
_CLOSED = re.compile(r"(Memory|Work|Quality)\s\s+(.*)", re.DOTALL)
"""What a scheme's docstring says in closed form, a paragraph each."""
_REFERENCE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")

_NS_PER_MS = 1e6
_DIGITS = 9
"""Significant digits of a number in the page; at most 6 are shown."""

Record = dict[str, Any]
Panel = tuple[str, str, str, Case, list[tuple[Variant, Record]]]
"""Phase, metric, method, case and the figure of each variant."""


class _Table:
    """Records that others refer to by their position."""

    def __init__(self, record: Callable[[Any], Record]) -> None:
        self._record = record
        self._positions: dict[Hashable, int] = {}
        self.records: list[Record] = []

    def position(self, value: Hashable) -> int:
        """Return the position of a value's record, which is added if it is new."""
        key = msgspec.json.encode(value)  # the options 1 and 1.0 differ
        if key not in self._positions:
            self._positions[key] = len(self.records)
            self.records.append(self._record(value))
        return self._positions[key]


def page_data(runs: Sequence[Run]) -> Record:
    """Return the data of a page.

    Args:
        runs: the runs to show, measured and published ones; those without rows are left out.

    """
    shown = sorted((run for run in runs if run.rows), key=_age, reverse=True)
    sources = ChainMap(*(run.header.sources for run in shown))  # the newest run's first
    docs = ChainMap(*(run.header.docs for run in shown))
    variants = _Table(lambda variant: _variant(variant, sources.get(variant.name, "")))
    cases, quantities = _Table(_case), _Table(_quantity)
    found = []
    for run in shown:
        header = run.header
        found.append(
            {
                "id": short(header.run_id),
                "suite": short(header.suite),
                "started": short(header.started),
                "origin": short(captions.origin(run)),
                "published": captions.is_published(run),
                "environment": _environment(run),
                "flaws": [short(flaw) for flaw in flaws(run)],
                "panels": [
                    {
                        "quantity": quantities.position((phase, metric, method)),
                        "case": cases.position(case),
                        "figures": [
                            _entry(variants.position(variant), record) for variant, record in figures
                        ],
                    }
                    for phase, metric, method, case, figures in panels(run)
                    if figures
                ],
            }
        )
    return {
        "variants": variants.records,
        "cases": cases.records,
        "quantities": quantities.records,
        "schemes": {name: _scheme(doc) for name, doc in sorted(docs.items())},
        "runs": found,
    }


def short(text: str) -> str:
    """Return a text on one line, cut off after :data:`MAX_TEXT` characters."""
    line = one_line(text)
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"


def _age(run: Run) -> tuple[bool, str]:
    """Sort published runs, which have no time, before measured ones, and these by their start."""
    return not captions.is_published(run), run.header.run_id


def _environment(run: Run) -> Record:
    """Return the fields that identify device and versions, without those that differ in every run."""
    facts = msgspec.structs.asdict(run.header.environment) | {"seed": run.header.seed}
    passing = {"idle_w", "memory_bytes", "load", "foreign"}
    return {
        name: value if isinstance(value, bool | int | float) else short(str(value))
        for name, value in facts.items()
        if name not in passing and value is not None
    }


def _scheme(doc: SchemeDoc) -> Record:
    """Return a scheme's docstring in parts: the formula, other paragraphs, and memory, work and quality.

    ``of`` is the scheme that this one computes in another way: its docstring begins with a reference to it.
    """
    computed = _REFERENCE.match(doc.text)
    parts = _PARAGRAPH.split(_REFERENCE.sub(r"\1", doc.text).replace("``", ""))
    closed = {found[1]: one_line(found[2]) for part in parts if (found := _CLOSED.fullmatch(part))}
    rest = [one_line(part) for part in parts if not _CLOSED.fullmatch(part)]
    return {
        "module": doc.module,
        "summary": "".join(rest[:1]),
        "text": rest[1:],
        "closed": closed,
        "of": computed[1] if computed else "",
    }


def _variant(variant: Variant, source: str) -> Record:
    can_train = variant.mode == "batched" and not variant.baseline
    return {
        "scheme": short(variant.scheme),
        "options": short(variant.name.removeprefix(variant.scheme)),
        "mode": variant.mode,
        "baseline": variant.baseline,
        "source": source,
        "code": expression(variant) if can_train else "",
    }


def _case(case: Case) -> Record:
    usual = msgspec.structs.replace(case, members=1024, dtype="float32")
    return {
        "operator": short(case.operator),
        "shape": short(usual.label.removeprefix(case.operator)),
        "dtype": short(case.dtype),
        "members": case.members,
        "sigma": case.sigma,
        "width": case.out_channels if case.out_channels == case.in_channels else None,
        "label": short(case.label),
    }


def _quantity(key: tuple[str, str, str]) -> Record:
    phase, metric, method = key
    return {
        "phase": phase,
        "metric": short(metric),
        "method": short(method),
        "title": "n_eff per ms" if metric == RATE else short(captions.metric(metric)),
        "unit": quantity(metric).column.symbol,
    }


def panels(run: Run) -> Iterator[Panel]:
    """Yield the figures of a run, each variant's on one case at a time, in the order of the tables."""
    for operator in operators(run):
        timed = grids(run, operator, TIMES)
        others = [grid for grid in grids(run, operator, "") if not grid.metric.endswith(TIMES)]
        for grid in [*timed, *others]:
            for case in grid.cases:
                rows = [(variant, grid.at(variant, case)) for variant in grid.variants]
                figures = [(variant, _measured(grid, variant, case, row)) for variant, row in rows if row]
                yield grid.phase, grid.metric, grid.method, case, figures
        for ranking in rankings(run, operator):
            yield from _ranked(ranking)
        yield from _qualities(run, operator)


def _measured(grid: Grid, variant: Variant, case: Case, row: Measurement | Skipped) -> Record:
    if isinstance(row, Skipped):
        return {"reason": short(f"{row.status}: {row.reason}{_largest(grid, variant, case)}")}
    value = median(row)
    if value is None:
        return {"reason": EMPTY_NOTE}
    sure = interval([one for one in round_medians(row) if one is not None])
    record = _figure(grid.metric, value, sure.low if sure else None, sure.high if sure else None)
    timed = grid.metric.endswith(TIMES)
    if timed or grid.metric == PEAK:
        record |= _ratio("time", grid.multiplier(variant, case, "base"))
    if timed:
        record |= _ratio("speed", grid.multiplier(variant, case, "naive"))
        record |= _numbers(floor=_in_column(grid.metric, bound_ns(grid.run, case.dtype, row.work)))
        if row.work:
            record |= _numbers(flops=row.work.flops, moved_bytes=row.work.moved_bytes)
    return record | ({"remark": short("; ".join(row.labels))} if row.labels else {})


def _largest(grid: Grid, variant: Variant, case: Case) -> str:
    """Return the largest population that fits in memory, where it was searched for."""
    largest = grid.largest(variant, case)
    if largest is None:
        return ""
    # A search that ran out of time has not tried larger populations.
    bound = "at least " if largest.stop == "budget" else ""
    return f", {bound}{format_value(LARGEST, median(largest))} members fit"


def _ranked(ranking: Rankings) -> Iterator[Panel]:
    """Yield n_eff per ms with n_eff, kappa and the time multiplier that it is computed from."""
    grid = ranking.grid
    for case in ranking.cases:
        figures = []
        for one in ranking.of(case):
            if one.variant.baseline and one.rate is None:
                continue  # a plain layer has no effective population
            low, high = ((end[0] * _NS_PER_MS) for end in one.reach) if one.reach else (None, None)
            record = _figure(RATE, None if one.is_exact else one.rate, low, high)
            if one.is_exact:
                record["kind"] = EXACT
            elif one.effective is not None and one.effective.is_bound and one.rate is not None:
                record["kind"] = AT_LEAST
            record |= _ratio("time", one.multiplier)
            if one.effective:
                n_eff = one.effective
                record["n_eff"] = _interval(n_eff.value, n_eff.low, n_eff.high)
            if one.kappa:
                record |= _numbers(kappa=one.kappa.mean)
            if one.skipped:
                record["reason"] = short(f"{one.skipped.status}: {one.skipped.reason}")
            figures.append((one.variant, record))
        yield grid.phase, RATE, grid.method, case, figures


def _qualities(run: Run, operator: str) -> Iterator[Panel]:
    measured = dict.fromkeys(
        (row.metric, row.method)
        for row in run.measurements
        if row.phase == QUALITY and row.case.operator == operator and row.metric != SPECTRUM
    )
    for metric, method in measured:
        for grid in quality_grids(run, operator, metric, method):
            for case in grid.cases:
                rows = [(variant, grid.at(variant, case)) for variant in grid.variants]
                yield QUALITY, metric, method, case, [(v, _quality(row)) for v, row in rows if row]


def _quality(row: Measurement | Skipped) -> Record:
    if isinstance(row, Skipped):
        return {"reason": short(f"{row.status}: {row.reason}")}
    if row.metric == EFFECTIVE:
        try:
            found = effective(row)
        except ValueError as error:
            return {"reason": str(error)}
        record = _figure(row.metric, None if found.is_exact else found.value, found.low, found.high)
        kind = EXACT if found.is_exact else AT_LEAST if found.is_bound else ""
        return record | ({"kind": kind} if kind else {})
    mean = estimate([sample for visit in row.samples for sample in visit])
    if mean is None or not math.isfinite(mean.mean):
        return {"reason": EMPTY_NOTE}
    if mean.half is None:
        return _figure(row.metric, mean.mean)
    return _figure(row.metric, mean.mean, mean.mean - mean.half, mean.mean + mean.half)


def _figure(metric: str, value: float | None, low: float | None = None, high: float | None = None) -> Record:
    """Return a figure and its 95 % interval, in the unit of the metric's column."""
    return {"figure": _interval(*(_in_column(metric, one) for one in (value, low, high)))}


def _ratio(name: str, ratio: Ratio | None) -> Record:
    return {name: _interval(ratio.value, ratio.low, ratio.high)} if ratio else {}


def _in_column(metric: str, value: float | None) -> float | None:
    return None if value is None else value / quantity(metric).column.size


def _entry(position: int, record: Record) -> list[Any]:
    """Return a figure as ``[variant, [value, low, high], rest of its record]``; an empty rest is left out."""
    rest = {name: value for name, value in record.items() if name != "figure"}
    return [position, record.get("figure", []), *([rest] if rest else [])]


def _interval(*values: float | None) -> list[float | None]:
    """Return a value and the ends of its interval, without missing ones at the end."""
    found = [_number(value) for value in values]
    while found and found[-1] is None:
        found.pop()
    return found


def _numbers(**values: float | None) -> Record:
    """Return the values that are finite, by their names."""
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


def _number(value: float | None) -> float | None:
    """Return a finite number, rounded to :data:`_DIGITS` digits unless it is whole."""
    if value is None or not math.isfinite(value):
        return None
    is_whole = float(value).is_integer() and abs(value) < 2**53
    return int(value) if is_whole else float(f"{value:.{_DIGITS}g}")
