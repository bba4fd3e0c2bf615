"""A case as something to measure: the layer, its inputs, and one call for each phase.

Layers are measured as they are trained with: through :func:`impls.population.perturb`.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.records import Case, Phase
from esbench.registry import UnavailableError, Workload, build, variant
from impls import oracle, truth
from impls.population import PopulationNoise, perturb
from impls.scheme import AbstractScheme, AnyScheme

SIGMA = 0.02
LEARNING_RATE = 1e-6
"""Small, so that thousands of timed steps leave the weights in their range."""


@variant(mode="base", baseline=True)
@dataclass(frozen=True)
class Base:
    """The plain layer on the whole batch, unperturbed: the upper bound.

    Its update is the weight's gradient by ordinary backpropagation (one product), its step an
    ordinary SGD step on the same batch.
    """


@variant(mode="naive", baseline=True)
@dataclass(frozen=True)
class Naive:
    """The plain layer called once for each member, one after another: a sequential implementation."""


def layer(case: Case, device: str, seed: int) -> nn.Module:
    """Make the case's plain layer with seeded weights of the usual size.

    Raises:
        UnavailableError: the operator is not known here.

    """
    place = {"device": torch.device(device), "dtype": getattr(torch, case.dtype)}
    module: nn.Module
    if case.operator == "Linear":
        module = nn.utils.skip_init(nn.Linear, case.in_channels, case.out_channels, case.bias, **place)
    elif case.operator == "Conv2d":
        module = nn.utils.skip_init(
            nn.Conv2d,
            case.in_channels,
            case.out_channels,
            case.kernel_size,
            stride=case.stride,
            padding=case.padding,
            dilation=case.dilation,
            groups=case.groups,
            bias=case.bias,
            padding_mode=case.padding_mode,
            **place,
        )
    else:
        message = f"no operator {case.operator!r} here; there are: Linear, Conv2d"
        raise UnavailableError(message)
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = max(1, parameter[0].numel())
            values = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
            parameter.copy_(values)
    return module


def features(case: Case) -> tuple[int, ...]:
    """Return the shape of one input row."""
    return (case.in_channels, *case.input_size)


def inputs(case: Case, device: str, seed: int) -> Tensor:
    """Make the case's rows, seeded N(0, 1): zeros would run faster on a GPU."""
    generator = Generator(device).manual_seed(seed + 1)
    dtype = getattr(torch, case.dtype)
    return torch.randn(case.rows, *features(case), device=device, dtype=dtype, generator=generator)


class PopulationWorkload(Workload):
    """A scheme on one layer: sample, forward, update, and the step that a training loop takes."""

    def __init__(self, scheme: AnyScheme, case: Case, device: str, seed: int) -> None:
        """Set the layer, the rows and the population up; draw nothing yet."""
        self._case, self._scheme, self._seed = case, scheme, seed
        module = layer(case, device, seed)
        self._population = perturb(
            module, scheme, members=case.members, sigma=SIGMA, antithetic=case.antithetic, seed=seed
        )
        self._x = inputs(case, device, seed)
        sides = 2 if case.antithetic else 1
        self._utilities = torch.randn(
            sides * case.members, device=device, generator=Generator(device).manual_seed(seed + 2)
        )
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        self._steps = itertools.count()
        self._noise: PopulationNoise | None = None

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"sample": self._sample, "forward": self._forward, "update": self._update, "step": self._step}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        return {}

    @property
    @override
    def noise_bytes(self) -> int:
        return self._population.noise_bytes

    @override
    def enter(self, phase: Phase) -> None:
        self._noise = None
        if phase in {"forward", "update"}:
            self._noise = self._population.sample(0)

    @override
    def verify(self) -> None:
        if self._case.dtype == "float64":
            oracle.check(oracle.Setting(self._scheme, self._population.model, features(self._case)))
            return
        # Both ends, and others that a scheme cannot know.
        count = self._case.members
        others = random.Random(f"{self._seed} {self._case.label}").sample(range(count), min(2, count))  # noqa: S311  # a choice, not a secret
        members = sorted({0, count - 1, *others})
        truth.check_forward(self._population, self._x, members)
        truth.check_update(self._population, members)

    def _sample(self) -> PopulationNoise:
        return self._population.sample(next(self._steps))

    def _forward(self) -> Tensor:
        y: Tensor = self._population(self._x, self._entered())
        return y

    def _update(self) -> object:
        self._optimizer.zero_grad()
        # Checking utilities waits for the device, which is not the update's cost.
        self._population.update(self._entered(), self._utilities, validate=False)
        return [parameter.grad for parameter in self._population.model.parameters()]

    def _step(self) -> object:
        self._optimizer.zero_grad()
        noise = self._sample()
        y: Tensor = self._population(self._x, noise)
        repeats = self._case.repeats // 2 if self._case.antithetic else self._case.repeats
        scores = y.float().flatten(1).mean(1).view(-1, repeats, self._case.members).mean(1).flatten()
        utilities = scores - scores.mean()
        self._population.update(noise, utilities, validate=False)
        self._optimizer.step()
        return y

    def _entered(self) -> PopulationNoise:
        if self._noise is None:
            message = "call enter(phase) before the phase's call"
            raise RuntimeError(message)
        return self._noise


