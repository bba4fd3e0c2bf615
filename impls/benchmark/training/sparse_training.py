"""A step of sparse training as something to measure."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import Figure, Workload, build
from esbench.schema import Case, Phase, Work
from impls.benchmark import inputs
from impls.benchmark.training import subjects
from impls.benchmark.training.sparse_schemes import AbstractTraining
from impls.benchmark.training.sparse_trainers import NEVER, AbstractTrainer
from impls.benchmark.training.written_steps import RATE, check_moves, check_steps

STEP = "a training step is measured as a whole; topology updates by themselves, on TopologyUpdate"


class TrainingWorkload(Workload):
    """A network and its training step."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()
    unavailable: Mapping[Phase, str] = dict.fromkeys(("sample", "forward", "update"), STEP)

    def __init__(self, scheme: AbstractTraining, case: Case, device: str, seed: int) -> None:
        """Make the network, its rows and its optimizer."""
        self._scheme, self._case, self._device, self._seed = scheme, case, device, seed
        self._trainer = self._made(inputs.LEARNING_RATE, NEVER)
        self._x = inputs.RotatingBuffers(subjects.rows(case, device, seed))
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
            check_moves(self._made(RATE, 2), self._plain(), self._x.items)

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


@build.register(AbstractTraining)
def _training(scheme: AbstractTraining, case: Case, device: str, seed: int) -> Workload:
    return TrainingWorkload(scheme, case, device, seed)
