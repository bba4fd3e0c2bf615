"""The worker of the gate measures both revisions: ``python -m esbench.gate.worker ORDERS MESSAGES``.

The variants come from the folders of the revisions; both use the installed harness. One file has the orders;
messages are appended to the other, one a line. The worker ends when stdin is closed.
"""

import gc
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec
import psutil
import torch

from esbench.errors import UserError
from esbench.gate.loading import Trees
from esbench.gate.records import (
    ARMS,
    Arm,
    Begin,
    Cell,
    End,
    Message,
    Orders,
    Replicate,
    Surveyed,
    controls_of,
    split_method,
)
from esbench.gate.worker_process import THREADS
from esbench.measure import validation
from esbench.measure.case_runner import free_memory, missing_phases
from esbench.measure.failure import classify
from esbench.measure.float32_precision import precision
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.timers import Call, Clock, quiet
from esbench.measure.validation import ExactChecks, InputRenewal, TorchState
from esbench.registry import LOADED, REGISTRY, UnknownNameError, entries_of_suite
from esbench.schema import QUALITY, Phase
from esbench.workload import Workload, build

WARM_CALLS = 3
"""Calls after a set-up that are not timed."""
CALLS = 3
"""Calls of a visit. Many short visits are better than a few long ones, because a disturbance is long."""
MIN_ROUNDS, MAX_ROUNDS = 6, 10
ROUNDS_S = 0.03
"""Seconds for the rounds of a replicate, within these bounds. With more rounds, the addresses of a set-up
would decide."""
CONTROL_SIDE = {"cpu": 48, "cuda": 512}
"""Device -> side of the two square matrices whose product is a unit of control work: about 5 us on a CPU."""
CONTROL_UNITS = 50
"""Units of control work in base; one unit is 2 %."""
PADDING_BITS = 18
"""Binary logarithm of the largest tensor, in numbers, that shifts the addresses of a set-up."""

SetUp = Callable[[Arm], tuple[Call, Sequence[torch.Tensor]]]
"""Sets a cell or control up in an arm; returns its call, and the inputs that calls read in turn."""
Send = Callable[[Message], object]


