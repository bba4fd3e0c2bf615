"""Which stored runs a report shows, and why the others are left out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
        """What could not be read of the runs of the device that was asked for."""
        return [problem for one in self.stored if one.status != OTHER_DEVICE for problem in one.problems]

    def summary(self) -> list[str]:
        """Return one line for each status but :data:`SHOWN`: the newest run and how many more there are."""
        lines = []
        for status in sorted({one.status for one in self.stored} - {SHOWN}):
            newest, *others = (one for one in reversed(self.stored) if one.status == status)
            more = f" and {len(others)} more" if others else ""
            why = f", {newest.reason}" if status == FLAWED else ""
            lines.append(f"left out, {status}: {run_name(newest.path)}{why}{more}")
        return lines


def select_runs(results: Path, page: Callable[[Run], Path], device: str | None = None) -> RunSelection:
    """Read all runs below a results folder and select the one that each page shows.

    Args:
        results: the folder.
        page: maps a run to the page it belongs on.
        device: the short name of the only device to show, None for all.

    """
    stored = []
    by_page: dict[Path, list[Run]] = {}
    for path in sorted(run_files(results)):
        run, problems = read_run(path)
        one = StoredRun(path, run, tuple(problems), page=page(run) if run else None)
        if run and device not in {None, run.header.environment.slug}:
            one = replace(one, status=OTHER_DEVICE, reason="the report was asked for another device")
        elif run and run.rows and one.page:
            by_page.setdefault(one.page, []).append(run)
        stored.append(one)
    shown = {page: newest_whole(runs) for page, runs in by_page.items()}
    return RunSelection(tuple(one if one.status else _with_status(one, shown) for one in stored))


def newest_whole(runs: Iterable[Run]) -> Run:
    """Select the run that a page shows, of at least one.

    Selected is the newest run that is complete, valid, of its whole suite and of committed code; if there is
    none, the newest that lacks only the commit; otherwise the newest of all.
    """

    def key(run: Run) -> tuple[bool, bool, str]:
        is_whole = not any(flaws(run))
        return is_whole, is_whole and not run.header.environment.dirty, run.header.run_id

    return max(runs, key=key)


def flaws(run: Run) -> Iterator[str]:
    """Yield why a run must not replace an older one on its page; nothing if it may."""
    yield from unusable(run)
    if part := partial_request(run):
        yield f"holds part of its suite ({part})"
    if cut := sum(row.reason == OUT_OF_TIME for row in run.skipped):
        yield f"left {cut} rows out for lack of time"


def unusable(run: Run) -> Iterator[str]:
    """Yield why the figures of a run must not be compared with those of others; nothing if they may."""
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


def _with_status(one: StoredRun, by_page: Mapping[Path, Run]) -> StoredRun:
    """Add the status of a file, given the run that each page shows."""
    shown = by_page.get(one.page) if one.page else None
    lost = [problem for problem in one.problems if problem.lost]
    if one.run is None:
        is_old = any(problem.is_other_schema for problem in lost)
        reason = "; ".join(problem.within for problem in one.problems)
        return replace(one, status=OTHER_SCHEMA if is_old else UNREADABLE, reason=reason)
    doubts = list(flaws(one.run))
    doubts += ["was measured with uncommitted changes"] if one.run.header.environment.dirty else []
    doubts += [f"lacks {len(lost)} of its lines, the first: {lost[0].within}"] if lost else []
    reason = f"it {' and '.join(doubts)}" if doubts else ""
    if one.run is shown:
        return replace(one, status=SHOWN, reason=f"although {reason}" if reason else "")
    if not one.run.rows or shown is None:
        return replace(one, status=EMPTY, reason=reason)
    if doubts:
        return replace(one, status=FLAWED, reason=reason)
    return replace(one, status=SUPERSEDED, reason=shown.header.run_id)
