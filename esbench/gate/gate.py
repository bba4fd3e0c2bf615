"""One run of the gate: survey both revisions, time all cells, confirm the suspects, decide.

Fresh worker processes measure both revisions. A replicate times all cells in random order. A cell is set up
in both arms and then timed in 20 to 60 rounds at the screen, three times as many at the confirmation, each
ABBA or BAAB at random; one worker is idle while the other is timed. Every replicate is written to disk as
soon as it is measured.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.gate.decision import Evidence, decide
from esbench.gate.protocol import Control, Hello, Open, Opened, Orders, Rows, Survey, Visit, Visited
from esbench.gate.records import (
    ARMS,
    CONTROLS,
    ROUND_FACTOR,
    SCHEMA,
    Arm,
    Cell,
    Decision,
    Opening,
    Replicate,
    Revision,
    Settings,
    Stage,
    Surveyed,
    Timed,
    control_name,
)
from esbench.gate.worker_process import WorkerError, WorkerProcess, start_workers
from esbench.progress import Show
from esbench.schema import Case, Environment, Variant
from esbench.store import new_run_id

REPLICATES = "replicates.jsonl"
"""The file of a gate's samples."""
MIN_ROUNDS, MAX_ROUNDS = 20, 60
"""Rounds of a cell at the screen."""
CONTROL_UNITS = 200
"""Units of control work in base; one unit is 0.5 %."""

Workers = Mapping[Arm, WorkerProcess]
Hellos = Mapping[Arm, Hello]
SetUp = Mapping[Arm, Open | Control]
"""The request that sets a cell or a control up in each arm."""


FAST_CALLS, SLOW_CALLS = Visit(launches=3, before=2), Visit(launches=2, before=1)
"""The other worker has just used the core, so the first launches of a visit are slow: on a CPU the first
takes 2 to 3 times as long as the last, and the second 1.5 times. Many short visits are better than a few long
ones, because a disturbance takes longer than a launch: in the same time, 60 rounds of 2 + 3 launches vary by
a fifth less than 20 rounds of 7 + 8, and as much as 100 rounds of 1 + 2."""


