"""A worker of the gate measures one work tree: ``python -m esbench.gate.worker ORDERS``.

The variants come from the work tree; the harness is the installed one, the same for both arms. Questions
arrive on stdin, answers leave on what was stdout; what variants print goes to stderr.
"""

import contextlib
import dataclasses
import gc
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import psutil
import torch

from esbench.gate.protocol import (
    Answer,
    Cell,
    Control,
    Found,
    Hello,
    Open,
    Opened,
    Orders,
    Question,
    Refused,
    Survey,
    Visit,
    Visited,
    WorkerFailure,
)
from esbench.measure import validation
from esbench.measure.case_runner import release
from esbench.measure.environment import source_hashes
from esbench.measure.failure import classify
from esbench.measure.float32_precision import precision
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.interleave import warm_up
from esbench.measure.timers import Call, Clock, quiet
from esbench.measure.validation import ExactChecks, TorchState
from esbench.registry import (
    REGISTRY,
    Entry,
    Suite,
    UnavailableError,
    UnknownNameError,
    Workload,
    WrongResultError,
    build,
    load,
    load_installed,
    suited,
)
from esbench.schema import QUALITY, Case, Phase, Variant

WARM_S = 0.005
"""Seconds of warm-up of a call on a CPU. The first visits of a cell warm it up, too, and are trimmed."""
CONTROL_SIDE = {"cpu": 48, "cuda": 512}
"""A unit of control work is a product of two square matrices of this side: about 5 us on a CPU."""


class Tree(NamedTuple):
    """The requested suite and variants in a work tree; ``unknown`` is the error if it lacks them."""

    suite: Suite
    entries: list[Entry]
    unknown: str = ""


def load_tree(orders: Orders) -> Tree:
    """Import the packages of variants, from the work tree if it has them, and select the variants.

    Raises:
        UserError: a package cannot be loaded.

    """
    sys.path.insert(0, orders.root)
    os.chdir(orders.root)  # a plug-in file is named relative to the work tree
    load_installed()
    plugins = {load(name) for name in orders.plugins}
    try:
        suite = REGISTRY.find_suite(orders.suite)
        entries = REGISTRY.select(orders.variants or ("*",))
    except UnknownNameError as error:
        return Tree(Suite(name=orders.suite, description="", cases=()), [], str(error))
    return Tree(suite, entries if orders.variants else suited(entries, suite, plugins))


