"""The real worker on a small package of variants: loading, answers and recovery from errors."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from esbench.gate.protocol import (
    Cell,
    Control,
    Found,
    Hello,
    Open,
    Opened,
    Orders,
    Refused,
    Survey,
    Visit,
    Visited,
)
from esbench.gate.worker import control_work
from esbench.gate.worker_process import WORKER, WorkerError, WorkerProcess
from esbench.schema import Case, Phase, Variant
from tests.gate.gate_plugin import of, plain, plugin
from tests.gate.gate_repository import write

FILE = "their_variants.py"
CASE = Case(operator="Tiny", out_channels=4, in_channels=4, members=8)
VARIANTS = (
    plain("TinyPlain"),
    of("TinyWrong", "sum(self, x)", "return x.sum(dim=0) + 1"),
    of("TinyNot", "ready(self)", "raise UnavailableError('needs a quantum computer')"),
    of("TinyPhaseless", "ready(self)", "self.phases, self.unavailable = {}, {'forward': 'it never learnt'}"),
    of(
        "TinyLoud", "sum(self, x)", "print('hello', flush=True)", "os.write(1, b'raw')", "return x.sum(dim=0)"
    ),
    of("TinyExits", "sum(self, x)", "raise SystemExit(7)"),
    of("TinyRaises", "sum(self, x)", "raise ValueError('two\\n lines')"),
    of(
        "TinyLate",
        "sum(self, x)",
        "if os.path.exists('late'): raise RuntimeError('enough')",
        "return x.sum(dim=0)",
    ),
    of("TinyChanges", "confirm(self, phase)", "raise WrongResultError('it is off now')"),
    of("TinyHoards", "sum(self, x)", "KEPT.append(x + 1)", "return x.sum(dim=0)"),
    of("TinyStale", "forward(self)", "return self.inputs[0].sum(dim=0)"),
    of("TinyGreedy", "ready(self)", "torch.set_num_threads(2)"),
    of("TinyTimeless", "sum(self, x)", "time.perf_counter_ns = lambda: 7", "return x.sum(dim=0)"),
    of("TinyRude", "sum(self, x)", "torch.set_grad_enabled(False)", "raise ValueError('left so')"),
    of("TinyHangs", "forward(self)", "open('hangs', 'w').close()", "time.sleep(600)"),
    "\nKEPT = []\n",
)


def orders(root: Path, **others: object) -> Orders:
    """Return the orders for a worker."""
    told: dict[str, object] = {"suite": "tiny", "plugins": (FILE,), **others}
    return Orders(root=str(root), device="cpu", threads=1, seed=0, **told)  # type: ignore[arg-type]  # fields of orders


@contextlib.contextmanager
def worker(root: Path, log: Path, **others: object) -> Iterator[WorkerProcess]:
    """Start a real worker for a folder, and end it afterwards."""
    one = WorkerProcess("head", orders(root, **others), log, WORKER)
    try:
        yield one
    finally:
        one.stop()


class Serving:
    """A running worker, its first message and its folder."""

    def __init__(self, process: WorkerProcess, root: Path) -> None:
        """Wait for the first message."""
        self.process, self.root = process, root
        self.hello: Hello = process.hello()

    def survey(self, name: str, *phases: Phase) -> Found | Refused:
        """Return the worker's survey of a variant."""
        question = Survey(variant=Variant(scheme=name), case=CASE, phases=phases or ("forward",))
        return self.process.ask(question, Found)

    def open(self, name: str) -> Opened | Refused:
        """Set a cell up."""
        cell = Cell(variant=Variant(scheme=name), case=CASE, phase="forward", method="host")
        return self.process.ask(Open(cell=cell), Opened)

    def visit(self, launches: int) -> tuple[float, ...]:
        """Time the open cell."""
        return self.process.require(Visit(launches=launches), Visited).samples


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Return one worker for many tests, because it takes seconds to start.

    At the end it runs a variant that hangs, and must end when stdin closes, as after its gate was killed.
    """
    root, log = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("logs") / "log"
    (root / FILE).write_text(plugin(*VARIANTS), encoding="utf-8")
    with worker(root, log) as one:
        yield Serving(one, root)
        cell = Cell(variant=Variant(scheme="TinyHangs"), case=CASE, phase="forward", method="host")
        assert one.process.stdin is not None
        one.process.stdin.write(msgspec.json.encode(Open(cell=cell)) + b"\n")
        one.process.stdin.flush()
        for _ in range(3000):
            if not (root / "hangs").exists():
                time.sleep(0.01)
        assert (root / "hangs").exists()
        one.process.stdin.close()
        assert one.process.wait(30) == 0


def test_a_correct_variant_is_surveyed_and_timed(serving: Serving) -> None:
    """Two surveys find the same bytes and launches; a visit returns one sample per requested launch.

    The first message names all cells of the suite without baselines, and the package in the work tree.
    """
    hello = serving.hello
    assert {"TinyPlain", "TinyWrong"} <= {cell.variant.scheme for cell in hello.cells}
    assert all(cell.case == CASE and cell.method == "host" for cell in hello.cells)
    assert hello.packages["their_variants"] == str(serving.root.resolve())
    assert hello.code.keys() >= {"their_variants", "impls", "esbench"}
    assert (hello.cell_s, hello.unknown) == (0.01, "")
    first = serving.survey("TinyPlain")
    assert isinstance(first, Found)
    assert serving.survey("TinyPlain") == first
    assert first.figures["forward"] == {"peak_bytes": 256.0, "launches": first.figures["forward"]["launches"]}
    assert isinstance(serving.open("TinyPlain"), Opened)
    assert len(serving.visit(5)) == 5


def test_a_variant_that_cannot_be_measured_has_its_reason(serving: Serving) -> None:
    """Global state that a variant changed is restored before the next variant is measured."""
    for name, status, reason in (
        ("TinyGone", "absent", "no variant TinyGoneTiny"),
        ("TinyNot", "unavailable", "needs a quantum computer"),
        ("TinyWrong", "failed", "oracle: the sum is off"),
        ("TinyExits", "failed", "SystemExit: 7"),
        ("TinyRaises", "failed", "ValueError: two lines"),
        ("TinyGreedy", "failed", "it changed a shared setting: the number of threads from 1 to 2"),
        ("TinyTimeless", "failed", "it replaced a timer: time.perf_counter_ns"),
        ("TinyRude", "failed", "ValueError: left so"),
        ("TinyChanges", "failed", "oracle: it is off now; found after timing"),
        ("TinyHoards", "failed", "bytes more after every call"),
        ("TinyStale", "failed", "oracle: forward returns the same result for different inputs"),
    ):
        answer = serving.survey(name)
        assert isinstance(answer, Refused), name
        assert answer.status == status, name
        assert reason in answer.reason
        assert "\n" not in answer.reason
        assert isinstance(serving.survey("TinyPlain"), Found), name
        assert isinstance(serving.open("TinyPlain"), Opened), name
    answer = serving.survey("TinyPhaseless", "forward", "update")
    assert isinstance(answer, Found)
    assert answer.figures == {}
    assert answer.missing == {"forward": "it never learnt", "update": "it has no phase update"}
    refused = serving.open("TinyPhaseless")
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == ("unavailable", "it never learnt")


def test_what_a_variant_prints_goes_to_the_log(serving: Serving) -> None:
    """Output by print or by file descriptor does not mix with the answers."""
    assert isinstance(serving.survey("TinyLoud"), Found)
    assert isinstance(serving.open("TinyLoud"), Opened)
    assert len(serving.visit(3)) == 3
    log = serving.process.log.read_bytes()
    assert b"hello" in log
    assert b"raw" in log


def test_a_variant_that_fails_while_it_is_timed_is_refused(serving: Serving) -> None:
    """Its cell is closed, so that it cannot be visited by mistake."""
    assert isinstance(serving.open("TinyExits"), Refused)
    assert isinstance(serving.open("TinyLate"), Opened)
    (serving.root / "late").touch()
    with pytest.raises(WorkerError, match=r"refused at TinyLateTiny.*RuntimeError: enough"):
        serving.visit(3)
    assert isinstance(serving.open("TinyGone"), Refused)
    with pytest.raises(WorkerError, match="open a cell first"):
        serving.visit(3)


def test_control_work_comes_in_units(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is one matrix product; the worker sets up and times the requested number."""
    products = Mock(wraps=torch.mm)
    monkeypatch.setattr(torch, "mm", products)
    for units in (3, 20):
        products.reset_mock()
        control_work(units, "cpu")()
        assert products.call_count == units
    assert isinstance(serving.process.ask(Control(units=20, method="host"), Opened), Opened)
    assert len(serving.visit(9)) == 9


