"""Steps of sparse training: masks on dense weights, no faster than dense ones, and products without zeros."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.records import Case, Phase, Work
from esbench.registry import Figure, UnavailableError, Workload, build, variant
from impls import inputs
from impls.training import sparse_products, topology
from impls.training.sparse_products import AbstractSparseLinear
from impls.training.workloads import subjects
from impls.training.workloads.sparse_trainers import (
    NEVER,
    AbstractTrainer,
    BackwardTrainer,
    DenseTrainer,
    ForeachTrainer,
    RigLTorchTrainer,
    ScheduledTrainer,
)
from impls.training.workloads.written_steps import RATE, check_moves, check_steps

OPERATORS = subjects.OPERATORS
STEP = "a training step is measured as a whole; topology updates by themselves, on TopologyUpdate"


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
            "T_end": NEVER,
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


class TrainingWorkload(Workload):
    """A network and its training step."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()
    unavailable: Mapping[Phase, str] = dict.fromkeys(("sample", "forward", "update"), STEP)

    def __init__(self, scheme: AbstractTraining, case: Case, device: str, seed: int) -> None:
        """Make the network, its rows and its optimizer."""
        self._scheme, self._case, self._device, self._seed = scheme, case, device, seed
        self._trainer = self._made(inputs.LEARNING_RATE, NEVER)
        self._x = inputs.Turns(subjects.rows(case, device, seed))
        self.inputs = self._x.items

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"step": lambda: self._trainer.step(self._x.take())}

    @override
    def work(self, phase: Phase) -> Work | None:
        return None  # of a network nobody declares it

    @override
    def enter(self, phase: Phase) -> None:
        self._x.restart()

    @override
    def verify(self) -> None:
        check_steps(self._made(RATE, NEVER), self._plain(), self._x.items, inputs.eps_of(self._case))
        if self._scheme.moves:
            check_moves(self._made(RATE, 2), self._x.items)

    @override
    def confirm(self, phase: Phase) -> None:
        inputs.refill(self._case, self._x.items, self._seed + 5)
        self.verify()

    @override
    def quality(self) -> Iterator[Figure]:
        weights, masks = self._trainer.written, self._trainer.masks
        sizes = [weights[name].numel() for name in weights if name.endswith("weight")]
        kept = [
            int(masks[name].sum()) if name in masks else weights[name].numel()
            for name in weights
            if name.endswith("weight")
        ]
        yield Figure("nonzero_count", "masks", (float(sum(kept)),))
        yield Figure("density_percent", "masks", (100 * sum(kept) / sum(sizes),))
        yield Figure("live_gradient_bytes", "step", (float(self._live_gradient_bytes(NEVER)),))
        if self._scheme.moves:
            most = float(self._live_gradient_bytes(2))
            yield Figure("live_gradient_bytes", "topology step", (most,))
        else:
            reason = "connections never move"
            yield Figure("live_gradient_bytes", "topology step", reason=reason)

    def _made(self, rate: float, delta: int) -> AbstractTrainer:
        return self._scheme.trainer(self._plain(), rate, delta, self._seed)

    def _plain(self) -> nn.Sequential:
        return subjects.network(self._case, self._device, self._seed)

    def _live_gradient_bytes(self, delta: int) -> int:
        """Return the most bytes of gradients that are there at once in the second step, on any device.

        A gradient comes when a tensor's own hook is called; it is gone when ``.grad`` is. Dense gradients
        that are kept beside count as well.
        """
        trainer, most = self._made(inputs.LEARNING_RATE, delta), 0
        trainer.step(self._x.items[0])
        parameters = list(trainer.model.parameters())

        def look(gradient: Tensor) -> None:
            nonlocal most
            held = [*(one.grad for one in parameters if one.grad is not None), *trainer.held]
            most = max(most, gradient.nbytes + sum(one.nbytes for one in held))

        handles = [parameter.register_hook(look) for parameter in parameters]
        trainer.step(self._x.items[1])
        for handle in handles:
            handle.remove()
        return most


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


@build.register(AbstractTraining)
def _training(scheme: AbstractTraining, case: Case, device: str, seed: int) -> Workload:
    return TrainingWorkload(scheme, case, device, seed)
