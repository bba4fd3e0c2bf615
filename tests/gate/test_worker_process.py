"""Workers as the referee has them, on stand-ins: what of theirs is believed, and that they always end."""

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

from esbench.gate.protocol import (
    ARMS,
    Arm,
    Cell,
    Control,
    Hello,
    Open,
    Opened,
    Orders,
    Refused,
    Visit,
    Visited,
)
from esbench.gate.referee import Referee
from esbench.gate.worker_process import Child, WorkerError, children
from tests.gate.fake_worker import DIES_AT
from tests.gate.gate_cases import cell

PATIENCE_S = 60.0
"""Nobody in these tests is slow, but the machine may be."""
HELLO = '{"message":"hello","number":0,"arm":"head","protocol":1,"packages":{},"code":{}}'
OPENED = '{"message":"opened","number":1,"arm":"head","launch_ns":5.0}'
CONTROL = Control(number=0, units=200, method="host")


def orders(root: Path, arm: Arm = "head") -> Orders:
    """What a worker is told."""
    return Orders(arm=arm, root=str(root), device="cpu", threads=1, seed=0, suite="gate", replicate="test")


@contextlib.contextmanager
def started(folder: Path, *program: str) -> Iterator[Child]:
    """One worker, ended afterwards, and then there is no process of it."""
    one = Child(orders(folder), folder / "log", program)
    process = psutil.Process(one._process.pid)  # noqa: SLF001  # whether it is gone is asked of the system
    family = [process]
    try:
        yield one
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
    finally:
        one.stop()
    assert all(is_gone(member) for member in family)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process ends within some seconds; that its parent did not ask how is no matter."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def stand_in(fault: str) -> tuple[str, ...]:
    """What Python is told to run for a stand-in with a fault."""
    return "-P", "-m", "tests.gate.fake_worker", fault


def script(*lines: str) -> tuple[str, ...]:
    """A worker in a few lines; ``say`` writes one as it stands."""
    head = """
        import os, sys, time
        def say(line):
            sys.stdout.write(line + "\\n")
            sys.stdout.flush()
    """
    return "-c", "\n".join([textwrap.dedent(head), *lines])


def failure(one: Child, silence_s: float = PATIENCE_S) -> str:
    """What is said of a worker that does not serve for long."""
    with pytest.raises(WorkerError) as error:
        visit(one, DIES_AT, silence_s)
    assert "\n" not in str(error.value)
    return str(error.value)


def visit(one: Child, times: int, silence_s: float = PATIENCE_S) -> list[tuple[float, ...]]:
    """Open something and visit it."""
    assert isinstance(one.hello(PATIENCE_S), Hello)
    opened: Cell = cell("Baker")
    assert isinstance(one.ask(Open(number=0, cell=opened), Opened, PATIENCE_S), Opened)
    found = []
    for _ in range(times):
        answer = one.ask(Visit(number=0, launches=3), Visited, silence_s)
        assert isinstance(answer, Visited)
        found.append(answer.samples)
    return found


def test_a_worker_that_serves_is_believed(tmp_path: Path) -> None:
    """It answers each question with as many times as it was asked for."""
    with started(tmp_path, *stand_in("none")) as one:
        assert [len(samples) for samples in visit(one, DIES_AT + 1)] == [3] * (DIES_AT + 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", "ended at Baker"),
        ("killed", "with signal 9"),
        ("ended", "with exit code 0"),
        ("hung", "said nothing at Baker"),
        ("garbage", "gave no usable answer at Baker"),
        ("half", "gave no usable answer at Baker"),
        ("nan", "gave no usable answer at Baker"),
        ("null", "Expected `float`, got `null` - at `$.samples[0]`"),
        ("negative", "Expected `float` > 0.0 - at `$.samples[0]`"),
        ("zero", "Expected `float` > 0.0 - at `$.samples[0]`"),
        ("swapped", f"answer {DIES_AT + 1} of base to question {DIES_AT + 1}"),
        ("late", f"to question {DIES_AT + 1}"),
    ],
)
def test_a_worker_that_fails_is_named_with_what_it_was_at(tmp_path: Path, fault: str, words: str) -> None:
    """The arm, the cell and what was wrong, in one line; afterwards it is no more, whatever it does."""
    with started(tmp_path, *stand_in(fault)) as one:
        told = failure(one, 3.0 if fault == "hung" else PATIENCE_S)
        assert told.startswith("the worker of head ")
        assert words in told


