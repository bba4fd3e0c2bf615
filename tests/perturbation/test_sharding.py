"""A population that is split over processes, which talk by gloo."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.spawn import start_processes

import impls
from impls.perturbation.sharding import split

pytestmark = pytest.mark.xdist_group("sharding")  # one worker makes what these tests share

STEPS = 20
Group = ProcessGroup | DeviceMesh | None
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


def train_all(group: Group = None) -> dict[str, dict[str, Tensor]]:
    """Train each scheme, and the first one with ordered sums."""
    results = {name: train(make(scheme), group=group) for name, scheme in SCHEMES.items()}
    results["ordered"] = train(make(SCHEMES["dense"]), group=group, parts=5, ordered=True)
    return results


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises((ValueError, RuntimeError), match=" ") as raised:
        call()
    return str(raised.value)


def refuse(rank: int, group: Group) -> list[str]:
    """Return the messages for ranks that do not fit together, and too few members."""

    def attempt(population: impls.Population | None = None, **options: Any) -> None:
        population = make(SCHEMES["dense"]) if population is None else population
        messages.append(message_of(lambda: impls.shard(population, group, **options)))

    messages: list[str] = []
    attempt(make(SCHEMES["dense"], seed=rank))
    attempt(make(SCHEMES["dense"], members=21 + rank))
    attempt(make(SCHEMES["dense"] if rank else SCHEMES["low rank"]))
    orthogonal = make(SCHEMES["dense"])
    torch.manual_seed(rank)
    nn.init.orthogonal_(orthogonal.layers[0].weight)
    attempt(orthogonal)
    buffered = make(SCHEMES["dense"])
    buffered.model.register_buffer("scale", torch.tensor([1j * rank]))
    attempt(buffered)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "__version__", f"2.{rank}")
        attempt()
    attempt(parts=4 + rank)
    attempt(parts=4, ordered=rank == 0)
    attempt(make(SCHEMES["dense"], members=256, stream="block"))
    attempt(make(SCHEMES["dense"], members=1))
    return messages


def fail(rank: int, group: Group) -> list[str]:
    """Return the messages of one rank's faults within a step."""
    shard = impls.shard(make(SCHEMES["dense"]), group)
    own = len(shard.own_parts[0])
    zeros = torch.zeros(2, 21)

    def raise_on_rank_0(_: impls.PopulationNoise) -> Tensor:
        if rank == 0:
            message = "the environment broke"
            raise ValueError(message)
        return zeros[:, :own]

    messages = [message_of(lambda: shard.update(zeros))]
    messages.append(message_of(lambda: shard.evaluate(0, raise_on_rank_0)))
    messages.append(message_of(lambda: shard.evaluate(3 + rank, lambda _: zeros[:, :own])))
    fitness = shard.evaluate(0, lambda _: torch.full((2, own), 0.0 if rank else torch.nan))
    messages.append(message_of(lambda: impls.centered_ranks(fitness)))
    messages.append(message_of(lambda: shard.update(zeros if rank else fitness)))
    messages.append(message_of(lambda: shard.update(zeros if rank else zeros.T)))
    # A gradient of rank 0 that is not finite in float16.
    narrow = make(SCHEMES["dense"])
    narrow.model.half()
    shard = impls.shard(narrow, group)
    shard.evaluate(0, lambda _: zeros[:, :own])
    zeros[0, 0] = 1e30
    messages.append(message_of(lambda: shard.update(zeros)))
    assert all(parameter.grad is None for parameter in narrow.model.parameters())
    return messages


def lose_rank_1(rank: int, group: Group) -> str:
    """End rank 1 within a step, and return the message of rank 0."""
    shard = impls.shard(make(SCHEMES["dense"]), group)

    def end_on_rank_1(noise: impls.PopulationNoise) -> Tensor:
        if rank == 1:
            os._exit(0)
        return torch.zeros(2, len(noise.members))

    return message_of(lambda: shard.evaluate(0, end_on_rank_1))


