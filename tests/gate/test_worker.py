"""The real worker, on a small package of variants: what it loads, what it says and what it survives."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

import esbench
from esbench.gate.protocol import (
    Arm,
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
from esbench.gate.worker_process import WORKER, Child, WorkerError
from esbench.schema import Case, Phase, Variant
from tests.gate.gate_plugin import of, plain, plugin

PATIENCE_S = 120.0
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
    of("TinyLate", "sum(self, x)", "if self.turn > 20: raise RuntimeError('enough')", "return x.sum(dim=0)"),
    of("TinyChanges", "confirm(self, phase)", "raise WrongResultError('it is off now')"),
    of("TinyHoards", "sum(self, x)", "KEPT.append(x + 1)", "return x.sum(dim=0)"),
    of("TinyStale", "forward(self)", "return self.inputs[0].sum(dim=0)"),
    of("TinyGreedy", "ready(self)", "torch.set_num_threads(2)"),
    of("TinyTimeless", "sum(self, x)", "time.perf_counter_ns = lambda: 7", "return x.sum(dim=0)"),
    of("TinyRude", "sum(self, x)", "torch.set_grad_enabled(False)", "raise ValueError('left so')"),
    of("TinyHangs", "forward(self)", "time.sleep(600)"),
    "\nKEPT = []\n",
)


def orders(root: Path, arm: Arm = "head", **others: object) -> Orders:
    """What a worker is told."""
    told: dict[str, object] = {"suite": "tiny", "plugins": (FILE,), "replicate": "test", **others}
    return Orders(arm=arm, root=str(root), device="cpu", threads=1, seed=0, **told)  # type: ignore[arg-type]  # fields of orders


@contextlib.contextmanager
def worker(root: Path, log: Path, **others: object) -> Iterator[Child]:
    """A real worker that serves a folder; ended afterwards."""
    one = Child(orders(root, "head", **others), log, WORKER)
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, Hello, Path, Path]]:
    """One worker for many questions: it takes seconds to start."""
    root, log = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("logs") / "log"
    (root / FILE).write_text(plugin(*VARIANTS), encoding="utf-8")
    with worker(root, log) as one:
        yield one, one.hello(PATIENCE_S), root, log


def survey(serving: tuple[Child, Hello, Path, Path], name: str, *phases: Phase) -> Found | Refused:
    """What the worker says of a variant."""
    question = Survey(number=0, variant=Variant(scheme=name), case=CASE, phases=phases or ("forward",))
    return serving[0].ask(question, Found, PATIENCE_S)


def opened(serving: tuple[Child, Hello, Path, Path], name: str, phase: Phase = "forward") -> Opened | Refused:
    """Set a cell up."""
    cell = Cell(variant=Variant(scheme=name), case=CASE, phase=phase, method="host")
    return serving[0].ask(Open(number=0, cell=cell), Opened, PATIENCE_S)


def test_it_says_what_it_has_and_from_where(serving: tuple[Child, Hello, Path, Path]) -> None:
    """All variants of the suite but baselines, and a package in the tree."""
    _, hello, root, _ = serving
    names = {cell.variant.scheme for cell in hello.cells}
    assert {"TinyPlain", "TinyWrong"} <= names
    assert all(cell.case == CASE and cell.method == "host" for cell in hello.cells)
    assert hello.packages["their_variants"] == str(root.resolve())
    assert hello.code.keys() >= {"their_variants", "impls", "esbench"}
    assert (hello.cell_s, hello.unknown) == (0.01, "")


def test_what_is_right_is_counted_and_timed(serving: tuple[Child, Hello, Path, Path]) -> None:
    """Bytes and launches, the same every time; as many times as were asked for."""
    first, second = survey(serving, "TinyPlain"), survey(serving, "TinyPlain")
    assert isinstance(first, Found)
    assert isinstance(second, Found)
    assert first.figures == second.figures
    assert first.figures["forward"] == {"peak_bytes": 256.0, "launches": first.figures["forward"]["launches"]}
    assert isinstance(opened(serving, "TinyPlain"), Opened)
    answer = serving[0].ask(Visit(number=0, launches=5), Visited, PATIENCE_S)
    assert isinstance(answer, Visited)
    assert len(answer.samples) == 5


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("TinyGone", "absent", "no variant TinyGoneTiny"),
        ("TinyNot", "unavailable", "needs a quantum computer"),
        ("TinyWrong", "failed", "oracle: the sum is off"),
        ("TinyExits", "failed", "SystemExit: 7"),
        ("TinyRaises", "failed", "ValueError: two lines"),
        ("TinyGreedy", "failed", "it changed for all variants: the number of threads from 1 to 2"),
        ("TinyTimeless", "failed", "it replaced a timer: time.perf_counter_ns"),
        ("TinyRude", "failed", "ValueError: left so"),
        ("TinyChanges", "failed", "oracle: it is off now; this was after it was timed"),
        ("TinyHoards", "failed", "bytes more after every call"),
        ("TinyStale", "failed", "oracle: forward gives the same for other inputs"),
    ],
)
def test_what_cannot_be_measured_is_said_with_its_reason(
    serving: tuple[Child, Hello, Path, Path], name: str, status: str, reason: str
) -> None:
    """And the worker serves on."""
    answer = survey(serving, name)
    assert isinstance(answer, Refused)
    assert answer.status == status
    assert reason in answer.reason
    assert "\n" not in answer.reason
    assert isinstance(survey(serving, "TinyPlain"), Found)


def test_a_phase_that_a_variant_lacks_has_its_reason(serving: tuple[Child, Hello, Path, Path]) -> None:
    """In its own words, or in the harness's where it has none; it cannot be opened either."""
    answer = survey(serving, "TinyPhaseless", "forward", "update")
    assert isinstance(answer, Found)
    assert answer.figures == {}
    assert answer.missing == {"forward": "it never learnt", "update": "it has no phase update"}
    refused = opened(serving, "TinyPhaseless")
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == ("unavailable", "it never learnt")