def test_a_worker_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """Its tree cannot be loaded, for instance."""
    with children([orders(tmp_path, arm) for arm in ARMS], stand_in("unloadable")) as found:
        assert isinstance(found["head"].hello(PATIENCE_S), Hello)
        with pytest.raises(WorkerError, match="base cannot go on at start: PluginError: cannot load"):
            found["base"].hello(PATIENCE_S)


def test_a_worker_of_another_protocol_is_not_asked(tmp_path: Path) -> None:
    """Its answers might mean something else."""
    both = {arm: orders(tmp_path, arm) for arm in ARMS}
    with (
        pytest.raises(WorkerError, match="the worker of base speaks protocol 0, not 1"),
        Referee(both, PATIENCE_S, stand_in("older")).workers("test"),
    ):
        pass


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["sys.exit(3)"], "ended at start: with exit code 3"),
        (["os.kill(os.getpid(), 11)"], "with signal 11"),
        (["print('oh', file=sys.stderr)", "sys.exit('no such thing')"], "its last words: no such thing"),
        (["os.write(2, b'\\xff' + b'x' * 1000)", "sys.exit(1)"], f"its last words: {'x' * 300}"),
        (["say('')"], "gave no usable answer"),
        (["say('{}')"], "gave no usable answer"),
        (["say('[' * 100_000)"], "gave no usable answer"),
        (["say('0')"], "gave no usable answer"),
        (["os.write(1, b'\\xff\\n')"], "gave no usable answer"),
        ([f"say({HELLO[:-1]!r} + ',\"more\":1}}')"], "gave no usable answer"),
        ([f"say({HELLO.replace('head', 'base')!r})"], "answer 0 of base to question 0"),
        ([f"say({OPENED.replace('1,', '0,')!r})"], "answered what it was not asked"),
    ],
)
def test_nonsense_is_no_hello(tmp_path: Path, lines: list[str], words: str) -> None:
    """Whatever a worker begins with, in one line, with the end of its last words."""
    with started(tmp_path, *script(*lines, "time.sleep(60)")) as one:
        told = failure(one)
        assert words in told
        assert len(told) < 600


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (OPENED, ""),
        (OPENED.replace("5.0", "0.0"), "Expected `float` > 0.0 - at `$.launch_ns`"),
        (OPENED.replace("5.0", "1e400"), "gave no usable answer"),
        (OPENED.replace(":1,", ":2,"), "answer 2 of head to question 1"),
        (
            '{"message":"visited","number":1,"arm":"head","samples":[1.0]}',
            "not asked at 200 units of its own",
        ),
        ('{"message":"visited","number":1,"arm":"head","samples":[]}', "length >= 1"),
        ('{"message":"failure","number":1,"arm":"head","reason":"lost"}', "cannot go on at 200 units"),
    ],
)
def test_an_answer_is_to_its_question_and_of_its_kind(tmp_path: Path, answer: str, words: str) -> None:
    """Any other is none."""
    lines = [f"say({HELLO!r})", "sys.stdin.readline()", f"say({answer!r})", "time.sleep(60)"]
    with started(tmp_path, *script(*lines)) as one:
        one.hello(PATIENCE_S)
        if words:
            with pytest.raises(WorkerError) as error:
                one.ask(CONTROL, Opened, PATIENCE_S)
            assert words in str(error.value)
        else:
            assert isinstance(one.ask(CONTROL, Opened, PATIENCE_S), Opened)


def test_a_refusal_is_an_answer(tmp_path: Path) -> None:
    """To any question: the referee decides what it means."""
    refused = '{"message":"refused","number":1,"arm":"head","status":"failed","reason":"off"}'
    lines = [f"say({HELLO!r})", "sys.stdin.readline()", f"say({refused!r})", "time.sleep(60)"]
    with started(tmp_path, *script(*lines)) as one:
        one.hello(PATIENCE_S)
        assert isinstance(one.ask(CONTROL, Opened, PATIENCE_S), Refused)


@pytest.mark.parametrize(
    "lines",
    [
        ["time.sleep(600)"],
        ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(600)"],
        ["os.write(1, b'x' * 1000)", "time.sleep(600)"],
        ["os.close(1)", "time.sleep(600)"],
        ["if os.fork() == 0: time.sleep(600)", "time.sleep(600)"],
        ["if os.fork() == 0: time.sleep(600)", "sys.exit(1)"],
        ["if os.fork() == 0: os.setsid(); time.sleep(5); os._exit(0)", "sys.exit(1)"],
    ],
    ids=[
        "silent",
        "stubborn",
        "half a line",
        "closes its output",
        "with a child",
        "leaves a child",
        "escaped",
    ],
)
def test_a_worker_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path, lines: list[str]) -> None:
    """Nor is what it has started, and what it has started ends with it."""
    start_s = time.monotonic()
    with started(tmp_path, *script("import signal", *lines)) as one, pytest.raises(WorkerError) as error:
        one.hello(2.0)
    assert "the worker of head " in str(error.value)
    assert time.monotonic() - start_s < PATIENCE_S / 2