def work(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Join the other processes, train and be refused, and store the results."""
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=120)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    results: dict[str, Any] = {"trained": [train_all(init_device_mesh("cpu", (ranks,)))]}
    pair = distributed.new_group([0, 1])
    if rank < 2:
        results["trained"].append(train_all(pair))
        results["refused"], results["failed"] = refuse(rank, pair), fail(rank, pair)
        torch.save(results, folder / f"rank{rank}.pt")
        results["lost"] = lose_rank_1(rank, pair)
    else:
        results["outside"] = message_of(lambda: impls.shard(make(SCHEMES["dense"]), pair))
    torch.save(results, folder / f"rank{rank}.pt")
    os._exit(0)  # a group without rank 1 cannot be ended in order


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results and messages of each of four processes."""
    folder, count = tmp_path_factory.mktemp("ranks"), 4
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload([__name__])  # imported once for all processes
    start_processes(work, (count, port, folder), count, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(count)]


def test_results_do_not_depend_on_the_number_of_ranks(ranks: list[dict[str, Any]]) -> None:
    """Two and four ranks train as one does: equal fitness and weights, and equal bits with an ordered sum."""
    alone = train_all()
    trained = [results for rank in ranks for results in rank["trained"]]
    assert len(trained) == 6
    for results in trained:
        for name, values in results.items():
            for key, value in values.items():
                tolerance = 0.0 if name == "ordered" else 1e-9
                torch.testing.assert_close(value, alone[name][key], rtol=tolerance, atol=tolerance)
    whole = train(make(SCHEMES["dense"]), parts=1)
    for key, value in whole.items():
        torch.testing.assert_close(value, alone["ordered"][key], rtol=1e-9, atol=1e-9)


def test_ranks_that_do_not_fit_together_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Ranks with other seeds, members, schemes, weights, buffers, versions or options get the same error."""
    expected = (
        "seed is 0 on rank 0, 1 on rank 1",
        "members is 21 on rank 0, 22 on rank 1",
        "layer '0' is LowRankSign",
        "the checksum of 0.weight is",
        "the checksum of scale is 0 on rank 0, 2 on rank 1",
        "torch is 2.0 on rank 0, 2.1 on rank 1",
        "parts is 4 on rank 0, 5 on rank 1",
        "ordered is True on rank 0, False on rank 1",
        "256 members cannot be split into 2 parts at multiples of 256: pass stream='philox'",
        "1 members cannot be split into 2 parts at multiples of 1",
    )
    for rank in ranks[:2]:
        for message, text in zip(rank["refused"], expected, strict=True):
            assert text in message
    for number, rank in enumerate(ranks[2:], start=2):
        assert rank["outside"] == f"rank {number} of all ranks is not in the group: call shard() on its ranks"


def test_a_fault_of_one_rank_is_an_error_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """No rank waits for one that raised, has NaN or utilities of another shape, or has ended."""
    on_others = "the gradient of a rank is not finite: its utilities are not"
    expected = (
        ("call evaluate(step, ...) first", "call evaluate(step, ...) first"),
        ("the environment broke", "evaluate raised an error on rank 0"),
        ("it is 3 on rank 0, 4 on rank 1", "it is 3 on rank 0, 4 on rank 1"),
        ("the fitness of 20 of 42 evaluations is not", "the fitness of 20 of 42 evaluations is not"),
        ("a utility is not finite", on_others),
        ("got utilities of shape [21, 2] for 21 members of all ranks: pass [2, 21]", on_others),
        ("the gradient of layer '0' is not finite in", on_others),
    )
    for number, rank in enumerate(ranks[:2]):
        for message, texts in zip(rank["failed"], expected, strict=True):
            assert texts[number] in message
    assert "lost a rank: it has ended, or it took longer than" in ranks[0]["lost"]
    assert "lost" not in ranks[1]


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


def test_weights_that_are_split_over_devices_are_refused(tmp_path: Path) -> None:
    """Each rank needs the whole model: FSDP and tensor parallelism split its weights."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(6, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (1,))))
        with pytest.raises(impls.UnsupportedError, match=r"^weight are split over devices, as by FSDP"):
            impls.perturb(model, impls.Perturbed(), members=4, sigma=0.1)
    finally:
        distributed.destroy_process_group()


def test_schemes_that_learn_from_rows_are_refused() -> None:
    """A shard keeps no rows for the update."""
    with pytest.raises(impls.UnsupportedError, match="learn from the rows"):
        impls.shard(make(impls.DropoutMask(side="out")))
