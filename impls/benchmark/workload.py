"""The workload of a scheme on a layer or network: its inputs, and one call for each phase.

Layers are measured as they are trained, through :func:`impls.perturbation.population.perturb`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.schema import Case, Phase, Work
from esbench.workload import QualityMetric, UnavailableError, Workload, WrongResultError, build
from impls.benchmark import inputs, minimum_work
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.population import ActivationRecord, PopulationNoise, perturb
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.quality import bias, kappa
from impls.quality.kappa import Subject
from impls.quality.metrics import digits_metrics, quality_metrics
from impls.verify import checks, reference

CHECKED_WIDTHS = 16, 64
"""Least and most channels per group of the layer on which a scheme's noise is checked."""

TIMED_NOISE_STEPS = 12
"""The number of steps whose noise is compared in the dtype that is timed."""

REPEATED_CALLS, FEWER_CALLS, FEW_NUMBERS = 32, 5, 2**13
"""How many calls without a pause must have the same result; fewer if rows exceed FEW_NUMBERS numbers."""

MANY_MEMBERS = 126
"""The most members whose outputs are compared one by one, where they cannot be compared together."""

CHECKED_LEARNING_RATE = 64.0
"""Large, so that a step changes low-precision weights by more than their rounding."""


class PopulationWorkload(Workload):
    """A scheme on a layer or network: sample, forward, update, and a training step."""

    unavailable: Mapping[Phase, str] = {}
    inputs: Sequence[Tensor] = ()

    def __init__(self, scheme: AnyScheme, case: Case, device: str, seed: int) -> None:
        """Create the layer, the rows and the population; draw no noise yet."""
        self._case, self._scheme, self._device, self._seed = case, scheme, device, seed
        module = inputs.layer(case, device, seed)
        self._population = perturb(
            module,
            scheme,
            members=case.members,
            sigma=case.sigma,
            antithetic=case.antithetic,
            seed=seed,
            warn=False,  # tables show n_eff
        )
        self._parameters = list(module.parameters())
        self._x = inputs.RotatingBuffers(inputs.rows(case, device, seed))
        sides = 2 if case.antithetic else 1
        # The rows use the seeds seed + 1 and seed + 2.
        self._utilities = inputs.RotatingBuffers(
            inputs.normal(sides * case.members, device=device, dtype=torch.float32, seed=seed + 3)
        )
        # A tensor on the GPU if the stream can read it there: each replay of a captured step advances it.
        counts_on_device = scheme.stream == "philox" and self._x.items[0].is_cuda
        self._step_number: int | Tensor = (
            torch.zeros((), dtype=torch.int64, device=device) if counts_on_device else 0
        )
        self._noise: PopulationNoise | None = None
        self._record: ActivationRecord | None = None

    @cached_property
    def _optimizer(self) -> torch.optim.SGD:
        """The optimizer of a step. The first one takes a second, because torch then imports its compiler."""
        return torch.optim.SGD(self._population.model.parameters(), lr=inputs.LEARNING_RATE)

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"sample": self._sample, "forward": self._forward, "update": self._update, "step": self._step}

    @property
    @override
    def noise_bytes(self) -> int:
        return self._population.noise_bytes

    @override
    def work(self, phase: Phase) -> Work | None:
        if inputs.is_network(self._case):
            return None  # not declared for networks
        return minimum_work.perturbed(
            self._scheme, self._case, self._population.model, self._x.items[0], phase
        )

    @override
    def enter(self, phase: Phase) -> None:
        self._record = None
        if phase not in {"forward", "update"}:
            self._noise = None
        elif self._noise is None:
            self._noise = self._population.sample(0)
        self._population.model.zero_grad()
        if phase == "update":
            _, self._record = self._population.call_with_activations(
                self._x.items[0], noise=self._current_noise()
            )
        buffers = {"forward": self._x.items, "update": self._utilities.items, "step": self._x.items}
        self.inputs = buffers.get(phase, ())
        self._step_number *= 0  # in place: captured graphs read the tensor
        self._x.restart()
        self._utilities.restart()

    @override
    def verify(self) -> None:
        if self._case.dtype == "float64":  # a small case of the suite "check"
            model, features = self._population.model, inputs.features(self._case)
            bits = self._case.in_channels if inputs.is_packed(self._case) else None
            checks.check(checks.Setting(self._scheme, model, features, bits=bits))
            self._check_noise_structure()
            self._check_step(range(self._case.members))
            return
        x, eps = self._x.items[0], inputs.eps_of(self._case)
        for check in (reference.check_forward, reference.check_update):
            check(self._population, x, reference.random_members(self._case.members), eps)

    @override
    def confirm(self, phase: Phase) -> None:
        count, eps = self._case.members, inputs.eps_of(self._case)
        if phase == "sample":
            checks.check_timed_moments(self._population)
            if not inputs.is_network(self._case):
                layer, features = self._layer_for_noise_checks(), inputs.features(self._case)
                checks.check_independence(checks.Setting(self._scheme, layer, features), TIMED_NOISE_STEPS)
                self._check_noise_structure()
        elif phase == "forward":
            inputs.refill(self._case, self._x.items)
            x, is_affine = self._x.items[0], reference.is_affine_layer(self._population)
            members = reference.random_members(count, 2 if is_affine else MANY_MEMBERS)
            reference.check_forward(self._population, x, members, eps, self._forward_often)
            if is_affine:
                reference.check_all_outputs(self._population, x, eps)
        elif phase == "update":
            x = self._x.items[0]
            reference.check_update(self._population, x, range(count), eps, self._update_gradients)
        elif phase == "step":
            self._check_step(reference.random_members(count))

    @override
    def quality(self) -> Iterator[QualityMetric]:
        # A new model: timed steps have changed the weights of the other one.
        model, case = inputs.layer(self._case, self._device, self._seed), self._case
        subject = Subject(model, self._scheme, case.members, case.sigma, self._seed)
        yield from quality_metrics(subject)
        if inputs.is_network(case):
            yield from digits_metrics(subject)

    def _update_gradients(self, utilities: Tensor) -> Mapping[str, Tensor]:
        """Write utilities into the inputs of the timed call, run it, and return its gradients."""
        self._utilities.items[0].copy_(utilities.view(-1))
        names = [name for name, _ in self._population.model.named_parameters()]

        def update() -> dict[str, Tensor]:
            self._utilities.restart()
            gradients = zip(names, self._update(), strict=True)
            return {name: gradient for name, gradient in gradients if gradient is not None}

        return self._call_often("update", update)

    def _check_noise_structure(self) -> None:
        """Check steps and kappa of a layer's noise; kappa without a bias, whose noise is independent."""
        bias.check_steps(self._scheme, self._layer_for_noise_checks())
        kappa.check_kappa(self._scheme, self._layer_for_noise_checks(bias=False))

    def _layer_for_noise_checks(self, **options: bool) -> nn.Module:
        """Return the case's layer with as many channels per group as :data:`CHECKED_WIDTHS` allows.

        A narrow layer may have a bias that vanishes at useful widths: members that permute w channels of one
        shared weight never change their sum, a bias of 1 / (w - 1). A wide one would take long.
        """
        least, most = (width * self._case.groups for width in CHECKED_WIDTHS)
        widths = {
            name: min(max(least, getattr(self._case, name)), most) for name in ("out_channels", "in_channels")
        }
        case = msgspec.structs.replace(self._case, **widths, **options)
        return inputs.layer(case, self._device, self._seed)

    def _check_step(self, members: Iterable[int]) -> None:
        """Check a whole step on new inputs, with a random step number and a large learning rate."""
        inputs.refill(self._case, self._x.items)
        self._x.restart()

        def take_step(step: int) -> object:
            self._step_number *= 0  # in place, see enter()
            self._step_number += step
            return self._step()

        (group,) = self._optimizer.param_groups
        group["lr"] = CHECKED_LEARNING_RATE
        try:
            x, eps = self._x.items[0], inputs.eps_of(self._case)
            reference.check_step(self._population, x, members, eps, take_step, CHECKED_LEARNING_RATE)
        finally:
            group["lr"] = inputs.LEARNING_RATE

    def _sample(self) -> PopulationNoise:
        noise = self._population.sample(self._step_number)
        self._step_number += 1  # in place, see enter()
        return noise

    def _forward(self) -> Tensor:
        y: Tensor = self._population(self._x.take(), noise=self._current_noise())
        return y

    def _forward_often(self) -> Tensor:
        def forward() -> dict[str, Tensor]:
            self._x.restart()
            return {"outputs": self._forward()}

        return self._call_often("forward", forward)["outputs"]

    def _call_often(self, phase: Phase, call: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run a call several times without a pause, as it is timed; return the last results.

        Raises:
            WrongResultError: the results differ, though input and noise are the same.
        """
        results = call()
        for _ in range(REPEATED_CALLS if self._x.items[0].numel() <= FEW_NUMBERS else FEWER_CALLS):
            earlier, results = results, call()
            for name, result in results.items():
                allowed = 8 * torch.finfo(result.dtype).eps + 64 * torch.finfo(torch.float32).eps
                if (result - earlier[name]).float().norm() > allowed * result.float().norm():
                    raise WrongResultError(f"{phase} gives different results for the same input and noise")
        return results

    def _update(self) -> list[Tensor | None]:
        self._population.update(self._current_noise(), self._utilities.take(), self._record)
        gradients = [parameter.grad for parameter in self._parameters]
        # Freed here, not before the update: a call's peak memory counts from its start, and freeing the last
        # call's gradients there would offset those that it allocates.
        for parameter in self._parameters:  # the model's zero_grad() would take up to 8 us
            parameter.grad = None
        return gradients

    def _step(self) -> object:
        noise = self._sample()
        y, record = self._population.call_with_activations(self._x.take(), noise=noise)
        sides = 2 if self._case.antithetic else 1
        row_means = y.to(torch.promote_types(torch.float32, y.dtype)).flatten(1).mean(1)
        member_means = row_means.view(sides, -1, self._case.members).mean(1).flatten()
        utilities = member_means - member_means.mean()
        self._population.update(noise, utilities, record)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return y

    def _current_noise(self) -> PopulationNoise:
        if self._noise is None:
            message = "call enter(phase) before the phase's call"
            raise RuntimeError(message)
        return self._noise


@build.register(AbstractScheme)
def _population(scheme: AnyScheme, case: Case, device: str, seed: int) -> Workload:
    try:
        return PopulationWorkload(scheme, case, device, seed)
    except UnsupportedError as error:
        raise UnavailableError(str(error)) from error
