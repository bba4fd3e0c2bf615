"""What the gate measures in one arm, by the process that has loaded it: counts, and the times of visits."""

import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property

import msgspec
import psutil
import torch

from esbench.gate.loading import Trees
from esbench.gate.records import CONTROLS, Arm, Begin, Cell, Message, Orders, Surveyed, control_of, method_of
from esbench.gate.worker_process import THREADS
from esbench.measure import validation
from esbench.measure.case_runner import free_memory, missing_phases
from esbench.measure.failure import classify
from esbench.measure.float32_precision import precision
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.timers import Call, quiet
from esbench.measure.validation import ExactChecks, InputRenewal, TorchState
from esbench.registry import LOADED, REGISTRY, UnknownNameError, entries_of_suite
from esbench.schema import QUALITY, Phase
from esbench.workload import Workload, build

CONTROL_SIDE = {"cpu": 48, "cuda": 512}
"""Device -> side of the two square matrices whose product is a unit of control work: about 5 us on a CPU."""
CONTROL_UNITS = 50
"""Units of control work in base; one unit is 2 %."""
PADDING_BITS = 18
"""Binary logarithm of the largest tensor, in numbers, that shifts the addresses of a set-up."""

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


class ArmRunner:
    """Measures one arm in this process, which may have loaded the other one, too."""

    def __init__(self, arm: Arm, orders: Orders, trees: Trees, tools: Instruments, send: Send) -> None:
        self.arm, self.orders, self.trees, self.tools, self.send = arm, orders, trees, tools, send

    def wait(self) -> None:
        """Do nothing, which another process can do only after the arm is loaded."""

    # Correctness and counts

    def survey(self) -> str:
        """Send the rows of this worker's share of the variants; return the error if there are none at all."""
        self.trees.activate(self.arm)
        checks = ExactChecks(REGISTRY.check_cases, self.orders.device, self.orders.seed)
        groups: dict[str, list[Cell]] = {}
        try:
            for cell in self._timed:
                label = f"{cell.variant.label(cell.case.operator)} on {cell.case.label}"
                groups.setdefault(label, []).append(cell)
        except UnknownNameError as error:
            return str(error)
        share = [*groups.items()][self.orders.process :: self.orders.processes]
        for number, (label, cells) in enumerate(share):
            self.send(Begin(f"the check of {label} in {self.arm}", number, len(share)))
            for row in self._rows(checks, cells):
                self.send(msgspec.structs.replace(row, timed=self._timed[row.cell]))
        return "" if groups else "the suite has no cell that is timed: name another --suite"

    @cached_property
    def _timed(self) -> dict[Cell, bool]:
        """The cells of the arm's suite without baselines, and whether each is timed.

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

    def _rows(self, checks: ExactChecks, cells: Sequence[Cell]) -> Iterator[Surveyed]:
        """Yield a row for each cell of a variant on a case: its counts, or the reason for not having them."""
        entry, case = REGISTRY.entries[cells[0].variant.name], cells[0].case
        counts: dict[Phase, dict[str, float]] = {}
        missing: dict[Phase, str] = {}
        of_process = TorchState()
        try:
            failure = checks.failure(entry, case.operator)
            of_process.check()
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
            of_process.restore()
        free_memory()
        for cell in cells:
            if failure is not None:
                yield Surveyed(cell, self.arm, failure.status, reason=failure.reason)
            elif cell.phase in missing:
                yield Surveyed(cell, self.arm, "unavailable", reason=missing[cell.phase])
            else:
                yield Surveyed(cell, self.arm, "ok", counts[cell.phase])

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

    def set_up(self, name: str, seed: float) -> None:
        """Set a cell or control up anew; ``seed`` decides by how much its addresses are shifted."""
        self.trees.activate(self.arm)
        rng = random.Random(seed)  # noqa: S311  # no secret
        self._padding: list[object] = [bytearray(rng.randrange(1, 4096)) for _ in range(rng.randrange(20))]
        self._padding.append(torch.empty(rng.randrange(2 ** rng.randrange(1, PADDING_BITS))))
        self._clock = next(clock for clock in self.tools.clocks if clock.method == method_of(name))
        cell = next((cell for cell in self._timed if cell.name == name), None)
        self._dtype = cell.case.dtype if cell else "float32"
        inputs: Sequence[torch.Tensor] = ()
        with precision(self._dtype):
            self._state = TorchState()
            if cell:
                scheme = REGISTRY.entries[cell.variant.name].scheme
                workload = build(scheme, cell.case, self.orders.device, self.orders.seed)
                workload.enter(cell.phase)
                call, inputs = workload.phases[cell.phase], workload.inputs
            else:
                more = CONTROLS[control_of(name)] if self.arm == "head" else 0
                call = control_work(round(CONTROL_UNITS * (1 + more)), self.orders.device)
            self._call = self._clock.prepare(call, max(1, len(inputs)))
        self._renew = InputRenewal(inputs)

    def visit(self, calls: int) -> tuple[float, ...]:
        """Time a number of calls of what was set up last; return the time of each in ns."""
        self.trees.activate(self.arm)  # because calls may import modules
        with precision(self._dtype), quiet():
            times = self._clock.visit(self._call, calls, self._renew).samples["latency_ns"]
            self._state.check()
        return times

    def finish(self) -> None:
        """Free what was set up."""
        del self._padding, self._call, self._renew
        if self.orders.device == "cuda":
            free_memory()


def _graphs(*, forget: bool = False) -> int:
    """Return the number of graphs that torch.compile made so far; ``forget`` makes it make them again."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds, and most variants never do
    if dynamo is None:
        return 0
    if forget:
        dynamo.reset()
    return int(dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def loaded(orders: Orders, arms: Sequence[Arm], send: Send) -> Iterator[dict[Arm, ArmRunner]]:
    """Load arms into this process in this order, and yield what measures them.

    Raises:
        UserError: one cannot be loaded.
    """
    torch.set_num_threads(THREADS)
    form = ", without --separate" if len(arms) > 1 else ""
    send(Begin(f"the loading of {', then '.join(arms)}{form}", 0, 1))
    trees = Trees(orders.roots, orders.plugins, arms)
    if orders.core is not None:  # after the imports, which are faster on all cores
        psutil.Process().cpu_affinity([orders.core])
    gc.collect()
    gc.freeze()  # later collections skip what is loaded by now
    with instruments(orders.device) as tools:
        yield {arm: ArmRunner(arm, orders, trees, tools, send) for arm in arms}
