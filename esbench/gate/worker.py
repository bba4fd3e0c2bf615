"""The worker of the gate measures both revisions: ``python -m esbench.gate.worker ORDERS MESSAGES``.

The variants come from the folders of the revisions; both use the installed harness. The worker imports both,
or starts a process for each of them, which visits its arm when the worker tells it to. One file has the
orders; messages are appended to the other, one a line. The worker ends when stdin is closed.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from esbench.errors import UserError
from esbench.gate.loading import Trees
from esbench.gate.records import (
    ARMS,
    CONTROLS,
    Arm,
    Begin,
    Cell,
    End,
    Message,
    Orders,
    Replicate,
    Surveyed,
    control_of,
    method_of,
)
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
                self.send(row)
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
        timed = {}
        for case, entry, phase, method in itertools.product(suite.cases, entries, suite.phases, methods):
            if entry.supports(case) and not entry.variant.baseline and phase != QUALITY:
                cell = Cell(entry.variant, case, phase, method)
                is_named = bool(orders.variants) or entry.package in plugins
                timed[cell] = is_named or any(fnmatchcase(cell.name, glob) for glob in suite.timed)
        return timed

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
                yield Surveyed(cell, self.arm, "ok", counts[cell.phase], timed=self._timed[cell])

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
                extra_work = CONTROLS[control_of(name)] if self.arm == "head" else 0
                call = control_work(round(CONTROL_UNITS * (1 + extra_work)), self.orders.device)
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


@contextlib.contextmanager
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


class ArmProcess:
    """A process that has loaded one arm only. Its methods are those of :class:`ArmRunner`.

    If it fails, it sends the reason to the gate, which ends the worker.
    """

    def __init__(self, arm: Arm, orders: Orders, messages: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=serve, args=(arm, orders, messages, other_end), daemon=True)
        self._process.start()
        other_end.close()  # only the process has it, so that its death closes the connection
        self._arm = arm

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def _call(self, method: str, *arguments: object) -> object:
        try:
            self._connection.send((method, arguments))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise UserError(f"the process of {self._arm} ended with exit code {code}") from error


def serve(arm: Arm, orders: Orders, messages: Path, connection: Connection) -> None:
    """Load one arm, and call its methods for a worker until that ends."""
    with sending(messages) as send, loaded(orders, (arm,), send) as runners, contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(runners[arm], method)(*arguments))


def time(orders: Orders, arms: Mapping[Arm, ArmRunner | ArmProcess], rng: random.Random, send: Send) -> None:
    """Send replicates of all cells and controls: each is set up anew, in random order."""
    share = range(orders.process, orders.replicates, orders.processes)
    names = [name for _ in share for name in rng.sample(orders.names, len(orders.names))]
    for done, name in enumerate(names):
        send(Begin(f"the timing of {name}", done, len(names)))
        order = rng.sample(ARMS, 2)
        for arm in order:
            arms[arm].set_up(name, rng.random())
        slowest_ns = max(min(arms[arm].visit(WARM_CALLS)) for arm in order)
        rounds = int(ROUNDS_S * 1e9 / (4 * CALLS * slowest_ns))
        visits: dict[Arm, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}
        first_arms = []
        for _ in range(min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)):
            first, second = rng.sample(ARMS, 2)
            first_arms.append(first)
            for arm in (first, second, second, first):  # a steady drift cancels
                visits[arm].append(arms[arm].visit(CALLS))
        for arm in order:
            arms[arm].finish()
        base, head = (tuple(visits[arm]) for arm in ARMS)
        send(Replicate(orders.look, orders.process, name, tuple(first_arms), base, head))


@contextlib.contextmanager
def sending(messages: Path) -> Iterator[Send]:
    """Yield a function that appends messages to a file; an exception becomes the message of the end."""
    with messages.open("ab", buffering=0) as file:

        def send(message: Message) -> None:
            file.write(msgspec.json.encode(message) + b"\n")

        try:
            yield send
        except UserError as error:
            send(End(str(error)))
        except BaseException as error:  # noqa: BLE001  # packages and variants may raise anything
            send(End(classify(error).reason))


def main(orders: Orders, messages: Path) -> None:
    """Load both revisions, and send what the orders ask for; the last message is the end."""
    rng = random.Random(f"{orders.seed} {orders.look} {orders.process}")  # noqa: S311  # an order, not a secret
    order = rng.sample(ARMS, 2)
    with sending(messages) as send, contextlib.ExitStack() as stack:
        arms: Mapping[Arm, ArmRunner | ArmProcess]
        if orders.separate:
            arms = {arm: ArmProcess(arm, orders, messages) for arm in order}
            for arm in order:
                arms[arm].wait()
        else:
            arms = stack.enter_context(loaded(orders, order, send))
        if orders.names:
            time(orders, arms, rng, send)
        else:
            errors = [arms[arm].survey() for arm in ARMS]
            if all(errors):
                raise UserError(errors[-1])
        send(End())


def _end_with_gate() -> None:
    """End this process and those that it started when the gate closes stdin, also because it is killed."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_gate, daemon=True).start()
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Orders), Path(sys.argv[2]))
