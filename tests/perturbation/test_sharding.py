"""A population that is split over processes, which talk by gloo."""

import multiprocessing
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import start_processes

import impls
from impls.perturbation.sharding import split

pytestmark = pytest.mark.xdist_group("sharding")  # one worker makes what these tests share

STEPS = 5
SCHEMES: dict[str, impls.AbstractScheme[Any]] = {
    "dense": impls.Perturbed(),
    "low rank": impls.LowRankSign(),
}


def make(scheme: impls.AbstractScheme[Any], **options: Any) -> impls.Population:
    """Return a population of a small network of the same weights in every process."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    settings: dict[str, Any] = {"members": 21, "sigma": 0.1, "stream": "philox", "antithetic": True}
    return impls.perturb(model, scheme, **{**settings, **options})


def train(population: impls.Population, **options: Any) -> dict[str, Tensor]:
    """Train on fixed data; return the fitness of the last step and the weights."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    shard, model = impls.shard(population, **options), population.model
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    fitness = torch.zeros(0)

    def evaluate(noise: impls.PopulationNoise) -> Tensor:
        y = population(population.rows(x, noise), noise=noise)
        return population.fitness(-(y - 1).square().sum(1), noise)

    for step in range(STEPS):
        fitness = shard.evaluate(step, evaluate)
        optimizer.zero_grad()
        shard.update(impls.centered_ranks(fitness))
        optimizer.step()
    return {"fitness": fitness, **{name: value.detach() for name, value in model.named_parameters()}}


def train_all() -> dict[str, dict[str, Tensor]]:
    """Train each scheme, and the first one with ordered sums."""
    results = {name: train(make(scheme)) for name, scheme in SCHEMES.items()}
    results["ordered"] = train(make(SCHEMES["dense"]), parts=5, ordered=True)
    return results


def refuse(rank: int) -> list[str]:
    """Return the messages for ranks that differ, too few members, and a NaN of one rank."""
    messages = []

    def attempt(call: Callable[[], object]) -> None:
        with pytest.raises(ValueError, match=" ") as raised:
            call()
        messages.append(str(raised.value))

    attempt(lambda: impls.shard(make(SCHEMES["dense"], seed=rank)))
    attempt(lambda: impls.shard(make(SCHEMES["dense"] if rank else SCHEMES["low rank"])))
    moved = make(SCHEMES["dense"])
    with torch.no_grad():
        moved.layers[0].weight[0, 0] += rank
    attempt(lambda: impls.shard(moved))
    attempt(lambda: impls.shard(make(SCHEMES["dense"], members=256, stream="block")))
    shard = impls.shard(make(SCHEMES["dense"]))
    attempt(lambda: shard.update(torch.zeros(2, 21)))
    fitness = shard.evaluate(0, lambda noise: torch.full((2, len(noise.members)), 0.0 if rank else torch.nan))
    attempt(lambda: shard.update(fitness))
    attempt(lambda: shard.update(fitness.T))

    def fail_on_rank_0(noise: impls.PopulationNoise) -> Tensor:
        return torch.zeros(3 if rank == 0 else 2, len(noise.members))

    if rank == 0:
        attempt(lambda: shard.evaluate(0, fail_on_rank_0))
    else:
        messages.append(str(shard.evaluate(0, fail_on_rank_0).isnan().sum().item()))
    # A gradient of rank 0 that is not finite in float16.
    narrow = make(SCHEMES["dense"])
    narrow.model.half()
    shard = impls.shard(narrow)
    shard.evaluate(0, lambda noise: torch.zeros(2, len(noise.members)))
    utilities = torch.zeros(2, 21)
    utilities[0, 0] = 1e30
    attempt(lambda: shard.update(utilities))
    return messages


def work(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Join the other processes, train and be refused, and store the results."""
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=120)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    torch.save((train_all(), refuse(rank)), folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results and messages of each of two processes."""
    folder, count = tmp_path_factory.mktemp("ranks"), 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["impls"])  # imported once for both processes
    start_processes(work, (count, port, folder), count, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(count)]


def test_results_do_not_depend_on_the_number_of_ranks(ranks: list[Any]) -> None:
    """Two ranks train as one does: equal fitness and weights, and equal bits with an ordered sum."""
    alone = train_all()
    for results, _ in ranks:
        for name, values in results.items():
            for key, value in values.items():
                tolerance = 0.0 if name == "ordered" else 1e-9
                torch.testing.assert_close(value, alone[name][key], rtol=tolerance, atol=tolerance)
    whole = train(make(SCHEMES["dense"]), parts=1)
    for key, value in whole.items():
        torch.testing.assert_close(value, alone["ordered"][key], rtol=1e-9, atol=1e-9)


def test_ranks_that_do_not_fit_together_are_refused_on_all_ranks(ranks: list[Any]) -> None:
    """Other seeds, schemes or weights, a missing evaluate and a NaN of one rank are the same error on all."""
    expected = (
        "seed is 0 on rank 0, 1 on rank 1",
        "layer '0' is LowRankSign",
        "the norm of 0.weight is",
        "256 members cannot be split into 2 parts at multiples of 256: pass stream='philox'",
        "call evaluate(step, ...) first",
        "a utility is not finite",
        "got utilities of shape [21, 2] for 21 members of all ranks: pass [2, 21]",
    )
    own = {
        0: ("evaluate returned fitness of shape [3, 10]", "the gradient of layer '0' is not finite in"),
        1: ("20", "the gradient is not finite on some rank"),
    }
    for rank, (_, messages) in enumerate(ranks):
        for text in reversed(own[rank]):
            assert text in messages.pop()
        assert messages == ranks[0][1]
        for message, text in zip(messages, expected, strict=True):
            assert text in message


def test_an_update_after_a_failed_evaluation_is_refused() -> None:
    """The noise of the step before is not used with the utilities of the failed one."""
    shard = impls.shard(make(SCHEMES["dense"]), parts=1)
    zeros = torch.zeros(2, 21)
    shard.evaluate(0, lambda _: zeros)
    with pytest.raises(ValueError, match=r"fitness of shape \[1, 21\] instead of \[2, 21\]"):
        shard.evaluate(1, lambda _: zeros[:1])
    with pytest.raises(ValueError, match="call evaluate"):
        shard.update(zeros)


def test_members_are_split_evenly() -> None:
    """Parts cover the members in order, start at multiples, and go to the ranks in order."""
    population = make(SCHEMES["dense"], members=1000, stream="block")
    assert split(population, 4, 2) == [[range(256), range(256, 512)], [range(512, 768), range(768, 1000)]]
    population = make(SCHEMES["dense"], members=10)
    assert split(population, 3, 3) == [[range(3)], [range(3, 6)], [range(6, 10)]]
    assert [len(parts) for parts in split(population, 5, 3)] == [1, 2, 2]
    with pytest.raises(ValueError, match="2 parts are fewer than 3 ranks"):
        split(population, 2, 3)
    with pytest.raises(ValueError, match=r"10 members cannot be split into 11 parts at multiples of 1$"):
        split(population, 11, 1)


def test_schemes_that_learn_from_rows_are_refused() -> None:
    """A shard keeps no rows for the update."""
    with pytest.raises(impls.UnsupportedError, match="learn from the rows"):
        impls.shard(make(impls.DropoutMask(side="out")))
