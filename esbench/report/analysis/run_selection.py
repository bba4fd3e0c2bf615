"""Selects the stored run that each page of a report shows, with the reasons why others are left out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from esbench.schema import OUT_OF_TIME, Request, Run
from esbench.store import Problem, read_results
from esbench.text import pluralize


@dataclass(frozen=True)
class RunSelection:
    """The runs of a report.

    Attributes:
        pages: the run that each page shows.
        runs: all runs with rows.
        left_out: a line for each reason why runs have no page.
        problems: files and lines that could not be read.
    """

    pages: dict[Path, Run]
    runs: list[Run]
    left_out: list[str]
    problems: list[Problem]


def select_runs(results: Path, page: Callable[[Run], Path]) -> RunSelection:
    """Read all runs below a results folder and select the one that each page shows.

    ``page`` returns the page that a run belongs on.
    """
    all_runs, problems = read_results(results)
    runs = [run for run in all_runs if run.rows]
    by_page: dict[Path, list[Run]] = {}
    for run in runs:
        by_page.setdefault(page(run), []).append(run)
    pages = {path: select_newest(runs_of_page) for path, runs_of_page in sorted(by_page.items())}
    by_reason: dict[str, list[str]] = {}
    for run in all_runs:
        if run is not pages.get(page(run)):
            by_reason.setdefault(_why_left_out(run), []).append(run.header.run_id)
    left_out = []
    for reason, ids in sorted(by_reason.items()):
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        left_out.append(f"left out, {reason}: {max(ids)}{more}")
    return RunSelection(pages, runs, left_out, problems)


def _why_left_out(run: Run) -> str:
    if not run.rows:
        return "without a row"
    doubts = [*flaws(run), *(["has uncommitted changes"] if run.header.environment.dirty else [])]
    return f"it {' and '.join(doubts)}" if doubts else "superseded by a newer run"


def select_newest(runs: Iterable[Run]) -> Run:
    """Select the run that a page shows, of at least one.

    Selected is the newest run that is complete, valid, of its whole suite and of committed code; if there is
    none, the newest that lacks only the commit; otherwise the newest of all.
    """

    def key(run: Run) -> tuple[bool, bool, str]:
        is_whole = not any(flaws(run))
        return is_whole, is_whole and not run.header.environment.dirty, run.header.run_id

    return max(runs, key=key)


def flaws(run: Run) -> Iterator[str]:
    """Yield the reasons why a run must not replace an older one on its page."""
    yield from reasons_unusable(run)
    if part := partial_request(run):
        yield f"holds part of its suite ({part})"
    if cut := sum(row.reason == OUT_OF_TIME for row in run.skipped):
        yield f"left {pluralize(cut, 'row')} out for lack of time"


def reasons_unusable(run: Run) -> Iterator[str]:
    """Yield the reasons why a run must not be compared with others: it is unfinished or invalid."""
    if run.end is None or run.end.status == "interrupted":
        yield "was interrupted" if run.end else "has no end"
    if run.end and run.end.invalid:
        yield f"is invalid ({'; '.join(run.end.invalid)})"


def partial_request(run: Run) -> str:
    """Return the options that limited a run to a part of its suite, such as ``phases step``; else empty.

    The dtype and plug-ins are left out: they do not limit a suite.
    """
    request = run.header.request or Request()
    values = {name: getattr(request, name) for name in ("variants", "cases", "phases", "methods")}
    values["variants"] = ", ".join(request.variants)
    return "; ".join(
        f"{name} {value}"
        for name, value in values.items()
        if getattr(request, name) not in {getattr(Request(), name), ("*",)}  # the glob of all
    )