def control_work(units: int, device: str) -> Call:
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
    """Measures both revisions."""

    def __init__(self, orders: Orders, trees: Trees, tools: Instruments, send: Send) -> None:
        self.orders, self.trees, self.tools, self.send = orders, trees, tools, send
        self.state = TorchState()

    # Correctness and counts

    def survey(self) -> None:
        """Send the rows of this worker's share of the variants in both arms."""
        unknown = "the suite has no cell that is timed: name another --suite"
        is_empty = True
        for arm in ARMS:
            self.trees.activate(arm)
            checks = ExactChecks(REGISTRY.check_cases, self.orders.device, self.orders.seed)
            groups: dict[str, dict[Cell, bool]] = {}
            try:
                for cell, is_timed in self._cells().items():
                    label = f"{cell.variant.label(cell.case.operator)} on {cell.case.label}"
                    groups.setdefault(label, {})[cell] = is_timed
            except UnknownNameError as error:
                unknown = str(error)
            is_empty &= not groups
            share = [*groups.items()][self.orders.process :: self.orders.processes]
            for number, (label, cells) in enumerate(share):
                self.send(Begin(f"the check of {label} in {arm}", number, len(share)))
                for row in self._rows(arm, checks, [*cells]):
                    self.send(msgspec.structs.replace(row, timed=cells[row.cell]))
        if is_empty:
            raise UserError(unknown)

    def _cells(self) -> dict[Cell, bool]:
        """Return the cells of the active revision's suite without baselines, and whether each is timed.

        Raises:
            UnknownNameError: the revision has no such suite or variant.
        """
        orders, suite = self.orders, REGISTRY.find_suite(self.orders.suite)
        plugins = {LOADED[name] for name in orders.plugins}
        entries = REGISTRY.select(orders.variants or ("*",))
        if not orders.variants:
            entries = entries_of_suite(entries, suite, plugins)
        methods = [clock.method for clock in self.tools.clocks]
        cells = {}
        for case, entry, phase, method in itertools.product(suite.cases, entries, suite.phases, methods):
            if entry.supports(case) and not entry.variant.baseline and phase != QUALITY:
                cell = Cell(entry.variant, case, phase, method)
                is_named = bool(orders.variants) or entry.package in plugins
                cells[cell] = is_named or any(fnmatchcase(cell.name, glob) for glob in suite.timed)
        return cells

    def _rows(self, arm: Arm, checks: ExactChecks, cells: Sequence[Cell]) -> Iterator[Surveyed]:
        """Yield a row for each cell of a variant on a case: its counts, or the reason for not having them."""
        entry, case = REGISTRY.entries[cells[0].variant.name], cells[0].case
        counts: dict[Phase, dict[str, float]] = {}
        missing: dict[Phase, str] = {}
        try:
            failure = checks.failure(entry, case.operator)
            self.state.check()
            with precision(case.dtype):
                state = TorchState()  # with the settings of this precision
                if failure is None:
                    workload = build(entry.scheme, case, self.orders.device, self.orders.seed)
                    validation.verify(entry, workload)
                    missing = missing_phases(workload)
                    for phase in {cell.phase: None for cell in cells if cell.phase not in missing}:
                        counts[phase] = self._phase_counts(workload, phase)
                state.check()
        except BaseException as error:  # noqa: BLE001  # a variant may raise anything
            failure = classify(error)
            self.state.restore()
        free_memory()
        for cell in cells:
            if failure is not None:
                yield Surveyed(cell, arm, failure.status, reason=failure.reason)
            elif cell.phase in missing:
                yield Surveyed(cell, arm, "unavailable", reason=missing[cell.phase])
            else:
                yield Surveyed(cell, arm, "ok", counts[cell.phase])

    def _phase_counts(self, workload: Workload, phase: Phase) -> dict[str, float]:
        """Count bytes, launches and compiled graphs of a phase, and check its result before and after."""
        workload.enter(phase)
        call = workload.phases[phase]
        before = _graphs(forget=True)
        fingerprints = validation.precheck(workload, phase, self.tools.synchronize)
        footprint = self.tools.footprint(call)
        validation.check_memory(footprint, phase)
        counts = {
            "peak_bytes": float(footprint.peak_bytes),
            "launches": float(self.tools.trace(call).launches),
            "graphs": float(_graphs() - before),
        }
        if phase == "sample":
            counts["noise_bytes"] = float(workload.noise_bytes)
        validation.postcheck(workload, phase, fingerprints)
        return counts

    # Times

    def time(self) -> None:
        """Send replicates of all cells and controls: each is set up anew, in random order."""
        orders = self.orders
        rng = random.Random(f"{orders.seed} {orders.look} {orders.process}")  # noqa: S311  # an order, not a secret
        self.trees.activate("head")
        cells = self._cells()
        set_ups: dict[str, tuple[SetUp, str]] = {
            cell.name: (partial(self._set_up, cell), cell.case.dtype) for cell in cells
        }
        for name, more in controls_of(cells).items():
            set_ups[name] = (partial(self._set_up_control, more), "float32")
        gc.collect()
        gc.freeze()  # later collections skip what is loaded by now
        for number in range(orders.replicates):
            for index, name in enumerate(rng.sample(orders.names, len(orders.names))):
                done = number * len(orders.names) + index
                self.send(Begin(f"the timing of {name}", done, orders.replicates * len(orders.names)))
                self.send(self._replicate(name, *set_ups[name], rng))
                if orders.device == "cuda":
                    free_memory()

    def _set_up(self, cell: Cell, arm: Arm) -> tuple[Call, Sequence[torch.Tensor]]:
        scheme = self.trees.arms[arm].entries[cell.variant.name].scheme
        workload = build(scheme, cell.case, self.orders.device, self.orders.seed)
        workload.enter(cell.phase)
        return workload.phases[cell.phase], workload.inputs

    def _set_up_control(self, more: float, arm: Arm) -> tuple[Call, Sequence[torch.Tensor]]:
        units = CONTROL_UNITS * (1 + more * (arm == "head"))
        return control_work(round(units), self.orders.device), ()

    def _replicate(self, name: str, set_up: SetUp, dtype: str, rng: random.Random) -> Replicate:
        """Set a cell or control up in both arms, and time it in rounds, each ABBA or BAAB at random."""
        clock = next(clock for clock in self.tools.clocks if clock.method == split_method(name)[1])
        order = rng.sample(ARMS, 2)
        calls: dict[Arm, Callable[[int], tuple[float, ...]]] = {}
        padding: list[object] = []  # so that a set-up has other addresses than the one before
        with precision(dtype):
            state = TorchState()
            for arm in order:
                padding += [bytearray(rng.randrange(1, 4096)) for _ in range(rng.randrange(20))]
                padding.append(torch.empty(rng.randrange(2 ** rng.randrange(1, PADDING_BITS))))
                self.trees.activate(arm)
                call, inputs = set_up(arm)
                calls[arm] = _visits(clock, clock.prepare(call, max(1, len(inputs))), InputRenewal(inputs))
            with quiet():
                slowest_ns = 1.0  # a coarse clock may measure 0
                for arm in order:
                    self.trees.activate(arm)
                    slowest_ns = max(slowest_ns, min(calls[arm](1)[0] for _ in range(WARM_CALLS)))
                rounds = int(ROUNDS_S * 1e9 / (4 * CALLS * slowest_ns))
                visits: dict[Arm, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}
                first_arms = []
                for _ in range(min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)):
                    first, second = rng.sample(ARMS, 2)
                    first_arms.append(first)
                    for arm in (first, second, second, first):  # a steady drift cancels
                        self.trees.activate(arm)  # because calls may import modules
                        visits[arm].append(calls[arm](CALLS))
            state.check()
        base, head = (tuple(visits[arm]) for arm in ARMS)
        return Replicate(self.orders.look, self.orders.process, name, tuple(first_arms), base, head)


