"""Worker processes: what they measure, how they fail, and that they always end."""

import contextlib
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import torch

from esbench import registry
from esbench.gate import worker_process
from esbench.gate.protocol import (
    Answer,
    Control,
    Failure,
    Hello,
    Open,
    Opened,
    Orders,
    Rows,
    Survey,
    Visit,
    Visited,
)
from esbench.gate.records import ARMS, Cell, Surveyed
from esbench.gate.worker import control_work, main
from esbench.gate.worker_process import WORKER, WorkerError, WorkerProcess, start_workers
from esbench.schema import Case, Phase, Variant
from tests.gate.gate_plugin import correct_variant, plugin, variant_with
from tests.gate.gate_repository import write

pytestmark = pytest.mark.xdist_group("gate_worker")  # one worker makes what these tests share

FILE = "their_variants.py"
CASE = Case(operator="Tiny", out_channels=4, in_channels=4, members=8)
VARIANTS = (
    correct_variant("TinyPlain"),
    variant_with("TinyWrong", "sum(self, x)", "return x.sum(dim=0) + 1"),
    variant_with("TinyNot", "ready(self)", "raise UnavailableError('needs a quantum computer')"),
    variant_with(
        "TinyPhaseless", "ready(self)", "self.phases, self.unavailable = {}, {'forward': 'it never learnt'}"
    ),
    variant_with(
        "TinyLoud", "sum(self, x)", "print('hello', flush=True)", "os.write(1, b'raw')", "return x.sum(dim=0)"
    ),
    variant_with("TinyExits", "sum(self, x)", "raise SystemExit(7)"),
    variant_with("TinyRaises", "sum(self, x)", "raise ValueError('two\\n lines')"),
    variant_with("TinyChanges", "confirm(self, phase)", "raise WrongResultError('it is off now')"),
    variant_with("TinyHoards", "sum(self, x)", "KEPT.append(x + 1)", "return x.sum(dim=0)"),
    variant_with("TinyStale", "forward(self)", "return self.inputs[0].sum(dim=0)"),
    variant_with("TinyGreedy", "ready(self)", "torch.set_num_threads(2)"),
    variant_with("TinyRude", "sum(self, x)", "torch.set_grad_enabled(False)", "raise ValueError('left so')"),
    variant_with("TinyMute", "ready(self)", "self.phases, self.unavailable = {}, {'forward': 7}"),
    variant_with(
        "TinyLookup",
        "sum(self, x)",
        "time.sleep(0 if x.sum().item() in SEEN else 0.002)",
        "SEEN.add(x.sum().item())",
        "return x.sum(dim=0)",
    ),
    variant_with("TinyHangs", "forward(self)", "open('hangs', 'w').close()", "time.sleep(600)"),
    "\nKEPT, SEEN = [], set()\n",
)


def orders(root: Path, **settings: object) -> Orders:
    """Return the orders for a worker."""
    settings = {"suite": "tiny", "plugins": (FILE,), **settings}
    return Orders(root=str(root), device="cpu", threads=1, seed=0, **settings)  # type: ignore[arg-type]  # fields of orders


@contextlib.contextmanager
def worker(root: Path, log: Path, **settings: object) -> Iterator[WorkerProcess]:
    """Start a real worker for a folder, and end it afterwards."""
    process = WorkerProcess(orders(root, **settings), log, WORKER)
    try:
        yield process
    finally:
        process.stop()


def cell(name: str, phase: Phase = "forward") -> Cell:
    """Return a cell of one of the variants."""
    return Cell(Variant(scheme=name), CASE, phase, "host")


def survey(process: WorkerProcess, name: str, *phases: Phase) -> tuple[Surveyed, ...]:
    """Return the worker's rows of a variant."""
    return process.ask(Survey(tuple(cell(name, phase) for phase in phases or ("forward",))), Rows).rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the variants."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / FILE).write_text(plugin(*VARIANTS), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def serving(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, Hello]]:
    """Return one worker and its first message for several tests, because it takes seconds to start.

    At the end it runs a variant that hangs, and must end when its connection closes, as after its gate was
    killed.
    """
    with worker(root, tmp_path_factory.mktemp("logs") / "log") as process:
        yield process, process.receive(Hello)
        process.send(Open(cell("TinyHangs")))
        for _ in range(3000):
            if not (root / "hangs").exists():
                time.sleep(0.01)
        assert (root / "hangs").exists()
        process._connection.close()  # noqa: SLF001  # as the end of the gate's process does
        assert process.process.wait(30) == 0


