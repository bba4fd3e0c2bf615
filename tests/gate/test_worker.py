"""Workers: what they measure, two revisions in one process, how they fail, and that they always end."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import torch

from esbench import registry
from esbench.errors import UserError
from esbench.gate import worker_process
from esbench.gate.loading import Trees
from esbench.gate.records import ARMS, MORE, Begin, Cell, End, Message, Orders, Replicate, Surveyed
from esbench.gate.worker import CALLS, MAX_ROUNDS, ArmProcess, control_work, main
from esbench.gate.worker_process import WORKER, WorkerError, WorkerProcess, run_workers
from esbench.schema import Case, Variant
from tests.gate.gate_plugin import correct_variant, plugin, variant_with
from tests.gate.gate_repository import Files, write

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
    correct_variant("TinyDropped"),
    variant_with("TinyRude", "sum(self, x)", "torch.set_grad_enabled(False)", "raise ValueError('left so')"),
    variant_with("TinyMute", "ready(self)", "self.phases, self.unavailable = {}, {'forward': 7}"),
    variant_with(
        "TinyLookup",
        "sum(self, x)",
        "time.sleep(0 if x.sum().item() in SEEN else 0.002)",
        "SEEN.add(x.sum().item())",
        "return x.sum(dim=0)",
    ),
    variant_with(
        "TinyCompiled",
        "sum(self, x)",
        "def total(x):",
        "    x = x + 0",
        "    BREAK",
        "    return x.sum(dim=0)",
        "return torch.compile(total, backend='eager')(x)",
    ),
    "\nKEPT, SEEN = [], set()\n",
)

REGISTERS = "\nimport torch\nLIBRARY = torch.library.Library('gate_twice', 'DEF')\n"


def orders(top: Path, **settings: object) -> Orders:
    """Return the orders for a worker."""
    roots = {arm: str(top / arm) for arm in ARMS}
    settings = {"suite": "tiny", "plugins": (FILE,), **settings}
    return Orders(roots=roots, device="cpu", **settings)  # type: ignore[arg-type]  # fields of orders


def cell(name: str) -> Cell:
    """Return a cell of one of the variants."""
    return Cell(Variant(scheme=name), CASE, "forward", "host")


def messages(top: Path, **settings: object) -> list[Message]:
    """Run a real worker; return its messages."""
    received = [*run_workers([orders(top, **settings)], top)]
    assert not [*top.glob("logs-*")]
    return received


def test_a_survey_has_a_row_for_each_cell_in_both_arms(tmp_path: Path) -> None:
    """A variant that cannot be measured has its reason; global state that it changed is restored.

    The folders' impls are loaded, their esbench and libraries are not.
    """
    another = dict.fromkeys(("esbench/__init__.py", "msgspec.py"), "raise SystemExit('another harness')")
    package, text = "impls/__init__.py", plugin(*VARIANTS)
    changed = text.replace('("Tiny*",)', '("Tiny*", "!TinyDropped")').replace(
        "BREAK", "torch._dynamo.graph_break()"
    )
    write(tmp_path / "base", {package: text.replace("BREAK", "pass"), **another})
    write(tmp_path / "head", {package: changed, **another})
    received = messages(tmp_path, plugins=())
    rows = {(row.cell.variant.scheme, row.arm): row for row in received if isinstance(row, Surveyed)}
    assert rows["TinyPlain", "base"].figures == rows["TinyPlain", "head"].figures
    assert rows["TinyPlain", "head"].figures == {"peak_bytes": 256.0, "launches": 1.0, "graphs": 0.0}
    assert [rows["TinyCompiled", arm].figures["graphs"] for arm in ARMS] == [1.0, 2.0]
    for name, status, reason in (
        ("TinyPlain", "ok", ""),
        ("TinyLoud", "ok", ""),
        ("TinyNot", "unavailable", "needs a quantum computer"),
        ("TinyPhaseless", "unavailable", "it never learnt"),
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
        for arm in ARMS:
            row = rows[name, arm]
            assert row.status == status, name
            assert reason in row.reason
            assert "\n" not in row.reason
    assert rows["TinyDropped", "base"].status == "ok"
    assert ("TinyDropped", "head") not in rows


@pytest.mark.parametrize("separate", [False, True])
def test_replicates_are_timed_in_rounds_of_new_set_ups(tmp_path: Path, *, separate: bool) -> None:
    """A cell is set up anew in both arms; each call reads new values, so that stored results are of no use.

    A module that a variant imports late comes from its own revision. Arms in separate processes may register
    the same operator.
    """
    lookup = VARIANTS[-3]
    late = variant_with(
        "TinyLate", "sum(self, x)", "import late", "assert late.ARM in __file__", "return x.sum(dim=0)"
    )  # fmt: skip
    for arm in ARMS:
        slower = lookup.replace("0.002", "0.004") if arm == "head" else lookup
        text = plugin(slower, late, VARIANTS[-1]) + REGISTERS * separate
        write(tmp_path / arm, {FILE: text, "late.py": f"ARM = '/{arm}/'"})
    control = f"{MORE} | host"
    names = {cell("TinyLookup").name, cell("TinyLate").name, control}
    *received, end = messages(
        tmp_path,
        names=tuple(names),
        replicates=7,
        look=1,
        process=2,
        processes=4,
        separate=separate,
    )
    assert end == End()
    replicates = [message for message in received if isinstance(message, Replicate)]
    assert sorted(replicate.cell for replicate in replicates) == sorted([*names, *names])
    assert {(replicate.look, replicate.process) for replicate in replicates} == {(1, 2)}
    for replicate in replicates:
        assert len(replicate.base) == len(replicate.head) == 2 * len(replicate.first) <= 2 * MAX_ROUNDS
        assert {len(visit) for visit in (*replicate.base, *replicate.head)} == {CALLS}
        if "Lookup" in replicate.cell:
            assert 2e6 < min(map(min, replicate.base)) < 4e6 < min(map(min, replicate.head))
    begun = [message for message in received if isinstance(message, Begin)]
    timed = [message for message in begun if message.subject.removeprefix("the timing of ") in names]
    assert [message.done for message in timed] == [*range(6)]
    assert len(begun) - len(timed) == 1 + separate  # the loading of both, or of each


def test_a_call_that_fails_while_it_is_timed_ends_its_worker(tmp_path: Path) -> None:
    """The error has the exception and the cell."""
    for arm in ARMS:
        write(tmp_path / arm, {FILE: plugin(VARIANTS[6])})
    with pytest.raises(WorkerError, match=r"^ValueError: two lines \(during the timing of TinyRaisesTiny \|"):
        messages(tmp_path, names=(cell("TinyRaises").name,), replicates=1)


def test_an_arm_in_its_own_process_sends_rows_and_errors(tmp_path: Path) -> None:
    """An exception is the end of the worker; a process that dies ends it with its exit code."""
    dies = variant_with("TinyDies", "sum(self, x)", "os.kill(os.getpid(), 9)")
    write(tmp_path / "base", {FILE: plugin(VARIANTS[0], VARIANTS[6]) + REGISTERS})
    write(tmp_path / "head", {FILE: plugin(dies)})
    file = tmp_path / "messages"
    base, head = (ArmProcess(arm, orders(tmp_path, separate=True), file) for arm in ARMS)
    assert base.survey() == ""
    base.set_up(cell("TinyRaises").name, 0.5)
    with pytest.raises(UserError, match=r"the process of base ended with exit code 0"):
        base.visit(1)
    sent = [msgspec.json.decode(line, type=Message) for line in file.read_bytes().splitlines()]
    rows = [(row.cell, row.arm, row.status) for row in sent if isinstance(row, Surveyed)]
    assert rows == [(cell("TinyPlain"), "base", "ok"), (cell("TinyRaises"), "base", "failed")]
    assert End("ValueError: two lines") in sent
    with pytest.raises(UserError, match=r"the process of head ended with exit code -9"):
        head.survey()


@pytest.mark.parametrize("separate", [False, True])
def test_a_worker_ends_with_its_gate(tmp_path: Path, *, separate: bool) -> None:
    """The end of the gate's process closes its stdin; that also ends a worker that hangs."""
    for arm in ARMS:
        write(tmp_path / arm, {FILE: "import time; time.sleep(600)"})
    process = WorkerProcess(orders(tmp_path, separate=separate), tmp_path / "worker", WORKER)
    try:
        begun = 0
        while begun < 1 + separate:
            begun += len([*process.messages()])
            time.sleep(0.05)
        children = psutil.Process(process.process.pid).children()
        assert process.process.stdin is not None
        process.process.stdin.close()
        assert process.process.wait(30) == -9
        assert all(map(is_gone, children))
    finally:
        process.stop()


