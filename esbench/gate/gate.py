"""One gate from start to end: survey both revisions, time all cells, confirm the suspects, decide.

Both revisions are served by fresh worker processes. A replicate goes through the cells in a seeded shuffle; a
cell is set up in both arms and then timed in twenty to sixty rounds, each ABBA or BAAB at random, so that one
worker is always idle while the other is timed. Every line is written to disk when it is measured.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.gate.decision import Evidence, cells_to_confirm, decide, timed_cells
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
from esbench.gate.records import (
    CONTROLS,
    ROUND_FACTOR,
    SCHEMA,
    STUDY_CONTROLS,
    Decision,
    Line,
    Opening,
    Replicate,
    Settings,
    Stage,
    Surveyed,
    Timed,
)
from esbench.gate.worker_process import WorkerError, WorkerProcess, start_workers
from esbench.gate.worktree import Revision
from esbench.progress import Show
from esbench.schema import Case, Environment, Phase, Variant
from esbench.store import new_run_id

REPLICATES = "replicates.jsonl"
"""The file of a gate's samples."""
SILENCE_S = 120.0
"""A worker that does not answer for this long is considered hung."""
MIN_ROUNDS, MAX_ROUNDS = 20, 60
"""Rounds of a cell at the screen."""
CONTROL_UNITS = 200
"""Units of control work in base; half a percent is one unit."""

Workers = Mapping[Arm, WorkerProcess]
Hellos = Mapping[Arm, Hello]


class VisitPlan(NamedTuple):
    """Launches of one visit: ``warm`` ones are not timed, they refill the caches; ``timed`` ones are kept."""

    warm: int
    timed: int


FAST_CALLS, SLOW_CALLS = VisitPlan(2, 3), VisitPlan(1, 2)
"""The other worker has just used the core, so the first launches are slow: on a CPU the first takes two to
three times as long as the last, and the second half as long again. Many short visits beat a few long ones,
because a disturbance outlasts a launch: in the same time, sixty rounds of 2 + 3 launches scatter by a fifth
less than twenty of 7 + 8, and no more than a hundred of 1 + 2."""


