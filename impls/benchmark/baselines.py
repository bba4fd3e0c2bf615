"""Baselines: the plain layer on the whole batch (base) and called once per member (naive)."""

import copy
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from esbench.schema import Case, Phase, Work
from esbench.workload import QualityMetric, UnavailableError, Workload, build
from impls.benchmark import inputs
from impls.benchmark.minimum_work import Extent
from impls.verify import reference

CHECKED_NUMBERS = 2**22
"""The update and the step of base are checked if its input has at most this many numbers."""
CHECKED_LEARNING_RATE = 4096.0
"""Large, so that a step changes low-precision weights by more than their rounding."""
NO_GRADIENT = "binarized layers have no gradient by backpropagation"


@variant(mode="base", baseline=True)
@dataclass(frozen=True)
class Base:
    """The plain layer on the whole batch, without perturbation: an upper bound of speed.

    Its update is the gradient by ordinary backpropagation, one product; its step is an ordinary SGD step on
    the same batch.
    """


@variant(mode="naive", baseline=True)
@dataclass(frozen=True)
class Naive:
    """The plain layer called once per member, one after another: a sequential implementation."""


class AbstractPlainWorkload(Workload):
    """A plain layer, which draws no noise."""

    noise_bytes = 0

    @override
    def quality(self) -> Iterable[QualityMetric]:
        raise UnavailableError("a plain layer perturbs nothing: there is no gradient estimate")


class BaseWorkload(AbstractPlainWorkload):
    """The plain layer on the whole batch."""

    inputs: Sequence[Tensor] = ()
    unavailable: Mapping[Phase, str] = {"sample": "a plain layer draws no noise"}

    def __init__(self, case: Case, device: str, seed: int) -> None:
        self._case, self._device, self._seed = case, device, seed
        self._module = inputs.layer(case, device, seed)
        self._x = inputs.RotatingBuffers(inputs.rows(case, device, seed))
        if inputs.is_packed(case):
            self.unavailable = {**self.unavailable, "update": NO_GRADIENT, "step": NO_GRADIENT}
        self._y: Tensor | None = None
        self._gradients: inputs.RotatingBuffers[Tensor] = inputs.RotatingBuffers(())

    @cached_property
    def _optimizer(self) -> torch.optim.SGD:
        """The optimizer of a step. The first one takes a second, because torch then imports its compiler."""
        return torch.optim.SGD(self._module.parameters(), lr=inputs.LEARNING_RATE)

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        phases: Mapping[Phase, Callable[[], object]] = {
            "forward": self._forward,
            "update": self._update,
            "step": self._step,
        }
        return {phase: call for phase, call in phases.items() if phase not in self.unavailable}

    @override
    def work(self, phase: Phase) -> Work | None:
        if inputs.is_network(self._case):
            return None  # not declared for networks
        extent = Extent.of(self._module, self._x.items[0])
        works: Mapping[Phase, Work] = {
            "forward": extent.forward,
            "update": extent.gradient(extent.y_bytes),
            # The gradient of a mean is one number.
            "step": extent.step(extent.forward, extent.gradient(0)),
        }
        return works.get(phase)

    @override
    def enter(self, phase: Phase) -> None:
        if phase != "update":
            self._y, self._gradients = None, inputs.RotatingBuffers(())
        elif self._y is None:
            # The forward pass runs once, so that a call is only the backward pass.
            y: Tensor = self._module(self._x.items[0])
            gradients = inputs.normal(*y.shape, device=self._device, dtype=y.dtype, seed=self._seed + 3)
            self._y, self._gradients = y, inputs.RotatingBuffers(gradients)
        self.inputs = self._gradients.items if phase == "update" else self._x.items
        self._x.restart()
        self._gradients.restart()

    @override
    def verify(self) -> None:
        self.enter("forward")
        check_plain(self._module, self._x.items[0], self._forward(), inputs.eps_of(self._case))

    @override
    def confirm(self, phase: Phase) -> None:
        if phase == "forward":
            inputs.refill(self._case, self._x.items)
            self.verify()
        elif self._x.items[0].numel() > CHECKED_NUMBERS:
            return
        elif phase == "update":
            self._check_update()
        else:
            self._check_step()

    def _check_update(self) -> None:
        """Check the parameters' gradients for a new random gradient of the outputs."""
        y_gradient = self._gradients.items[0]
        y_gradient.normal_(generator=Generator(y_gradient.device).manual_seed(secrets.randbits(62)))
        self._gradients.restart()
        results = self._update()
        names = [name for name, _ in self._module.named_parameters()]
        references = reference_gradients(self._module, self._x.items[0], y_gradient)
        for name, result, expected, rounded in zip(names, results, *references, strict=True):
            reference.check_close(f"update of {name}", result, expected, rounded, inputs.eps_of(self._case))

    def _check_step(self) -> None:
        """Check a whole step on new inputs, with a large learning rate; restore the weights."""
        before, eps = copy.deepcopy(self._module), inputs.eps_of(self._case)
        inputs.refill(self._case, self._x.items)
        self._x.restart()
        (group,) = self._optimizer.param_groups
        group["lr"] = CHECKED_LEARNING_RATE
        try:
            y = self._step()
            x = self._x.items[0]
            check_plain(before, x, y, eps)
            # The loss is the mean of the outputs.
            references = reference_gradients(before, x, torch.full_like(y, 1 / y.numel()))
            weights = zip(before.named_parameters(), self._module.parameters(), *references, strict=True)
            for (name, weight), result, *gradients in weights:
                expected, rounded = (weight.detach() - CHECKED_LEARNING_RATE * g for g in gradients)
                reference.check_close(f"step of {name}", result.detach(), expected, rounded, eps)
        finally:
            group["lr"] = inputs.LEARNING_RATE
            self._module.load_state_dict(before.state_dict())

    @torch.no_grad()
    def _forward(self) -> Tensor:
        y: Tensor = self._module(self._x.take())
        return y

    def _update(self) -> tuple[Tensor, ...]:
        if self._y is None:
            raise RuntimeError("call enter(phase) before the phase's call")
        parameters = list(self._module.parameters())
        return torch.autograd.grad(self._y, parameters, self._gradients.take(), retain_graph=True)

    def _step(self) -> Tensor:
        self._optimizer.zero_grad()
        y: Tensor = self._module(self._x.take())
        y.mean().backward()
        self._optimizer.step()
        return y.detach()


