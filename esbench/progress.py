"""The progress of a run on stderr: a bar on a terminal, plain lines elsewhere.

Nothing is drawn between two calls: the loop calls between measurements, and a display that
refreshed itself would be inside them.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TextIO

Show = Callable[[int, int, str], None]
"""Takes the cells done, the cells in all, and what runs now."""

BAR_S = 0.25
"""Seconds between two redrawings of a bar."""
LINE_S = 10.0
"""Seconds before a line; later lines come after half the time that has passed: an hour has a dozen."""


@contextlib.contextmanager
def showing(
    stream: TextIO | None = None, now_s: Callable[[], float] = time.monotonic, end_s: float = math.inf
) -> Iterator[Show]:
    """Yield a function that shows progress on a stream, stderr by default.

    ``end_s`` is the moment at which a time budget ends: no more time than until then is left.
    """
    stream = stream or sys.stderr
    with _bar(stream) if stream.isatty() else _lines(stream) as draw:
        shown_s, is_bar = now_s() - LINE_S, stream.isatty()
        last = ""
        stage = _Stage(now_s(), 0, 0)

        def show(done: int, total: int, what: str) -> None:
            nonlocal shown_s, last, stage
            if done < stage.latest:
                stage = _Stage(now_s(), done, done)
            stage = stage._replace(latest=done)
            state = f"{done} {what}"
            wait_s = BAR_S if is_bar else max(LINE_S, (shown_s - stage.start_s) / 2)
            if state == last or now_s() - shown_s < wait_s:
                return
            shown_s, last = now_s(), state
            left = remaining(done - stage.done, total - stage.done, shown_s - stage.start_s)
            most = f", at most {_minutes(max(end_s - shown_s, 0))}" if math.isfinite(end_s) else ""
            draw(done, total, f"{what}  ETA {left}{most}")

        yield show


class _Stage(NamedTuple):
    """A stage of a run: its start, and the cells done then and now; a smaller count begins another."""

    start_s: float
    done: int
    latest: int


def remaining(done: int, total: int, elapsed_s: float) -> str:
    """Return the remaining time as minutes and seconds, extrapolated from the share that is done.

    ``?`` before the first cell is done.
    """
    if not done:
        return "?"
    return _minutes(elapsed_s * max(total - done, 0) / done)


def _minutes(span_s: float) -> str:
    minutes, seconds = divmod(round(span_s), 60)
    return f"{minutes}:{seconds:02d}"


@contextlib.contextmanager
def _lines(stream: TextIO) -> Iterator[Show]:
    def draw(done: int, total: int, text: str) -> None:
        stream.write(f"cell {min(done + 1, total)}/{total}  {text}\n")
        stream.flush()

    yield draw


@contextlib.contextmanager
def _bar(stream: TextIO) -> Iterator[Show]:
    from rich.console import Console  # noqa: PLC0415  # slow to import, only bars need it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415  # slow to import, only bars need it

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=stream), auto_refresh=False, transient=True) as display:
        task = display.add_task("", total=None)

        def draw(done: int, total: int, text: str) -> None:
            display.update(task, completed=done, total=total, description=text, refresh=True)

        yield draw