def control_work(units: int, device: str) -> Callable[[], object]:
    """Return a call that does some units of independent work, the same in every process."""
    generator = torch.Generator(device).manual_seed(0)
    side = CONTROL_SIDE[device]
    a, b = (torch.randn(side, side, generator=generator, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)

    def work() -> torch.Tensor:
        for _ in range(units):
            torch.mm(a, b, out=out)
        return out

    return work


@dataclasses.dataclass
class Worker:
    """Answers questions about one work tree.

    Attributes:
        orders: what the worker was told.
        tools: clocks and meters of the device.
        tree: the selected variants.
        oracle: checks variants against their reference.
        torch_state: global torch state before any variant ran.
        open: the call and clock of the next visit.
        open_state: global torch state that the next visit must leave unchanged.

    """

    orders: Orders
    tools: Instruments
    tree: Tree
    oracle: ExactChecks
    torch_state: TorchState
    open: tuple[Call, Clock] | None = None
    open_state: TorchState = dataclasses.field(default_factory=TorchState)
    _precision: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def hello(self) -> Hello:
        """Return the variants and cases that this worker has loaded."""
        entries = list(REGISTRY.entries.values())
        packages = {entry.package: _folder(entry.package) for entry in entries}
        hashes = source_hashes(entries)
        return Hello(
            packages=packages,
            code={name: hashes[name] for name in (*packages, "esbench") if name in hashes},
            cells=tuple(self._cells()),
            cell_s=self.tree.suite.cell_s,
            unknown=self.tree.unknown,
        )

    def answer(self, question: Question) -> Answer:
        """Carry out a request; an exception of a variant becomes the answer."""
        try:
            match question:
                case Survey():
                    return self._survey(question)
                case Open():
                    return Opened(launch_ns=self._open(question.cell))
                case Control():
                    return Opened(launch_ns=self._open_control(question))
                case Visit():
                    return Visited(samples=self._visit(question))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises is reported
            self._leave()
            with contextlib.suppress(WrongResultError):  # restores the state for the next variant
                self.torch_state.check()
            if isinstance(error, _RefusedError):
                return error.answer
            failure = classify(error)
            return Refused(status=failure.status, reason=failure.reason)

    def _cells(self) -> Iterator[Cell]:
        """Yield the cells of the suite, without baselines."""
        methods = [clock.method for clock in self.tools.clocks]
        for case in self.tree.suite.cases:
            for entry in self.tree.entries:
                served = entry.supports(case) and not entry.variant.baseline
                for phase in self.tree.suite.phases if served else ():
                    for method in methods if phase != QUALITY else ():
                        yield Cell(variant=entry.variant, case=case, phase=phase, method=method)

    def _entry(self, variant: Variant, case: Case) -> Entry:
        entry = REGISTRY.entries.get(variant.name)
        if entry is None or not entry.supports(case):
            message = f"no variant {variant.label(case.operator)}"
            raise _RefusedError(Refused(status="absent", reason=message))
        return entry

    def _survey(self, question: Survey) -> Found:
        """Check a variant against its reference; count bytes and launches of each phase."""
        self._leave()
        case, orders = question.case, self.orders
        entry = self._entry(question.variant, case)
        if failure := self.oracle.failure(entry, case.operator):
            raise _RefusedError(Refused(status=failure.status, reason=failure.reason))
        self.torch_state.check()
        with precision(case.dtype):
            state = TorchState()
            workload = build(entry.scheme, case, orders.device, orders.seed)
            workload.verify()
            figures = {
                phase: self._figures(workload, phase) for phase in question.phases if phase in workload.phases
            }
            state.check()
        missing = {phase: _why_missing(workload, phase) for phase in question.phases if phase not in figures}
        return Found(figures=figures, missing=missing)

    def _figures(self, workload: Workload, phase: Phase) -> dict[str, float]:
        """Count bytes and launches of a phase, and check its result before and after."""
        workload.enter(phase)
        call = workload.phases[phase]
        seen = validation.precheck(workload, phase, self.tools.synchronize)
        footprint = self.tools.footprint(call)
        validation.check_memory(footprint, phase)
        found = {
            "peak_bytes": float(footprint.peak_bytes),
            "launches": float(self.tools.trace(call).launches),
        }
        if phase == "sample":
            found["noise_bytes"] = float(workload.noise_bytes)
        validation.postcheck(workload, phase, seen)
        return found

    def _open(self, cell: Cell) -> float:
        self._leave()
        entry = self._entry(cell.variant, cell.case)
        self._precision.enter_context(precision(cell.case.dtype))
        self.open_state = TorchState()
        workload = build(entry.scheme, cell.case, self.orders.device, self.orders.seed)
        if cell.phase not in workload.phases:
            raise UnavailableError(_why_missing(workload, cell.phase))
        workload.enter(cell.phase)
        return self._warm(workload.phases[cell.phase], cell.method, max(1, len(workload.inputs)))

    def _open_control(self, question: Control) -> float:
        self._leave()
        return self._warm(control_work(question.units, self.orders.device), question.method, 1)

    def _warm(self, call: Call, method: str, turns: int) -> float:
        clock = next(clock for clock in self.tools.clocks if clock.method == method)
        call = clock.prepare(call, turns)
        with quiet():
            warm = warm_up(call, clock, WARM_S)
        self.open_state.check()
        self.open = call, clock
        return max(warm.call_ns, 1.0)

    def _visit(self, question: Visit) -> tuple[float, ...]:
        if self.open is None:
            message = "nothing is set up to be visited: open a cell first"
            raise ValueError(message)
        call, clock = self.open
        with quiet():
            for _ in range(question.before):
                call()
            samples = clock.visit(call, question.launches).samples["latency_ns"]
        self.open_state.check()
        return samples

    def _leave(self) -> None:
        self._precision.close()
        self.open_state = self.torch_state
        if self.open is not None:
            self.open = None
            release()
            gc.freeze()  # later collections skip what is loaded by now


class _RefusedError(Exception):
    """There is nothing to measure; ``answer`` has the reason."""

    def __init__(self, answer: Refused) -> None:
        """Store the answer."""
        super().__init__(answer.reason)
        self.answer = answer


def _why_missing(workload: Workload, phase: Phase) -> str:
    return workload.unavailable.get(phase, f"it has no phase {phase}")


def _folder(package: str) -> str:
    """Return the folder that a package of variants was imported from, or an empty string."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).resolve().parent) if file else ""


def main(orders: Orders, channel: BinaryIO) -> None:
    """Load the tree, send the hello, and answer questions until stdin ends."""

    def say(answer: Answer) -> None:
        channel.write(msgspec.json.encode(answer) + b"\n")
        channel.flush()

    try:
        torch.set_num_threads(orders.threads)
        state = TorchState()
        tree = load_tree(orders)
        state.check()
        if "step" in tree.suite.phases:  # the first optimizer imports a thousand modules, which takes seconds
            torch.optim.SGD([torch.zeros(1)])
        if orders.core is not None:  # only now, because both workers share the core
            psutil.Process().cpu_affinity([orders.core])
        with instruments(orders.device, orders.methods) as tools:
            checks = REGISTRY.suites["check"].cases if "check" in REGISTRY.suites else ()
            oracle = ExactChecks(checks, orders.device, orders.seed)
            worker = Worker(orders, tools, tree, oracle, state)
            say(worker.hello())
            for question in _questions():
                say(worker.answer(question))
    except Exception as error:  # noqa: BLE001  # importing a tree may raise anything
        say(WorkerFailure(reason=classify(error).reason))


def _questions() -> Iterator[Question]:
    """Yield questions; end the process as soon as stdin ends.

    A thread reads the lines, so that the process also ends if a variant hangs.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield msgspec.json.decode(lines.get(), type=Question)


if __name__ == "__main__":
    # What variants print must not mix with the answers: file descriptor 1 becomes stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(msgspec.json.decode(sys.argv[1], type=Orders), answers)
