"""Suite ``rigl``: steps of sparse training, topology updates, and accuracy on digits."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from esbench.registry import Suite, suite, variant
from esbench.schema import QUALITY, Case
from impls.benchmark.training import sparse_digits, topology_update
from impls.benchmark.training.sparse_training import (
    ALPHA,
    CNN,
    MLP,
    MOMENTUM,
    NEVER,
    OPERATORS,
    AbstractTraining,
)
from impls.benchmark.training.workload import Masks, Trainer, case_of, check_supported, square, step_and_zero
from impls.training import sparse_masks, sparse_products
from impls.training.rigl import RigLInBackward, RigLScheduler, entry_state
from impls.training.sparse_products import AbstractSparseLinear

SPARSE_TENSOR_CORES = (8, 0)
"""First compute capability with sparse tensor cores: Ampere."""


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """Return the optimizer of all variants."""
    return SGD(parameters, rate, momentum=MOMENTUM)


def _plain_trainer(model: nn.Sequential, rate: float) -> Trainer:
    optimizer = sgd(model.parameters(), rate)

    def masks() -> Masks:
        layers = model.named_children()
        return {f"{name}.weight": x.mask() for name, x in layers if isinstance(x, AbstractSparseLinear)}

    return Trainer(model, partial(step_and_zero, optimizer), masks=masks)


def _masks_of(rigl: RigLScheduler | RigLInBackward) -> Masks:
    return {layer.name: layer.mask for layer in rigl.layers}


def _scheduled_trainer(
    model: nn.Sequential, rate: float, density: float, delta: int | None, seed: int
) -> Trainer:
    """Return a trainer with RigLScheduler, whose masks are static without ``delta``."""
    optimizer = sgd(model.parameters(), rate)
    scheduler = RigLScheduler(
        model,
        optimizer,
        dense_allocation=density,
        T_end=2 * NEVER,
        delta=delta or NEVER,
        static_topo=delta is None,
        sparsity_distribution="erk",
        ignore_linear_layers=False,
        seed=seed,
    )

    def finish() -> None:
        if scheduler():
            optimizer.step()
        optimizer.zero_grad()

    def dense_gradients() -> list[Tensor]:
        pairs = ((layer.accumulated, layer.pass_gradient) for layer in scheduler.layers)
        return [gradient for pair in pairs for gradient in pair if gradient is not None]

    return Trainer(model, finish, masks=partial(_masks_of, scheduler), copies=dense_gradients)


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class DenseTraining(AbstractTraining):
    """The dense network: masks cannot be faster."""

    moves = False

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> Trainer:
        return _plain_trainer(model, rate)


class MaskedWeights:
    """Masks on the dense weights of a model, and its optimizer, without a scheduler."""

    def __init__(self, model: nn.Sequential, rate: float, density: float, delta: int) -> None:
        self.optimizer, self._delta, self._steps = sgd(model.parameters(), rate), delta, 0
        self.weights = sparse_masks.sparsifiable(model)
        generator = Generator().manual_seed(0)
        self.masks = sparse_masks.random_masks(self.weights, density, "erk", generator)
        self._move_counts = {name: int(ALPHA * int(mask.sum())) for name, mask in self.masks.items()}
        with torch.no_grad():
            for name, mask in self.masks.items():
                self.weights[name].mul_(mask)

    def next_is_update(self) -> bool:
        """Count a step; return True every ``delta`` steps, when masks are updated."""
        self._steps += 1
        return self._steps % self._delta == 0

    def move(self, name: str, gradient: Tensor, choose: Callable[..., Tensor]) -> None:
        """Replace a mask by ``choose(weight, gradient, mask, number of entries that move)``."""
        weight, mask = self.weights[name], self.masks[name]
        after = choose(weight, gradient, mask, self._move_counts[name])
        sparse_masks.zero_changed([weight, *entry_state(self.optimizer, weight)], mask, after)
        mask.copy_(after)


@variant(mode="naive", baseline=True, operators=OPERATORS, source="rigl-torch, rewritten")
@dataclass(frozen=True)
class RigLTorch(AbstractTraining):
    """A copy of every dense gradient in every step, and masks that multiply one tensor at a time."""

    density: float = 0.1

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> Trainer:
        state, gradients = MaskedWeights(model, rate, self.density, delta), dict[str, Tensor]()

        def copy_and_mask(name: str, gradient: Tensor) -> Tensor:
            gradients[name] = gradient.clone()
            return gradient * state.masks[name]

        for name in state.masks:
            state.weights[name].register_hook(partial(copy_and_mask, name))

        @torch.no_grad()
        def finish() -> None:
            if state.next_is_update():
                for name, gradient in gradients.items():
                    state.move(name, gradient, topology_update.drop_and_grow_by_sorting)
            else:
                state.optimizer.step()
                for name, mask in state.masks.items():
                    weight = state.weights[name]
                    for tensor in (*entry_state(state.optimizer, weight), weight):
                        tensor.mul_(mask)
            state.optimizer.zero_grad()

        return Trainer(model, finish, masks=lambda: state.masks, copies=lambda: list(gradients.values()))


@variant(
    operators=OPERATORS, source="Evci et al. 2020: RigLScheduler", by=("scheduler", "foreach", "backward")
)
@dataclass(frozen=True)
class RigL(AbstractTraining):
    """Masks on dense weights: RigLScheduler, masks by foreach calls, or inside the backward pass."""

    by: str = "scheduler"
    density: float = 0.1

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> Trainer:
        if self.by == "foreach":
            return self._foreach(model, rate, delta)
        if self.by == "backward":
            training = RigLInBackward(
                model,
                partial(sgd, rate=rate),
                dense_allocation=self.density,
                T_end=2 * NEVER,
                delta=delta,
                sparsity_distribution="erk",
                ignore_linear_layers=False,
                seed=seed,
            )
            return Trainer(model, training, masks=partial(_masks_of, training))
        return _scheduled_trainer(model, rate, self.density, delta, seed)

    def _foreach(self, model: nn.Sequential, rate: float, delta: int) -> Trainer:
        state = MaskedWeights(model, rate, self.density, delta)
        weights = [state.weights[name] for name in state.masks]
        # As numbers: _foreach_mul_ would multiply bools one tensor at a time.
        factors = [state.masks[name].to(state.weights[name].dtype) for name in state.masks]

        def finish() -> None:
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            if state.next_is_update():
                for name, gradient, factor in zip(state.masks, gradients, factors, strict=True):
                    state.move(name, gradient, lambda *args: sparse_masks.drop_and_grow(*args)[0])
                    factor.copy_(state.masks[name])
            else:
                torch._foreach_mul_(gradients, factors)  # as torch's own optimizers call it
                state.optimizer.step()
            state.optimizer.zero_grad()

        return Trainer(model, finish, masks=lambda: state.masks)


@variant(operators=OPERATORS, source="RigLScheduler with static_topo")
@dataclass(frozen=True)
class Static(AbstractTraining):
    """Masks on dense weights that never move."""

    density: float = 0.1
    moves = False

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> Trainer:
        return _scheduled_trainer(model, rate, self.density, None, seed)


class AbstractProducts(AbstractTraining):
    """Sparse layers with static masks, for linear layers only."""

    moves = False

    @abstractmethod
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        """Return a sparse layer for a dense one, or raise UnavailableError."""

    @override
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> Trainer:
        generator = Generator().manual_seed(seed)
        is_linear = not any(isinstance(module, nn.Conv2d) for module in model)
        check_supported(is_linear, "torch has sparse products of matrices, but not of convolutions")
        layers = [self.layer(x, generator) if isinstance(x, nn.Linear) else x for x in model]
        return _plain_trainer(nn.Sequential(*layers), rate)


def _check_dtype(weight: Tensor, *supported: torch.dtype) -> None:
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in supported)
    reason = f"torch's sparse products support {names}, not {weight.dtype}: see --dtype"
    check_supported(weight.dtype in supported, reason)


@variant(operators=OPERATORS, source="torch.sparse.sampled_addmm", density=(0.1, 0.01))
@dataclass(frozen=True)
class Csr(AbstractProducts):
    """Products with CSR matrices in both directions; no dense gradient is computed."""

    density: float = 0.1

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        _check_dtype(linear.weight, torch.float32, torch.float64)
        nonzero = max(1, round(self.density * linear.weight.numel()))
        return sparse_products.CsrLinear(linear, sparse_masks.random_mask(linear.weight, nonzero, generator))


@variant(operators=OPERATORS, source="Lasby et al. 2023 (constant fan-in)", density=(0.1, 0.01))
@dataclass(frozen=True)
class Condensed(AbstractProducts):
    """The same number of inputs for every output, in a table: sums of weighted columns."""

    density: float = 0.1

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        _check_dtype(linear.weight, torch.float32, torch.float64)
        mask = sparse_products.constant_fan_in_mask(linear.weight, self.density, generator)
        return sparse_products.CondensedLinear(linear, mask)


@variant(operators=OPERATORS, source="ours")
@dataclass(frozen=True)
class Blocks(AbstractProducts):
    """Square active blocks, as a batch of small dense products."""

    density: float = 0.1
    side: int = 32

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        outputs, inputs = linear.weight.shape
        sizes, block = f"{outputs} x {inputs}", f"{self.side} x {self.side}"
        is_divisible = outputs % self.side == inputs % self.side == 0
        check_supported(is_divisible, f"{sizes} channels are not divisible into {block} blocks")
        mask = sparse_products.block_mask(linear.weight, self.density, self.side, generator)
        return sparse_products.BlockLinear(linear, mask, self.side)


@variant(operators=OPERATORS, source="torch.sparse.to_sparse_semi_structured; Mishra et al. 2021")
@dataclass(frozen=True)
class SemiStructured(AbstractProducts):
    """Two of every four inputs: sparse tensor cores of a GPU in the forward pass."""

    @override
    def layer(self, linear: nn.Linear, generator: Generator) -> AbstractSparseLinear:
        weight = linear.weight
        check_supported(weight.is_cuda, "2:4 products need a CUDA GPU with sparse tensor cores")
        capability = torch.cuda.get_device_capability(weight.device)
        present, required = (".".join(map(str, version)) for version in (capability, SPARSE_TENSOR_CORES))
        reason = f"this GPU has no sparse tensor cores: capability {present} < {required}"
        check_supported(capability >= SPARSE_TENSOR_CORES, reason)
        _check_dtype(weight, torch.float16, torch.bfloat16)
        mask = sparse_products.two_of_four_mask(weight, generator)
        return sparse_products.SemiStructuredLinear(linear, mask)


def update(out: int, inp: int, kernel_size: tuple[int, ...] = (), dtype: str = "float32") -> Case:
    """Return a case of a topology update."""
    return case_of(topology_update.OPERATORS[0], out, inp, dtype=dtype, kernel_size=kernel_size)


mlp = partial(square, MLP)


def cnn(width: int, side: int, rows: int, dtype: str = "float32") -> Case:
    """Return a case of a CNN on images of three colors."""
    return case_of(CNN, width, 3, rows, dtype, kernel_size=(3, 3), input_size=(side, side))


DIGITS = case_of(sparse_digits.OPERATORS[0], 10, 64)

CHECKS = (
    update(9, 8, dtype="float64"),
    update(4, 3, (3, 3), dtype="float64"),
    mlp(64, 8, dtype="float64"),
    cnn(16, 8, 4, dtype="float64"),
)
"""For the suite ``check``."""

VARIANTS = (
    *("MaskMultiply", "FullSort", "PartialSelection*"),
    *("DenseTraining", "RigLTorch", "RigL", "RigL(*", "Static", "Csr*", "Condensed*", "Blocks*"),
    *("SemiStructured", "DenseDigits", "Trained(*"),
)

suite(
    Suite(
        name="rigl",
        description="sparse training: topology updates, steps of an MLP and a CNN, accuracy on digits",
        cases=(
            *(update(size, size) for size in (256, 512, 1024, 2048, 4096)),
            update(64, 64, (3, 3)),
            mlp(1024, 128),
            cnn(64, 16, 32),
            DIGITS,
        ),
        variants=VARIANTS,
        phases=("update", "step", QUALITY),
        cell_s=1.0,
        active=(),
        limit_s=300.0,
    )
)
