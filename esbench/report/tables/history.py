"""A history as tables, and as one JSON object."""

from collections.abc import Sequence

from esbench.report import captions
from esbench.report.analysis.history import (
    MIN_RUNS,
    MULTIPLIER,
    History,
    Key,
    Series,
    measured_in,
    moment,
    percentage,
    source,
)
from esbench.report.tables.table import Block, Cell, Section, Table
from esbench.units import format_multiplier, format_value

RULE = (
    "A change point is where the medians of two levels of at least 3 runs differ by more than the noise of "
    "the series explains. In simulations at most 2 of 100 series in which nothing changes are marked, 10 "
    "where neighbouring runs are alike, and a step of four times the noise is found in two of three series "
    f"with three runs on each side, in all with ten. A series of fewer than {MIN_RUNS} runs is too short. "
    "`esbench compare` lists what else differs between two runs."
)


def sections(found: History) -> list[Section]:
    """Return tables of the first and last figures of the series, and of where their levels change."""
    shown = measured_in(found.series)
    by_title: dict[str, list[Series]] = {}
    for one in found.series:
        by_title.setdefault(_title(found, one.key), []).append(one)
    tables = {title: _table(found, series) for title, series in by_title.items()}
    return [
        Section(
            title=title,
            origin="",
            conditions=f"{source(found, shown)}.",
            blocks=(Block("First and last run", ", and where the level changes in between", table),),
            footnotes=(RULE,),
        )
        for title, table in tables.items()
    ]


def _title(found: History, key: Key) -> str:
    """Return the title of a panel's series without their case."""
    if found.metric == MULTIPLIER:
        what = f"time(variant) / time({key.against}), lower is better"
    else:
        what = captions.metric(found.metric)
    return f"{key.case.operator}, {found.phase}: {what} (method {key.method})"


def _table(found: History, series: Sequence[Series]) -> Table:
    panels = {key: len(measured_in(panel)) for key, panel in found.panels.items()}
    rows = [_row(found, one, panels[one.key]) for one in series]
    return Table(
        corner="variant",
        headings=("case", "runs", "first", "last", "change", "change points"),
        labels=tuple(one.name for one in series),
        cells=tuple(tuple(map(Cell, row)) for row in rows),
    )


def _row(found: History, one: Series, of: int) -> list[str]:
    first, last = one.points[0].value, one.points[-1].value
    count = len(one.points)
    return [
        one.key.case.label,
        str(count) if count == of else f"{count} of {of}",
        _value(found.metric, first),
        _value(found.metric, last) if count > 1 else "",
        percentage(first, last) if count > 1 else "",
        _steps(found, one),
    ]


def _value(metric: str, number: float) -> str:
    return format_multiplier(number) if metric == MULTIPLIER else format_value(metric, number)


def _steps(found: History, one: Series) -> str:
    if len(one.points) < MIN_RUNS:
        return "too short"
    words = [
        f"{moment(found.runs[before])} -> {moment(found.runs[after])}: {percentage(step.before, step.after)}"
        for step in one.change_points
        for before, after in [one.around(step)]
    ]
    return "; ".join(words) or "none"
