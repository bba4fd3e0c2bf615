"""Progress on stderr."""

import io
import threading

import pytest

from esbench.progress import remaining, showing


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


class FakeTime:
    """A clock that is set."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return what it was set to."""
        return self.now_s


def test_where_there_is_no_terminal_a_line_says_what_runs_and_how_long() -> None:
    """Cell, what, time left: nothing but text and ends of lines."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock) as show:
        show(0, 48, "Linear(512, 512)  sample")
        clock.now_s = 2.0
        show(2, 48, "Linear(512, 512)  forward")
        clock.now_s = 90.0
        show(47, 48, "Linear(512, 512)  step")
    assert stream.getvalue().splitlines() == [
        "cell 1/48  Linear(512, 512)  sample  ETA ?",
        "cell 3/48  Linear(512, 512)  forward  ETA 0:46",
        "cell 48/48  Linear(512, 512)  step  ETA 0:02",
    ]


def test_a_time_budget_bounds_the_time_that_is_left() -> None:
    """It stands beside the estimate, never below nothing."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock, 61.0) as show:
        for now_s, done in ((0.0, 0), (50.0, 1), (62.0, 2)):
            clock.now_s = now_s
            show(done, 10, "x")
    assert [line.partition("ETA ")[2] for line in stream.getvalue().splitlines()] == [
        "?, at most 1:01",
        "7:30, at most 0:11",
        "4:08, at most 0:00",
    ]


def test_the_time_left_of_a_stage_is_judged_by_that_stage() -> None:
    """What came before it had another pace."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock) as show:
        for now_s, done, total in ((0.0, 0, 10), (50.0, 9, 10), (60.0, 0, 100), (61.0, 1, 100)):
            clock.now_s = now_s
            show(done, total, "x")
    assert [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()] == ["?", "0:06", "?", "1:39"]


def test_at_most_four_lines_a_second_and_none_that_says_the_same() -> None:
    """A hundred changes in a second give four lines, a state that stays gives one."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock) as show:
        for step in range(100):
            clock.now_s = step / 100
            show(step, 100, "sample")
        for step in range(100):
            clock.now_s = 2.0 + step
            show(100, 100, "step")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert [line.split()[2] for line in lines] == ["sample"] * 4 + ["step"]


def test_the_time_left_is_judged_by_what_is_done() -> None:
    """Minutes and seconds; unknown at first, never less than nothing."""
    cases: list[tuple[int, int, float, str]] = [
        (0, 9, 5.0, "?"),
        (1, 3, 21.0, "0:42"),
        (1, 3, 61.0, "2:02"),
        (3, 3, 10.0, "0:00"),
        (4, 3, 10.0, "0:00"),
    ]
    for done, total, elapsed_s, text in cases:
        assert remaining(done, total, elapsed_s) == text


def test_on_a_terminal_nothing_is_drawn_between_calls() -> None:
    """A bar, drawn by the caller's own thread: no other is started that could draw in a measurement."""
    stream = Terminal()
    threads = threading.active_count()
    with showing(stream) as show:
        show(3, 48, "PermutedLinear(in_sparsity=0.5) [x]")
        assert threading.active_count() == threads
        assert "3/48" in stream.getvalue()
        assert "in_sparsity=0.5) [x]" in stream.getvalue()


def test_the_display_is_put_away_after_an_interrupt() -> None:
    """The cursor is shown again, and the interrupt passes through."""
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), showing(stream):
        raise KeyboardInterrupt
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