def test_a_correct_variant_is_surveyed_and_timed(serving: tuple[WorkerProcess, Hello]) -> None:
    """Two surveys count the same bytes and launches; a visit returns one sample per launch.

    The first message has all cells of the suite without baselines, and the package in the folder. What a
    variant prints goes to the log. Each call reads new values, so that stored results are of no use.
    """
    process, hello = serving
    assert {"TinyPlain", "TinyWrong"} <= {cell.variant.scheme for cell in hello.cells}
    assert all(cell.case == CASE and cell.method == "host" for cell in hello.cells)
    assert hello.own_packages == ("their_variants",)
    assert {"their_variants", "impls"} <= hello.code.keys()
    assert (hello.cell_s, hello.unknown) == (0.01, "")
    (first,) = survey(process, "TinyPlain")
    assert survey(process, "TinyPlain") == (first,)
    assert (first.arm, first.status, first.figures["peak_bytes"]) == ("head", "ok", 256.0)
    for name in ("TinyPlain", "TinyLoud"):
        process.ask(Open(cell(name)), Opened)
        assert len(process.ask(Visit(5), Visited).samples) == 5
    process.ask(Open(cell("TinyLookup")), Opened)
    assert min(process.ask(Visit(5, before=2), Visited).samples) > 2e6
    process.ask(Control(20, "host"), Opened)
    assert len(process.ask(Visit(9), Visited).samples) == 9
    log = process.log.read_bytes()
    assert b"hello" in log
    assert b"raw" in log


def test_a_variant_that_cannot_be_measured_has_its_reason(serving: tuple[WorkerProcess, Hello]) -> None:
    """Global state that a variant changed is restored before the next variant is measured."""
    process, _ = serving
    for name, status, reason in (
        ("TinyGone", "absent", "no variant TinyGoneTiny"),
        ("TinyNot", "unavailable", "needs a quantum computer"),
        ("TinyWrong", "failed", "wrong result: the sum is off"),
        ("TinyExits", "failed", "SystemExit: 7"),
        ("TinyRaises", "failed", "ValueError: two lines"),
        ("TinyGreedy", "failed", "it changed a global setting: the number of threads from 1 to 2"),
        ("TinyRude", "failed", "ValueError: left so"),
        ("TinyChanges", "failed", "wrong result: it is off now; found after timing"),
        ("TinyHoards", "failed", "bytes more allocated after each call"),
        ("TinyMute", "failed", "TypeError: unavailable['forward'] is of type int: give the reason as a str"),
        ("TinyStale", "failed", "wrong result: forward returns the same result for different inputs"),
    ):
        (row,) = survey(process, name)
        assert row.status == status, name
        assert reason in row.reason
        assert "\n" not in row.reason
        assert survey(process, "TinyPlain")[0].status == "ok", name
    rows = survey(process, "TinyPhaseless", "forward", "update")
    assert [row.reason for row in rows] == ["it never learnt", "it has no phase update"]
    assert {row.status for row in rows} == {"unavailable"}


def test_a_unit_of_control_work_is_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control's work is a whole number of matrix products."""
    products = Mock(wraps=torch.mm)
    monkeypatch.setattr(torch, "mm", products)
    control_work(3, "cpu")()
    assert products.call_count == 3


LATE = variant_with(
    "TinyLate",
    "sum(self, x)",
    "if os.path.exists('late'): raise RuntimeError('enough')",
    "return x.sum(dim=0)",
)


