"""The measurements of a gate: survey both revisions, then time cells look by look until each is decided.

A worker process imports both revisions, or starts a process for each of them. For a replicate it sets a cell
up anew in both arms, and times them in ABBA or BAAB rounds. The addresses that a set-up happens to get change
a time, with either revision and in any process, so set-ups, not processes, are what is repeated. If each arm
has its own process, the addresses of the processes differ, too, so pairs of processes are repeated. Each look
uses fresh processes, a few at the same time. Every set-up is written to disk as soon as it is measured.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.gate.decision import Evidence, independent_log_ratios, open_names
from esbench.gate.records import (
    SCHEMA,
    Arm,
    Begin,
    Cell,
    Message,
    Opening,
    Orders,
    Replicate,
    Revision,
    Settings,
    Surveyed,
    controls_of,
)
from esbench.gate.worker_process import THREADS, WorkerError, run_workers
from esbench.progress import Show
from esbench.schema import Environment
from esbench.store import new_run_id
from esbench.text import first_names

REPLICATES = "replicates.jsonl"
"""The file of a gate's samples."""

Start = Callable[[Sequence[Orders], Path], Generator[Message]]


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

    def run(self, folder: Path) -> Evidence:
        """Measure until every cell is decided, and write all samples to a file in the folder.

        A worker that fails while a cell is timed makes the gate invalid.

        Raises:
            UserError: a revision cannot be measured at all.
            OSError: the file cannot be written, for example because the disk is full.
        """
        evidence, settings = self.survey(), self.settings
        folder.mkdir(parents=True, exist_ok=True)
        with _naming(folder / REPLICATES) as path, path.open("wb", buffering=0) as file:
            file.write(msgspec.json.Encoder().encode_lines([evidence.opening, *evidence.surveys]))
            for look, count in enumerate(settings.new_replicates):
                new: dict[str, list[Replicate]] = {
                    name: [] for name in open_names(evidence.log_ratios, settings)
                }
                if not new:
                    break
                try:
                    for replicate in self.replicates(look, count, new):
                        file.write(msgspec.json.encode(replicate) + b"\n")
                        new[replicate.cell].append(replicate)
                except WorkerError as error:
                    evidence.invalid.append(str(error))
                    break
                for name, replicates in new.items():
                    evidence.log_ratios[name].append(independent_log_ratios(replicates, settings))
        return evidence

    def survey(self) -> Evidence:
        """Check and count every variant in both arms; return the evidence before anything is timed.

        Raises:
            UserError: a worker fails, there are no cells, or a package is not imported from the revision.
        """
        now, foreign = datetime.now(UTC), ", ".join(self.environment.foreign)
        try:
            messages = self._messages(len(self.cores), "survey")
            surveys = [message for message in messages if isinstance(message, Surveyed)]
        except WorkerError as error:
            arms = (f"{arm} is {rev.asked}, {rev.commit[:12]}" for arm, rev in self.revisions.items())
            raise UserError(f"{error} ({', '.join(arms)})") from error
        cells = timed_cells(surveys)
        opening = Opening(
            schema=SCHEMA,
            gate_id=new_run_id("gate", now),
            started=now.isoformat(timespec="seconds"),
            seed=self.orders.seed,
            suite=self.orders.suite,
            revisions=dict(self.revisions),
            environment=msgspec.structs.replace(self.environment, threads=THREADS),
            separate=self.orders.separate,
        )
        return Evidence(
            opening,
            surveys,
            log_ratios={name: [] for name in (*(cell.name for cell in cells), *controls_of(cells))},
            invalid=[f"other processes on the GPU at the start: {foreign}"] if foreign else [],
        )

    def replicates(self, look: int, count: int, names: Collection[str]) -> Iterator[Replicate]:
        """Measure ``count`` more replicates of these cells and controls; yield one message for each set-up.

        A replicate is one set-up in both arms or, with ``per_pair``, that many in a pair of processes.

        Raises:
            WorkerError: not all were measured.
        """
        per_pair = self.settings.per_pair
        processes, set_ups = (count, count * per_pair) if per_pair else (self.settings.processes, count)
        missing = Counter(dict.fromkeys(names, set_ups))
        orders = {"look": look, "names": tuple(names), "replicates": set_ups}
        for message in self._messages(processes, f"look {look + 1}", **orders):
            if isinstance(message, Replicate):
                missing[message.cell] -= 1
                yield message
        if +missing:
            raise WorkerError(f"not all replicates were measured: {first_names([*+missing])}")

    def _messages(self, processes: int, label: str, **orders: object) -> Iterator[Message]:
        """Run workers with these orders, one on each core at a time; yield their messages, show progress."""
        at_once, folder = len(self.cores), Path(self.orders.roots["base"]).parent
        shares = [
            msgspec.structs.replace(
                self.orders, process=number, processes=processes, core=self.cores[number % at_once], **orders
            )
            for number in range(processes)
        ]
        for start in range(0, processes, at_once):
            with contextlib.closing(self.start(shares[start : start + at_once], folder)) as messages:
                for message in messages:
                    if isinstance(message, Begin):
                        part = f"{label}, process {start + 1} of {processes}"
                        self.progress(message.done, message.total, f"{part}: {message.subject}")
                    yield message


def timed_cells(surveys: Sequence[Surveyed]) -> list[Cell]:
    """Return the cells to time: both arms have them and compute them correctly, and head times them."""
    in_base = {row.cell for row in surveys if row.status == "ok" and row.arm == "base"}
    rows = (row for row in surveys if row.status == "ok" and row.arm == "head" and row.timed)
    return sorted((row.cell for row in rows if row.cell in in_base), key=lambda cell: cell.name)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[Path]:
    """Yield a path, and name it in errors without a file, which those of writing are."""
    try:
        yield path
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