def test_what_a_variant_prints_does_not_reach_the_channel(serving: tuple[Child, Hello, Path, Path]) -> None:
    """Neither by print nor by the descriptor: it is in the log."""
    assert isinstance(survey(serving, "TinyLoud"), Found)
    assert isinstance(opened(serving, "TinyLoud"), Opened)
    assert isinstance(serving[0].ask(Visit(number=0, launches=3), Visited, PATIENCE_S), Visited)
    log = serving[3].read_bytes()
    assert b"hello" in log
    assert b"raw" in log


def test_a_variant_that_fails_while_it_is_timed_is_refused(serving: tuple[Child, Hello, Path, Path]) -> None:
    """And nothing stays open that could be visited by mistake."""
    assert isinstance(opened(serving, "TinyExits"), Refused)
    late = opened(serving, "TinyLate")
    answer = (
        late
        if isinstance(late, Refused)
        else serving[0].ask(Visit(number=0, launches=40), Visited, PATIENCE_S)
    )
    assert isinstance(answer, Refused)
    assert answer.reason == "RuntimeError: enough"
    assert isinstance(opened(serving, "TinyGone"), Refused)
    nothing = serving[0].ask(Visit(number=0, launches=3), Visited, PATIENCE_S)
    assert isinstance(nothing, Refused)
    assert "open a cell first" in nothing.reason


def test_its_own_work_comes_in_units(serving: tuple[Child, Hello, Path, Path]) -> None:
    """Four times as many take longer."""
    took = []
    for units in (50, 200):
        assert isinstance(
            serving[0].ask(Control(number=0, units=units, method="host"), Opened, PATIENCE_S), Opened
        )
        answer = serving[0].ask(Visit(number=0, launches=9), Visited, PATIENCE_S)
        assert isinstance(answer, Visited)
        took.append(min(answer.samples))
    assert took[1] > 2 * took[0]