@dataclass
class Gate:
    """Compares two revisions.

    Attributes:
        orders: what each arm's workers are told.
        revisions: the commit of each arm.
        environment: the machine.
        threads: CPU threads of a worker.
        folder: where the file of samples is written.
        settings: the decision rule.
        seed: of the order of cells and rounds.
        suite: name of the suite that is compared.
        silence_s: how long a worker may take to answer.
        progress: is called with cells done, cells in total and what runs now.
        start: starts one worker per order.
        evidence: what was measured so far.

    """

    orders: Mapping[Arm, Orders]
    revisions: Mapping[Arm, Revision]
    environment: Environment
    threads: int
    folder: Path
    settings: Settings = field(default_factory=Settings)
    seed: int = 0
    suite: str = "gate"
    silence_s: float = SILENCE_S
    progress: Show = lambda *_: None
    start: Callable[[Sequence[Orders]], AbstractContextManager[Workers]] = start_workers
    evidence: Evidence = field(default_factory=Evidence)

    def run(self) -> Decision:
        """Measure what the decision rule asks for, and decide; a worker that fails makes the gate invalid.

        Raises:
            UserError: a revision cannot be measured at all.

        """
        start_s, evidence = time.monotonic(), self.evidence
        others = self.environment.foreign
        invalid = [f"other processes on the GPU at the start: {', '.join(others)}"] if others else []
        with _open_file(self.folder / REPLICATES, "wb") as file, self._survey_workers() as (workers, hellos):
            opening = self._opening(hellos)
            _write(file, opening)
            try:
                self._survey(file, workers, hellos)
                if cells := timed_cells(evidence.surveys):
                    self._replicates(file, hellos, "screen", self.settings.screen, cells)
                    again = cells_to_confirm(evidence, cells, self.settings)
                    self._replicates(file, hellos, "confirm", self.settings.confirm, again)
            except WorkerError as error:
                invalid.append(str(error))
        wall_s = time.monotonic() - start_s
        return decide(opening, evidence, self.settings, wall_s=wall_s, invalid=invalid)

    def study(self, replicates: int) -> Path:
        """Measure replicates of all cells and of controls with injected slowdowns; return the file.

        Raises:
            UserError: the revision cannot be measured at all.
            WorkerError: a worker died, hangs or sends no valid answer.

        """
        with self._survey_workers() as (workers, hellos):
            opening = self._opening(hellos)
            path = self.folder / f"{opening.gate_id}.jsonl"
            with _open_file(path, "xb") as file:
                _write(file, opening)
                self._survey(file, workers, hellos)
                cells = timed_cells(self.evidence.surveys)
                self._replicates(file, hellos, "study", replicates, cells, controls=STUDY_CONTROLS)
        return path

    def _opening(self, hellos: Hellos) -> Opening:
        now = datetime.now(UTC)
        code = {
            arm: {name: one for name, one in hellos[arm].code.items() if name != "esbench"} for arm in ARMS
        }
        return Opening(
            schema=SCHEMA,
            gate_id=new_run_id("gate", now),
            started=now.isoformat(timespec="seconds"),
            seed=self.seed,
            suite=self.suite,
            revisions=dict(self.revisions),
            environment=msgspec.structs.replace(self.environment, threads=self.threads),
            code=code,
            harness=hellos["head"].code.get("esbench", ""),
        )

    # Workers

    @contextmanager
    def workers(self, name: str, *, timed: bool = True) -> Iterator[tuple[Workers, dict[Arm, Hello]]]:
        """Start two fresh workers at once; yield them and what they said first.

        Args:
            name: what they are started for.
            timed: whether both are pinned to the same core.

        Raises:
            WorkerError: one of them cannot serve.

        """
        orders = [
            msgspec.structs.replace(
                self.orders[arm], replicate=name, core=self.orders[arm].core if timed else None
            )
            for arm in ARMS
        ]
        with self.start(orders) as workers:
            hellos = {arm: workers[arm].hello(self.silence_s) for arm in ARMS}
            for arm, hello in hellos.items():
                if hello.protocol != PROTOCOL:
                    message = (
                        f"the gate in {arm} has protocol {hello.protocol}, this one {PROTOCOL}: "
                        f"name another revision with --{arm}"
                    )
                    raise WorkerError(message)
            yield workers, hellos

    @contextmanager
    def _survey_workers(self) -> Iterator[tuple[Workers, dict[Arm, Hello]]]:
        """Start the workers of the survey, and check that each measures its own revision.

        Raises:
            UserError: a revision cannot be loaded, or its packages of variants come from elsewhere.

        """
        try:
            with self.workers("survey", timed=False) as (workers, hellos):
                _check_packages(hellos, {arm: Path(one.root) for arm, one in self.orders.items()})
                yield workers, hellos
        except WorkerError as error:  # failures after the survey are handled where they occur
            revisions = ", ".join(
                f"{arm} is {one.asked}, {one.commit[:12]}" for arm, one in self.revisions.items()
            )
            message = f"{error} ({revisions})"
            raise UserError(message) from error

    # The survey checks correctness and counts

    def _survey(self, file: IO[bytes], workers: Workers, hellos: Hellos) -> None:
        """Check and count every variant in both arms; stop the workers."""
        head = hellos["head"]
        listed, reason = set(head.cells), head.unknown or "the suite of head no longer has it"
        for row in self._surveyed(workers, _all_cells(hellos)):
            # A variant that head still has but no longer measures is a missing row, too.
            if row.arm == "head" and row.status == "ok" and row.cell not in listed:
                row = msgspec.structs.replace(row, status="absent", reason=reason, figures={})  # noqa: PLW2901  # the row as it is stored
            self.evidence.surveys.append(row)
            _write(file, row)
        for worker in workers.values():
            worker.stop()

    def _surveyed(self, workers: Workers, cells: Sequence[Cell]) -> Iterator[Surveyed]:
        """Ask both arms about every variant on every case, in parallel: nothing is timed."""
        wanted: dict[tuple[Variant, Case], list[Phase]] = {}
        for cell in cells:
            phases = wanted.setdefault((cell.variant, cell.case), [])
            phases += [cell.phase] if cell.phase not in phases else []

        def ask(arm: Arm) -> list[Found | Refused]:
            answers = []
            for place, ((variant, case), phases) in enumerate(wanted.items()):
                if arm == "head":  # one progress bar for both arms
                    self.progress(place, len(wanted), f"checking {variant.label(case.operator)}")
                question = Survey(number=0, variant=variant, case=case, phases=tuple(phases))
                answers.append(workers[arm].ask(question, Found, self.silence_s))
            return answers

        with ThreadPoolExecutor(len(ARMS)) as pool:
            try:
                found = dict(zip(ARMS, pool.map(ask, ARMS), strict=True))
            except BaseException:  # also an interrupt: do not wait for the other arm's answer
                for worker in workers.values():
                    worker.stop()
                raise
        for arm in ARMS:
            answers = dict(zip(wanted, found[arm], strict=True))
            for cell in cells:
                yield survey_row(cell, arm, answers[cell.variant, cell.case])

    # Times

    def _replicates(  # noqa: PLR0913  # what a stage consists of
        self,
        file: IO[bytes],
        hellos: Hellos,
        stage: Stage,
        count: int,
        cells: Sequence[Cell],
        *,
        controls: Mapping[str, float] = CONTROLS,
    ) -> None:
        """Measure the replicates of a stage.

        Args:
            file: where each replicate is written.
            hellos: what the workers of the survey said.
            stage: name of the stage.
            count: number of replicates.
            cells: the cells that are timed.
            controls: control -> additional share of work in head.

        """
        methods = sorted({cell.method for cell in _all_cells(hellos)})
        cell_s = max(hello.cell_s for hello in hellos.values())
        subjects: dict[str, Callable[[Arm], Open | Control]] = {cell.name: _opener(cell) for cell in cells}
        for name, more in controls.items():
            subjects |= {f"{name} | {method}": _control_opener(more, method) for method in methods}
        for number in range(1, count + 1):
            start_s = time.monotonic()
            rng = random.Random(f"{self.seed} {stage} {number}")  # noqa: S311  # an order, not a secret
            order = list(subjects.items())
            rng.shuffle(order)
            timed = []
            with self.workers(f"{stage} {number}") as (workers, _):
                for place, (name, opener) in enumerate(order, start=(number - 1) * len(order)):
                    self.progress(place, count * len(order), f"{stage} {number}: {name}")
                    rounds, plan = self._set_up(workers, name, opener, cell_s)
                    timed.append(self._time(workers, name, ROUND_FACTOR[stage] * rounds, plan, rng))
            replicate = Replicate(
                stage=stage, number=number, cells=tuple(timed), wall_s=time.monotonic() - start_s
            )
            self.evidence.replicates.append(replicate)
            _write(file, replicate)

    def _set_up(
        self, workers: Workers, name: str, opener: Callable[[Arm], Open | Control], cell_s: float
    ) -> tuple[int, VisitPlan]:
        """Set a cell up in both arms; return the rounds that fit into ``cell_s`` and the plan of a visit."""
        slowest_ns = 0.0
        for arm in ARMS:
            answer = workers[arm].ask(opener(arm), Opened, self.silence_s)
            if isinstance(answer, Refused):
                message = (
                    f"the worker of {arm} could not set up {name}, which it could before: {answer.reason}"
                )
                raise WorkerError(message)
            slowest_ns = max(slowest_ns, answer.launch_ns)
        launches = int(cell_s * 1e9 / (4 * slowest_ns))
        plan = FAST_CALLS if launches >= MIN_ROUNDS * sum(FAST_CALLS) else SLOW_CALLS
        return min(max(launches // sum(plan), MIN_ROUNDS), MAX_ROUNDS), plan

    def _time(self, workers: Workers, name: str, rounds: int, plan: VisitPlan, rng: random.Random) -> Timed:
        """Time what is set up in both arms, in ABBA or BAAB rounds."""
        visits: dict[Arm, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}
        firsts = []
        for _ in range(rounds):
            first = rng.choice(ARMS)
            second = ARMS[first == ARMS[0]]
            firsts.append(first)
            for arm in (first, second, second, first):
                visit = Visit(number=0, launches=plan.timed, before=plan.warm)
                answer = workers[arm].ask(visit, Visited, self.silence_s)
                if isinstance(answer, Refused):
                    message = f"the worker of {arm} failed while it was timed on {name}: {answer.reason}"
                    raise WorkerError(message)
                if len(answer.samples) != plan.timed:
                    message = (
                        f"the worker of {arm} sent {len(answer.samples)} times for {plan.timed} launches "
                        f"of {name}"
                    )
                    raise WorkerError(message)
                visits[arm].append(answer.samples)
        return Timed(cell=name, first=tuple(firsts), base=tuple(visits["base"]), head=tuple(visits["head"]))


def _opener(cell: Cell) -> Callable[[Arm], Open]:
    return lambda _: Open(number=0, cell=cell)


def _control_opener(more: float, method: str) -> Callable[[Arm], Control]:
    units = {"base": CONTROL_UNITS, "head": round(CONTROL_UNITS * (1 + more))}
    return lambda arm: Control(number=0, units=units[arm], method=method)


def survey_row(cell: Cell, arm: Arm, answer: Found | Refused) -> Surveyed:
    """Return the row of a cell from what a worker answered about its variant."""
    if isinstance(answer, Refused):
        return Surveyed(cell=cell, arm=arm, status=answer.status, reason=answer.reason)
    if cell.phase in answer.missing:
        return Surveyed(cell=cell, arm=arm, status="unavailable", reason=answer.missing[cell.phase])
    return Surveyed(cell=cell, arm=arm, status="ok", figures=answer.figures.get(cell.phase, {}))


def _all_cells(hellos: Hellos) -> list[Cell]:
    """Return the cells of both arms, those of head first.

    Raises:
        UserError: neither arm has any.

    """
    found = list(dict.fromkeys(cell for arm in reversed(ARMS) for cell in hellos[arm].cells))
    if not found:
        raise UserError(hellos["head"].unknown or "the suite has no cell that is timed: name another --suite")
    return found


def _check_packages(hellos: Hellos, roots: Mapping[Arm, Path]) -> None:
    """Check that the packages of variants come from the work trees.

    Raises:
        UserError: a package comes from elsewhere in one arm, or all do.

    """
    own: dict[Arm, set[str]] = {
        arm: {
            name
            for name, folder in hellos[arm].packages.items()
            if folder and Path(folder).is_relative_to(roots[arm].resolve())
        }
        for arm in ARMS
    }
    for arm, other in (ARMS, ARMS[::-1]):
        if lone := own[other] - own[arm]:
            message = (
                f"{', '.join(sorted(lone))} comes from the work tree of {other}, but not from that of {arm}"
            )
            raise UserError(message)
    if not own["head"]:
        message = "no package of variants comes from this repository: name one with --plugin"
        raise UserError(message)


@contextmanager
def _open_file(path: Path, mode: str) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, buffering=0) as file:
        yield file


def _write(file: IO[bytes], line: Line) -> None:
    """Append a line.

    Raises:
        UserError: it cannot be written, for instance to a full disk; the message names the file.

    """
    try:
        file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:  # the error of a write does not name the file
        message = f"{file.name}: {error.strerror or error}"
        raise UserError(message) from error
