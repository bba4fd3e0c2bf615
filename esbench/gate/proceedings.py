"""A gate from its first line to its last: survey, screen, confirm; everything is on disk as it comes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from esbench.errors import UserError
from esbench.gate.decision import Evidence, judge, kept, timed_cells
from esbench.gate.protocol import ARMS, Arm, Cell, Hello
from esbench.gate.records import SCHEMA, STUDY_CONTROLS, Decision, Line, Opening, Settings, Stage
from esbench.gate.referee import CONTROLS, Referee
from esbench.gate.worker_process import Child, WorkerError
from esbench.gate.worktree import Revision
from esbench.progress import Show
from esbench.schema import Environment
from esbench.store import new_run_id

EVIDENCE = "replicates.jsonl"


@dataclass
class Proceedings:
    """One gate. ``folder`` takes its file; ``evidence`` is what was measured so far."""

    referee: Referee
    revisions: Mapping[Arm, Revision]
    environment: Environment
    threads: int
    folder: Path
    settings: Settings = field(default_factory=Settings)
    seed: int = 0
    suite: str = "gate"
    progress: Show = lambda *_: None
    evidence: Evidence = field(default_factory=Evidence)

    def conduct(self) -> Decision:
        """Measure as much as the rule asks for, and judge it; a worker that fails makes it invalid.

        Raises:
            UserError: a tree cannot be measured at all.

        """
        start_s, invalid, evidence = time.monotonic(), [*_foreign(self.environment)], self.evidence
        with _file(self.folder / EVIDENCE, "wb") as file, self._workers() as (workers, hellos):
            opening = self._opening(hellos)
            _write(file, opening)
            try:
                self._survey(file, workers, hellos)
                if cells := timed_cells(evidence.surveys):
                    self._replicates(file, hellos, "screen", self.settings.screen, cells)
                    again = kept(evidence, cells, self.settings)
                    self._replicates(file, hellos, "confirm", self.settings.confirm, again)
            except WorkerError as error:
                invalid.append(str(error))
        wall_s = time.monotonic() - start_s
        return judge(opening, evidence, self.settings, wall_s=wall_s, invalid=invalid)

    def study(self, replicates: int) -> Path:
        """Measure so many replicates of all cells and of work of a known surplus; return the file.

        Raises:
            UserError: a tree cannot be measured at all.
            WorkerError: a worker died, hangs or speaks nonsense.

        """
        with self._workers() as (workers, hellos):
            opening = self._opening(hellos)
            path = self.folder / f"{opening.gate_id}.jsonl"
            with _file(path, "xb") as file:
                _write(file, opening)
                self._survey(file, workers, hellos)
                cells = timed_cells(self.evidence.surveys)
                self._replicates(file, hellos, "study", replicates, cells, controls=STUDY_CONTROLS)
        return path

    def _survey(self, file: IO[bytes], workers: Mapping[Arm, Child], hellos: Mapping[Arm, Hello]) -> None:
        head = hellos["head"]
        listed, why = set(head.cells), head.unknown or "the suite of head has it no longer"
        for found in self.referee.survey(workers, _union(hellos), self.progress):
            # A variant that is there and no longer measured is a row that is missing all the same.
            is_dropped = found.arm == "head" and found.status == "ok" and found.cell not in listed
            row = (
                msgspec.structs.replace(found, status="absent", reason=why, figures={})
                if is_dropped
                else found
            )
            self.evidence.surveys.append(row)
            _write(file, row)
        for worker in workers.values():
            worker.stop()

    def _replicates(  # noqa: PLR0913  # what a stage is
        self,
        file: IO[bytes],
        hellos: Mapping[Arm, Hello],
        stage: Stage,
        count: int,
        cells: Sequence[Cell],
        *,
        controls: Mapping[str, float] = CONTROLS,
    ) -> None:
        for number in range(1, count + 1):
            found = self.referee.replicate(
                stage,
                number,
                cells,
                methods=sorted({cell.method for cell in _union(hellos)}),
                cell_s=max(hello.cell_s for hello in hellos.values()),
                controls=controls,
                seed=self.seed,
                progress=self._share_of(number - 1, count),
            )
            self.evidence.replicates.append(found)
            _write(file, found)

    def _share_of(self, done: int, total: int) -> Show:
        """Return what shows the progress of one replicate as a part of all of them."""
        return lambda place, cells, what: self.progress(done * cells + place, total * cells, what)

    @contextmanager
    def _workers(self) -> Iterator[tuple[dict[Arm, Child], dict[Arm, Hello]]]:
        """Start the workers of the survey.

        Raises:
            UserError: a tree cannot be loaded, or is not what is measured.

        """
        try:
            with self.referee.workers("survey", timed=False) as (workers, hellos):
                _hold(hellos, {arm: Path(orders.root) for arm, orders in self.referee.orders.items()})
                yield workers, hellos
        except WorkerError as error:  # later ones are met where they happen
            words = ", ".join(
                f"{arm} is {one.asked}, {one.commit[:12]}" for arm, one in self.revisions.items()
            )
            message = f"{error} ({words})"
            raise UserError(message) from error

    def _opening(self, hellos: Mapping[Arm, Hello]) -> Opening:
        now = datetime.now(UTC)
        return Opening(
            schema=SCHEMA,
            gate_id=new_run_id("gate", now),
            started=now.isoformat(timespec="seconds"),
            seed=self.seed,
            suite=self.suite,
            revisions=dict(self.revisions),
            environment=msgspec.structs.replace(self.environment, threads=self.threads),
            code={
                arm: {name: code for name, code in hellos[arm].code.items() if name != "esbench"}
                for arm in ARMS
            },
            harness=hellos["head"].code.get("esbench", ""),
        )


@contextmanager
def _file(path: Path, mode: str) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, buffering=0) as file:
        yield file


def _write(file: IO[bytes], line: Line) -> None:
    """Append a line.

    Raises:
        UserError: the disk is full, for instance; the message names the file.

    """
    try:
        file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:  # one that comes from writing does not know where
        message = f"{file.name}: {error.strerror or error}"
        raise UserError(message) from error


def _union(hellos: Mapping[Arm, Hello]) -> list[Cell]:
    """The cells of both arms, those of head first.

    Raises:
        UserError: neither arm has any.

    """
    found = list(dict.fromkeys(cell for arm in reversed(ARMS) for cell in hellos[arm].cells))
    if not found:
        message = hellos["head"].unknown or "the suite has no cell that is timed"
        raise UserError(message)
    return found


def _hold(hellos: Mapping[Arm, Hello], roots: Mapping[Arm, Path]) -> None:
    """Look whether what is measured is what the trees hold.

    Raises:
        UserError: a package of variants comes from elsewhere in one arm, or none comes from the trees.

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
            message = f"{arm} has no {', '.join(sorted(lone))} of its own in its tree, as {other} has"
            raise UserError(message)
    if not own["head"]:
        message = "no package of variants comes from this repository: name one with --plugin"
        raise UserError(message)


def _foreign(environment: Environment) -> tuple[str, ...]:
    found = environment.foreign
    return (f"other processes on the GPU at the start: {', '.join(found)}",) if found else ()
