"""The gate's handle on a worker: which answers are accepted, and that the process always ends."""

import contextlib
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from esbench.gate import worker_process
from esbench.gate.protocol import (
    ARMS,
    Arm,
    Control,
    Hello,
    Open,
    Opened,
    Orders,
    Refused,
    Visit,
    Visited,
)
from esbench.gate.worker_process import WorkerError, WorkerProcess, start_workers
from tests.gate.fake_worker import PROGRAM, InProcess
from tests.gate.gate_cases import cell

PATIENCE_S = 60.0
HELLO = '{"message":"hello","number":0,"arm":"head","protocol":1,"packages":{},"code":{}}'
OPENED = '{"message":"opened","number":1,"arm":"head","launch_ns":5.0}'
CONTROL = Control(number=0, units=200, method="host")


def orders(root: Path, arm: Arm = "head") -> Orders:
    """What a worker is told."""
    return Orders(arm=arm, root=str(root), device="cpu", threads=1, seed=0, suite="gate", replicate="test")


@contextlib.contextmanager
def started(folder: Path, *program: str) -> Iterator[WorkerProcess]:
    """One worker, ended afterwards; then neither it nor a child of it is left."""
    one = WorkerProcess(orders(folder), folder / "log", program)
    family = [psutil.Process(one.process.pid)]
    try:
        yield one
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
    finally:
        one.stop()
    assert all(is_gone(member) for member in family)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process ends within some seconds, perhaps as a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def script(*lines: str) -> tuple[str, ...]:
    """A worker in a few lines; ``say`` writes one as it is."""
    head = """
        import os, sys, time
        def say(line):
            sys.stdout.write(line + "\\n")
            sys.stdout.flush()
    """
    return "-S", "-c", "\n".join([textwrap.dedent(head), *lines])


def visit(one: WorkerProcess, times: int) -> list[int]:
    """Open a cell and visit it; return the number of times of each visit."""
    assert isinstance(one.hello(PATIENCE_S), Hello)
    assert isinstance(one.ask(Open(number=0, cell=cell("Baker")), Opened, PATIENCE_S), Opened)
    answers = [one.ask(Visit(number=0, launches=3), Visited, PATIENCE_S) for _ in range(times)]
    return [len(answer.samples) for answer in answers if isinstance(answer, Visited)]


def error_of(one: WorkerProcess, silence_s: float = PATIENCE_S) -> str:
    """The one line about a worker that sends no valid hello."""
    with pytest.raises(WorkerError) as error:
        one.hello(silence_s)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("the worker of head ")
    return str(error.value)


def test_a_worker_answers_and_is_stopped(tmp_path: Path) -> None:
    """It has a session of its own, so an interrupt reaches only the gate; stopping twice is stopping."""
    threads = threading.active_count()
    with started(tmp_path, *PROGRAM, "none") as one:
        assert visit(one, 5) == [3] * 5
        assert os.getsid(one.process.pid) == one.process.pid
        one.stop()
        one.stop()
        with pytest.raises(WorkerError, match=f"ended at Baker.*signal {signal.SIGKILL.value}"):
            one.ask(Visit(number=0, launches=3), Visited, PATIENCE_S)
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, "a thread outlives its worker"
        time.sleep(0.01)


def test_the_harness_is_not_that_of_the_work_tree(tmp_path: Path) -> None:
    """Nor are its libraries, though the worker runs in that folder."""
    (tmp_path / "esbench").mkdir()
    (tmp_path / "esbench" / "__init__.py").write_text("raise SystemExit('another harness')")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('another library')")
    with started(tmp_path, *PROGRAM, "none") as one:
        assert isinstance(one.hello(PATIENCE_S), Hello)


def test_a_worker_that_fails_is_named_with_what_it_was_at() -> None:
    """The arm, the cell and what was wrong with the answer."""
    for fault, words in (
        ("garbage", "sent no valid answer at Baker"),
        ("null", "Expected `float`, got `null` - at `$.samples[0]`"),
        ("negative", "Expected `float` > 0.0 - at `$.samples[0]`"),
        ("zero", "Expected `float` > 0.0 - at `$.samples[0]`"),
        ("swapped", "answer 41 of base to question 41"),
        ("late", "to question 41"),
    ):
        with pytest.raises(WorkerError) as error:
            visit(InProcess(orders(Path()), Path(os.devnull), (fault,)), 40)
        assert str(error.value).startswith("the worker of head "), fault
        assert words in str(error.value), fault


class Canned(WorkerProcess):
    """A worker without a process, whose lines are given."""

    def __init__(self, *lines: bytes) -> None:
        """Say them one after the other."""
        super().__init__(orders(Path()), Path(os.devnull))
        for line in lines:
            self._answers.put(line)

    def _start(self, orders: Orders, program: object) -> None:
        """Start nothing."""

    def _send(self, line: bytes) -> None:
        """Ignore the question."""


