"""A worker of the gate: a fresh process that serves one tree, ``python -m esbench.gate.worker ORDERS``.

The harness is the one that judges, for both arms alike; what is measured comes from the tree. Questions come
by stdin and answers go to what was stdout; whatever a variant prints goes to stderr.
"""

import contextlib
import dataclasses
import gc
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import psutil
import torch

from esbench.gate.controls import control
from esbench.gate.loading import Tree, folder, loaded
from esbench.gate.protocol import (
    PROTOCOL,
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
from esbench.measure.environment import source_hashes
from esbench.measure.failure import Failure, explain
from esbench.measure.group import release
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.oracle import Oracle
from esbench.measure.precision import precision
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.timers import Call, Clock, quiet
from esbench.measure.torch_state import TorchState
from esbench.measure.warming import warm_up
from esbench.registry import REGISTRY, Entry, UnavailableError, Workload, build
from esbench.registry import WrongResultError as Wrong
from esbench.schema import QUALITY, Case, Phase, Variant

WARM_S = 0.005
"""A call is warmed up for no longer on a CPU: the first visits of a cell warm it too, and are trimmed."""


@dataclasses.dataclass
class Worker:
    """Serves one tree: ``open`` is what the next visit launches, ``inner`` what it must not change."""

    orders: Orders
    tools: Instruments
    tree: Tree
    oracle: Oracle
    surroundings: TorchState
    open: tuple[Call, Clock] | None = None
    inner: TorchState = dataclasses.field(default_factory=TorchState)
    _around: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def hello(self) -> Hello:
        """Say what this worker has."""
        entries = list(REGISTRY.entries.values())
        packages = {entry.package: folder(entry.package) for entry in entries}
        hashes = source_hashes(entries)
        return Hello(
            number=0,
            arm=self.orders.arm,
            protocol=PROTOCOL,
            packages=packages,
            code={name: hashes[name] for name in (*packages, "esbench") if name in hashes},
            cells=tuple(self._cells()),
            cell_s=self.tree.suite.cell_s,
            unknown=self.tree.unknown,
        )

    def answer(self, question: Question) -> Answer:
        """Do what is asked; whatever a variant raises is the answer."""
        number, arm = question.number, self.orders.arm
        try:
            match question:
                case Survey():
                    figures, missing = self._survey(question)
                    return Found(number=number, arm=arm, figures=figures, missing=missing)
                case Open():
                    return Opened(number=number, arm=arm, launch_ns=self._open(question.cell))
                case Control():
                    return Opened(number=number, arm=arm, launch_ns=self._open_control(question))
                case Visit():
                    return Visited(number=number, arm=arm, samples=self._visit(question))
        except _AbsentError as error:
            return Refused(number=number, arm=arm, status="absent", reason=str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, the referee is told
            fault = error.fault if isinstance(error, _FaultError) else explain(error)
            self._leave()
            with contextlib.suppress(Wrong):  # put right for the next one; this one has its reason
                self.surroundings.check()
            return Refused(number=number, arm=arm, status=fault.status, reason=fault.reason)

    def _cells(self) -> Iterator[Cell]:
        """Yield what is gated: all but the baselines, which are there to be compared with."""
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
            raise _AbsentError(message)
        return entry

    def _survey(self, question: Survey) -> tuple[dict[Phase, dict[str, float]], dict[Phase, str]]:
        """Hold a variant to its oracle; count what each phase holds and launches."""
        self._leave()
        case, orders = question.case, self.orders
        entry = self._entry(question.variant, case)
        if fault := self.oracle.verdict(entry, case.operator):
            raise _FaultError(fault)
        self.surroundings.check()
        with precision(case.dtype):
            surroundings = TorchState()
            workload = build(entry.scheme, case, orders.device, orders.seed)
            workload.verify()
            missing = {
                phase: workload.unavailable.get(phase, f"it has no phase {phase}")
                for phase in question.phases
                if phase not in workload.phases
            }
            figures = {
                phase: self._figures(workload, phase) for phase in question.phases if phase not in missing
            }
            surroundings.check()
        return figures, missing

    def _figures(self, workload: Workload, phase: Phase) -> dict[str, float]:
        """Count what a phase holds and launches, between two looks at what it computes."""
        workload.enter(phase)
        call = workload.phases[phase]
        seen = validation.rehearse(workload, phase, self.tools.synchronize, Stopwatch())
        footprint = self.tools.footprint(call)
        validation.check_memory(footprint, phase)
        found = {
            "peak_bytes": float(footprint.peak_bytes),
            "launches": float(self.tools.trace(call).launches),
        }
        if phase == "sample":
            found["noise_bytes"] = float(workload.noise_bytes)
        validation.confirm(workload, phase, seen)
        return found

    def _open(self, cell: Cell) -> float:
        self._leave()
        entry = self._entry(cell.variant, cell.case)
        self._around.enter_context(precision(cell.case.dtype))
        self.inner = TorchState()
        workload = build(entry.scheme, cell.case, self.orders.device, self.orders.seed)
        if cell.phase not in workload.phases:
            raise UnavailableError(workload.unavailable.get(cell.phase, f"it has no phase {cell.phase}"))
        workload.enter(cell.phase)
        return self._warm(workload.phases[cell.phase], cell.method, max(1, len(workload.inputs)))

    def _open_control(self, question: Control) -> float:
        self._leave()
        return self._warm(control(question.units, self.orders.device), question.method, 1)

    def _warm(self, call: Call, method: str, turns: int) -> float:
        clock = next(clock for clock in self.tools.clocks if clock.method == method)
        call = clock.prepare(call, turns)
        with quiet():
            warm = warm_up(call, clock, WARM_S)
        self.inner.check()
        self.open = call, clock
        return max(warm.call_ns, 1.0)

    def _visit(self, question: Visit) -> tuple[float, ...]:
        if self.open is None:
            message = "a visit to nothing: open a cell first"
            raise ValueError(message)
        call, clock = self.open
        with quiet():
            for _ in range(question.before):
                call()
            samples = clock.visit(call, question.launches).samples["latency_ns"]
        self.inner.check()
        return samples

    def _leave(self) -> None:
        self._around.close()
        self.inner = self.surroundings
        if self.open is not None:
            self.open = None
            release()
            gc.freeze()  # what is loaded by now stays: no later release looks through it


class _AbsentError(Exception):
    """This tree has no such variant; the message says which."""


class _FaultError(Exception):
    """The oracle found a variant wrong on its small cases."""

    def __init__(self, fault: Failure) -> None:
        """Keep what it found."""
        super().__init__(fault.reason)
        self.fault = fault


def main(orders: Orders, channel: BinaryIO) -> None:
    """Load the tree, say hello and answer until nobody asks any more."""

    def say(answer: Answer) -> None:
        channel.write(msgspec.json.encode(answer) + b"\n")
        channel.flush()

    try:
        torch.set_num_threads(orders.threads)
        surroundings = TorchState()
        tree = loaded(orders)
        surroundings.check()
        torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports another thousand modules, for seconds
        if orders.core is not None:  # from here on both workers share it: what they load is loaded by now
            psutil.Process().cpu_affinity([orders.core])
        with instruments(orders.device, orders.methods) as tools:
            checks = REGISTRY.suites["check"].cases if "check" in REGISTRY.suites else ()
            oracle = Oracle(checks, orders.device, orders.seed)
            worker = Worker(orders, tools, tree, oracle, surroundings)
            say(worker.hello())
            for question in _questions():
                say(worker.answer(question))
    except Exception as error:  # noqa: BLE001  # a tree may raise anything when it is loaded: the referee is told
        say(WorkerFailure(number=0, arm=orders.arm, reason=explain(error).reason))


def _questions() -> Iterator[Question]:
    """Yield what is asked; end the process at once where nobody can ask any more.

    A thread waits for the lines, so that a variant that hangs does not outlive who asked for it.
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
    # What variants print must not reach the channel: stdout is what stderr is from here on.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(msgspec.json.decode(sys.argv[1], type=Orders), answers)
