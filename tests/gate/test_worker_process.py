"""The gate's handle on a worker process: it accepts only valid answers and always ends the process."""

import contextlib
import os
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from esbench.gate import worker_process
from esbench.gate.protocol import ARMS, Control, Hello, Opened, Orders, Refused
from esbench.gate.worker_process import WorkerError, WorkerProcess, start_workers

HELLO = '{"message":"hello","packages":{},"code":{}}'
OPENED = '{"message":"opened","launch_ns":5.0}'
REFUSED = '{"message":"refused","status":"failed","reason":"off"}'
CONTROL = Control(units=200, method="host")


def orders(root: Path) -> Orders:
    """Return the orders for a worker."""
    return Orders(root=str(root), device="cpu", threads=1, seed=0, suite="gate")


@contextlib.contextmanager
def started(folder: Path, *lines: str) -> Iterator[WorkerProcess]:
    """Start a worker with this source, in which ``say`` writes a line; end its processes afterwards."""
    say = """
        import os, sys, time
        def say(line):
            sys.stdout.write(line + "\\n")
            sys.stdout.flush()
    """
    program = ("-S", "-P", "-c", "\n".join([textwrap.dedent(say), *lines]))
    one = WorkerProcess("head", orders(folder), folder / "log", program)
    family = [psutil.Process(one.process.pid)]
    try:
        yield one
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
    finally:
        one.stop()
    assert all(map(is_gone, family))


def is_gone(process: psutil.Process) -> bool:
    """Return whether a process ends within some seconds, perhaps as a zombie."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


class Canned(WorkerProcess):
    """A worker without a process, which answers with the given lines."""

    def __init__(self, *lines: str | bytes) -> None:
        """Store the lines, which are read one after the other."""
        super().__init__("head", orders(Path()), Path(os.devnull))
        for line in lines:
            self._lines.put(line.encode() if isinstance(line, str) else line)

    def _start(self, orders: Orders, program: object) -> None:
        """Start no process."""

    def _write(self, line: bytes) -> None:
        """Ignore the question."""


def error_of(one: WorkerProcess) -> str:
    """Return the one short error line about a worker without a valid hello."""
    with pytest.raises(WorkerError) as error:
        one.hello()
    told = str(error.value)
    assert told.startswith("the worker of head ")
    assert "\n" not in told
    assert len(told) < 600
    return told


def test_an_answer_is_valid_and_of_the_kind_that_was_asked_for() -> None:
    """Any other answer is an error that names the question; a refusal answers any question."""
    for line in ("\n", "{}", "[" * 100_000, "0", b"\xff\n", HELLO[:-1] + ',"more":1}'):
        assert "sent no valid answer at start" in error_of(Canned(line))
    assert "refused at start: off" in error_of(Canned(REFUSED))
    assert "failed at start: lost" in error_of(Canned('{"message":"failure","reason":"lost"}'))
    for answer, words in (
        (OPENED.replace("5.0", "0.0"), "Expected `float` > 0.0 - at `$.launch_ns`"),
        (OPENED.replace("5.0", "-1.0"), "Expected `float` > 0.0 - at `$.launch_ns`"),
        (OPENED.replace("5.0", "null"), "got `null` - at `$.launch_ns`"),
        (OPENED.replace("5.0", "NaN"), "sent no valid answer at 200 units of control work"),
        (OPENED.replace("5.0", "1e400"), "sent no valid answer"),
        ('{"message":"visited","samples":[1.0]}', "answered another question at 200 units of control work"),
        ('{"message":"visited","samples":[]}', "length >= 1"),
        ('{"message":"failure","reason":"lost"}', "failed at 200 units"),
    ):
        one = Canned(HELLO, answer)
        assert isinstance(one.hello(), Hello)
        with pytest.raises(WorkerError) as error:
            one.ask(CONTROL, Opened)
        assert words in str(error.value)
    assert isinstance(Canned(OPENED).ask(CONTROL, Opened), Opened)
    assert isinstance(Canned(REFUSED).ask(CONTROL, Opened), Refused)
    with pytest.raises(WorkerError, match="refused at 200 units of control work: off"):
        Canned(REFUSED).require(CONTROL, Opened)


def test_a_worker_runs_on_its_own_and_is_stopped(tmp_path: Path) -> None:
    """A worker has its own session, so that an interrupt reaches only the gate; it may be stopped twice.

    It runs in the work tree's folder, but imports neither harness nor libraries from there.
    """
    (tmp_path / "esbench").mkdir()
    (tmp_path / "esbench" / "__init__.py").write_text("raise SystemExit('another harness')")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('another library')")
    lines = ["import site; site.main()", "import esbench.gate.protocol", f"say({HELLO!r})", "time.sleep(600)"]
    with started(tmp_path, *lines) as one:
        assert isinstance(one.hello(), Hello)
        assert os.getsid(one.process.pid) == one.process.pid
        one.stop()
        one.stop()
        with pytest.raises(WorkerError, match="ended at 200 units of control work: with signal 9"):
            one.ask(CONTROL, Opened)
        assert not one.reader.is_alive()


def test_a_process_that_ends_is_named_with_its_exit_code_and_stderr(tmp_path: Path) -> None:
    """The last line on stderr is quoted, shortened; a signal is named."""
    for line, words in (
        ("os.kill(os.getpid(), 11)", "with signal 11"),
        ("print('oh', file=sys.stderr); sys.exit('no such')", "exit code 1; last line on stderr: no such"),
        ("os.write(2, b'\\xff' + b'x' * 1000); sys.exit(1)", f"last line on stderr: {'x' * 300}"),
    ):
        with started(tmp_path, line) as one:
            told = error_of(one)
        assert "ended at start: " in told
        assert words in told


def test_a_worker_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may ignore signals, write half a line, close its output, or leave a child running."""
    monkeypatch.setattr(worker_process, "SILENCE_S", 0.4)
    monkeypatch.setattr(worker_process, "GRACE_S", 0.1)
    for line, words in (
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", "did not answer"),
        ("os.write(1, b'x' * 1000); time.sleep(600)", "did not answer"),
        ("os.close(1); time.sleep(600)", "its output closed, still running"),
        ("os.fork(); time.sleep(600)", "did not answer"),
        ("if os.fork() == 0: os.setsid(); time.sleep(1); os._exit(0)\nsys.exit(1)", "did not answer"),
    ):
        with started(tmp_path, line) as one:
            assert words in error_of(one)


def test_both_workers_end_whatever_happens(tmp_path: Path) -> None:
    """An interrupt also deletes their logs; if the second cannot be started, the first one ends."""
    processes: list[psutil.Process] = []
    program = ("-S", "-c", "import time; time.sleep(600)")

    def interrupted() -> None:
        with start_workers({arm: orders(tmp_path) for arm in ARMS}, program) as found:
            processes.extend(psutil.Process(one.process.pid) for one in found.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    before = {process.pid for process in psutil.Process().children()}
    second = {"base": orders(tmp_path), "head": orders(tmp_path / "gone")}
    with pytest.raises(FileNotFoundError), start_workers(second, program):  # type: ignore[arg-type]  # arms
        pass
    assert len(processes) == 2
    assert all(map(is_gone, processes))
    assert {process.pid for process in psutil.Process().children()} <= before
    assert not list(tmp_path.iterdir())
