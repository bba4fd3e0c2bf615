"""Ways to train a sparse network: masks on dense weights, no faster than those, and sparse products."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import UnavailableError, variant
from impls.benchmark.training import subjects
from impls.benchmark.training.sparse_trainers import (
    NEVER,
    AbstractTrainer,
    BackwardTrainer,
    DenseTrainer,
    ForeachTrainer,
    RigLTorchTrainer,
    ScheduledTrainer,
)
from impls.training import sparse_products, topology
from impls.training.sparse_products import AbstractSparseLinear

OPERATORS = subjects.OPERATORS


class AbstractTraining:
    """A way to train a network."""

    moves = True
    """Whether connections ever move."""

    @abstractmethod
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> AbstractTrainer:
        """Make what takes the steps; connections move at every ``delta``-th.

        Raises:
            UnavailableError: the device, the type or the network is not for it, and why.

        """


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class DenseTraining(AbstractTraining):
    """The dense network, trained plainly: what masks can not beat."""

    moves = False

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> AbstractTrainer:
        return DenseTrainer(model, rate)


@variant(mode="naive", baseline=True, operators=OPERATORS, source="rigl-torch's way, written anew")
@dataclass(frozen=True)
class RigLTorch(AbstractTraining):
    """A copy of every dense gradient in every step, and masks that multiply one tensor at a time."""

    density: float = 0.1

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> AbstractTrainer:
        return RigLTorchTrainer(model, rate, self.density, delta)


@variant(
    operators=OPERATORS, source="Evci et al. 2020: RigLScheduler", by=("scheduler", "foreach", "backward")
)
@dataclass(frozen=True)
class RigL(AbstractTraining):
    """Masks on dense weights: RigLScheduler, all masks in a few calls, or inside the backward pass."""

    by: str = "scheduler"
    density: float = 0.1

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> AbstractTrainer:
        settings = {
            "dense_allocation": self.density,
            "T_end": 2 * NEVER,
            "delta": delta,
            "sparsity_distribution": "erk",
            "seed": seed,
        }
        if self.by == "foreach":
            return ForeachTrainer(model, rate, self.density, delta)
        kind = BackwardTrainer if self.by == "backward" else ScheduledTrainer
        return kind(model, rate, **settings)


@variant(operators=OPERATORS, source="RigLScheduler with static_topo")
@dataclass(frozen=True)
class Static(AbstractTraining):
    """Masks on dense weights that never move."""

    density: float = 0.1
    moves = False

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> AbstractTrainer:
        return ScheduledTrainer(
            model,
            rate,
            dense_allocation=self.density,
            static_topo=True,
            sparsity_distribution="erk",
            seed=seed,
        )


class AbstractProducts(AbstractTraining):
    """Static connections in layers of their own kind, for linear layers alone."""

    moves = False

    @abstractmethod
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        """Make a linear layer sparse.

        Raises:
            UnavailableError: it cannot be made so here, and why.

        """

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> AbstractTrainer:
        generator = Generator().manual_seed(seed)
        if any(isinstance(one, nn.Conv2d) for one in model):
            message = "torch has sparse products of matrices, and none of convolutions"
            raise UnavailableError(message)
        made = (self.layer(one, generator) if isinstance(one, nn.Linear) else one for one in model)
        return DenseTrainer(nn.Sequential(*made), rate)


@variant(operators=OPERATORS, source="torch.sparse.sampled_addmm", density=(0.1, 0.01))
@dataclass(frozen=True)
class Csr(AbstractProducts):
    """Products with matrices in the layout CSR, forwards and backwards; no dense gradient is made."""

    density: float = 0.1

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        wide_enough(linear)
        kept = round(self.density * linear.weight.numel())
        return sparse_products.CsrLinear(linear, scattered(linear, kept, generator))


@variant(operators=OPERATORS, source="Lasby et al. 2023 (constant fan-in)", density=(0.1, 0.01))
@dataclass(frozen=True)
class Condensed(AbstractProducts):
    """As many inputs for every output, in a table: sums of weighted columns."""

    density: float = 0.1

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        wide_enough(linear)
        mask = sparse_products.constant_fan_in(shape_of(linear), self.density, generator)
        return sparse_products.CondensedLinear(linear, mask.to(linear.weight.device))


@variant(operators=OPERATORS, source="ours")
@dataclass(frozen=True)
class Blocks(AbstractProducts):
    """Square blocks of connections, as a batch of small dense products."""

    density: float = 0.1
    side: int = 32

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        shape = shape_of(linear)
        if any(size % self.side for size in shape):
            message = f"{shape[0]} x {shape[1]} channels are no blocks of {self.side} x {self.side}"
            raise UnavailableError(message)
        mask = sparse_products.blocks(shape, self.density, self.side, generator)
        return sparse_products.BlockLinear(linear, mask.to(linear.weight.device), self.side)


@variant(operators=OPERATORS, source="torch.sparse.to_sparse_semi_structured; Mishra et al. 2021")
@dataclass(frozen=True)
class SemiStructured(AbstractProducts):
    """Two of every four inputs, half of all weights: the sparse tensor cores of a GPU, forwards."""

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        weight = linear.weight
        if weight.device.type != "cuda":
            message = "2:4 products need a CUDA GPU with compute capability 8.0 or more"
            raise UnavailableError(message)
        if torch.cuda.get_device_capability(weight.device)[0] < 8:  # noqa: PLR2004  # Ampere
            message = "this GPU has no sparse tensor cores: 2:4 products need compute capability 8.0 or more"
            raise UnavailableError(message)
        if weight.dtype not in {torch.float16, torch.bfloat16}:
            message = f"2:4 products take float16 and bfloat16, not {weight.dtype}: see --dtype"
            raise UnavailableError(message)
        mask = sparse_products.two_of_four(shape_of(linear), generator)
        return sparse_products.SemiStructuredLinear(linear, mask.to(weight.device))


def scattered(linear: nn.Linear, kept: int, generator: Generator) -> Tensor:
    """Return a random mask of a layer."""
    return topology.scattered(linear.weight, max(1, kept), generator)


def shape_of(linear: nn.Linear) -> tuple[int, int]:
    """Return (out, in)."""
    return linear.out_features, linear.in_features


def wide_enough(linear: nn.Linear) -> None:
    """Look whether torch has sparse products of a layer's type.

    Raises:
        UnavailableError: it has none.

    """
    if linear.weight.dtype not in {torch.float32, torch.float64}:
        message = f"torch's sampled_addmm takes float32 and float64, not {linear.weight.dtype}"
        raise UnavailableError(message)