def test_a_unit_of_control_work_is_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control's work is a whole number of matrix products."""
    products = Mock(wraps=torch.mm)
    monkeypatch.setattr(torch, "mm", products)
    control_work(3, "cpu")()
    assert products.call_count == 3


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the packages of variants, and restore them and other global state afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    registry_state, loaded, folder = {**vars(registry.REGISTRY)}, {**registry.LOADED}, Path.cwd()
    modules, threads, linear = {**sys.modules}, torch.get_num_threads(), torch.nn.functional.linear
    call, conv2d = torch.nn.Module.__call__, torch.nn.Conv2d
    try:
        yield
    finally:
        vars(registry.REGISTRY).update(registry_state)
        registry.LOADED.clear()
        registry.LOADED.update(loaded)
        os.chdir(folder)
        for name in sys.modules.keys() - modules.keys():
            del sys.modules[name]
        sys.modules.update(modules)
        torch.set_num_threads(threads)
        torch.nn.functional.linear = linear
        torch.nn.Module.__call__, torch.nn.Conv2d = call, conv2d  # type: ignore[method-assign,misc]  # as above


PLAIN = plugin(correct_variant("TinyPlain"))


def load_trees(top: Path, base: Files, head: Files) -> Trees:
    """Load two revisions with these files into this process, base first."""
    write(top / "base", base)
    write(top / "head", head)
    return Trees({arm: str(top / arm) for arm in ARMS}, (FILE,), ARMS)


