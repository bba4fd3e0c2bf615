"""The referee: two fresh workers, and whose turn it is.

A replicate goes through its cells in a seeded shuffle. A cell is set up in both arms and then visited in
twenty to sixty rounds, each ABBA or BAAB at random; while one arm works the other waits for its turn. Where
a few cells are confirmed, each has three times as many.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from esbench.gate.protocol import (
    ARMS,
    PROTOCOL,
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
from esbench.gate.records import LONGER, MORE, SAME, Replicate, Stage, Surveyed, Timed
from esbench.gate.worker_process import WORKER, Child, WorkerError, children
from esbench.progress import Show
from esbench.schema import Case, Phase, Variant

FEWEST_ROUNDS, MOST_ROUNDS = 20, 60


class Visiting(NamedTuple):
    """So many launches of a visit are kept, behind so many that take the core's caches back."""

    before: int
    kept: int


QUICK, SLOW = Visiting(2, 3), Visiting(1, 2)
"""The other worker had the core before: on a CPU the first launch takes two to three times as long as the
last, and the second half as long again. What disturbs a core lasts longer than a launch, so that many short
visits tell more than a few long ones: in the same time sixty of 2 + 3 launches spread by a fifth less than
twenty of 7 + 8, and a hundred of 1 + 2 by no less than they."""

CONTROLS: Mapping[str, float] = {SAME: 0.0, MORE: 0.02}
"""Name of a control -> by which share head has more of the harness's own work."""

UNITS = 200
"""The units of a control: half a percent of them is one more."""

Visits = dict[Arm, list[tuple[float, ...]]]
Wanted = dict[tuple[Variant, Case], list[Phase]]


