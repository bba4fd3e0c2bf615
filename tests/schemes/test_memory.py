"""Memory of schemes: bytes of noise, the largest tensor of a step, and results computed piece by piece."""

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from impls.perturbation import noise as streams
from impls.perturbation.member_ops import MAX_SEPARATE_TERMS
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import (
    DropConnect,
    DropoutMask,
    Flipped,
    Hadamard,
    LowRank,
    LowRankSign,
    NoiseTable,
    Orthogonal,
    Permuted,
    Perturbed,
    Regenerated,
    RegeneratedSign,
    SparsePerturbed,
    dropout,
    hadamard,
)
from impls.schemes.dense import DenseNoise
from impls.schemes.lowrank import Factors, RedrawnFactors
from impls.schemes.regenerated import StreamNoise
from impls.verify.reference import compute_update
from tests.scheme_cases import fill, normal


def test_noise_has_the_documented_bytes() -> None:
    """A sign or gate takes one byte; cores and tables are stored once, regenerated noise not at all."""
    members, core = 50, 4 * 16 * 24
    expected: dict[AnyScheme, int] = {
        Perturbed(): members * core,
        Regenerated(): 0,
        LowRank(3): members * 3 * (16 + 24) * 4,
        LowRank(3, regenerated=True): 0,
        SparsePerturbed(2): members * 2 * (16 * 4 + 8),
        Flipped("both", cores=3): members * (16 + 24) + 3 * core,
        Hadamard(): members * (16 + 24) + 4 * 32 * 32,
        NoiseTable(): members * 8 + 16 * core,
        DropoutMask(): members * 24,
        DropoutMask(side="out"): members * 16,
        DropConnect(): members * 16 * 24,
    }
    for scheme, nbytes in expected.items():
        population = perturb(nn.Linear(24, 16, bias=False), scheme, members=members, sigma=1.0)
        assert population.noise_bytes == population.sample(0).nbytes == nbytes, scheme


