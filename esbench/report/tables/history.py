"""A history as tables for a terminal and for a page, and as one JSON object."""

from collections.abc import Callable, Iterator

from tabulate import tabulate

from esbench.report import captions
from esbench.report.analysis.comparison import differences
from esbench.report.analysis.history import (
    MIN_RUNS,
    MULTIPLIER,
    History,
    Key,
    Series,
    boundaries,
    change,
    measured_in,
    moment,
    percentage,
    source,
)
from esbench.report.text import escape, listed, one_line
from esbench.schema import Run
from esbench.units import format_multiplier, format_value

RULE = (
    "A change point is where the medians of two levels of at least 3 runs differ by more than the noise of "
    "the series explains: least absolute deviations of logarithms, with a penalty that marks at most 1 in "
    "100 series in which nothing changes, 1 in 20 where neighbouring runs are alike. A step of four times "
    "the noise is found in two of three series with three runs on each side, in all with ten. A series of "
    f"fewer than {MIN_RUNS} runs is too short."
)

_TELLING = (
    "esbench",
    "torch",
    "triton",
    "cuda",
    "driver",
    "python",
    "platform",
    "clocks",
    "matmul_precision",
)
"""What else may have changed between two runs that explains a step."""


def text(found: History) -> str:
    """The history for a terminal."""
    return "\n\n".join(_parts(found, "simple", one_line)) + "\n"


def markdown(found: History) -> str:
    """The history as GitHub renders it."""
    return "\n\n".join(_parts(found, "pipe", escape)) + "\n"


def as_json(found: History) -> dict[str, object]:
    """The history as one object: figures in the unit of their metric, ``null`` for a missing one."""
    names = [run.header.run_id for run in found.runs]
    return {
        "device": found.runs[-1].header.environment.slug,
        "metric": found.metric,
        "phase": found.phase,
        "rule": RULE,
        "runs": [_run_as_json(run) for run in found.runs],
        "left_out": found.left_out,
        "series": [
            {
                "variant": one.name,
                "case": one.key.case.label,
                "method": one.key.method,
                "against": one.key.against or None,
                "points": [
                    {"run": names[point.run], "value": point.value, "low": point.low, "high": point.high}
                    for point in one.points
                ],
                "change_percent": change(one.points[0].value, one.points[-1].value),
                "change_points": [
                    {
                        "last_before": names[one.around(step)[0]],
                        "first_after": names[one.around(step)[1]],
                        "before": step.before,
                        "after": step.after,
                        "change_percent": change(step.before, step.after),
                    }
                    for step in one.change_points
                ],
            }
            for one in found.series
        ],
    }


def title(found: History, key: Key) -> str:
    """What the series of a panel are, but for their case."""
    if found.metric == MULTIPLIER:
        what = f"time(variant) / time({key.against}), lower is better"
    else:
        what = captions.metric(found.metric)
    return f"{key.case.operator}, {found.phase}: {what} (method {key.method})"


def _run_as_json(run: Run) -> dict[str, object]:
    header = run.header
    return {
        "run": header.run_id,
        "started": header.started,
        "suite": header.suite,
        "commit": header.environment.commit,
        "dirty": header.environment.dirty,
    }


def _parts(found: History, style: str, show: Callable[[str], str]) -> Iterator[str]:
    yield show(f"{source(found, measured_in(found.series) or range(len(found.runs)))}.")
    tables: dict[str, list[Series]] = {}
    for one in found.series:
        tables.setdefault(title(found, one.key), []).append(one)
    panels = found.panels
    for name, series in tables.items():
        rows = [
            [show(cell) for cell in _row(found, one, len({p.run for s in panels[one.key] for p in s.points}))]
            for one in series
        ]
        header = ["variant", "case", "runs", "first", "last", "change", "change points"]
        right = ("left", "left", "right", "right", "right", "right", "left")
        table = tabulate(rows, header, tablefmt=style, disable_numparse=True, colalign=right)
        yield f"{show(name)}\n{table}" if style == "simple" else f"## {show(name)}\n\n{table}"
    yield show(RULE)
    if lines := list(_boundaries(found)):
        yield "\n".join(
            [show("Where levels change, and what else changed there:"), *([""] if style == "pipe" else [])]
            + [f"{'- ' if style == 'pipe' else '  '}{show(line)}" for line in lines]
        )


def _row(found: History, one: Series, of: int) -> list[str]:
    first, last = one.points[0].value, one.points[-1].value
    count = len(one.points)
    return [
        one.name,
        one.key.case.label,
        str(count) if count == of else f"{count} of {of}",
        value(found.metric, first),
        value(found.metric, last) if count > 1 else "",
        percentage(first, last) if count > 1 else "",
        _steps(found, one),
    ]


def value(metric: str, number: float) -> str:
    """A figure of a history, with its unit."""
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


def _boundaries(found: History) -> Iterator[str]:
    for (before, after), series in boundaries(found.series).items():
        a, b = found.runs[before], found.runs[after]
        apart = differences(a, b)
        changed = [f"{name} {apart[name][0]} -> {apart[name][1]}" for name in _TELLING if name in apart]
        code = [one.variant.name for one in series if f"code of {one.variant.name}" in apart]
        changed += [f"code of {listed(list(dict.fromkeys(code)))}"] if code else []
        names = listed(list(dict.fromkeys(one.name for one in series)))
        yield f"{moment(a)} -> {moment(b)}: {names}" + (f"; {', '.join(changed)}" if changed else "")