def _visits(clock: Clock, call: Call, renew: Call) -> Callable[[int], tuple[float, ...]]:
    """Return a function that times a number of calls and returns their times in ns."""
    return lambda count: clock.visit(call, count, renew).samples["latency_ns"]


def _graphs(*, forget: bool = False) -> int:
    """Return the number of graphs that torch.compile made so far; ``forget`` makes it make them again."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds, and most variants never do
    if dynamo is None:
        return 0
    if forget:
        dynamo.reset()
    return int(dynamo.utils.counters["stats"]["unique_graphs"])


def main(orders: Orders, send: Send) -> None:
    """Load both revisions, and send what the orders ask for; the last message is the end."""
    try:
        torch.set_num_threads(THREADS)
        rng = random.Random(f"{orders.seed} {orders.look} {orders.process} order")  # noqa: S311  # no secret
        first, second = rng.sample(ARMS, 2)
        send(Begin(f"the loading of {first}, then {second}", 0, 1))
        trees = Trees(orders.roots, orders.plugins, (first, second))
        if orders.core is not None:  # after the imports, which are faster on all cores
            psutil.Process().cpu_affinity([orders.core])
        with instruments(orders.device) as tools:
            worker = Worker(orders, trees, tools, send)
            if orders.replicates:
                worker.time()
            else:
                worker.survey()
        send(End())
    except UserError as error:
        send(End(str(error)))
    except BaseException as error:  # noqa: BLE001  # packages and variants may raise anything
        send(End(classify(error).reason))


def _end_with_gate() -> None:
    """End the process when the gate closes stdin, which happens also if it is killed."""
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_gate, daemon=True).start()
    with Path(sys.argv[2]).open("ab", buffering=0) as file:
        main(
            msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Orders),
            lambda message: file.write(msgspec.json.encode(message) + b"\n"),
        )
