"""The worker of the gate measures one revision: ``python -m esbench.gate.worker FILE_DESCRIPTOR ORDERS``.

The variants come from the folder of the revision; both arms use the installed harness. The file descriptor is
the connection for questions and answers.
"""

import contextlib
import gc
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import torch

from esbench.gate.protocol import (
    Answer,
    Control,
    Failure,
    Hello,
    Open,
    Opened,
    Orders,
    Question,
    Rows,
    Survey,
    Visit,
    Visited,
)
from esbench.gate.records import Cell, Surveyed
from esbench.measure import validation
from esbench.measure.case_runner import free_memory, missing_phases
from esbench.measure.environment import source_hashes
from esbench.measure.failure import classify
from esbench.measure.float32_precision import precision
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.interleave import warm_up
from esbench.measure.timers import Call, Clock, quiet
from esbench.measure.validation import ExactChecks, InputRenewal, TorchState
from esbench.registry import REGISTRY, Entry, Suite, UnknownNameError, entries_of_suite, load, load_installed
from esbench.schema import QUALITY, Phase
from esbench.workload import Workload, build

WARM_S = 0.005
"""Seconds of warm-up of a call. The first rounds, which may be slower, are trimmed."""
CONTROL_SIDE = {"cpu": 48, "cuda": 512}
"""Device -> side of the two square matrices whose product is a unit of control work: about 5 us on a CPU."""


@dataclass
class Selection:
    """The suite and variants of a revision; ``unknown`` is the error if the revision does not have them."""

    suite: Suite
    entries: list[Entry]
    unknown: str = ""


def load_variants(orders: Orders) -> Selection:
    """Import the packages of variants, those of the revision first, and select variants.

    Raises:
        UserError: a package cannot be loaded.
    """
    sys.path.insert(0, orders.root)
    os.chdir(orders.root)  # a plug-in file is named relative to the top folder
    load_installed()
    plugins = {load(name) for name in orders.plugins}
    try:
        suite = REGISTRY.find_suite(orders.suite)
        entries = REGISTRY.select(orders.variants or ("*",))
    except UnknownNameError as error:
        return Selection(Suite(name=orders.suite, description="", cases=()), [], str(error))
    return Selection(suite, entries if orders.variants else entries_of_suite(entries, suite, plugins))


