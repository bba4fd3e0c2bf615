"""Several ranks of torch.distributed have the same connections."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from tests.rigl_cases import Training, equal, masks, rows

RANKS = 2
RUNS = (("gradient", 100), ("gradient", 200), ("random", 100))
"""Growth, and from where the other rank's rows are."""


def train(rank: int, rendezvous: str, out: str) -> None:
    """Train one rank on rows of its own, in each of the runs; write its first and last masks."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        torch.save(
            [one for growth, rows_from in RUNS for one in trained(rank, growth, rows_from)],
            Path(out) / f"{rank}.pt",
        )
    finally:
        distributed.destroy_process_group()


def trained(rank: int, growth: str, rows_from: int) -> list[list[Tensor]]:
    """Return the masks before and after a training."""
    # Weights of their own, and seeds of their own for masks: only the first rank's may count.
    training = Training(seed=rank, drawn=rank, growth=growth, _momentum=0.9)
    first = masks(training.scheduler)
    for step in range(30):
        training.optimizer.zero_grad()
        if not (rank == 1 and step == 4):  # this rank has no gradient at the first update
            training.model(rows(rows_from * rank + step)).square().mean().backward()
        if training.scheduler():
            training.optimizer.step()
    return [first, masks(training.scheduler)]


def test_two_ranks_end_with_the_same_connections(tmp_path: Path) -> None:
    """Whatever their weights, rows and seeds are, and where one has no gradient; and connections did move."""
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, str(tmp_path / "rendezvous"), str(tmp_path)) for rank in range(RANKS)]
    processes = [context.Process(target=train, args=one) for one in arguments]
    for one in processes:
        one.start()
    for one in processes:
        one.join(300)
    assert [one.exitcode for one in processes] == [0] * RANKS
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS))
    assert all(map(equal, one, other))
    assert len(one) == 2 * len(RUNS)
    assert not any(map(equal, one[::2], one[1::2]))
    assert not equal(one[1], one[3])  # what the other rank sees counts


def test_a_wrapped_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    """DistributedDataParallel or torch.compile around it: a state fits both."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'it'}", rank=0, world_size=1)
    try:
        training = Training()
        training.scheduler.close()
        asked: dict[str, Any] = {"dense_allocation": 0.2, "T_end": 25, "delta": 5}
        compiled: Any = torch.compile(training.model, backend="eager")
        for wrapped in (nn.parallel.DistributedDataParallel(training.model), compiled):
            scheduler = type(training.scheduler)(wrapped, training.optimizer, **asked)
            assert [one.name for one in scheduler.layers] == ["5.weight", "7.weight"]
            scheduler.load_state_dict(scheduler.state_dict())
            scheduler.close()
    finally:
        distributed.destroy_process_group()
