"""Which runs the page has room for: the newest whole ones, and of older ones as much as fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esbench.documentation import Documentation
from esbench.report.analysis import run_selection
from esbench.report.analysis.run_selection import newest_whole
from esbench.report.captions import is_published
from esbench.report.page.embedding import Embedding
from esbench.schema import Run

ROOM = 1_500_000
"""Bytes of data: the page stays below 2 MB, of which its text, style and scripts take a tenth."""

THINNED_ROOM = 500_000
"""Bytes of it that thinned runs may have together: they are some hundreds, more than anybody compares."""

_NO_ROOM = 2_000
"""Bytes in which no run fits."""
_LEAST_BYTES = 4
"""What a row takes at least, about: whether it is worth trying to add all older runs as they are."""

RULE = (
    "The newest whole run of each device, suite and number format is here with all of its figures, as far as "
    "there is room. There is none for all of the others, so these are thinned: the newest of them are here "
    "with times, peak memory and effective members per ms alone, and the rest are left out."
)


@dataclass(frozen=True)
class Contents:
    """What the page holds, and what there was no room for.

    Attributes:
        embedding: the runs that were added.
        total: how many runs there are, with those that nobody read.
        thinned: how many of those that are there are thinned.
        empty: how many hold no row.
        unread: how many of a device with very many runs were not read: all are older than those that were.

    """

    embedding: Embedding
    total: int
    thinned: int
    empty: int
    unread: int = 0

    @property
    def left_out(self) -> int:
        """How many runs with rows are not there, of those that were read."""
        return self.total - self.unread - self.empty - len(self.embedding.runs)

    @property
    def words(self) -> str:
        """What of the runs the page holds, in a sentence."""
        held = len(self.embedding.runs)
        said = f"{held:,} of {self.total:,} runs are in this page"
        said += f", {self.thinned:,} of them thinned" if self.thinned else ""
        said += f"; {self.left_out:,} had no room" if self.left_out else ""
        said += f"; {self.empty:,} hold no row" if self.empty else ""
        if self.unread:
            said += f"; {self.unread:,} were not read: of a device with very many runs only the newest "
            said += f"{run_selection.READ} are, and those that its other pages show"
        return f"{said}."


def contents(
    runs: Sequence[Run], known: Mapping[str, Documentation], room: int = ROOM, *, unread: int = 0
) -> Contents:
    """Fill the page with runs.

    Args:
        runs: measured and published ones, in any order.
        known: what is said of their schemes.
        room: bytes of data that it may have.
        unread: how many more there are.

    """
    total = len(runs) + unread
    usable = [run for run in runs if run.rows]
    pages: dict[tuple[str, str, str | None], list[Run]] = {}
    for run in usable:
        header = run.header
        dtype = header.request.dtype if header.request else None
        pages.setdefault((header.environment.slug, header.suite, dtype), []).append(run)
    shown = [newest_whole(rivals)[0] for rivals in pages.values()]
    chosen = set(map(id, shown))
    older = sorted((run for run in usable if id(run) not in chosen), key=_age, reverse=True)
    embedding = Embedding(known)
    thinned, left = 0, room
    for run in sorted(shown, key=_age, reverse=True):
        if left < _NO_ROOM:
            break
        size = embedding.add(run, room=left)
        if size is None:
            size = embedding.add(run, thinned=True, room=left)
            thinned += size is not None
        left -= size or 0
    if sum(len(run.rows) for run in older) * _LEAST_BYTES <= left:
        whole = Embedding.like(embedding)
        if _fill(whole, older, left, thinned=False) == len(older):
            return Contents(whole, total, thinned, len(runs) - len(usable), unread)
    thinned += _fill(embedding, older, min(left, THINNED_ROOM), thinned=True)
    return Contents(embedding, total, thinned, len(runs) - len(usable), unread)


def _fill(embedding: Embedding, runs: Sequence[Run], room: int, *, thinned: bool) -> int:
    """Add runs until one has no room; return how many were added."""
    for count, run in enumerate(runs):
        size = embedding.add(run, thinned=thinned, room=room)
        if size is None:
            return count
        room -= size
    return len(runs)


def _age(run: Run) -> tuple[bool, str]:
    """What sorts the oldest first: run ids begin with their time, and published figures are of no time."""
    return not is_published(run), run.header.run_id
