"""Which run a page shows: the newest that is complete, valid and of the whole suite."""

from collections.abc import Iterable, Iterator

from esbench.records import Run
from esbench.report import captions


def newest_whole(runs: Iterable[Run]) -> tuple[Run, list[str]]:
    """The run to show of those of one page, and for each newer one why it was passed over.

    Where none is complete, valid and of the whole suite, the newest of all is shown.

    Args:
        runs: at least one, in any order.

    """
    newest_first = sorted(runs, key=lambda run: run.header.run_id, reverse=True)
    shown = next((run for run in newest_first if not any(flaws(run))), newest_first[0])
    newer = newest_first[: newest_first.index(shown)]
    return shown, [
        f"shows run {shown.header.run_id}: the newer {run.header.run_id} was passed over, "
        f"it {' and '.join(flaws(run))}"
        for run in newer
    ]


def flaws(run: Run) -> Iterator[str]:
    """Why a run must not take the place of another on its page, nothing where it may."""
    yield from unusable(run)
    if part := captions.part(run):
        yield f"holds part of its suite ({part})"


def unusable(run: Run) -> Iterator[str]:
    """Why the figures of a run must not stand beside those of others, nothing where they may."""
    if run.end is None or run.end.status == "interrupted":
        yield "was interrupted" if run.end else "has no end"
    if run.end and run.end.invalid:
        yield f"is invalid ({'; '.join(run.end.invalid)})"
