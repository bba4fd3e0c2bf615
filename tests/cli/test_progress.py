"""Progress messages on stderr."""

import io
import math
import threading

from esbench.progress import remaining, showing


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class FakeTime:
    """A clock whose time is set by the test."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now_s


def shown(*states: tuple[float, int, int], end_s: float = math.inf) -> list[str]:
    """Return the lines of a run whose clock, finished cells and total cells have these values."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock, end_s) as show:
        for now_s, done, total in states:
            clock.now_s = now_s
            show(done, total, f"Linear(512, 512)  {done}")
    return stream.getvalue().splitlines()


def test_where_there_is_no_terminal_a_line_says_what_runs_and_how_long() -> None:
    """Lines have cell, activity and time left, at most the time budget, as plain text."""
    assert shown((0.0, 0, 48), (9.0, 1, 48), (12.0, 2, 48), (90.0, 47, 48)) == [
        "cell 1/48  Linear(512, 512)  0  ETA ?",
        "cell 3/48  Linear(512, 512)  2  ETA 4:36",
        "cell 48/48  Linear(512, 512)  47  ETA 0:02",
    ]
    assert [
        line.partition("ETA ")[2] for line in shown((0, 0, 10), (50, 1, 10), (76, 2, 10), end_s=61.0)
    ] == [
        "?, at most 1:01",
        "7:30, at most 0:11",
        "5:04, at most 0:00",
    ]


def test_the_time_left_is_estimated_per_stage() -> None:
    """The time left is unknown before the first cell of a stage, and never negative."""
    stages = shown((0, 0, 10), (50, 9, 10), (60, 0, 100), (61, 1, 100), (70, 10, 100))
    assert [line.rpartition(" ")[2] for line in stages] == ["?", "0:06", "?", "1:30"]
    assert remaining(4, 3, 10.0) == "0:00"


def test_lines_get_rarer_and_none_says_the_same() -> None:
    """Lines are 10 s apart at least, later half the time so far; an unchanged state has one line."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock) as show:
        for second in range(600):
            clock.now_s = second
            show(second, 600, "sample")
        for second in range(600, 2000):
            clock.now_s = second
            show(600, 600, "step")
    lines = stream.getvalue().splitlines()
    cells = [int(line.split()[1].partition("/")[0]) for line in lines if "sample" in line]
    assert cells == [1, 11, 21, 31, 46, 69, 103, 154, 231, 346, 519]
    assert sum("step" in line for line in lines) == 1


def test_on_a_terminal_nothing_is_drawn_between_calls() -> None:
    """The caller's thread draws the bar; another thread could draw during a measurement."""
    stream = Terminal()
    threads = threading.active_count()
    with showing(stream) as show:
        show(3, 48, "PermutedLinear(in_sparsity=0.5) [x]")
        assert threading.active_count() == threads
        assert "3/48" in stream.getvalue()
        assert "in_sparsity=0.5) [x]" in stream.getvalue()
