"""Which run a page shows: the newest that is complete, valid, of the whole suite and of committed code."""

from collections.abc import Iterable, Iterator

from esbench.report import captions
from esbench.schema import OUT_OF_TIME, Run

DIRTY = "was measured with uncommitted changes"


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
