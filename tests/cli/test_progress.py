"""Progress messages on stderr."""

import fcntl
import io
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from esbench import store
from esbench.measure.remaining_time import SET_UP, RemainingTime
from esbench.progress import CaseProgress, RunProgress, showing
from esbench.schema import Measurement
from tests.fakes import CASE
from tests.gate import gate_plugin
from tests.report.ranking_cases import SQUARE

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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


def test_without_a_terminal_lines_name_the_activity_and_the_times() -> None:
    """Lines have elapsed and remaining time, at most the time budget, the cell and the activity."""
    assert shown((0.0, 0, 48), (9.0, 1, 48), (12.0, 2, 48), (90.0, 47, 48)) == [
        "0:00 elapsed  cell 1/48  Linear(512, 512)  0",
        "0:12 elapsed, 4:36 left  cell 3/48  Linear(512, 512)  2",
        "1:30 elapsed, 0:02 left  cell 48/48  Linear(512, 512)  47",
    ]
    lines = shown((0, 0, 10), (50, 1, 10), (101, 2, 10), end_s=61.0)
    assert [line.partition("  ")[0] for line in lines] == [
        "0:00 elapsed",
        "0:50 elapsed, 0:11 left",
        "1:41 elapsed, 0:00 left",
    ]


def test_the_time_left_is_estimated_per_stage() -> None:
    """The time left is unknown before the first cell of a stage, and never negative."""
    stages = shown((0, 0, 10), (50, 9, 10), (60, 0, 100), (61, 1, 100), (70, 10, 100), (90, 101, 100))
    assert [re.findall(r"(\S+) left", line) for line in stages] == [[], ["0:06"], [], ["1:30"], ["0:00"]]


def test_lines_get_rarer_and_do_not_repeat() -> None:
    """Lines are 10 s apart, later two minutes; an unchanged state has one line."""
    stream, clock = io.StringIO(), FakeTime()
    with showing(stream, clock) as show:
        for second in range(3000):
            clock.now_s = second
            show(second, 3000, "sample " * 20)
        for second in range(3000, 5000):
            clock.now_s = second
            show(3000, 3000, "step")
    lines = stream.getvalue().splitlines()
    cells = [int(number) for number in re.findall(r"cell (\d+)/3000  sample", stream.getvalue())]
    assert cells == [1, 11, 21, 41, 81, *range(161, 3000, 120)]
    assert sum("step" in line for line in lines) == 1
    assert max(map(len, lines)) == 100


def test_the_time_left_of_a_run_is_weighted_by_the_cost_of_its_stages() -> None:
    """A finished stage tells what it costs on the next case, and scales the guesses of the other stages."""
    clock = FakeTime()
    cases = (CASE, SQUARE)
    variants = {(case, name): 10 for case in cases for name in (SET_UP, "forward", "quality")}
    remaining = RemainingTime(variants, {SET_UP: 0.1, "forward": 1.0, "quality": 0.1}, clock)
    assert remaining.left_s() == pytest.approx(24.0)
    remaining.begin((CASE, SET_UP))
    clock.now_s = 2.0  # twice its guess
    remaining.begin((CASE, "forward"))
    assert remaining.left_s(SQUARE) == pytest.approx(2.0 + 20.0 + 2.0)
    assert remaining.share(CASE) == pytest.approx(2.0 / 24.0)
    clock.now_s = 12.0
    assert remaining.left_s(CASE) == pytest.approx(10.0 + 2.0)
    clock.now_s = 42.0  # longer than expected
    assert remaining.left_s(CASE) == pytest.approx(2.0)
    remaining.begin((CASE, "quality"))
    assert remaining.left_s(SQUARE) == pytest.approx(2.0 + 40.0 + 1.0 * 42 / 11)
    remaining.finish(CASE)
    assert remaining.left_s() == remaining.left_s(SQUARE)
    assert (remaining.share(CASE), remaining.share(SQUARE)) == (1.0, 0.0)


@pytest.mark.parametrize(("columns", "rows"), [(100, 40), (40, 12), (10, 2)])
def test_a_terminal_shows_a_line_for_each_case(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header has elapsed and remaining time; no line is wider than the terminal; no thread draws."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    stream, clock, threads = Terminal(), FakeTime(), threading.active_count()
    cases = [CaseProgress(f"Linear({n}, {n})", n < 5, "step" * (n == 5), "best") for n in range(30)]
    with showing(stream, clock) as show:
        clock.now_s = 61.0
        show(3, 48, "step host  Permuted [x]", RunProgress(30.0, cases))
        assert threading.active_count() == threads
        lines = ESCAPE.sub("", stream.getvalue()).split("\n")
    assert max(map(len, lines)) < columns
    assert len(lines) <= rows
    assert lines[0].startswith("1:01 elapsed, 0:30 left"[: columns - 2])
    if columns == 100:
        assert "step host  Permuted [x]" in lines[1]
        assert len(lines) == 2 + 12 + 1
        assert lines[2].startswith("Linear(4, 4)   ━━━━━━━━━━━━━━━━")
        assert lines[3] == "Linear(5, 5)   ──────────────── step best"
        assert lines[-1] == "and 18 more cases"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal with TERM=dumb, which cannot move the cursor, gets plain lines."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with showing(stream) as show:
        show(0, 48, "Permuted")
    assert stream.getvalue() == "0:00 elapsed  cell 1/48  Permuted\n"


def test_ctrl_c_on_a_terminal_leaves_finished_rows_and_a_clean_screen(tmp_path: Path) -> None:
    """After an interrupt the display is removed, the finished rows can be read, and the exit code is 130."""
    # On the second case the variant waits for the interrupt.
    waiting = gate_plugin.variant_with(
        "TinyWaiting", "sum(self, x)", "self.case.members == 16 and time.sleep(1000)", "return x.sum(dim=0)"
    )
    (tmp_path / "waiting.py").write_text(gate_plugin.plugin(waiting, members=(8, 16)))
    (tmp_path / "impls.py").touch()  # loads faster than the real one
    # Programs started in the background may ignore interrupts, which their child processes inherit.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; from esbench.cli import main; main()"]
    command += ["run", "--suite", "tiny", "--device", "cpu", "--results", "other", "--plugin", "waiting.py"]
    terminal, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=slave, stderr=slave, stdout=subprocess.PIPE
    ) as process:
        os.close(slave)
        deadline = time.monotonic() + 120
        while not any(b'"measurement"' in path.read_bytes() for path in tmp_path.rglob("*.jsonl")):
            assert time.monotonic() < deadline, "nothing was measured"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output = b""
        while chunk := _read(terminal):
            output += chunk
        process.wait(60)
    os.close(terminal)
    text = output.decode()
    assert process.returncode == 130
    assert "Traceback" not in text
    assert re.search(r"Tiny\(4, 4\) members=8  [━─]+ (set-up|forward)", text)
    drawn, _, after = text.rpartition("\x1b[?25h")  # the cursor is shown again
    assert "\x1b[?25l" in drawn
    assert "━" not in after
    assert "─" not in after
    assert "interrupted: the finished rows are in" in text
    assert "continue it with `esbench run --resume --results other --device cpu`" in text
    runs, _ = store.read_results(tmp_path / "other")
    assert [run.end and run.end.status for run in runs] == ["interrupted"]
    assert any(isinstance(row, Measurement) for row in runs[0].rows)


def _read(terminal: int) -> bytes:
    """Read from a pseudo-terminal; nothing after the program at its other end has exited."""
    try:
        return os.read(terminal, 2**16)
    except OSError:
        return b""
