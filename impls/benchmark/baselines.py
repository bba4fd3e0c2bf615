"""Baselines: the plain layer on the whole batch (base) and called once per member (naive)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from esbench.schema import Case, Phase, Work
from esbench.workload import QualityMetric, UnavailableError, Workload, build
from impls.benchmark import inputs
from impls.benchmark.minimum_work import Extent
from impls.verify import reference

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
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=inputs.LEARNING_RATE)
        if inputs.is_packed(case):
            self.unavailable = {**self.unavailable, "update": NO_GRADIENT, "step": NO_GRADIENT}
        self._y: Tensor | None = None
        self._gradients: inputs.RotatingBuffers[Tensor] = inputs.RotatingBuffers(())

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
            # One graph and two gradients that are read in turn: each call is one product.
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

    @torch.no_grad()
    def _forward(self) -> Tensor:
        y: Tensor = self._module(self._x.take())
        return y

    def _update(self) -> object:
        if self._y is None:
            raise RuntimeError("call enter(phase) before the phase's call")
        parameters = list(self._module.parameters())
        return torch.autograd.grad(self._y, parameters, self._gradients.take(), retain_graph=True)

    def _step(self) -> object:
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


@torch.no_grad()
def check_plain(module: nn.Module, x: Tensor, y: Tensor, eps: float) -> None:
    """Compare the outputs of the first and the last row with those computed in float64.

    Args:
        module: the plain layer.
        x: input rows.
        y: outputs of these rows.
        eps: spacing at 1 of the numbers in which products are computed.

    Raises:
        WrongResultError: they differ.
    """
    ends = [0, -1]
    exact = reference.to_float64(module)(reference.rows_to_float64(x[ends]))
    reference.check_close("forward", y[ends], exact, module(x[ends]), eps)


@build.register
def _base(scheme: Base, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  dispatched on
    return BaseWorkload(case, device, seed)


@build.register
def _naive(scheme: Naive, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  dispatched on
    return NaiveWorkload(case, device, seed)