def control_work(units: int, device: str) -> Callable[[], object]:
    """Return a call of ``units`` matrix products with the same inputs in every process."""
    generator = torch.Generator(device).manual_seed(0)
    side = CONTROL_SIDE[device]
    a, b = (torch.randn(side, side, generator=generator, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)

    def work() -> torch.Tensor:
        for _ in range(units):
            torch.mm(a, b, out=out)
        return out

    return work


class Worker:
    """Answers questions about one revision."""

    def __init__(self, orders: Orders, selection: Selection, state: TorchState, tools: Instruments) -> None:
        """Prepare to measure; ``state`` has torch's global settings, which no variant may change."""
        self.orders, self.selection, self.state, self.tools = orders, selection, state, tools
        self._checks = ExactChecks(REGISTRY.check_cases, orders.device, orders.seed)
        self._open: tuple[Call, Clock, Call] | None = None
        self._open_state = state
        self._precision = contextlib.ExitStack()

    def hello(self) -> Hello:
        """Return the first message: the packages and cells of the revision."""
        hashes = source_hashes(REGISTRY.entries.values())
        packages = {entry.package for entry in REGISTRY.entries.values()}
        root = Path(self.orders.root).resolve()
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in packages}
        return Hello(
            own_packages=tuple(
                sorted(
                    name for name, file in files.items() if file and Path(file).resolve().is_relative_to(root)
                )
            ),
            code={name: hashes[name] for name in sorted(packages & hashes.keys())},
            harness=hashes["esbench"],
            cells=tuple(self._cells()),
            cell_s=self.selection.suite.cell_s,
            unknown=self.selection.unknown,
        )

    def answer(self, question: Question) -> Answer:
        """Return the answer to a question. An error in a survey is part of the answer."""
        match question:
            case Survey():
                return Rows(tuple(self._survey(question.cells)))
            case Open():
                return Opened(self._set_up(question.cell))
            case Control():
                self._close()
                work = control_work(question.units, self.orders.device)
                return Opened(self._warm(work, question.method))
            case Visit():
                return Visited(self._visit(question))

    def _cells(self) -> Iterator[Cell]:
        """Yield the cells of the suite, without baselines."""
        suite = self.selection.suite
        variants = [entry for entry in self.selection.entries if not entry.variant.baseline]
        phases = [phase for phase in suite.phases if phase != QUALITY]
        methods = [clock.method for clock in self.tools.clocks]
        for case, entry in itertools.product(suite.cases, variants):
            if entry.supports(case):
                for phase, method in itertools.product(phases, methods):
                    yield Cell(entry.variant, case, phase, method)

    # Correctness and counts

    def _survey(self, cells: tuple[Cell, ...]) -> Iterator[Surveyed]:
        """Yield a row for each cell of a variant on a case: its counts, or the reason for not having them."""
        variant, case, arm = cells[0].variant, cells[0].case, self.orders.arm
        entry = REGISTRY.entries.get(variant.name)
        if entry is None or not entry.supports(case):
            reason = f"no variant {variant.label(case.operator)}"
            yield from (Surveyed(cell, arm, "absent", reason=reason) for cell in cells)
            return
        try:
            failure = self._checks.failure(entry, case.operator)
            self.state.check()
            counts, missing = self._counts(entry, cells) if failure is None else ({}, {})
        except BaseException as error:  # noqa: BLE001  # a variant may raise anything
            failure = classify(error)
        free_memory()
        if failure is not None:
            self.state.restore()
            yield from (Surveyed(cell, arm, failure.status, reason=failure.reason) for cell in cells)
            return
        for cell in cells:
            if cell.phase in missing:
                yield Surveyed(cell, arm, "unavailable", reason=missing[cell.phase])
            else:
                yield Surveyed(cell, arm, "ok", counts[cell.phase])

    def _counts(
        self, entry: Entry, cells: tuple[Cell, ...]
    ) -> tuple[dict[Phase, dict[str, float]], dict[Phase, str]]:
        """Return the counts of each phase, and the reasons for phases that the variant lacks."""
        case = cells[0].case
        counts = {}
        with precision(case.dtype):
            state = TorchState()  # with the settings of this precision
            workload = build(entry.scheme, case, self.orders.device, self.orders.seed)
            validation.verify(entry, workload)
            missing = missing_phases(workload)
            for phase in dict.fromkeys(cell.phase for cell in cells):
                if phase not in missing:
                    counts[phase] = self._phase_counts(workload, phase)
            state.check()
        return counts, missing

    def _phase_counts(self, workload: Workload, phase: Phase) -> dict[str, float]:
        """Count bytes and launches of a phase, and check its result before and after."""
        workload.enter(phase)
        call = workload.phases[phase]
        fingerprints = validation.precheck(workload, phase, self.tools.synchronize)
        footprint = self.tools.footprint(call)
        validation.check_memory(footprint, phase)
        counts = {
            "peak_bytes": float(footprint.peak_bytes),
            "launches": float(self.tools.trace(call).launches),
        }
        if phase == "sample":
            counts["noise_bytes"] = float(workload.noise_bytes)
        validation.postcheck(workload, phase, fingerprints)
        return counts

    # Times

    def _set_up(self, cell: Cell) -> float:
        """Set a cell up and warm it up; return the approximate time of a call in ns."""
        self._close()
        self._precision.enter_context(precision(cell.case.dtype))
        self._open_state = TorchState()  # with the settings of this precision
        scheme = REGISTRY.entries[cell.variant.name].scheme
        workload = build(scheme, cell.case, self.orders.device, self.orders.seed)
        workload.enter(cell.phase)
        return self._warm(workload.phases[cell.phase], cell.method, workload.inputs)

    def _warm(self, call: Call, method: str, inputs: Sequence[torch.Tensor] = ()) -> float:
        """Warm a call up and open it for visits; return the approximate time of a call in ns."""
        clock = next(clock for clock in self.tools.clocks if clock.method == method)
        call = clock.prepare(call, max(1, len(inputs)))
        with quiet():
            warm = warm_up(call, clock, WARM_S)
        self._open_state.check()
        self._open = call, clock, InputRenewal(inputs)
        return max(warm.call_ns, 1.0)  # a coarse clock may measure 0

    def _visit(self, visit: Visit) -> tuple[float, ...]:
        """Return the times of the launches of a visit in ns."""
        if self._open is None:
            raise RuntimeError("a cell must be open before it is visited")
        call, clock, renew = self._open
        with quiet():
            for _ in range(visit.before):
                renew()
                call()
            samples = clock.visit(call, visit.launches, renew).samples["latency_ns"]
        self._open_state.check()
        return samples

    def _close(self) -> None:
        """Free the open cell, and restore the precision of float32 products."""
        self._precision.close()
        self._open_state = self.state
        if self._open is not None:
            self._open = None
            free_memory()
            gc.freeze()  # later collections skip what is loaded by now


def main(orders: Orders, connection: Connection) -> None:
    """Load the variants, send the first message, and answer questions until the gate ends."""

    def send(answer: Answer) -> None:
        connection.send_bytes(msgspec.json.encode(answer))

    try:
        torch.set_num_threads(orders.threads)
        state = TorchState()
        selection = load_variants(orders)
        state.check()
        if "step" in selection.suite.phases:  # importing the optimizers takes seconds
            torch.optim.SGD([torch.zeros(1)])
        if orders.core is not None:  # after the imports, which both workers do at the same time
            psutil.Process().cpu_affinity([orders.core])
        with instruments(orders.device, orders.methods) as tools:
            worker = Worker(orders, selection, TorchState(), tools)
            send(worker.hello())
            for question in _questions(connection):
                send(worker.answer(question))
    except BaseException as error:  # noqa: BLE001  # packages and variants may raise anything
        send(Failure(classify(error).reason))


def _questions(connection: Connection) -> Iterator[Question]:
    """Yield questions; end the process when the gate closes the connection.

    A thread reads the connection, so that the process ends even if a variant hangs.
    """
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv_bytes())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield msgspec.json.decode(messages.get(), type=Question)


if __name__ == "__main__":
    file_descriptor = int(sys.argv[1])
    os.set_inheritable(file_descriptor, False)  # noqa: FBT003  # positional only
    main(msgspec.json.decode(sys.argv[2], type=Orders), Connection(file_descriptor))
