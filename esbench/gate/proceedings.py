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
from esbench.gate.child import Child, WorkerError
from esbench.gate.judgement import Evidence, judge, kept, timed_cells
from esbench.gate.messages import ARMS, Arm, Cell, Hello
from esbench.gate.records import SCHEMA, Judgement, Line, Opening, Settings, Stage
from esbench.gate.referee import Referee
from esbench.gate.study import SURPLUS
from esbench.gate.trees import Revision
from esbench.progress import Show
from esbench.records import Environment
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

    def conduct(self) -> Judgement:
        """Measure as much as the rule asks for, and judge it; a worker that fails makes it invalid.

        Raises:
            UserError: a tree cannot be measured at all.

        """
        start_s, invalid = time.monotonic(), [*_foreign(self.environment)]
        with self._file() as file, self._workers() as (workers, hellos):
            opening = self._opening(hellos)
            _write(file, opening)
            cells = _union(hellos)
            methods = sorted({cell.method for cell in cells})
            cell_s = max(hello.cell_s for hello in hellos.values())
            try:
                for row in self.referee.survey(workers, cells, self.progress):
                    self.evidence.surveys.append(row)
                    _write(file, row)
                for worker in workers.values():
                    worker.stop()
                self._stages(file, methods, cell_s)
            except WorkerError as error:
                invalid.append(str(error))
        wall_s = time.monotonic() - start_s
        return judge(opening, self.evidence, self.settings, wall_s=wall_s, invalid=invalid)

    def study(self, replicates: int) -> Path:
        """Measure so many replicates of all cells and of work of a known surplus; return the file.

        Raises:
            UserError: a tree cannot be measured at all.
            WorkerError: a worker died, hangs or speaks nonsense.

        """
        with self._workers() as (workers, hellos):
            opening = self._opening(hellos)
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{opening.gate_id}.jsonl"
            cells = _union(hellos)
            with path.open("xb", buffering=0) as file:
                _write(file, opening)
                surveys = list(self.referee.survey(workers, cells, self.progress))
                for worker in workers.values():
                    worker.stop()
                for row in surveys:
                    _write(file, row)
                for number in range(1, replicates + 1):
                    found = self.referee.replicate(
                        "study",
                        number,
                        timed_cells(surveys),
                        methods=sorted({cell.method for cell in cells}),
                        cell_s=max(hello.cell_s for hello in hellos.values()),
                        controls=SURPLUS,
                        seed=self.seed,
                        progress=self._share_of(number - 1, replicates),
                    )
                    _write(file, found)
        return path

    def _share_of(self, done: int, total: int) -> Show:
        """Return what shows the progress of one replicate as a part of all of them."""
        return lambda place, cells, what: self.progress(done * cells + place, total * cells, what)

    def _stages(self, file: IO[bytes], methods: Sequence[str], cell_s: float) -> None:
        cells = timed_cells(self.evidence.surveys)
        if not cells:
            return
        stages: tuple[tuple[Stage, int], ...] = (
            ("screen", self.settings.screen),
            ("confirm", self.settings.confirm),
        )
        for stage, count in stages:
            wanted = cells if stage == "screen" else kept(self.evidence, cells, self.settings)
            for number in range(1, count + 1):
                found = self.referee.replicate(
                    stage,
                    number,
                    wanted,
                    methods=methods,
                    cell_s=cell_s,
                    seed=self.seed,
                    progress=self._share_of(number - 1, count),
                )
                self.evidence.replicates.append(found)
                _write(file, found)

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
    def _file(self) -> Iterator[IO[bytes]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / EVIDENCE).open("wb", buffering=0) as file:
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