@pytest.mark.parametrize(
    ("text", "others", "words"),
    [
        (plugin(plain("TinyPlain")), {"suite": "nope"}, "no suite 'nope'; there are: "),
        (plugin(plain("TinyPlain")), {"variants": ("Nope*",)}, "no variant matches 'Nope*'; there are: "),
    ],
    ids=["suite", "variants"],
)
def test_a_tree_without_what_is_asked_for_has_no_cells(
    tmp_path: Path, text: str, others: dict[str, object], words: str
) -> None:
    """It says so, and the other arm may have it."""
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with worker(tmp_path, tmp_path / "log", **others) as one:
        hello = one.hello(PATIENCE_S)
    assert hello.cells == ()
    assert words in hello.unknown


def test_a_tree_that_changes_the_harness_is_not_measured(tmp_path: Path) -> None:
    """Not even where it does so as it is loaded: the times of its variants would be of its own making."""
    (tmp_path / FILE).write_text(
        plugin(plain("TinyPlain"), "time.monotonic = lambda: 7.0\n"), encoding="utf-8"
    )
    with worker(tmp_path, tmp_path / "log") as one, pytest.raises(WorkerError) as error:
        one.hello(PATIENCE_S)
    assert "it replaced a timer: time.monotonic" in str(error.value)


def test_what_a_variant_has_changed_is_put_right_for_the_next(
    serving: tuple[Child, Hello, Path, Path],
) -> None:
    """Whether it was found in it or it failed before that: the next one neither gains nor is blamed."""
    for name in ("TinyGreedy", "TinyTimeless", "TinyRude"):
        assert isinstance(survey(serving, name), Refused)
        assert isinstance(survey(serving, "TinyPlain"), Found)
        assert isinstance(opened(serving, "TinyPlain"), Opened)


def test_a_tree_that_cannot_be_loaded_is_a_failure(tmp_path: Path) -> None:
    """In a line that names file and error, also where it ends the process that loads it."""
    (tmp_path / FILE).write_text("raise SystemExit('no\\nway')", encoding="utf-8")
    with worker(tmp_path, tmp_path / "log") as one, pytest.raises(WorkerError) as error:
        one.hello(PATIENCE_S)
    assert f"cannot load variants from {FILE}: SystemExit: no way" in str(error.value)


def test_variants_come_from_the_tree_and_the_harness_does_not(tmp_path: Path) -> None:
    """Its impls are loaded and not the installed ones; its esbench is not."""
    (tmp_path / "impls").mkdir()
    (tmp_path / "impls" / "__init__.py").write_text(plugin(plain("TinyTheirs")), encoding="utf-8")
    (tmp_path / "esbench").mkdir()
    (tmp_path / "esbench" / "__init__.py").write_text("raise SystemExit('another harness')", encoding="utf-8")
    with worker(tmp_path, tmp_path / "log", plugins=()) as one:
        hello = one.hello(PATIENCE_S)
    assert hello.packages == {"impls": str((tmp_path / "impls").resolve())}
    assert [cell.variant.scheme for cell in hello.cells] == ["TinyTheirs"]


def test_it_ends_when_nobody_can_ask_any_more_even_if_a_variant_hangs(tmp_path: Path) -> None:
    """As when the referee was killed: it is alone then, and leaves the device."""
    (tmp_path / FILE).write_text(plugin(*VARIANTS), encoding="utf-8")
    harness = str(Path(esbench.__file__).parents[1])
    command = [sys.executable, *WORKER, msgspec.json.encode(orders(tmp_path)).decode()]
    cell = Cell(variant=Variant(scheme="TinyHangs"), case=CASE, phase="forward", method="host")
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": harness},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert b"hello" in process.stdout.readline()
            process.stdin.write(msgspec.json.encode(Open(number=1, cell=cell)) + b"\n")
            process.stdin.flush()
            time.sleep(0.5)
            assert psutil.Process(process.pid).is_running()
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()
