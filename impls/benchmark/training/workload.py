"""Base classes of training workloads, comparison with a reference, and the peak memory of gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from esbench.schema import PHASES, Case, Phase, Work
from esbench.workload import QualityMetric, UnavailableError, Workload, WrongResultError
from impls.benchmark import inputs
from impls.verify import reference

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes a loss from a model's outputs and its rows."""
Masks = Mapping[str, Tensor]
"""Masks of sparse weights by name."""


def check_result(is_right: bool, message: str) -> None:  # noqa: FBT001  a condition, as in assert
    """Raise WrongResultError with a message unless a result is right."""
    if not is_right:
        raise WrongResultError(message)


def check_supported(is_supported: bool, reason: str) -> None:  # noqa: FBT001  a condition, as in assert
    """Raise UnavailableError with a reason unless a variant supports its case and device."""
    if not is_supported:
        raise UnavailableError(reason)


class AbstractTrainingWorkload(Workload):
    """A workload with at most one timed call, which reads ``buffers`` in turn; it has no noise."""

    phase: Phase | None = None
    """Phase of the timed call, None if nothing is timed."""
    reason: str
    """Why there are no other phases."""
    noise_bytes = 0

    def __init__(self, case: Case, device: str, seed: int, buffers: Sequence[Tensor] = ()) -> None:
        self._case, self._device, self._seed = case, device, seed
        self._buffers = inputs.RotatingBuffers(buffers)

    def call(self) -> object:
        """Run the timed call."""
        raise NotImplementedError

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {} if self.phase is None else {self.phase: self.call}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        return {phase: self.reason for phase in PHASES if phase != self.phase}

    @property
    @override
    def inputs(self) -> Sequence[Tensor]:
        return self._buffers.items

    @override
    def work(self, phase: Phase) -> Work | None:
        return None

    @override
    def enter(self, phase: Phase) -> None:
        self._buffers.restart()

    @override
    def confirm(self, phase: Phase) -> None:
        inputs.refill(self._case, self.inputs)
        self.verify()


@dataclass
class Trainer:
    """Takes training steps on the mean square of a model's outputs."""

    model: nn.Module
    finish: Callable[[], object]  # after each backward pass: updates weights and frees gradients
    optimizers: Sequence[Optimizer] = ()
    close: Callable[[], object] = lambda: None  # releases the model
    masks: Callable[[], Masks] = dict
    copies: Callable[[], list[Tensor]] = list  # dense gradients that are stored outside ``.grad``

    def step(self, x: Tensor) -> Tensor:
        """Take a step on rows; return the outputs."""
        y: Tensor = self.model(x)
        mean_square(y).backward()
        self.finish()
        return y.detach()

    def peak_gradient_bytes(self, x: Tensor) -> int:
        """Return the largest number of gradient bytes alive at once in a step."""
        return peak_gradient_bytes(self.model.parameters(), lambda: self.step(x), self.copies)


class AbstractStepWorkload(AbstractTrainingWorkload):
    """A training step on rows [rows, in_channels, *input_size]; subclasses set ``_trainer``."""

    phase: Phase = "step"
    _trainer: Trainer

    def __init__(self, case: Case, device: str, seed: int) -> None:
        shape = (case.rows, case.in_channels, *case.input_size)
        x = inputs.normal(*shape, device=device, dtype=inputs.dtype_of(case), seed=seed + 1)
        super().__init__(case, device, seed, x)

    @override
    def call(self) -> Tensor:
        return self._trainer.step(self._buffers.take())


def step_and_zero(optimizer: Optimizer) -> None:
    """Take an ordinary optimizer step and free the gradients."""
    optimizer.step()
    optimizer.zero_grad()


def add_leaking_hooks(
    model: nn.Module, rule: Callable[[list[nn.Parameter]], Optimizer]
) -> tuple[list[Optimizer], list[RemovableHandle]]:
    """Update inside the backward pass by the usual recipe, whose hooks reference their own parameters.

    The garbage collector misses these cycles, so models leak until the returned handles are removed.
    """
    optimizers = {parameter: rule([parameter]) for parameter in model.parameters()}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda updated: step_and_zero(optimizers[updated]))
        for parameter in optimizers
    ]
    return list(optimizers.values()), handles


def case_of(
    operator: str, out: int, inp: int, rows: int = 1, dtype: str = "float32", **sizes: tuple[int, ...]
) -> Case:
    """Return a case of one model that is trained on ``rows`` rows."""
    channels: dict[str, Any] = {"out_channels": out, "in_channels": inp, **sizes}
    return Case(operator=operator, members=1, repeats=rows, dtype=dtype, **channels)


def square(operator: str, width: int, rows: int, dtype: str = "float32") -> Case:
    """Return a case of layers with ``width`` inputs and outputs, trained on ``rows`` rows."""
    return case_of(operator, width, width, rows, dtype)


def quality_metric(metric: str, method: str, samples: Iterable[float], reason: str = "") -> QualityMetric:
    """Return a quality metric with its values as floats; none if there is a reason why it has no values."""
    return QualityMetric(metric, method, () if reason else tuple(map(float, samples)), reason)


def mean_square(y: Tensor, _: object = None) -> Tensor:
    """Return the mean square of a model's outputs."""
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()


def loss_and_gradients(
    model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, loss_of: Loss = mean_square
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss at ``weights`` and its gradients by name, computed with torch.autograd.grad."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    loss = loss_of(torch.func.functional_call(model, leaves, x), x)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, gradients, strict=True))


def check_against_reference(
    results: Mapping[str, Tensor],
    compute_reference: Callable[..., Mapping[str, Tensor]],
    *arguments: object,
    eps: float | None = None,
) -> None:
    """Raise WrongResultError unless named tensors are those of ``compute_reference(*arguments)`` in float64.

    The tolerance depends on the error of the same function in the dtype of the arguments.
    """
    expected = compute_reference(*pytree.tree_map(_to_float64, arguments))
    for name, rounded in compute_reference(*arguments).items():
        reference.check_close(name, results.get(name), expected[name], rounded, eps)


def _to_float64(value: object) -> object:
    """Return a tensor or a model in float64, and other values unchanged."""
    if isinstance(value, Tensor):
        return reference.rows_to_float64(value)
    return reference.to_float64(value) if isinstance(value, nn.Module) else value


def peak_gradient_bytes(
    parameters: Iterable[nn.Parameter],
    step: Callable[[], object],
    copies: Callable[[], Iterable[Tensor]] = tuple,
) -> int:
    """Return the largest number of gradient bytes alive at once in a step, exactly and on any device.

    A gradient is alive from the call of its tensor hook until ``.grad`` is None; ``copies`` returns gradients
    that are stored elsewhere.
    """
    peak, trained = 0, list(parameters)

    def update_peak(gradient: Tensor) -> None:
        nonlocal peak
        alive = [*(parameter.grad for parameter in trained if parameter.grad is not None), *copies()]
        peak = max(peak, gradient.nbytes + sum(tensor.nbytes for tensor in alive))

    handles = [parameter.register_hook(update_peak) for parameter in trained]
    step()
    for handle in handles:
        handle.remove()
    return peak