def test_a_process_that_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    """As those do that a compiler starts for its own use."""
    lines = [
        "import subprocess",
        "again = [sys.executable, '-c', 'import time; time.sleep(600)']",
        "print(subprocess.Popen(again).pid, file=sys.stderr)",
        f"say({HELLO!r})",
        "time.sleep(600)",
    ]
    with started(tmp_path, *script(*lines)) as one:
        one.hello(PATIENCE_S)
        started_by_it = psutil.Process(int((tmp_path / "log").read_text(encoding="utf-8")))
        assert started_by_it.is_running()
    assert is_gone(started_by_it)


def test_both_workers_end_whatever_happens(tmp_path: Path) -> None:
    """An interrupt among it; their logs go too."""
    processes: list[psutil.Process] = []
    logs: list[Path] = []

    def interrupted() -> None:
        with children([orders(tmp_path, arm) for arm in ARMS], stand_in("none")) as found:
            processes.extend(psutil.Process(one._process.pid) for one in found.values())  # noqa: SLF001  # as above
            logs.extend(one._log for one in found.values())  # noqa: SLF001  # where they are is nobody else's business
            assert all(log.exists() for log in logs)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes) == 2
    assert all(map(is_gone, processes))
    assert not any(log.exists() for log in logs)


def test_a_worker_that_cannot_be_started_leaves_no_other(tmp_path: Path) -> None:
    """The first one runs already when the second one's folder is gone."""
    before = {process.pid for process in psutil.Process().children()}
    with (
        pytest.raises(FileNotFoundError),
        children([orders(tmp_path), orders(tmp_path / "gone", "base")], stand_in("none")),
    ):
        pass
    assert {process.pid for process in psutil.Process().children()} <= before


def test_an_interrupt_reaches_the_referee_alone(tmp_path: Path) -> None:
    """Its workers have a session of their own, so that they are ended and do not end in the middle."""
    with started(tmp_path, *stand_in("none")) as one:
        one.hello(PATIENCE_S)
        pid = one._process.pid  # noqa: SLF001  # whose session it is in is asked of the system
        assert os.getsid(pid) == pid


def test_stopping_twice_is_stopping(tmp_path: Path) -> None:
    """A worker that is dead is not ended again, and asking it is an error like any other."""
    with started(tmp_path, *stand_in("none")) as one:
        one.hello(PATIENCE_S)
        one.stop()
        one.stop()
        with pytest.raises(WorkerError, match=f"ended at Baker.*signal {signal.SIGKILL.value}"):
            one.ask(Open(number=0, cell=cell("Baker")), Opened, PATIENCE_S)


def test_no_thread_outlives_its_worker(tmp_path: Path) -> None:
    """What listens to one ends with it."""
    before = threading.active_count()
    for _ in range(3):
        with started(tmp_path, *stand_in("none")) as one:
            one.hello(PATIENCE_S)
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_harness_is_the_one_that_judges(tmp_path: Path) -> None:
    """Whatever the folder of a tree holds, and though the worker runs in it."""
    (tmp_path / "esbench").mkdir()
    (tmp_path / "esbench" / "__init__.py").write_text("raise SystemExit('another harness')")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('another library')")
    with started(tmp_path, *stand_in("none")) as one:
        assert isinstance(one.hello(PATIENCE_S), Hello)


def test_an_output_that_somebody_else_holds_is_closed_when_they_end(tmp_path: Path) -> None:
    """Not before: nobody waits for who has escaped, and no file stays open behind them."""
    escape = f"if os.fork() == 0: os.setsid(); say({HELLO!r}); time.sleep(6); os._exit(0)"
    with started(tmp_path, *script(escape, "time.sleep(600)")) as one:
        one.hello(PATIENCE_S)
        output = one._process.stdout  # noqa: SLF001  # whether it is closed is what is asked
        one.stop()
        assert output is not None
        assert not output.closed
        one._ear.join(60)  # noqa: SLF001  # who closes it
        assert output.closed
