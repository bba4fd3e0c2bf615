"""Run the scaling study: time training steps of a population that is split over processes."""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from esbench.errors import UserError
from esbench.progress import Show
from esbench.registry import REGISTRY, Entry, load, load_installed
from esbench.schema import Environment, Recipe
from esbench.store import new_run_id
from esbench.studies.scaling import FILES, Cell, Link, Study
from esbench.text import pluralize
from esbench.workload import trainer

LIMIT = timedelta(minutes=5)
"""A rank waits at most this long for another one."""
WARM_UP = 2
"""Steps of a cell before the first that is timed."""


@dataclass(frozen=True)
class Plan:
    """What each rank needs to know.

    Attributes:
        device: ``cpu`` or ``cuda``.
        plugins: packages and files of variants to load.
        variant: name of the variant.
        recipe: the network and the training settings; its steps are those of a visit.
        cells: (ranks, members) of each cell.
        rounds: visits to each cell, in this order and in reverse by turns.
    """

    device: str
    plugins: Sequence[str]
    variant: str
    recipe: Recipe
    cells: Sequence[tuple[int, int]]
    rounds: int


def processors(device: str) -> int:
    """Return the number of CPUs that this process may use, or of GPUs."""
    return torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))


def measure(entry: Entry, plan: Plan, link: Link, environment: Environment, progress: Show) -> Study:
    """Measure all cells of a plan for a variant, and return the study.

    Raises:
        UserError: the variant cannot be trained, there are too few GPUs, or a rank raised an error.
    """
    start, start_s = datetime.now(UTC), time.monotonic()
    count, ranks = processors(plan.device), max(count for count, _ in plan.cells)
    scheme_trainer = trainer(entry.scheme)
    if scheme_trainer is None:
        raise UserError(
            f"{plan.variant} cannot be trained: its package registers no esbench.workload.trainer"
        )
    scheme_trainer.prepare(plan.recipe)
    if plan.device == "cuda" and ranks > count:
        raise UserError(
            f"--ranks {ranks}: this machine has {pluralize(count, 'GPU')}, and ranks cannot share one"
        )
    progress(0, 1, f"{ranks} processes, {len(plan.cells)} cells, {plan.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        try:
            start_processes(_work, (ranks, port, Path(folder), plan), ranks, start_method="spawn")
        except ProcessRaisedException as error:
            raise UserError(f"a rank failed: {str(error).strip().splitlines()[-1]}") from error
        records = [torch.load(Path(folder, f"rank{rank}.pt"), weights_only=True) for rank in range(ranks)]
    return Study(
        schema=FILES.schema,
        study_id=new_run_id("scaling", start),
        started=start.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - start_s,
        environment=msgspec.structs.replace(environment, threads=1),
        variant=entry.variant,
        recipe=plan.recipe,
        parameters=records[0]["parameters"],
        processors=count,
        link=link,
        cells=tuple(
            _merge(size, [rank_records["cells"][index] for rank_records in records[: size[0]]])
            for index, size in enumerate(plan.cells)
        ),
    )


def _merge(size: tuple[int, int], ranks: Sequence[dict[str, Any]]) -> Cell:
    """Return a cell of the times of its ranks."""

    def across(choose: Callable[..., float], name: str) -> tuple[tuple[float, ...], ...]:
        rounds = zip(*(rank[name] for rank in ranks), strict=True)
        return tuple(tuple(map(float, map(choose, zip(*visits, strict=True)))) for visits in rounds)

    return Cell(
        ranks=size[0],
        members=size[1],
        steps=across(max, "steps"),
        waits=across(min, "waits"),
        collectives=tuple(ranks[0]["collectives"]),
    )


@dataclass
class Collectives:
    """The collectives that this process has called: bytes of their tensors, and nanoseconds in them."""

    sizes: list[int] = field(default_factory=list)
    waits_ns: list[int] = field(default_factory=list)

    def counted(self, collective: Callable[..., object]) -> Callable[..., object]:
        """Return a collective that is counted."""

        def call(tensor: Tensor, *args: object, **kwargs: object) -> object:
            start = time.perf_counter_ns()
            result = collective(tensor, *args, **kwargs)
            self.waits_ns.append(time.perf_counter_ns() - start)
            self.sizes.append(tensor.nbytes)
            return result

        return call

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the collectives of ``torch.distributed`` while the context lasts."""
        names = ("all_reduce", "broadcast")
        before = {name: getattr(distributed, name) for name in names}
        try:
            for name, collective in before.items():
                setattr(distributed, name, self.counted(collective))
            yield
        finally:
            for name, collective in before.items():
                setattr(distributed, name, collective)


def _work(rank: int, ranks: int, port: int, folder: Path, plan: Plan) -> None:
    """Take part in all cells as one rank, and store its times."""
    torch.set_num_threads(1)
    load_installed()
    for name in plan.plugins:
        load(name)
    (entry,) = REGISTRY.select([plan.variant])
    scheme_trainer = trainer(entry.scheme)
    assert scheme_trainer is not None  # noqa: S101  # the caller has checked it
    device = f"cuda:{rank}" if plan.device == "cuda" else "cpu"
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
    store = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=LIMIT)
    backend = "nccl" if plan.device == "cuda" else "gloo"
    groups = {count: distributed.new_group(range(count), LIMIT, backend) for count, _ in plan.cells}
    steps: list[Callable[[int], None]] = []
    records: list[dict[str, list[Any]]] = []
    parameters = 0
    for count, members in plan.cells:
        records.append({"steps": [], "waits": [], "collectives": []})
        if rank < count:
            recipe = msgspec.structs.replace(plan.recipe, members=members)
            own_step, parameters = scheme_trainer.sharded_step(entry.scheme, recipe, device, groups[count])
            steps.append(own_step)
        else:
            steps.append(lambda _: None)
    for step in steps:
        for number in range(WARM_UP):
            step(number)
    for round_number in range(plan.rounds):
        visits = range(len(plan.cells))
        for index in visits if round_number % 2 == 0 else reversed(visits):
            distributed.barrier()  # idle ranks wait here
            if rank < plan.cells[index][0]:
                first = WARM_UP + round_number * plan.recipe.steps
                _visit(records[index], steps[index], range(first, first + plan.recipe.steps), plan.device)
    torch.save({"cells": records, "parameters": parameters}, folder / f"rank{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def _visit(record: dict[str, list[Any]], step: Callable[[int], None], numbers: range, device: str) -> None:
    """Time some steps of a cell, and add their times, and those of the collectives in them, to its record."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, waits = [], []
    for number in numbers:
        collectives = Collectives()
        with collectives.watched():
            synchronize()
            start = time.perf_counter_ns()
            step(number)
            synchronize()
            times.append(time.perf_counter_ns() - start)
        waits.append(sum(collectives.waits_ns))
        record["collectives"] = collectives.sizes  # the same in every step
    record["steps"].append(times)
    record["waits"].append(waits)