def test_variants_come_from_the_revision_and_the_harness_does_not(tmp_path: Path) -> None:
    """The folder's impls is loaded, its esbench and libraries are not; missing names are reported.

    A variant that fails while it is timed ends its worker: the error has the cell and the exception.
    """
    another = "raise SystemExit('another harness')"
    files = {"esbench/__init__.py": another, "msgspec.py": another, "impls/__init__.py": plugin(LATE)}
    theirs = tmp_path / "theirs"
    write(theirs, files)
    with worker(theirs, tmp_path / "log", plugins=(), variants=("Nope*",)) as process:
        hello = process.receive(Hello)
        assert hello.own_packages == ("impls",)
        assert hello.cells == ()
        assert hello.unknown == "no variant matches 'Nope*'; available: TinyLate"
        process.ask(Open(cell("TinyLate")), Opened)
        (theirs / "late").touch()
        with pytest.raises(
            WorkerError, match=r"of head failed: RuntimeError: enough \(during the timing of TinyLateTiny \|"
        ):
            process.ask(Visit(3), Visited)
        with pytest.raises(WorkerError, match="ended with exit code 0"):
            process.ask(Visit(3), Visited)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            plugin(correct_variant("TinyPlain"), "torch.set_num_threads(2)\n"),
            "it changed a global setting: the number of threads from 1 to 2",
        ),
        (
            "raise SystemExit('it never\\nworked')\n",
            r"UserError: cannot load variants from their_variants\.py.*it never worked",
        ),
    ],
    ids=["greedy", "broken"],
)
def test_a_revision_that_is_not_measured_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    """Its variants cannot be loaded, or change a global torch setting when they are imported."""
    write(tmp_path, {FILE: text})
    monkeypatch.chdir(tmp_path)  # the worker changes the folder and the path of modules
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "LOADED", {**registry.LOADED})
    threads, connection = torch.get_num_threads(), Mock()
    try:
        main(orders(tmp_path), connection)
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("their_variants", None)
    ((message,),) = (call.args for call in connection.send_bytes.call_args_list)
    failure = msgspec.json.decode(message, type=Answer)
    assert isinstance(failure, Failure)
    assert re.search(reason, failure.reason)


def error_of(tmp_path: Path, line: str) -> str:
    """Return the error about a process that runs this line instead of a worker; all its processes end."""
    start = """
        import os, sys, time
        from multiprocessing.connection import Connection
        connection = Connection(int(sys.argv[1]))
    """
    program = ("-S", "-c", "\n".join([textwrap.dedent(start), line]))
    process = WorkerProcess(orders(tmp_path), tmp_path / "log", program)
    family = [psutil.Process(process.process.pid)]
    assert os.getsid(process.process.pid) == process.process.pid  # an interrupt reaches only the gate
    try:
        with pytest.raises(WorkerError) as error:
            process.receive(Hello)
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
    finally:
        process.stop()
    assert all(map(is_gone, family))
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def is_gone(process: psutil.Process) -> bool:
    """Return whether a process ends within some seconds, perhaps as a zombie."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("os.kill(os.getpid(), 11)", "the worker of head ended with signal 11 (during the start)"),
        (
            "sys.exit('no such')",
            "ended with exit code 1 (during the start); the last line it printed: no such",
        ),
        ("os.write(2, b'\\xff' + b'x' * 1000); sys.exit(1)", f"the last line it printed: {'x' * 300}"),
        ("""connection.send_bytes(b'{"message":"opened","launch_ns":0}')""", "an invalid answer: Expected"),
        ("""connection.send_bytes(b'{"message":"opened","launch_ns":1}')""", "failed: sent Opened"),
        ("connection.close(); time.sleep(600)", "closed its connection but still runs"),
        (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(600)",
            "did not answer",
        ),
    ],
)
def test_a_process_that_is_not_a_worker_is_an_error_and_is_killed(
    tmp_path: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process may die, send an invalid answer, hang, ignore signals or start other processes."""
    monkeypatch.setattr(worker_process, "SILENCE_S", 5.0 if "sleep" not in line else 0.5)
    monkeypatch.setattr(worker_process, "END_S", 0.5)
    assert words in error_of(tmp_path, line)


def test_both_workers_end_after_an_error(tmp_path: Path) -> None:
    """An interrupt also deletes their logs; if the second cannot be started, the first one ends."""
    processes: list[psutil.Process] = []
    program = ("-S", "-c", "import time; time.sleep(600)")

    def interrupted() -> None:
        with start_workers({arm: orders(tmp_path) for arm in ARMS}, program) as workers:
            processes.extend(psutil.Process(worker.process.pid) for worker in workers.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    before = {process.pid for process in psutil.Process().children()}
    with (
        pytest.raises(FileNotFoundError),
        start_workers({"base": orders(tmp_path), "head": orders(tmp_path / "gone")}, program),
    ):
        pass
    assert len(processes) == 2
    assert all(map(is_gone, processes))
    assert {process.pid for process in psutil.Process().children()} <= before
    assert not list(tmp_path.iterdir())