def test_variants_come_from_the_work_tree_and_the_harness_does_not(tmp_path: Path) -> None:
    """The work tree's impls is loaded, its esbench is not; missing names are reported.

    A work tree that cannot be loaded, or replaces a timer when it is imported, is not measured.
    """
    theirs, cheat, broken = tmp_path / "theirs", tmp_path / "cheat", tmp_path / "broken"
    another = "raise SystemExit('another harness')"
    impls = plugin(plain("TinyTheirs"))
    write(theirs, {"impls/__init__.py": impls, "esbench/__init__.py": another})
    write(cheat, {FILE: plugin(plain("TinyPlain"), "time.monotonic = lambda: 7.0\n")})
    write(broken, {FILE: "raise SystemExit('it never\\nworked')\n"})
    with (
        worker(theirs, tmp_path / "log", plugins=(), variants=("Nope*",)) as one,
        worker(cheat, tmp_path / "log of the cheat") as other,
        worker(broken, tmp_path / "log of the broken") as third,
    ):
        hello = one.hello()
        with pytest.raises(WorkerError, match=r"it replaced a timer: time\.monotonic"):
            other.hello()
        cannot = "failed at start: PluginError: cannot load variants from their_variants.py.*it never worked"
        with pytest.raises(WorkerError, match=cannot):
            third.hello()
    assert hello.packages == {"impls": str((theirs / "impls").resolve())}
    assert hello.cells == ()
    assert hello.unknown == "no variant matches 'Nope*'; there are: TinyTheirs"
