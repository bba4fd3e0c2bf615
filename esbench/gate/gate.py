"""One run of the gate: survey both revisions, time cells look by look until each is decided, decide.

A worker process imports both revisions. For a replicate it sets a cell up anew in both arms, and times them
in ABBA or BAAB rounds. The addresses that a set-up happens to get change a time, with either
revision and in any process, so set-ups, not processes, are what is repeated. Each look uses fresh processes,
a few at the same time. Every replicate is written to disk as soon as it is measured.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.gate.decision import Evidence, decide
from esbench.gate.protocol import Begin, Hello, Message, Orders
from esbench.gate.records import (
    SCHEMA,
    Arm,
    Decision,
    Opening,
    Replicate,
    Revision,
    Settings,
    Surveyed,
    controls_of,
)
from esbench.gate.worker_process import WorkerError, run_workers
from esbench.progress import Show
from esbench.schema import Environment
from esbench.store import new_run_id

REPLICATES = "replicates.jsonl"
"""The file of a gate's samples."""

Start = Callable[[Sequence[Orders], Path], Generator[tuple[int, Message]]]


@dataclass
class Gate:
    """Compares two revisions of a repository.

    Attributes:
        orders: the settings of all workers.
        folders: the folder with the files of each arm.
        settings: the decision rule.
        cores: the cores of workers that run at the same time; None is any core.
        start: starts workers and yields their messages.
    """

    orders: Orders
    folders: Mapping[Arm, Path]
    revisions: Mapping[Arm, Revision]
    environment: Environment
    settings: Settings = field(default_factory=Settings)
    cores: Sequence[int | None] = (None,)
    progress: Show = lambda *_: None
    start: Start = run_workers
    evidence: Evidence = field(default_factory=Evidence)

    def run(self, folder: Path) -> Decision:
        """Measure until every cell is decided, write all samples to a file in the folder, and decide.

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
            file.write(msgspec.json.Encoder().encode_lines([opening, *evidence.surveys]))
            try:
                for look, count in enumerate(settings.new_replicates):
                    if names := evidence.open_names(settings):
                        for replicate in self.replicates(look, count, names):
                            evidence.add(replicate)
                            file.write(msgspec.json.encode(replicate) + b"\n")
            except WorkerError as error:
                invalid.append(str(error))
        return decide(opening, evidence, settings, wall_s=time.monotonic() - start_s, invalid=invalid)

    def survey(self) -> Opening:
        """Check and count every variant in both arms; return the first line of the file of samples.

        Raises:
            UserError: a worker fails, there are no cells, or a package is not imported from the revision.
        """
        now = datetime.now(UTC)
        hello = None
        try:
            for message in self._messages([self.orders] * len(self.cores), "survey"):
                if isinstance(message, Hello):
                    hello = message
                elif isinstance(message, Surveyed):
                    self.evidence.surveys.append(message)
        except WorkerError as error:
            arms = ", ".join(
                f"{arm} is {revision.asked}, {revision.commit[:12]}"
                for arm, revision in self.revisions.items()
            )
            raise UserError(f"{error} ({arms})") from error
        assert hello is not None  # noqa: S101  # a worker that is done has sent it
        self.evidence.timed = hello.timed
        place = {cell: number for number, cell in enumerate(hello.cells)}
        self.evidence.surveys.sort(key=lambda row: place[row.cell])
        return Opening(
            schema=SCHEMA,
            gate_id=new_run_id("gate", now),
            started=now.isoformat(timespec="seconds"),
            seed=self.orders.seed,
            suite=self.orders.suite,
            revisions=dict(self.revisions),
            environment=msgspec.structs.replace(self.environment, threads=self.orders.threads),
            code=hello.code,
            harness=hello.harness,
        )

    def replicates(self, look: int, count: int, names: Collection[str]) -> Iterator[Replicate]:
        """Yield ``count`` replicates of each of these cells and controls, from fresh processes."""
        timed = self.evidence.timed_cells()
        processes = min(self.settings.processes, count)
        orders = [
            msgspec.structs.replace(
                self.orders,
                look=look,
                process=number,
                cells=tuple(cell for cell in timed if cell.name in names),
                controls={name: more for name, more in controls_of(timed).items() if name in names},
                replicates=len(range(number, count, processes)),
            )
            for number in range(processes)
        ]
        for start in range(0, processes, len(self.cores)):
            batch = orders[start : start + len(self.cores)]
            label = f"look {look + 1}, process {start + 1} of {processes}"
            for message in self._messages(batch, label):
                if isinstance(message, Replicate):
                    yield message

    def _messages(self, orders: Sequence[Orders], label: str) -> Iterator[Message]:
        """Run workers at the same time, each on its core; yield their messages and show their progress."""
        is_timed = any(order.replicates for order in orders)
        orders = [
            msgspec.structs.replace(
                order,
                roots={arm: str(folder) for arm, folder in self.folders.items()},
                core=self.cores[number] if is_timed else None,
                **({} if is_timed else {"process": number, "processes": len(orders)}),
            )
            for number, order in enumerate(orders)
        ]
        states: dict[int, Begin] = {}
        with contextlib.closing(self.start(orders, next(iter(self.folders.values())).parent)) as messages:
            for number, message in messages:
                if isinstance(message, Begin):
                    states[number] = message
                    done, total = (
                        sum(getattr(state, key) for state in states.values()) for key in ("done", "total")
                    )
                    self.progress(done, total, f"{label}: {message.subject}")
                yield message
