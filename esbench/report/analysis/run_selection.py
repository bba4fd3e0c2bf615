"""Which run a page shows: the newest that is complete, valid, of the whole suite and of committed code."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from esbench.report import captions
from esbench.schema import OUT_OF_TIME, Run
from esbench.store import COMPRESSED, Problem, parse_run, read_bytes, read_run, run_files, run_name

DIRTY = "was measured with uncommitted changes"


READ = 100
"""So many runs of each device are read whole, the newest."""


SHOWN, SUPERSEDED, DEVICE, EMPTY, SCHEMA, UNREADABLE = (
    "shown",
    "superseded by a newer run",
    "of another device",
    "without a row",
    "of another schema version",
    "unreadable",
)


FLAWS = {
    "was interrupted": "cut off",
    "has no end": "cut off",
    "is invalid": "invalid",
    "holds part": "not of the whole suite",
    DIRTY: "of uncommitted changes",
}
"""How the reason begins that another run is shown -> what became of the one that has it, in a word or two."""


_TAIL_BYTES = 1 << 16


def newest_whole(runs: Iterable[Run]) -> tuple[Run, list[str]]:
    """The run to show of those of one page, and for each newer one why it was passed over.

    Where none is complete, valid, of the whole suite and of committed code, the newest that is only not of
    committed code is shown, and without one the newest of all.

    Args:
        runs: at least one, in any order.

    """
    newest_first = sorted(runs, key=lambda run: run.header.run_id, reverse=True)
    usable = [run for run in newest_first if not any(flaws(run))]
    committed = [run for run in usable if not any(doubts(run))]
    shown = next(iter([*committed, *usable, *newest_first]))
    newer = newest_first[: newest_first.index(shown)]
    return shown, [
        f"shows run {shown.header.run_id}: the newer {run.header.run_id} was passed over, "
        f"it {' and '.join(doubts(run))}"
        for run in newer
    ]


def doubts(run: Run) -> Iterator[str]:
    """Why another run is shown rather than this one, nothing where there is no reason but its age."""
    yield from flaws(run)
    if run.header.environment.dirty:
        yield DIRTY


def flaws(run: Run) -> Iterator[str]:
    """Why a run must not take the place of another on its page, nothing where it may."""
    yield from unusable(run)
    if part := captions.part(run):
        yield f"holds part of its suite ({part})"
    if cut := sum(row.reason == OUT_OF_TIME for row in run.skipped):
        yield f"left {cut} rows out for lack of time"


def unusable(run: Run) -> Iterator[str]:
    """Why the figures of a run must not stand beside those of others, nothing where they may."""
    if run.end is None or run.end.status == "interrupted":
        yield "was interrupted" if run.end else "has no end"
    if run.end and run.end.invalid:
        yield f"is invalid ({'; '.join(run.end.invalid)})"


@dataclass(frozen=True)
class Stored:
    """A run's file: what of it could be read, what could not, and whether its rows were looked at.

    ``fate`` says in a word what became of it, ``why`` in a sentence, and ``page`` on which page it would be.
    """

    path: Path
    run: Run | None
    problems: tuple[Problem, ...] = ()
    is_whole: bool = True
    fate: str = ""
    why: str = ""
    page: Path | None = None


@dataclass(frozen=True)
class Inventory:
    """All files of runs, in the order of device and name, and the runs that pages are made of."""

    stored: tuple[Stored, ...]

    @property
    def runs(self) -> list[Run]:
        """The runs with rows that were read whole, of the device that was asked for."""
        return [
            one.run for one in self.stored if one.run and one.is_whole and one.fate not in {EMPTY, DEVICE}
        ]

    @property
    def unread(self) -> int:
        """How many runs of the device that was asked for there are of which no row was read."""
        return sum(one.run is not None and not one.is_whole and one.fate != DEVICE for one in self.stored)

    @property
    def pages(self) -> dict[Path, Run]:
        """The run of each page."""
        found = {one.page: one.run for one in self.stored if one.fate == SHOWN and one.page and one.run}
        return dict(sorted(found.items()))

    @property
    def problems(self) -> list[Problem]:
        """What could not be read, and the newer runs that were passed over."""
        found = [problem for one in self.stored for problem in one.problems]
        for one in self.stored:
            if one.run and one.fate == EMPTY:
                message = f"run {one.run.header.run_id} holds no row, it is not shown"
                found.append(Problem(one.path, message, lost=False))
        for page, rivals in _rivals(self.stored).items():
            _, passed_over = newest_whole(rivals)
            found += [Problem(page, message, lost=False) for message in passed_over]
        return found

    def summary(self) -> list[str]:
        """A line for each reason to leave a run out, with how many there are and the first of them."""
        fates = dict.fromkeys(one.fate for one in self.stored if one.fate != SHOWN)
        lines = []
        for fate in sorted(fates):
            names = [run_name(one.path) for one in self.stored if one.fate == fate]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"left out, {fate}: {names[0]}{more}")
        return lines


def take(results: Path, page: Callable[[Run], Path], device: str | None = None) -> Inventory:
    """Read what lies under a results folder, as far as a report needs it.

    Args:
        results: the folder.
        page: which page a run would be on, by its header.
        device: the only device that is wanted, by its name in :func:`devices`, None for all.

    """
    by_device: dict[str | None, list[Stored]] = {}
    for one in _files(results):
        by_device.setdefault(_slug(one), []).append(one)
    found: list[Stored] = []
    for name, stored in by_device.items():
        if name is None:  # of a file that cannot be read nobody knows the device
            found += stored
        elif device in {None, name}:
            found += _read(stored, page)
        else:
            found += [replace(one, problems=(), fate=DEVICE) for one in stored]
    return Inventory(tuple(_judged(sorted(found, key=lambda one: one.path))))


def devices(results: Path) -> list[str]:
    """The devices that have runs under a results folder, as ``--device`` takes them."""
    return sorted({name for one in _files(results) if (name := _slug(one))})


def _files(results: Path) -> Iterator[Stored]:
    """Every file of a run by its first line and its last; whole where these say nothing."""
    yield from map(_ends, run_files(results))


def _slug(one: Stored) -> str | None:
    return one.run.header.environment.slug if one.run else None


def _read(stored: Sequence[Stored], page: Callable[[Run], Path]) -> list[Stored]:
    """The files of a device: all whole where they are few, otherwise the newest and those that pages need."""
    if len(stored) <= READ:
        return [_with_page(one if one.is_whole else _whole(one.path), page) for one in stored]
    found = {one.path: _with_page(one, page) for one in stored}
    newest = sorted((one for one in found.values() if one.run), key=_name, reverse=True)[:READ]
    wanted = [one for one in newest if not one.is_whole]
    while wanted:  # what is read may turn out to hold no row, and then another is the newest of its page
        found |= {one.path: _with_page(_whole(one.path), page) for one in wanted}
        shown = {where: newest_whole(runs)[0] for where, runs in _rivals(found.values()).items()}
        unread = (one for one in found.values() if one.page and not one.is_whole)
        wanted = [one for one in unread if one.page and shown.get(one.page) is one.run]
    return list(found.values())


def _whole(path: Path) -> Stored:
    run, problems = read_run(path)
    return Stored(path, run, tuple(problems))


def _ends(path: Path) -> Stored:
    """A file by its first line and its last, which say what run it is and how it ended."""
    try:
        if path.name.endswith(COMPRESSED):
            first, _, rest = read_bytes(path).partition(b"\n")
            first += b"\n"
        else:
            with path.open("rb") as file:
                first = file.readline()
                start = file.tell()
                file.seek(0, 2)
                file.seek(max(start, file.tell() - _TAIL_BYTES))
                rest = file.read()
        last = rest.rstrip().rpartition(b"\n")[2]
    except OSError:
        return _whole(path)  # which says why
    run, _ = parse_run(path, first + last)
    return Stored(path, run, is_whole=False) if run else _whole(path)


def _with_page(one: Stored, page: Callable[[Run], Path]) -> Stored:
    return replace(one, page=page(one.run)) if one.run else one


def _name(one: Stored) -> str:
    return one.run.header.run_id if one.run else ""


def _by_page(stored: Iterable[Stored]) -> dict[Path, list[Stored]]:
    found: dict[Path, list[Stored]] = {}
    for one in stored:
        if one.page is not None:
            found.setdefault(one.page, []).append(one)
    return found


def _rivals(stored: Iterable[Stored]) -> dict[Path, list[Run]]:
    """The runs of each page that have rows, or may have some."""
    found = {
        page: [one.run for one in rivals if one.run and _counts(one)]
        for page, rivals in _by_page(stored).items()
    }
    return {page: runs for page, runs in sorted(found.items()) if runs}


def _counts(one: Stored) -> bool:
    return bool(one.run and (one.run.rows or not one.is_whole))


def _judged(stored: Sequence[Stored]) -> list[Stored]:
    """The files, each with what became of it."""
    shown = {page: newest_whole(runs)[0] for page, runs in _rivals(stored).items()}
    return [_fate(one, shown.get(one.page) if one.page else None) for one in stored]


def _fate(one: Stored, shown: Run | None) -> Stored:
    """What became of a file, beside the run that its page shows."""
    if one.fate:
        return replace(one, why="the report was asked for another device")
    lost = [problem for problem in one.problems if problem.lost]
    if one.run is None:
        is_old = any(problem.field == "schema" for problem in lost)
        why = "; ".join(problem.within for problem in one.problems)
        return replace(one, fate=SCHEMA if is_old else UNREADABLE, why=why)
    own = list(doubts(one.run))
    own += [f"lacks {len(lost)} of its lines, the first: {lost[0].within}"] if lost else []
    why = f"it {' and '.join(own)}" if own else ""
    if one.run is shown:
        return replace(one, fate=SHOWN, why=f"although {why}" if why else "")
    if not _counts(one) or shown is None:
        return replace(one, fate=EMPTY, why=why)
    flaw = next((fate for start, fate in FLAWS.items() if own and own[0].startswith(start)), SUPERSEDED)
    unread = "" if one.is_whole else "only its header and its end were read"
    by = shown.header.run_id if flaw == SUPERSEDED else ""
    return replace(one, fate=flaw, why="; ".join(filter(None, [by, why, unread])))