def test_a_first_message_must_be_a_valid_hello() -> None:
    """Anything else is an error in one short line."""
    for line, words in (
        (b"\n", "sent no valid answer"),
        (b"{}", "sent no valid answer"),
        (b"[" * 100_000, "sent no valid answer"),
        (b"0", "sent no valid answer"),
        (b"\xff\n", "sent no valid answer"),
        (HELLO[:-1].encode() + b',"more":1}', "sent no valid answer"),
        (HELLO.replace("head", "base").encode(), "answer 0 of base to question 0"),
        (OPENED.replace("1,", "0,").encode(), "answered another question"),
        (b'{"message":"failure","number":0,"arm":"head","reason":"lost"}', "failed at start: lost"),
    ):
        told = error_of(Canned(line))
        assert words in told, line[:100]
        assert len(told) < 600


def test_an_answer_is_to_its_question_and_of_its_kind() -> None:
    """Any other is an error; a refusal is an answer to any question."""
    for answer, words in (
        (OPENED.replace("5.0", "0.0"), "Expected `float` > 0.0 - at `$.launch_ns`"),
        (OPENED.replace("5.0", "1e400"), "sent no valid answer"),
        (OPENED.replace(":1,", ":2,"), "answer 2 of head to question 1"),
        (
            '{"message":"visited","number":1,"arm":"head","samples":[1.0]}',
            "another question at 200 units of control work",
        ),
        ('{"message":"visited","number":1,"arm":"head","samples":[]}', "length >= 1"),
        ('{"message":"failure","number":1,"arm":"head","reason":"lost"}', "failed at 200 units"),
    ):
        one = Canned(HELLO.encode(), answer.encode())
        one.hello(PATIENCE_S)
        with pytest.raises(WorkerError) as error:
            one.ask(CONTROL, Opened, PATIENCE_S)
        assert words in str(error.value)
    refused = '{"message":"refused","number":1,"arm":"head","status":"failed","reason":"off"}'
    for answer, kind in ((OPENED, Opened), (refused, Refused)):
        one = Canned(HELLO.encode(), answer.encode())
        one.hello(PATIENCE_S)
        assert isinstance(one.ask(CONTROL, Opened, PATIENCE_S), kind)


def test_a_process_that_ends_is_named_with_its_exit_code_and_stderr(tmp_path: Path) -> None:
    """The last line on stderr is quoted, shortened; a signal is named."""
    for lines, words in (
        (["os.kill(os.getpid(), 11)"], "with signal 11"),
        (
            ["print('oh', file=sys.stderr)", "sys.exit('no such thing')"],
            "exit code 1; last line on stderr: no such",
        ),
        (["os.write(2, b'\\xff' + b'x' * 1000)", "sys.exit(1)"], f"last line on stderr: {'x' * 300}"),
    ):
        with started(tmp_path, *script(*lines)) as one:
            told = error_of(one)
        assert "ended at start: " in told
        assert words in told
        assert len(told) < 600


def test_a_worker_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it ignores signals, writes half a line, closes its output or leaves a child."""
    monkeypatch.setattr(worker_process, "GRACE_S", 0.2)
    start_s = time.monotonic()
    for lines in (
        ["import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(600)"],
        ["os.write(1, b'x' * 1000)", "time.sleep(600)"],
        ["os.close(1)", "time.sleep(600)"],
        ["if os.fork() == 0: time.sleep(600)", "time.sleep(600)"],
        ["if os.fork() == 0: time.sleep(600)", "sys.exit(1)"],
        ["if os.fork() == 0: os.setsid(); time.sleep(3); os._exit(0)", "sys.exit(1)"],
    ):
        with started(tmp_path, *script(*lines)) as one:
            error_of(one, 0.5)
    assert time.monotonic() - start_s < PATIENCE_S


def test_an_output_that_an_escaped_process_holds_is_closed_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopping does not wait for it, and no file stays open afterwards."""
    monkeypatch.setattr(worker_process, "GRACE_S", 0.2)
    end = tmp_path / "end"
    escape = f"""\
if os.fork() == 0:
    os.setsid()
    say({HELLO!r})
    for _ in range(300):
        time.sleep(0.1)
        if os.path.exists({str(end)!r}): break
    os._exit(0)"""
    with started(tmp_path, *script(escape, "time.sleep(600)")) as one:
        one.hello(PATIENCE_S)
        output = one.process.stdout
        one.stop()
        assert output is not None
        assert not output.closed
        end.touch()
        one.reader.join(60)
        assert output.closed


def test_both_workers_end_whatever_happens(tmp_path: Path) -> None:
    """After an interrupt their logs go, too; if the second cannot be started the first one ends."""
    processes: list[psutil.Process] = []
    logs: list[Path] = []

    def interrupted() -> None:
        with start_workers([orders(tmp_path, arm) for arm in ARMS], script("time.sleep(600)")) as found:
            processes.extend(psutil.Process(one.process.pid) for one in found.values())
            logs.extend(one.log for one in found.values())
            assert all(log.exists() for log in logs)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes) == 2
    assert all(map(is_gone, processes))
    assert not any(log.exists() for log in logs)
    before = {process.pid for process in psutil.Process().children()}
    both = [orders(tmp_path), orders(tmp_path / "gone", "base")]
    with pytest.raises(FileNotFoundError), start_workers(both, script("time.sleep(600)")):
        pass
    assert {process.pid for process in psutil.Process().children()} <= before
