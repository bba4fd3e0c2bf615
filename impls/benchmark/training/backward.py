"""Suites ``backward`` and ``backward_large``: updates inside the backward pass and after it.

All variants use AdamW, so that there is optimizer state. Compare fused kernels with fused ones, and foreach
with foreach.
"""

import copy
import gc
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import REGISTRY, Suite, suite, variant
from esbench.schema import QUALITY, Case
from esbench.workload import QualityMetric, build
from impls.benchmark import inputs
from impls.benchmark.training.workload import (
    AbstractStepWorkload,
    Trainer,
    add_leaking_hooks,
    check_against_reference,
    check_result,
    check_supported,
    mean_square,
    quality_metric,
    square,
    step_and_zero,
)
from impls.training.optimizer_in_backward import Granularity, OptimizerInBackward, Rule

Kernel = Literal["loop", "foreach", "fused"]

MANY_SMALL, FEW_LARGE, ACTIVATION_HEAVY, TIED = OPERATORS = REGISTRY.reserve(
    "ManySmall", "FewLarge", "ActivationHeavy", "Tied"
)
DEPTHS = {MANY_SMALL: 100, FEW_LARGE: 8, ACTIVATION_HEAVY: 4, TIED: 4}
"""Number of layers of each model, all of the case's shape."""

MODELS = 30
"""Number of models that are created and deleted to count those that leak."""


def adamw(kernel: Kernel, device: str, dtype: torch.dtype = torch.float32) -> Rule:
    """Return a function that builds AdamW with one of torch's kernels."""
    return partial(
        torch.optim.AdamW,
        lr=inputs.LEARNING_RATE,
        weight_decay=0.01,
        foreach=kernel == "foreach",
        fused=kernel == "fused",
        # A captured graph must count steps on the device. That count is float32, so float64 is left out.
        capturable=device == "cuda" and dtype is not torch.float64,
    )


@dataclass(frozen=True)
class AbstractStep(ABC):
    """A way to take a training step."""

    kernel: Kernel = "foreach"

    @abstractmethod
    def trainer(self, model: nn.Module, rule: Rule) -> Trainer:
        """Return a trainer of a model with optimizers by ``rule``."""


@variant(mode="base", baseline=True, operators=OPERATORS, source="torch.optim")
@variant(mode="naive", baseline=True, operators=OPERATORS, kernel="loop", source="torch.optim")
@variant(operators=OPERATORS, kernel="fused", source="torch.optim")
@dataclass(frozen=True)
class StandardStep(AbstractStep):
    """The ordinary optimizer after the backward pass; ``loop`` updates one parameter after another."""

    @override
    def trainer(self, model: nn.Module, rule: Rule) -> Trainer:
        optimizer = rule(list(model.parameters()))
        return Trainer(model, partial(step_and_zero, optimizer), [optimizer])


@variant(operators=OPERATORS, source="lower bound")
@dataclass(frozen=True)
class NoUpdate(AbstractStep):
    """Forward and backward pass only: no step can be faster."""

    @override
    def trainer(self, model: nn.Module, rule: Rule) -> Trainer:
        return Trainer(model, model.zero_grad)


@variant(operators=OPERATORS, source="torch.optim inside Tensor.register_post_accumulate_grad_hook")
@variant(operators=OPERATORS, kernel="fused", source="ours")
@variant(operators=OPERATORS, kernel="foreach", granularity=("bucket", "module"), source="ours")
@variant(operators=OPERATORS, kernel="fused", granularity="bucket", source="ours")
@variant(operators=OPERATORS, kernel="foreach", granularity="bucket", guarded=True, source="ours")
@dataclass(frozen=True)
class StepInBackward(AbstractStep):
    """OptimizerInBackward; ``guarded`` skips layers whose gradients are not finite."""

    kernel: Kernel = "loop"
    granularity: Granularity = "parameter"
    guarded: bool = False

    @override
    def trainer(self, model: nn.Module, rule: Rule) -> Trainer:
        optimizer = OptimizerInBackward(model, rule, self.granularity, skip_nonfinite=self.guarded)
        return Trainer(model, optimizer.step, [optimizer], optimizer.close)


@variant(operators=OPERATORS, source="PyTorch's tutorial on stepping in backward, as usually copied")
@dataclass(frozen=True)
class LeakingHook(AbstractStep):
    """Hooks that reference their own parameters: the garbage collector misses the cycles, so models leak."""

    kernel: Kernel = "loop"

    @override
    def trainer(self, model: nn.Module, rule: Rule) -> Trainer:
        optimizers, _ = add_leaking_hooks(model, rule)
        return Trainer(model, lambda: None, optimizers)


class TiedPair(nn.Module):
    """A layer and its transpose with one weight: x -> GELU(x @ W.T) @ W."""

    def __init__(self, out_channels: int, in_channels: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, dtype=dtype))

    @override
    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.gelu(nn.functional.linear(x, self.weight))
        return nn.functional.linear(inner, self.weight.T)


def stack(case: Case, device: str, seed: int) -> nn.Sequential:
    """Return a case's model with seeded weights that preserve the scale of activations."""
    is_square = case.operator == TIED or case.out_channels == case.in_channels
    check_supported(case.members == 1 and is_square, f"{case.operator} has square layers and one member")
    dtype = inputs.dtype_of(case)
    layers: list[nn.Module] = []
    for _ in range(DEPTHS[case.operator]):
        sizes = case.in_channels, case.out_channels
        if case.operator == TIED:
            layers.append(TiedPair(*sizes[::-1], dtype=dtype))
        else:
            layers.append(nn.utils.skip_init(nn.Linear, *sizes, bias=case.bias, dtype=dtype))
        if case.operator == ACTIVATION_HEAVY:
            layers.append(nn.GELU())
    model, generator = nn.Sequential(*layers), Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if case.operator == MANY_SMALL and values.ndim > 1:
                nn.init.orthogonal_(values, generator=generator)  # Gaussian layers would shrink activations
            else:
                values /= math.sqrt(case.in_channels)
            parameter.copy_(values)
    return model.to(device)