@pytest.mark.usefixtures("unloaded")
def test_cells_of_one_arm_are_enough(tmp_path: Path) -> None:
    """A suite that neither revision has is an error."""
    write(tmp_path / "base", {FILE: PLAIN})
    write(tmp_path / "head", {FILE: PLAIN.replace('"tiny"', '"new"')})
    for suite, arms, failure in (("new", ["head"], ""), ("nowhere", [], "no suite 'nowhere'; ")):
        file = tmp_path / suite
        main(orders(tmp_path, suite=suite), file)
        *sent, end = (msgspec.json.decode(line, type=Message) for line in file.read_bytes().splitlines())
        assert [message.arm for message in sent if isinstance(message, Surveyed)] == arms
        assert isinstance(end, End)
        assert end.failure.startswith(failure)
        assert bool(end.failure) == bool(failure)


@pytest.mark.usefixtures("unloaded")
def test_two_revisions_are_loaded_side_by_side(tmp_path: Path) -> None:
    """Each has its own variants, suites and modules; those of packages elsewhere are the same in both."""
    new = plugin(correct_variant("TinyPlain"), correct_variant("TinyNew"))
    helper = "\nimport below.helper\n"
    files = {"below/__init__.py": "", "below/helper.py": ""}
    trees = load_trees(tmp_path, {FILE: PLAIN + helper, **files}, {FILE: new + helper, **files})
    assert trees.own == [FILE]
    seen = {}
    for arm in ARMS:
        trees.activate(arm)
        schemes = {name for name in registry.REGISTRY.entries if name.startswith("Tiny")}
        assert schemes == {"TinyPlain"} | ({"TinyNew"} if arm == "head" else set())
        assert "tiny" in registry.REGISTRY.suites
        seen[arm] = [sys.modules[name] for name in ("their_variants", "below.helper", "impls")]
        assert all(str(module.__file__).startswith(str(tmp_path / arm)) for module in seen[arm][:2])
        assert registry.REGISTRY.entries is trees.arms[arm].registry["entries"]
    same = [base is head for base, head in zip(*seen.values(), strict=True)]
    assert same == [False, False, True]


COMPILES = """
torch.manual_seed = torch._compile._disable_dynamo(torch.manual_seed)
torch.nn.Module.__setstate__ = torch.compiler.disable(torch.nn.Module.__setstate__)
"""
"""What torch does once in a process when a function is compiled."""


