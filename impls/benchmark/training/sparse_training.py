"""Training steps of sparse networks: their workload, its reference, and checks of masks.

Steps use SGD with momentum on the mean square of the outputs, and leave no gradient.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import REGISTRY
from esbench.schema import Case
from esbench.workload import QualityMetric, build
from impls.benchmark import inputs
from impls.benchmark.training.topology_update import check_update
from impls.benchmark.training.workload import (
    AbstractStepWorkload,
    Masks,
    Trainer,
    check_against_reference,
    check_result,
    check_supported,
    loss_and_gradients,
    quality_metric,
)
from impls.training.sparse_products import AbstractSparseLinear

MLP, CNN = OPERATORS = REGISTRY.reserve("SparseMLP", "SparseCNN")
MLP_DEPTH = 4
CLASSES = 10

MOMENTUM = 0.9
ALPHA = 0.3
"""Share of the active entries that moves at first."""
NEVER = 10**9
"""Steps between two topology updates where steps without one are measured."""
CHECKED_RATE = 0.1
"""Learning rate of the steps that are compared with the reference."""


def network(case: Case, device: str, seed: int) -> nn.Sequential:
    """Return the case's dense network with seeded weights N(0, 2 / fan in) and biases N(0, 0.01).

    ``SparseMLP``: four linear layers of ``in_channels`` with ReLU. ``SparseCNN``: three 3 x 3 convolutions to
    ``out_channels``, the second with stride 2, a mean over space and a linear layer.
    """
    width, dtype = case.out_channels, inputs.dtype_of(case)
    layers: list[nn.Module] = []
    if case.operator == MLP:
        sizes = f"{case.in_channels} and {width}"
        check_supported(case.in_channels == width, f"all layers of {MLP} have one width, not {sizes}")
        for _ in range(MLP_DEPTH):
            layers += [nn.utils.skip_init(nn.Linear, width, width, dtype=dtype), nn.ReLU()]
        layers.pop()
    else:
        for channels, stride in ((case.in_channels, 1), (width, 2), (width, 1)):
            options = {"stride": stride, "padding": 1, "dtype": dtype}
            layers += [nn.utils.skip_init(nn.Conv2d, channels, width, 3, **options), nn.ReLU()]
        linear = nn.utils.skip_init(nn.Linear, width, CLASSES, dtype=dtype)
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear]
    model, generator = nn.Sequential(*layers), Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = (2 / parameter[0].numel()) ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def dense_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights, with zeros, and of biases, by their names in the dense network."""
    weights: dict[str, Tensor] = {}
    for path, module in model.named_children():
        if isinstance(module, AbstractSparseLinear):
            weights |= {f"{path}.weight": module.dense(), f"{path}.bias": module.bias}
        else:
            weights |= {f"{path}.{name}": value for name, value in module.named_parameters()}
    return {name: value.detach().clone() for name, value in weights.items()}


class AbstractTraining(ABC):
    """A way to train a network; ``moves`` is whether it ever updates its masks."""

    moves = True

    @abstractmethod
    def trainer(self, model: nn.Sequential, rate: float, delta: int, seed: int) -> Trainer:
        """Return a trainer that updates the masks in every ``delta``-th step, or raise UnavailableError."""