@dataclass(frozen=True)
class MaterializedLowRank(LowRank):
    """Low-rank noise that is materialized, as found in other implementations."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        return torch.tensordot(utilities, self.dense_noise(noise), dims=1)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes; views count once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without hints
        self.numel = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                stored = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.numel = max(self.numel, min(tensor.numel(), stored))
        return result


def test_no_tensor_has_a_number_for_each_member_and_weight() -> None:
    """The largest tensor of draw, forward and update of low-rank and sparse noise is as large as a factor."""
    members, width = 256, 48

    def largest(scheme: AnyScheme) -> int:
        population = perturb(nn.Linear(width, width), scheme, members=members, sigma=0.1)
        with LargestTensor() as tensors:
            noise = population.sample(0)
            population(torch.ones(members, width), noise=noise)
            population.update(noise, torch.ones(members))
        return tensors.numel

    ranks: dict[AnyScheme, int] = {
        **{LowRank(rank): rank for rank in (1, 4, MAX_SEPARATE_TERMS + 1)},
        **dict.fromkeys((LowRank(1, regenerated=True), LowRankSign(), SparsePerturbed(1)), 1),
        Orthogonal(2): 2,
        SparsePerturbed(3, "sign"): 3,
    }
    for scheme, rank in ranks.items():
        assert largest(scheme) <= 2 * members * width * rank, scheme
    assert largest(MaterializedLowRank(1)) == members * width * width


@pytest.mark.parametrize(
    "scheme",
    [
        Regenerated(),
        Regenerated("uniform"),
        RegeneratedSign(),
        Perturbed("weights"),
        NoiseTable(),
        LowRank(2, regenerated=True),
        Orthogonal(regenerated=True),
        Permuted("both"),
        Hadamard(),
        DropConnect(0.3),
    ],
    ids=str,
)
def test_pieces_do_not_change_results(scheme: AnyScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and updates are the same for any number of members that are computed at a time."""
    model = fill(nn.Conv2d(6, 4, 3, padding=1, groups=2, bias=False))
    x, utilities, results = normal(4 * 7, 6, 5, 5), normal(14), []
    for piece_bytes in (2**30, 3 * 8 * 108, 1):
        monkeypatch.setitem(streams.PIECE_BYTES, "cpu", piece_bytes)
        for module in (dropout, hadamard):
            monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
        population = perturb(model, scheme, members=7, sigma=0.5, antithetic=True, stream="philox")
        noise = population.sample(0)
        results.append((population(x, noise=noise), compute_update(population, noise, utilities)["weight"]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_one_piece_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of noise is freed before the next one is drawn, in the forward and in the update."""
    pieces: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @dataclass(frozen=True)
    class Watched(Regenerated):
        @override
        def dense_noise(self, noise: StreamNoise) -> Tensor:
            alive.append(sum(piece() is not None for piece in pieces))
            values = super().dense_noise(noise)
            pieces.append(weakref.ref(values))
            return values

    monkeypatch.setitem(streams.PIECE_BYTES, "cpu", 2 * 4 * 64)
    population = perturb(nn.Linear(8, 8, bias=False), Watched(), members=9, sigma=0.1, stream="philox")
    noise = population.sample(0)
    alive.clear()
    population(torch.ones(9, 8), noise=noise)
    population.update(noise, torch.ones(9))
    assert alive == [0] * 10


def test_new_noise_overwrites_what_was_drawn_and_nothing_shared() -> None:
    """Noise is drawn into the memory of the given noise; a weight that this noise refers to stays.

    A stream, which noise may keep, holds no memory that did not fit.
    """
    drawn_from: list[streams.NoiseStream] = []

    @dataclass(frozen=True)
    class Referring(Perturbed):
        @override
        def sample(self, weight: Tensor, stream: streams.NoiseStream) -> DenseNoise:
            drawn_from.append(stream)
            values, others = (stream.normal(name, *weight.shape) for name in ("dense", "others"))
            return DenseNoise(values.add_(others), center=weight)

    model = fill(nn.Linear(8, 8))
    weight = model.weight.detach().clone()
    population = perturb(model, Referring(), members=1, sigma=0.1, warn=False)
    noise = population.sample(0)
    values, center, bias = noise.tensors()
    later = population.sample(1, out=noise)
    assert [x.data_ptr() for x in later.tensors()] == [x.data_ptr() for x in (values, center, bias)]
    torch.testing.assert_close(model.weight.detach(), weight, rtol=0, atol=0)
    torch.testing.assert_close(later.tensors(), population.sample(1).tensors(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="drawn by another population"):
        perturb(model, Referring(), members=1, sigma=0.1, warn=False).sample(2, out=later)
    population = perturb(model, Referring(), members=2, sigma=0.1, stream="philox", warn=False)
    population.sample(1, range(1), out=population.sample(0))
    assert not any(stream.memory for stream in drawn_from)


@pytest.mark.parametrize("scheme", [Permuted(cores=2), Flipped(cores=2), NoiseTable()], ids=repr)
def test_new_noise_overwrites_the_cores_or_the_table_of_older_noise(scheme: AnyScheme) -> None:
    """They are shared by members, but drawn for one noise."""
    population = perturb(fill(nn.Linear(300, 8)), scheme, members=4, sigma=0.1, warn=False)
    noise = population.sample(0)
    addresses = {values.data_ptr() for values in noise.tensors()}
    later = population.sample(1, out=noise)
    assert {values.data_ptr() for values in later.tensors()} == addresses
    torch.testing.assert_close(later.tensors(), population.sample(1).tensors(), rtol=0, atol=0)


def test_noise_is_not_drawn_into_memory_of_another_device() -> None:
    """After the model has moved to another device, the memory of older noise does not fit."""
    layer = perturb(fill(nn.Linear(8, 8)), Perturbed(), members=4, sigma=0.1).layers[0]
    noise = layer.sample(0, 0, range(4))
    later = layer.sample(0, 1, range(4), device="meta", out=noise)
    assert isinstance(later.weight, DenseNoise)
    assert isinstance(later.bias, Tensor)
    assert later.weight.values.is_meta
    assert later.bias.is_meta
