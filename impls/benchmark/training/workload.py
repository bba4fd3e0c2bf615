"""Base class of training workloads, and the peak memory of gradients."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import Workload
from esbench.schema import Case, Phase, Work
from impls.benchmark.inputs import RotatingBuffers, refill


class AbstractTrainingWorkload(Workload):
    """A workload without noise and without declared minimum work, whose calls read buffers in turn.

    Args:
        case: what is trained.
        seed: for everything random.
        buffers: tensors that calls read in turn.

    """

    noise_bytes = 0

    def __init__(self, case: Case, seed: int, buffers: Sequence[Tensor] = ()) -> None:
        """Start with the first buffer."""
        self._case, self._seed = case, seed
        self._buffers = RotatingBuffers(buffers)

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
        refill(self._case, self.inputs, self._seed + 5)
        self.verify()


def peak_gradient_bytes(
    parameters: Iterable[nn.Parameter],
    step: Callable[[], object],
    others: Callable[[], Iterable[Tensor]] = tuple,
) -> int:
    """Return the largest number of gradient bytes alive at once in a step, exactly and on any device.

    A gradient is alive from the call of its tensor hook until ``.grad`` is None.

    Args:
        parameters: those that are trained.
        step: a training step.
        others: returns gradients that are kept outside ``.grad``.

    """
    peak, watched = 0, list(parameters)

    def count(gradient: Tensor) -> None:
        nonlocal peak
        held = [*(one.grad for one in watched if one.grad is not None), *others()]
        peak = max(peak, gradient.nbytes + sum(one.nbytes for one in held))

    handles = [parameter.register_hook(count) for parameter in watched]
    step()
    for handle in handles:
        handle.remove()
    return peak