class TrainingWorkload(AbstractStepWorkload):
    """A training step of a network."""

    reason = "a training step is measured as a whole; topology updates alone, on TopologyUpdate"

    def __init__(self, scheme: AbstractTraining, case: Case, device: str, seed: int) -> None:
        super().__init__(case, device, seed)
        self._scheme = scheme
        self._trainer = self._new_trainer(inputs.LEARNING_RATE, NEVER)

    @override
    def verify(self) -> None:
        plain = network(self._case, self._device, self._seed)
        eps = inputs.eps_of(self._case)
        check_steps(self._new_trainer(CHECKED_RATE, NEVER), plain, self.inputs, eps)
        if self._scheme.moves:
            check_moves(self._new_trainer(CHECKED_RATE, 2), plain, self.inputs)

    @override
    def quality(self) -> Iterator[QualityMetric]:
        masks, weights = self._trainer.masks(), dense_weights(self._trainer.model)
        sizes = {name: weight.numel() for name, weight in weights.items() if name.endswith("weight")}
        nonzero = sum(int(masks[name].sum()) if name in masks else size for name, size in sizes.items())
        yield quality_metric("nonzero_count", "masks", [nonzero])
        yield quality_metric("density_percent", "masks", [100 * nonzero / sum(sizes.values())])
        yield quality_metric("live_gradient_bytes", "step", [self._peak_gradient_bytes(NEVER)])
        reason = "" if self._scheme.moves else "masks never move"
        peak_bytes = [self._peak_gradient_bytes(2)] if self._scheme.moves else []
        yield quality_metric("live_gradient_bytes", "topology step", peak_bytes, reason)

    def _new_trainer(self, rate: float, delta: int) -> Trainer:
        model = network(self._case, self._device, self._seed)
        return self._scheme.trainer(model, rate, delta, self._seed)

    def _peak_gradient_bytes(self, delta: int) -> int:
        """Return the peak of the second step, which moves entries if ``delta`` is 2."""
        trainer = self._new_trainer(inputs.LEARNING_RATE, delta)
        trainer.step(self.inputs[0])
        return trainer.peak_gradient_bytes(self.inputs[1])


def check_steps(trainer: Trainer, plain: nn.Sequential, rows: Sequence[Tensor], eps: float) -> None:
    """Raise WrongResultError unless trained weights equal the reference's and inactive entries are zero."""
    before, masks = dense_weights(trainer.model), trainer.masks()
    for x in rows:
        trainer.step(x)
    after = dense_weights(trainer.model)
    check_against_reference(after, train_reference, plain, before, masks, tuple(rows), eps=eps)
    check_zeros(masks, masks, after)


def check_moves(trainer: Trainer, plain: nn.Module, rows: Sequence[Tensor]) -> None:
    """Raise WrongResultError unless masks are right in five steps, every second of which moves entries.

    RigL's rule is checked in float64, where rounding makes no scores equal. Some entry must always move.
    """
    has_moved = False
    for number, x in enumerate(itertools.islice(itertools.cycle(rows), 5)):
        weights = dense_weights(trainer.model)
        before = {name: mask.clone() for name, mask in trainer.masks().items()}
        trainer.step(x)
        masks = trainer.masks()
        check_zeros(before, masks, dense_weights(trainer.model))
        has_moved |= not all(torch.equal(mask, before[name]) for name, mask in masks.items())
        if number % 2 and x.dtype is torch.float64:
            _, gradients = loss_and_gradients(plain, weights, x)
            for name, mask in masks.items():
                count = int(ALPHA * int(mask.sum()))
                check_update(weights[name], gradients[name], before[name], mask, count)
    check_result(has_moved, "no entry has moved")


def check_zeros(before: Masks, masks: Masks, weights: Mapping[str, Tensor]) -> None:
    """Raise WrongResultError unless masks have as many entries as before and other weights are zero."""
    for name, mask in masks.items():
        count = int(before[name].sum())
        is_exact = int(mask.sum()) == count and not bool(weights[name][~mask].any())
        check_result(is_exact, f"{name} does not have exactly {count} nonzero entries")


def train_reference(
    plain: nn.Module, weights: Mapping[str, Tensor], masks: Masks, rows: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the weights after SGD with momentum, computed with dense products from the formulas."""
    current = dict(weights)
    velocity = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for x in rows:
        _, gradients = loss_and_gradients(plain, current, x)
        for name, gradient in gradients.items():
            masked = gradient * masks[name] if name in masks else gradient
            velocity[name] = MOMENTUM * velocity[name] + masked
            current[name] = current[name] - CHECKED_RATE * velocity[name]
    return current


build.register(AbstractTraining, TrainingWorkload)
