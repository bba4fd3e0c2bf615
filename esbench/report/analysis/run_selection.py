"""Which stored runs a report shows, and why the others are left out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from esbench.schema import OUT_OF_TIME, Request, Run
from esbench.store import Problem, read_run, run_files, run_name

SHOWN = "shown"
SUPERSEDED = "superseded by a newer run"
FLAWED = "passed over"
OTHER_DEVICE = "of another device"
EMPTY = "without a row"
OTHER_SCHEMA = "of another schema version"
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class StoredRun:
    """The file of a run, and whether a report shows it.

    Attributes:
        path: the file.
        run: what could be read of it, None if nothing.
        problems: what could not be read.
        status: :data:`SHOWN`, or why it is left out in a few words.
        reason: details of the status, empty if there are none.
        page: the page that the run belongs on.

    """

    path: Path
    run: Run | None
    problems: tuple[Problem, ...] = ()
    status: str = ""
    reason: str = ""
    page: Path | None = None


@dataclass(frozen=True)
class RunSelection:
    """All stored runs, sorted by path, with the run that each page shows."""

    stored: tuple[StoredRun, ...]

    @property
    def runs(self) -> list[Run]:
        """The runs with rows, of the device that was asked for."""
        return [one.run for one in self.stored if one.run and one.status not in {EMPTY, OTHER_DEVICE}]

    @property
    def devices(self) -> list[str]:
        """The short names of all devices with runs, as ``--device`` takes them."""
        return sorted({one.run.header.environment.slug for one in self.stored if one.run})

    @property
    def pages(self) -> dict[Path, Run]:
        """The run of each page."""
        found = {one.page: one.run for one in self.stored if one.status == SHOWN and one.page and one.run}
        return dict(sorted(found.items()))

    @property
    def problems(self) -> list[Problem]:
        """What could not be read, runs without rows, and newer runs that were passed over."""
        asked = [one for one in self.stored if one.status != OTHER_DEVICE]
        found = [problem for one in asked for problem in one.problems]
        for one in asked:
            if one.run and one.status == EMPTY:
                message = f"run {one.run.header.run_id} holds no row, it is not shown"
                found.append(Problem(one.path, message, lost=False))
        for page, runs in _runs_by_page(asked).items():
            found += [Problem(page, message, lost=False) for message in newest_whole(runs)[1]]
        return found

    def summary(self) -> list[str]:
        """One line for each status but :data:`SHOWN`: the first run and how many more there are."""
        lines = []
        for status in sorted({one.status for one in self.stored} - {SHOWN}):
            names = [run_name(one.path) for one in self.stored if one.status == status]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"left out, {status}: {names[0]}{more}")
        return lines


def select_runs(results: Path, page: Callable[[Run], Path], device: str | None = None) -> RunSelection:
    """Read all runs below a results folder and select the one that each page shows.

    Args:
        results: the folder.
        page: maps a run to the page it belongs on.
        device: the short name of the only device to show, None for all.

    """
    asked, others = [], []
    for path in run_files(results):
        run, problems = read_run(path)
        one = StoredRun(path, run, tuple(problems), page=page(run) if run else None)
        if run and device not in {None, run.header.environment.slug}:
            reason = "the report was asked for another device"
            others.append(replace(one, status=OTHER_DEVICE, reason=reason))
        else:
            asked.append(one)
    shown = {page: newest_whole(runs)[0] for page, runs in _runs_by_page(asked).items()}
    asked = [_with_status(one, shown.get(one.page) if one.page else None) for one in asked]
    return RunSelection(tuple(sorted([*asked, *others], key=lambda one: one.path)))


def newest_whole(runs: Iterable[Run]) -> tuple[Run, list[str]]:
    """Select the run that a page shows, and say of each newer one why it was passed over.

    Selected is the newest run that is complete, valid, of its whole suite and of committed code; if there is
    none, the newest that lacks only the commit; otherwise the newest of all.

    Args:
        runs: at least one, in any order.

    """
    newest_first = sorted(runs, key=lambda run: run.header.run_id, reverse=True)
    whole = [run for run in newest_first if not any(flaws(run))]
    committed = [run for run in whole if not run.header.environment.dirty]
    shown = next(iter([*committed, *whole, *newest_first]))
    newer = newest_first[: newest_first.index(shown)]
    return shown, [
        f"shows run {shown.header.run_id}: the newer {run.header.run_id} was passed over, "
        f"it {' and '.join(_doubts(run))}"
        for run in newer
    ]


def flaws(run: Run) -> Iterator[str]:
    """Why a run must not replace an older one on its page; nothing if it may."""
    yield from unusable(run)
    if part := partial_request(run):
        yield f"holds part of its suite ({part})"
    if cut := sum(row.reason == OUT_OF_TIME for row in run.skipped):
        yield f"left {cut} rows out for lack of time"


def unusable(run: Run) -> Iterator[str]:
    """Why the figures of a run must not be compared with those of others; nothing if they may."""
    if run.end is None or run.end.status == "interrupted":
        yield "was interrupted" if run.end else "has no end"
    if run.end and run.end.invalid:
        yield f"is invalid ({'; '.join(run.end.invalid)})"


def partial_request(run: Run) -> str:
    """Which part of its suite a run was asked for; empty if all of it.

    Another dtype is the whole suite in that dtype, and a plug-in adds to it.
    """
    request = run.header.request or Request()
    default = msgspec.structs.replace(Request(), dtype=request.dtype, plugins=request.plugins)
    values = {
        "variants": ", ".join(request.variants),
        "cases": request.cases,
        "phases": request.phases,
        "methods": request.methods,
    }
    return "; ".join(
        f"{name} {value}"
        for name, value in values.items()
        if getattr(request, name) not in {getattr(default, name), ("*",)}
    )


def _doubts(run: Run) -> Iterator[str]:
    yield from flaws(run)
    if run.header.environment.dirty:
        yield "was measured with uncommitted changes"


def _runs_by_page(stored: Sequence[StoredRun]) -> dict[Path, list[Run]]:
    """The runs with rows of each page."""
    found: dict[Path, list[Run]] = {}
    for one in stored:
        if one.run and one.run.rows and one.page:
            found.setdefault(one.page, []).append(one.run)
    return dict(sorted(found.items()))


def _with_status(one: StoredRun, shown: Run | None) -> StoredRun:
    """Add the status of a file, given the run that its page shows."""
    lost = [problem for problem in one.problems if problem.lost]
    if one.run is None:
        is_old = any(problem.field == "schema" for problem in lost)
        reason = "; ".join(problem.within for problem in one.problems)
        return replace(one, status=OTHER_SCHEMA if is_old else UNREADABLE, reason=reason)
    doubts = list(_doubts(one.run))
    doubts += [f"lacks {len(lost)} of its lines, the first: {lost[0].within}"] if lost else []
    reason = f"it {' and '.join(doubts)}" if doubts else ""
    if one.run is shown:
        return replace(one, status=SHOWN, reason=f"although {reason}" if reason else "")
    if not one.run.rows or shown is None:
        return replace(one, status=EMPTY, reason=reason)
    if doubts:
        return replace(one, status=FLAWED, reason=reason)
    return replace(one, status=SUPERSEDED, reason=shown.header.run_id)
