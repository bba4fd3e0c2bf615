"""A history as tables: the first and last value of each series, and its change points."""

from collections.abc import Sequence

from esbench.report.analysis.history import (
    MIN_RUNS,
    History,
    Key,
    Series,
    measured_in,
    moment,
    percentage,
    source,
)
from esbench.report.tables.table import Block, Cell, Section, Table
from esbench.units import format_multiplier

RULE = (
    "A change point is where the medians of two levels of at least 3 runs differ by more than the noise of "
    "the series explains. In simulations at most 2 of 100 series in which nothing changes are marked, 10 "
    "where neighboring runs are alike, and a step of four times the noise is found in two of three series "
    f"with three runs on each side, in all with ten. A series of fewer than {MIN_RUNS} runs is too short. "
    "`esbench compare` lists what else differs between two runs."
)


def sections(history: History) -> list[Section]:
    """Return tables with the first value, the last value and the change points of each series."""
    shown = measured_in(history.series)
    by_title: dict[str, list[Series]] = {}
    for line in history.series:
        by_title.setdefault(_title(history, line.key), []).append(line)
    tables = {title: _table(history, series) for title, series in by_title.items()}
    return [
        Section(
            title=title,
            origin="",
            conditions=f"{source(history, shown)}.",
            blocks=(Block("First and last run", ", and where the level changes in between", table),),
            footnotes=(RULE,),
        )
        for title, table in tables.items()
    ]


def _title(history: History, key: Key) -> str:
    what = f"time(variant) / time({key.against}), lower is better"
    return f"{key.case.operator}, {history.phase}: {what} (method {key.method})"


def _table(history: History, series: Sequence[Series]) -> Table:
    runs_of_panel = {key: len(measured_in(panel)) for key, panel in history.panels.items()}
    rows = [_row(history, line, runs_of_panel[line.key]) for line in series]
    return Table(
        corner="variant",
        headings=("case", "runs", "first", "last", "change", "change points"),
        labels=tuple(line.name for line in series),
        cells=tuple(tuple(map(Cell, row)) for row in rows),
    )


def _row(history: History, series: Series, runs: int) -> list[str]:
    first, last = series.points[0].value, series.points[-1].value
    count = len(series.points)
    return [
        series.key.case.label,
        str(count) if count == runs else f"{count} of {runs}",
        format_multiplier(first),
        format_multiplier(last) if count > 1 else "",
        percentage(first, last) if count > 1 else "",
        _change_points_text(history, series),
    ]


def _change_points_text(history: History, series: Series) -> str:
    if len(series.points) < MIN_RUNS:
        return "too short"
    texts = []
    for change_point in series.change_points:
        before, after = (moment(history.runs[number]) for number in series.runs_around(change_point))
        texts.append(f"{before} -> {after}: {percentage(change_point.before, change_point.after)}")
    return "; ".join(texts) or "none"