@pytest.mark.usefixtures("unloaded")
def test_a_revision_may_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that torch's compiler replaces are not counted as replaced by a revision."""
    monkeypatch.setattr(torch, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(torch.nn.Module, "__setstate__", torch.nn.Module.__setstate__)
    load_trees(tmp_path, {FILE: PLAIN + COMPILES}, {FILE: PLAIN})


REFUSES = """
if "is loaded" in sys.modules:
    raise ImportError("cannot load module more than once per process")
sys.modules["is loaded"] = sys
"""


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("base", "head", "words"),
    [
        (
            PLAIN + REGISTERS,
            PLAIN + REGISTERS,
            "^head cannot be loaded: .*: if it can be loaded without base in the .* gate with --separate$",
        ),
        (PLAIN + REFUSES, PLAIN + REFUSES, "module more than once per process: .* with --separate$"),
        (PLAIN, "raise SystemExit('it never\\nworked')", "SystemExit: it never worked"),
        ("1 / 0", PLAIN, "base cannot be loaded: cannot load variants from their_variants.py: ZeroDivision"),
        (PLAIN, PLAIN + "torch.set_num_threads(7)", "it changed a global setting: the number of threads"),
        (
            PLAIN,
            PLAIN + "torch.nn.functional.linear = torch.nn.functional.relu",
            "head replaces torch.nn.functional.linear, which both revisions use: .* with --separate",
        ),
        (PLAIN, PLAIN + "torch.nn.Module.__call__ = torch.add", "head replaces Module.__call__, which"),
        (PLAIN + "torch.nn.Conv2d = torch.nn.Linear", PLAIN, "base replaces torch.nn.Conv2d, which"),
        (PLAIN, None, "head does not contain the variant package their_variants.py, which"),
        (None, PLAIN, "base does not contain the variant package their_variants.py, which"),
        (None, None, "no variant package is part of this repository: name one .* path from the top folder$"),
    ],
)
def test_revisions_that_cannot_be_loaded_together_are_refused(
    tmp_path: Path, base: str | None, head: str | None, words: str
) -> None:
    """The one line says which revision, and why."""
    with pytest.raises(UserError) as error:
        load_trees(tmp_path, *({"a": ""} if text is None else {FILE: text} for text in (base, head)))
    assert re.search(words, str(error.value))
    assert "\n" not in str(error.value)


def fake_worker(folder: Path, line: str, workers: int = 1) -> Generator[Message]:
    """Run processes that run this line instead of a worker."""
    start = "import os, sys, time\nsend = lambda line: open(sys.argv[2], 'ab', 0).write(line + b'\\n')\n"
    return run_workers([orders(folder)] * workers, folder, ("-S", "-c", start + line))


def error_of(tmp_path: Path, line: str) -> str:
    """Return the error about a process that runs this line instead of a worker; all its processes end."""
    before = {*psutil.Process().children(recursive=True)}
    family: set[psutil.Process] = set()
    with pytest.raises(WorkerError) as error:  # noqa: PT012  # children exist only while it runs
        for _ in fake_worker(tmp_path, line):
            family |= {*psutil.Process().children(recursive=True)} - before
    assert all(map(is_gone, family))
    assert not [*tmp_path.iterdir()]
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


REPLICATE = """send(b'{"record":"replicate","look":0,"process":0,"cell":"A","first":[],"base":[[TIME]]}')"""
BEGIN = """send(b'{"record":"begin","subject":"a check","done":0,"total":1}'); """


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("os.kill(os.getpid(), 11)", "the worker ended with signal 11 (during a check)"),
        ("sys.exit('no such')", "ended with exit code 1 (during a check); the last line it printed: no such"),
        ("os._exit(0)", "ended with exit code 0"),
        ("os.write(2, b'\\xff' + b'x' * 1000); sys.exit(1)", f"the last line it printed: {'x' * 300}"),
        ("send(b'hello')", "sent an invalid message: JSON is malformed"),
        ("""send(b'{"record":"end","failure":"it broke"}')""", "it broke (during a check)"),
        *(
            (REPLICATE.replace("TIME", time_of_a_call), f"sent an invalid message: {words}")
            for time_of_a_call, words in (("-1", "Expected `float` > 0"), ("NaN", "JSON is malformed"))
        ),
        (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(600)",
            "has sent no message for 0.5 s (during a check)",
        ),
    ],
)
def test_a_process_that_is_not_a_worker_is_an_error_and_is_killed(
    tmp_path: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process may die, send an invalid message, hang, ignore signals or start other processes."""
    monkeypatch.setattr(worker_process, "SILENCE_S", 5.0 if "sleep" not in line else 0.5)
    monkeypatch.setattr(worker_process, "POLL_S", 0.01)
    assert words in error_of(tmp_path, BEGIN + line)


def test_all_workers_end_after_an_error(tmp_path: Path) -> None:
    """An interrupt ends them, too, and deletes their logs."""
    others = psutil.Process().children()  # such as the server of a browser's test
    processes: list[psutil.Process] = []
    with contextlib.closing(fake_worker(tmp_path, f"{BEGIN}time.sleep(600)", workers=2)) as running:
        assert next(running) == next(running) == Begin("a check", 0, 1)
        processes += [child for child in psutil.Process().children() if child not in others]
    assert len(processes) >= 2
    assert all(map(is_gone, processes))
    assert not [*tmp_path.iterdir()]