@dataclass
class Gate:
    """Compares two revisions of a repository.

    Attributes:
        orders: the settings of both workers, without arm and folder.
        folders: the folder with the files of each arm.
        settings: the decision rule.
        start: starts a worker for each arm.
        cell_s: seconds to spend on a cell, from the suite.
    """

    orders: Orders
    folders: Mapping[Arm, Path]
    revisions: Mapping[Arm, Revision]
    environment: Environment
    settings: Settings = field(default_factory=Settings)
    progress: Show = lambda *_: None
    start: Callable[[Mapping[Arm, Orders]], AbstractContextManager[Workers]] = start_workers
    evidence: Evidence = field(default_factory=Evidence)
    cell_s: float = 0.0

    def run(self, folder: Path) -> Decision:
        """Measure the replicates of the decision rule, write them to a file in the folder, and decide.

        A worker that fails while a cell is timed makes the gate invalid.

        Raises:
            UserError: a revision cannot be measured at all.
        """
        start_s, evidence, settings = time.monotonic(), self.evidence, self.settings
        foreign = self.environment.foreign
        invalid = [f"other processes on the GPU at the start: {', '.join(foreign)}"] if foreign else []
        opening = self.survey()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / REPLICATES).open("wb", buffering=0) as file:

            def measure(stage: Stage, count: int, cells: Sequence[Cell]) -> None:
                for replicate in self.replicates(stage, count, cells):
                    evidence.replicates.append(replicate)
                    file.write(msgspec.json.encode(replicate) + b"\n")

            file.write(msgspec.json.Encoder().encode_lines([opening, *evidence.surveys]))
            try:
                if cells := evidence.timed_cells():
                    measure("screen", settings.screen, cells)
                    measure("confirm", settings.confirm, evidence.cells_to_confirm(settings))
            except WorkerError as error:
                invalid.append(str(error))
        return decide(opening, evidence, settings, wall_s=time.monotonic() - start_s, invalid=invalid)

    @contextmanager
    def _workers(self, *, timed: bool) -> Iterator[tuple[Workers, Hellos]]:
        """Start a fresh worker for each arm; yield the workers and their first messages.

        Both are pinned to one core if ``timed``.
        """
        core = self.orders.core if timed else None
        orders = {
            arm: msgspec.structs.replace(self.orders, arm=arm, root=str(self.folders[arm]), core=core)
            for arm in ARMS
        }
        with self.start(orders) as workers:
            yield workers, {arm: workers[arm].receive(Hello) for arm in ARMS}

    # The survey checks correctness and counts

    def survey(self) -> Opening:
        """Check and count every variant in both arms; return the first line of the file of samples.

        Raises:
            UserError: a worker fails, there are no cells, or a package is not imported from the revision.
        """
        now = datetime.now(UTC)
        try:
            with self._workers(timed=False) as (workers, hellos):
                _check_packages(hellos)
                self.evidence.surveys += self._rows(workers, hellos)
        except WorkerError as error:
            arms = ", ".join(
                f"{arm} is {revision.asked}, {revision.commit[:12]}"
                for arm, revision in self.revisions.items()
            )
            raise UserError(f"{error} ({arms})") from error
        self.cell_s = max(hello.cell_s for hello in hellos.values())
        return Opening(
            schema=SCHEMA,
            gate_id=new_run_id("gate", now),
            started=now.isoformat(timespec="seconds"),
            seed=self.orders.seed,
            suite=self.orders.suite,
            revisions=dict(self.revisions),
            environment=msgspec.structs.replace(self.environment, threads=self.orders.threads),
            code={arm: hello.code for arm, hello in hellos.items()},
            harness=hellos["head"].harness,
        )

    def _rows(self, workers: Workers, hellos: Hellos) -> Iterator[Surveyed]:
        """Yield the row of every cell in both arms, by variant."""
        head = hellos["head"]
        groups: dict[tuple[Variant, Case], list[Cell]] = {}
        for cell in dict.fromkeys((*head.cells, *hellos["base"].cells)):
            groups.setdefault((cell.variant, cell.case), []).append(cell)
        if not groups:
            raise UserError(head.unknown or "the suite has no cell that is timed: name another --suite")
        cells_of_head = set(head.cells)
        absent = head.unknown or "the suite of head no longer has it"
        for number, ((variant, case), cells) in enumerate(groups.items()):
            self.progress(number, len(groups), f"checking {variant.label(case.operator)}")
            for arm in ARMS:  # both work at the same time, because nothing is timed
                workers[arm].send(Survey(tuple(cells)))
            yield from workers["base"].receive(Rows).rows
            for row in workers["head"].receive(Rows).rows:
                # A cell that head could measure but its suite does not contain is a missing row, too.
                is_dropped = row.status == "ok" and row.cell not in cells_of_head
                yield Surveyed(row.cell, "head", "absent", reason=absent) if is_dropped else row

    # Times

    def replicates(
        self, stage: Stage, count: int, cells: Sequence[Cell], controls: Mapping[str, float] = CONTROLS
    ) -> Iterator[Replicate]:
        """Yield replicates of cells and controls; each is timed in a pair of fresh processes."""
        set_ups: dict[str, SetUp] = {cell.name: {"base": Open(cell), "head": Open(cell)} for cell in cells}
        methods = sorted({cell.method for cell in self.evidence.timed_cells()})
        for (control, more), method in itertools.product(controls.items(), methods):
            set_ups[control_name(control, method)] = {
                "base": Control(CONTROL_UNITS, method),
                "head": Control(round(CONTROL_UNITS * (1 + more)), method),
            }
        for number in range(1, count + 1):
            start_s = time.monotonic()
            rng = random.Random(f"{self.orders.seed} {stage} {number}")  # noqa: S311  # an order, not a secret
            order = list(set_ups)
            rng.shuffle(order)
            timed = []
            with self._workers(timed=True) as (workers, _):
                for index, name in enumerate(order, start=(number - 1) * len(order)):
                    self.progress(index, count * len(order), f"{stage} {number}: {name}")
                    timed.append(self._time(workers, name, set_ups[name], ROUND_FACTOR[stage], rng))
            yield Replicate(stage, number, tuple(timed), time.monotonic() - start_s)

    def _time(
        self, workers: Workers, name: str, set_up: SetUp, round_factor: int, rng: random.Random
    ) -> Timed:
        """Set a cell up in both arms, and time it.

        The rounds take about ``round_factor * cell_s`` seconds, and are between ``round_factor`` times
        MIN_ROUNDS and MAX_ROUNDS.
        """
        slowest_ns = max(workers[arm].ask(set_up[arm], Opened).launch_ns for arm in ARMS)

        def rounds_in_time(visit: Visit) -> int:
            """Return how many rounds of four visits take ``cell_s`` seconds."""
            return int(self.cell_s * 1e9 / (4 * (visit.before + visit.launches) * slowest_ns))

        visit = FAST_CALLS if rounds_in_time(FAST_CALLS) >= MIN_ROUNDS else SLOW_CALLS
        rounds = round_factor * min(max(rounds_in_time(visit), MIN_ROUNDS), MAX_ROUNDS)
        visits: dict[Arm, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}
        first_arms = []
        for _ in range(rounds):
            first, second = rng.choice((ARMS, ARMS[::-1]))
            first_arms.append(first)
            for arm in (first, second, second, first):  # a steady drift cancels
                visits[arm].append(workers[arm].ask(visit, Visited).samples)
        return Timed(name, tuple(first_arms), tuple(visits["base"]), tuple(visits["head"]))


def _check_packages(hellos: Hellos) -> None:
    """Raise a UserError unless both workers import the variant packages from their own revision."""
    base, head = (set(hellos[arm].own_packages) for arm in ARMS)
    if not base | head:
        raise UserError("no variant package is part of this repository: name one with --plugin")
    for arm, missing in (("base", head - base), ("head", base - head)):
        if missing:
            raise UserError(
                f"{arm} does not contain the variant package {', '.join(sorted(missing))}, which would be "
                "imported from elsewhere: compare two revisions that both contain it"
            )