class BaseWorkload(Workload):
    """The plain layer on the whole batch."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        """Set the layer and its rows up."""
        self._module, self._x = layer(case, device, seed), inputs(case, device, seed)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)
        self._y: Tensor | None = None

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"forward": self._forward, "update": self._update, "step": self._step}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        return {"sample": "a plain layer draws no noise"}

    @property
    @override
    def noise_bytes(self) -> int:
        return 0

    @override
    def enter(self, phase: Phase) -> None:
        self._y = self._module(self._x) if phase == "update" else None

    @override
    def verify(self) -> None:
        check_plain(self._module, self._x, self._forward())

    @torch.no_grad()
    def _forward(self) -> Tensor:
        y: Tensor = self._module(self._x)
        return y

    def _update(self) -> object:
        if self._y is None:
            message = "call enter(phase) before the phase's call"
            raise RuntimeError(message)
        y = self._y
        return torch.autograd.grad(y, list(self._module.parameters()), y.detach(), retain_graph=True)

    def _step(self) -> object:
        self._optimizer.zero_grad()
        y: Tensor = self._module(self._x)
        y.mean().backward()
        self._optimizer.step()
        return y.detach()


class NaiveWorkload(Workload):
    """The plain layer, one member's rows at a time."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        """Set the layer up and lay the members' rows apart."""
        self._module = layer(case, device, seed)
        rows = inputs(case, device, seed).unflatten(0, (case.repeats, case.members))
        self._rows = rows.transpose(0, 1).contiguous().unbind()

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"forward": self._forward}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        reason = "plain calls draw no noise and learn nothing: see Loop"
        return {"sample": reason, "update": reason, "step": reason}

    @property
    @override
    def noise_bytes(self) -> int:
        return 0

    @override
    def enter(self, phase: Phase) -> None:
        pass

    @override
    def verify(self) -> None:
        check_plain(self._module, self._rows[-1], self._forward())

    @torch.no_grad()
    def _forward(self) -> Tensor:
        module = self._module
        for rows in self._rows:
            y: Tensor = module(rows)
        return y


@torch.no_grad()
def check_plain(module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Hold plain rows to float64: the first and the last, within what batch size may change.

    Raises:
        WrongResultError: they differ.

    """
    ends = [0, -1]
    truth.compare("forward", y[ends], truth.double(module)(x[ends].double()), module(x[ends]))


@build.register(AbstractScheme)
def _population(scheme: AnyScheme, case: Case, device: str, seed: int) -> Workload:
    try:
        return PopulationWorkload(scheme, case, device, seed)
    except ValueError as error:
        raise UnavailableError(str(error)) from error


@build.register
def _base(scheme: Base, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  dispatched on
    return BaseWorkload(case, device, seed)


@build.register
def _naive(scheme: Naive, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  dispatched on
    return NaiveWorkload(case, device, seed)