@dataclass(frozen=True)
class Referee:
    """Knows how to start both workers; ``silence_s`` is how long each may say nothing."""

    orders: Mapping[Arm, Orders]
    silence_s: float
    program: Sequence[str] = WORKER

    @contextmanager
    def workers(
        self, name: str, *, timed: bool = True
    ) -> Iterator[tuple[dict[Arm, Child], dict[Arm, Hello]]]:
        """Start two fresh workers at the same time for what is named; yield them, and what they said first.

        Where nothing is timed each may have a core of its own.

        Raises:
            WorkerError: one of them cannot serve.

        """
        orders = [
            msgspec.structs.replace(
                self.orders[arm], replicate=name, core=self.orders[arm].core if timed else None
            )
            for arm in ARMS
        ]
        with children(orders, self.program) as found:
            hellos = {arm: found[arm].hello(self.silence_s) for arm in ARMS}
            for arm, hello in hellos.items():
                if hello.protocol != PROTOCOL:
                    message = f"the worker of {arm} speaks protocol {hello.protocol}, not {PROTOCOL}"
                    raise WorkerError(message)
            yield found, hellos

    def survey(
        self, workers: Mapping[Arm, Child], cells: Sequence[Cell], progress: Show
    ) -> Iterator[Surveyed]:
        """Let both arms check and count every variant on its case, each at its own pace: nothing is timed."""
        wanted: Wanted = {}
        for cell in cells:
            phases = wanted.setdefault((cell.variant, cell.case), [])
            phases += [cell.phase] if cell.phase not in phases else []

        def ask(arm: Arm) -> list[Found | Refused]:
            answers = []
            for place, ((variant, case), phases) in enumerate(wanted.items()):
                if arm == "head":  # one bar for both
                    progress(place, len(wanted), f"checking {variant.label(case.operator)}")
                question = Survey(number=0, variant=variant, case=case, phases=tuple(phases))
                answers.append(workers[arm].ask(question, Found, self.silence_s))
            return answers

        with ThreadPoolExecutor(len(ARMS)) as pool:
            try:
                found = dict(zip(ARMS, pool.map(ask, ARMS), strict=True))
            except BaseException:  # an interrupt among them: the other arm's answer is not waited for
                for worker in workers.values():
                    worker.stop()
                raise
        for arm in ARMS:
            answers = dict(zip(wanted, found[arm], strict=True))
            for cell in cells:
                yield _surveyed(cell, arm, answers[cell.variant, cell.case])

    def replicate(  # noqa: PLR0913  # what one replicate is
        self,
        stage: Stage,
        number: int,
        cells: Sequence[Cell],
        *,
        methods: Sequence[str],
        cell_s: float,
        controls: Mapping[str, float] = CONTROLS,
        seed: int = 0,
        progress: Show,
    ) -> Replicate:
        """Let two fresh workers take turns on cells and controls, about ``cell_s`` on each, or LONGER.

        Raises:
            WorkerError: a worker died, hangs, speaks nonsense, or refuses what it did before.

        """
        start_s = time.monotonic()
        rng = random.Random(f"{seed} {stage} {number}")  # noqa: S311  # an order, not a secret
        subjects: list[tuple[str, Callable[[Arm], Open | Control]]] = [
            *((cell.name, _opener(cell)) for cell in cells),
            *(
                (f"{name} | {method}", _controller(more, method))
                for name, more in controls.items()
                for method in methods
            ),
        ]
        rng.shuffle(subjects)
        timed = []
        with self.workers(f"{stage} {number}") as (workers, _):
            for place, (name, opener) in enumerate(subjects):
                progress(place, len(subjects), f"{stage} {number}: {name}")
                pace = self._open(workers, name, opener, cell_s)
                timed.append(self._visit(workers, name, LONGER[stage] * pace.rounds, pace.visiting, rng))
        return Replicate(stage=stage, number=number, cells=tuple(timed), wall_s=time.monotonic() - start_s)

    def _open(
        self,
        workers: Mapping[Arm, Child],
        name: str,
        opener: Callable[[Arm], Open | Control],
        cell_s: float,
    ) -> "_Pace":
        """Set a cell up in both arms; return how often it is visited."""
        slowest_ns = 0.0
        for arm in ARMS:
            answer = workers[arm].ask(opener(arm), Opened, self.silence_s)
            if isinstance(answer, Refused):
                message = (
                    f"the worker of {arm} could not set up {name}, which it could before: {answer.reason}"
                )
                raise WorkerError(message)
            slowest_ns = max(slowest_ns, answer.launch_ns)
        affordable = int(cell_s * 1e9 / (4 * slowest_ns))
        visiting = QUICK if affordable >= FEWEST_ROUNDS * sum(QUICK) else SLOW
        return _Pace(min(max(affordable // sum(visiting), FEWEST_ROUNDS), MOST_ROUNDS), visiting)

    def _visit(
        self, workers: Mapping[Arm, Child], name: str, rounds: int, visiting: Visiting, rng: random.Random
    ) -> Timed:
        visits: Visits = {arm: [] for arm in ARMS}
        firsts = []
        for _ in range(rounds):
            first = rng.choice(ARMS)
            second = ARMS[first == ARMS[0]]
            firsts.append(first)
            for arm in (first, second, second, first):
                visit = Visit(number=0, launches=visiting.kept, before=visiting.before)
                answer = workers[arm].ask(visit, Visited, self.silence_s)
                if isinstance(answer, Refused):
                    message = f"the worker of {arm} failed while it was timed on {name}: {answer.reason}"
                    raise WorkerError(message)
                if len(answer.samples) != visiting.kept:
                    times = f"{len(answer.samples)} times for {visiting.kept} launches"
                    message = f"the worker of {arm} has {times} of {name}"
                    raise WorkerError(message)
                visits[arm].append(answer.samples)
        return Timed(cell=name, first=tuple(firsts), base=tuple(visits["base"]), head=tuple(visits["head"]))


class _Pace(NamedTuple):
    """How often a cell is visited at the screen, and how each time."""

    rounds: int
    visiting: Visiting


def _opener(cell: Cell) -> Callable[[Arm], Open]:
    return lambda _: Open(number=0, cell=cell)


def _controller(more: float, method: str) -> Callable[[Arm], Control]:
    units = {"base": UNITS, "head": round(UNITS * (1 + more))}
    return lambda arm: Control(number=0, units=units[arm], method=method)


def _surveyed(cell: Cell, arm: Arm, answer: Found | Refused) -> Surveyed:
    if isinstance(answer, Refused):
        return Surveyed(cell=cell, arm=arm, status=answer.status, reason=answer.reason)
    if cell.phase in answer.missing:
        return Surveyed(cell=cell, arm=arm, status="unavailable", reason=answer.missing[cell.phase])
    return Surveyed(cell=cell, arm=arm, status="ok", figures=answer.figures.get(cell.phase, {}))