class NaiveWorkload(AbstractPlainWorkload):
    """The plain layer, one member's rows at a time."""

    unavailable: Mapping[Phase, str] = dict.fromkeys(
        ("sample", "update", "step"), "the plain layer draws no noise and has no update: see Loop"
    )

    def __init__(self, case: Case, device: str, seed: int) -> None:
        self._case, self._seed, self._module = case, seed, inputs.layer(case, device, seed)
        self._x = [
            x.unflatten(0, (case.repeats, case.members)).transpose(0, 1).contiguous()
            for x in inputs.rows(case, device, seed)
        ]
        self._rows = inputs.RotatingBuffers(x.unbind() for x in self._x)

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"forward": self._forward}

    @property
    @override
    def inputs(self) -> Sequence[Tensor]:
        return self._x

    @override
    def work(self, phase: Phase) -> Work | None:
        if phase != "forward" or inputs.is_network(self._case):
            return None
        all_members = Extent.of(self._module, self._x[0].flatten(0, 1)).forward
        # A call returns the last member's outputs.
        return msgspec.structs.replace(
            all_members, output_bytes=all_members.output_bytes // self._case.members
        )

    @override
    def enter(self, phase: Phase) -> None:
        self._rows.restart()

    @override
    def verify(self) -> None:
        self.enter("forward")
        check_plain(self._module, self._x[0][-1], self._forward(), inputs.eps_of(self._case))

    @override
    def confirm(self, phase: Phase) -> None:
        inputs.refill(self._case, self._x)
        self.verify()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        module = self._module
        for rows in self._rows.take():
            y: Tensor = module(rows)
        return y


def reference_gradients(
    module: nn.Module, x: Tensor, y_gradient: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the gradients of a layer's parameters, computed in float64 and in the layer's dtype.

    Args:
        module: the plain layer.
        x: input rows.
        y_gradient: gradient of the outputs of these rows.
    """
    module_float64, x_float64 = reference.to_float64(module), reference.rows_to_float64(x)
    expected = torch.autograd.grad(
        module_float64(x_float64), list(module_float64.parameters()), y_gradient.double()
    )
    rounded = torch.autograd.grad(module(x), list(module.parameters()), y_gradient)
    return expected, rounded


@torch.no_grad()
def check_plain(module: nn.Module, x: Tensor, y: Tensor, eps: float) -> None:
    """Compare the outputs of the first and the last row with those computed in float64.

    Args:
        module: the plain layer.
        x: input rows.
        y: outputs of these rows.
        eps: machine epsilon of matrix products.

    Raises:
        WrongResultError: the outputs are not finite or wrong.
    """
    ends = [0, -1]
    expected = reference.to_float64(module)(reference.rows_to_float64(x[ends]))
    reference.check_close("forward", y[ends], expected, module(x[ends]), eps)


@build.register
def _base(scheme: Base, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  dispatched on
    return BaseWorkload(case, device, seed)


@build.register
def _naive(scheme: Naive, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  dispatched on
    return NaiveWorkload(case, device, seed)
