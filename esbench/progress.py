"""Progress messages on stderr: a display that is redrawn on a terminal, plain lines elsewhere.

Nothing is drawn between two calls, because a display that refreshes itself would disturb measurements; the
measuring loop calls between them.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TextIO

from esbench.text import cut

REDRAW_S = 0.25
"""Seconds between two redrawings on a terminal."""
LINE_S, MAX_LINE_S = 10.0, 120.0
"""Limits of the seconds between two lines, which are as many as have passed: two minutes have five lines."""
BAR = 16
"""Characters of a bar."""
CASES = 12
"""Cases shown on a terminal: the rest is counted."""


class CaseProgress(NamedTuple):
    """The progress of one case: the finished share of its time, from 0 to 1, and what is measured now.

    ``best`` is the fastest variant so far with its time.
    """

    label: str
    share: float = 0.0
    phase: str = ""
    best: str = ""


class RunProgress(NamedTuple):
    """The progress of a run: the expected remaining seconds, and its cases."""

    left_s: float
    cases: Sequence[CaseProgress] = ()


class Show(Protocol):
    """Takes the number of finished cells, of all cells, the current activity, and the progress of a run."""

    def __call__(self, done: int, total: int, activity: str, run: RunProgress | None = None, /) -> None:
        """Show the progress, unless something was shown a moment ago."""


class _State(NamedTuple):
    """What is drawn: clock times in seconds, cells, the activity, and the cases of a run."""

    times: str
    done: int
    total: int
    activity: str
    cases: Sequence[CaseProgress]


@contextlib.contextmanager
def showing(
    stream: TextIO | None = None,
    now_s: Callable[[], float] = time.monotonic,
    end_s: float = math.inf,
    start_s: float | None = None,
) -> Iterator[Show]:
    """Yield a function that shows progress on a stream, stderr by default.

    Without a ``RunProgress``, the time left is the number of unfinished cells times the mean time of those
    finished. ``end_s`` is the moment at which a time budget ends, which limits the time left. ``start_s`` is
    the moment from which the elapsed time counts, by default now.
    """
    stream = stream or sys.stderr
    on_terminal = stream.isatty() and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}
    start_s = now_s() if start_s is None else start_s
    with _display(stream) if on_terminal else contextlib.nullcontext(partial(_write_line, stream)) as draw:
        drawn_s, drawn = -math.inf, (-1, "")
        stage_start_s, done_before_stage, last_done = start_s, 0, 0

        def show(done: int, total: int, activity: str, run: RunProgress | None = None, /) -> None:
            nonlocal drawn_s, drawn, stage_start_s, done_before_stage, last_done
            if done < last_done:  # another stage, whose cells are counted from the beginning
                stage_start_s, done_before_stage = now_s(), done
            last_done = done
            # Lines become rarer: the wait is as long as the stage has lasted.
            wait_s = REDRAW_S if on_terminal else min(max(LINE_S, drawn_s - stage_start_s), MAX_LINE_S)
            if (done, activity) == drawn or now_s() - drawn_s < wait_s:
                return
            drawn_s, drawn = now_s(), (done, activity)
            times = [f"{format_minutes(drawn_s - start_s)} elapsed"]
            left_s = None
            if run:
                left_s = run.left_s
            elif done > done_before_stage:
                per_cell_s = (drawn_s - stage_start_s) / (done - done_before_stage)
                left_s = per_cell_s * max(total - done, 0)
            if left_s is not None:
                times.append(f"{format_minutes(min(left_s, max(end_s - drawn_s, 0)))} left")
            draw(_State(", ".join(times), done, total, activity, run.cases if run else ()))

        yield show


def format_minutes(seconds: float) -> str:
    """Return a time span as minutes and seconds: ``12:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _write_line(stream: TextIO, state: _State) -> None:
    cell = f"cell {min(state.done + 1, state.total)}/{state.total}"
    stream.write(f"{cut(f'{state.times}  {cell}  {state.activity}')}\n")
    stream.flush()


@contextlib.contextmanager
def _display(stream: TextIO) -> Iterator[Callable[[_State], None]]:
    """Redraw a header and a line for each case in place; remove them at the end, also after an error."""
    from rich.console import Console  # noqa: PLC0415  # slow to import, only a terminal needs it
    from rich.live import Live  # noqa: PLC0415  # slow to import, only a terminal needs it
    from rich.text import Text  # noqa: PLC0415  # slow to import, only a terminal needs it

    console = Console(file=stream, highlight=False)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:

        def draw(state: _State) -> None:
            lines = display_lines(state, console.width, console.height)
            live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

        yield draw


def display_lines(state: _State, width: int, height: int) -> list[str]:
    """Return the header and one line for each case, at most ``width`` columns and ``height - 1`` lines.

    If there are more cases than lines, the last finished case, the current case and the next cases are shown.
    """
    header = f"{state.times}  {_bar(state.done / max(state.total, 1))} {state.done}/{state.total}"
    lines = [header, state.activity]
    cases = state.cases
    room = max(min(CASES, height - 4), 1)  # besides header, activity, number of other cases and last line
    if len(cases) > room:
        current = next((index for index, case in enumerate(cases) if case.share < 1), len(cases))
        first = min(max(current - 1, 0), len(cases) - room)
        cases = cases[first : first + room]
    label_width = max((len(case.label) for case in cases), default=0)
    phase_width = max((len(case.phase) for case in cases), default=0)
    lines += [
        f"{case.label:<{label_width}} {_bar(case.share)} {case.phase:<{phase_width}} {case.best}"
        for case in cases
    ]
    if len(cases) < len(state.cases):
        lines.append(f"and {len(state.cases) - len(cases)} more cases")
    return [cut(line.rstrip(), width - 1) for line in lines[: max(height - 1, 1)]]


def _bar(share: float) -> str:
    """Return a bar of BAR characters, of which the given share is drawn thick."""
    full = round(BAR * min(max(share, 0.0), 1.0))
    return "━" * full + "─" * (BAR - full)
