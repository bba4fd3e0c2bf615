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
from esbench.gate.decision import Evidence, decide, open_names
from esbench.gate.records import (
    SCHEMA,
    Arm,
    Begin,
    Decision,
    Message,
    Opening,
    Orders,
    Replicate,
    Revision,
    Settings,
    Surveyed,
)
from esbench.gate.worker_process import THREADS, WorkerError, run_workers
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
        settings: the decision rule.
        cores: the cores of workers that run at the same time; None is any core.
        start: starts workers and yields their messages.
    """

    orders: Orders
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
                    if names := open_names(evidence.looks(settings), settings):
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
        now, orders, evidence = datetime.now(UTC), self.orders, self.evidence
        processes = len(self.cores)
        shares = [
            msgspec.structs.replace(orders, process=number, processes=processes)
            for number in range(processes)
        ]
        try:
            for message in self._messages(shares, "survey"):
                if isinstance(message, Surveyed):
                    evidence.surveys.append(message)
        except WorkerError as error:
            arms = ", ".join(
                f"{arm} is {revision.asked}, {revision.commit[:12]}"
                for arm, revision in self.revisions.items()
            )
            raise UserError(f"{error} ({arms})") from error
        return Opening(
            schema=SCHEMA,
            gate_id=new_run_id("gate", now),
            started=now.isoformat(timespec="seconds"),
            seed=orders.seed,
            suite=orders.suite,
            revisions=dict(self.revisions),
            environment=msgspec.structs.replace(self.environment, threads=THREADS),
        )

    def replicates(self, look: int, count: int, names: Collection[str]) -> Iterator[Replicate]:
        """Yield ``count`` replicates of each of these cells and controls, from fresh processes."""
        processes = min(self.settings.processes, count)
        orders = [
            msgspec.structs.replace(
                self.orders,
                look=look,
                process=number,
                processes=processes,
                core=self.cores[number % len(self.cores)],
                names=tuple(names),
                replicates=len(range(number, count, processes)),
            )
            for number in range(processes)
        ]
        for start in range(0, processes, len(self.cores)):
            label = f"look {look + 1}, process {start + 1} of {processes}"
            for message in self._messages(orders[start : start + len(self.cores)], label):
                if isinstance(message, Replicate):
                    yield message

    def _messages(self, orders: Sequence[Orders], label: str) -> Iterator[Message]:
        """Run workers at the same time; yield their messages and show their progress."""
        begun: dict[int, Begin] = {}
        with contextlib.closing(self.start(orders, Path(self.orders.roots["base"]).parent)) as messages:
            for number, message in messages:
                if isinstance(message, Begin):
                    begun[number] = message
                    done = sum(begin.done for begin in begun.values())
                    total = sum(begin.total for begin in begun.values())
                    self.progress(done, total, f"{label}: {message.subject}")
                yield message