class StepWorkload(AbstractStepWorkload):
    """A training step of a stack of layers: forward, backward and update."""

    reason = "a training step is measured as a whole; forward and backward alone are NoUpdate"

    def __init__(self, scheme: AbstractStep, case: Case, device: str, seed: int) -> None:
        super().__init__(case, device, seed)
        self._scheme, self._model = scheme, stack(case, device, seed)
        self._trainer = scheme.trainer(self._model, adamw(scheme.kernel, device, inputs.dtype_of(case)))

    @override
    def verify(self) -> None:
        self.enter("step")
        parameters = dict(self._model.named_parameters())
        before = copy.deepcopy((self._model, self._slots(), tuple(self.inputs)))
        results: dict[str, Tensor] = {}
        handles = [
            parameter.register_hook(
                lambda gradient, name=name: results.update({f"gradient of {name}": gradient.clone()})
            )
            for name, parameter in parameters.items()
        ]
        for _ in self.inputs:  # AdamW's first step starts without moments
            self.call()
        for handle in handles:
            handle.remove()
        leftover = [name for name, parameter in parameters.items() if parameter.grad is not None]
        check_result(not leftover, f"gradients are left after the step: {', '.join(leftover)}")
        results |= {f"weight {name}": parameter.detach() for name, parameter in parameters.items()}
        results |= {f"moment of {name}": slots["exp_avg"] for name, slots in self._slots().items()}
        check_against_reference(results, reference_steps, *before, bool(self._trainer.optimizers))

    def _slots(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizers' state by the names of the parameters."""
        names: dict[Tensor, str] = {weight: name for name, weight in self._model.named_parameters()}
        optimizers = self._trainer.optimizers
        return {names[weight]: slots for optimizer in optimizers for weight, slots in optimizer.state.items()}

    @override
    def quality(self) -> Iterator[QualityMetric]:
        live_bytes = self._trainer.peak_gradient_bytes(self.inputs[0])
        yield quality_metric("live_gradient_bytes", "hooks", [live_bytes])
        tensors = [value for slots in self._slots().values() for value in slots.values()]
        yield quality_metric("state_bytes", "optimizer", [sum(value.nbytes for value in tensors)])
        alive, alive_after_collection = count_leaked(self._scheme)
        yield quality_metric("alive_count", "gc off", [alive])
        yield quality_metric("alive_count", "after collection", [alive_after_collection])


def reference_steps(
    model: nn.Module,
    state: Mapping[str, Mapping[str, Tensor]],
    rows: Iterable[Tensor],
    learns: bool,  # noqa: FBT001  passed on by check_against_reference()
) -> dict[str, Tensor]:
    """Return the last gradients, and weights and first moments after steps of torch's AdamW."""
    parameters = dict(model.named_parameters())
    optimizer = adamw("loop", "cpu")(list(parameters.values()))
    for name, slots in state.items():
        optimizer.state[parameters[name]].update({slot: value.clone() for slot, value in slots.items()})
    for x in rows:
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        if learns:
            optimizer.step()
    results: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        results |= {f"gradient of {name}": parameter.grad, f"weight {name}": parameter.detach()}  # type: ignore[dict-item]  # there is one
        if learns:
            results[f"moment of {name}"] = optimizer.state[parameter]["exp_avg"]
    return results


def count_leaked(scheme: AbstractStep) -> tuple[int, int]:
    """Return how many of ``MODELS`` deleted models are alive before and after a garbage collection."""

    def create_and_delete_model() -> "weakref.ref[Tensor]":
        model = nn.Linear(4, 4)
        trainer = scheme.trainer(model, adamw(scheme.kernel, "cpu"))
        trainer.step(torch.ones(2, 4))
        trainer.close()
        return weakref.ref(model.weight)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        models = [create_and_delete_model() for _ in range(MODELS)]
        before = sum(model() is not None for model in models)
        gc.collect()
        return before, sum(model() is not None for model in models)
    finally:
        if was_enabled:
            gc.enable()


build.register(AbstractStep, StepWorkload)

CHECKS = tuple(square(operator, 4, 3, "float64") for operator in OPERATORS)
"""For the suite ``check``."""

VARIANTS = ("StandardStep*", "NoUpdate", "StepInBackward*", "LeakingHook")

SMALL = suite(
    Suite(
        name="backward",
        description="training steps that update inside the backward pass: 100 x 64^2, 8 x 1024^2, others",
        cases=(
            square(MANY_SMALL, 64, 32),
            square(FEW_LARGE, 1024, 32),
            square(ACTIVATION_HEAVY, 128, 4096),
            square(TIED, 256, 64),
        ),
        variants=VARIANTS,
        phases=("step", QUALITY),
        cell_s=1.0,
        active=(),
    )
)
suite(
    replace(
        SMALL,
        name="backward_large",
        description="suite backward with 8 x 4096^2: two gigabytes for each variant",
        cases=(square(FEW_LARGE, 4096, 32),),
        cell_s=5.0,
    )
)
