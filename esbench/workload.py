"""The interfaces that a package of variants implements for the harness.

The package extends :func:`build` for its classes of schemes, and :func:`trainer` for the trainable ones.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import singledispatch
from typing import Any, Protocol

from esbench.schema import Case, Outcome, Phase, Recipe, Task, Work


class UnavailableError(Exception):
    """A variant cannot run here; the message is stored in its row."""


class WrongResultError(Exception):
    """A result differs from the reference implementation; the message has the index and the difference."""


@dataclasses.dataclass(frozen=True)
class QualityMetric:
    """A quality metric of a variant: one value per replicate, or the reason for not having values."""

    metric: str
    method: str
    samples: tuple[float, ...] = ()
    reason: str = ""


class Workload(Protocol):
    """A variant set up on a case and a device, as the measuring loop uses it.

    Consecutive calls of a phase read different inputs, so that a result cannot be reused.
    """

    def enter(self, phase: Phase) -> None:
        """Prepare the inputs of a phase and free those of other phases; called before the phase is measured.

        It is called again after the call of ``sample`` or ``step`` was captured in a CUDA graph; the phase
        then restarts at the first input and step, and the tensors that the graph reads keep their addresses.
        """

    @property
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        """Phase -> its call, which returns the computed tensor or nested tensors."""

    @property
    def unavailable(self) -> Mapping[Phase, str]:
        """Phase that the variant does not have -> the reason."""

    @property
    def inputs(self) -> Sequence[Any]:
        """The tensors that consecutive calls of the entered phase read; empty for a phase without inputs.

        The first call after ``enter`` reads the first tensor. The harness may write other values into them.
        """

    def work(self, phase: Phase) -> Work | None:
        """Return the minimum work of a call of this phase, or None if it is unknown."""

    @property
    def noise_bytes(self) -> int:
        """The bytes of the stored noise of one step, 0 if no noise is stored."""

    def verify(self) -> None:
        """Compare the variant with the reference implementation on this case.

        Raises:
            WrongResultError: the results differ.
        """

    def confirm(self, phase: Phase) -> None:
        """Compare the call of the entered phase with the reference implementation on new inputs.

        The new inputs are written into the tensors of the timed call.

        Raises:
            WrongResultError: the results differ.
        """

    def quality(self) -> Iterable[QualityMetric]:
        """Yield the quality metrics of the gradient estimate, with a fixed seed; not timed.

        Called after ``enter("quality")``. The method is optional.

        Raises:
            UnavailableError: the quality cannot be computed; the message has the reason.
        """
        ...


@singledispatch
def build(scheme: object, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  # the interface
    """Return a workload of a scheme on a case; packages extend this with ``@build.register``.

    Raises:
        UnavailableError: the scheme does not support the case on this device; the message has the reason.
    """
    raise UnavailableError(
        f"{type(scheme).__name__} cannot be measured: its package registers no esbench.workload.build for it"
    )


class Training(Protocol):
    """A training run of a task, step by step."""

    def step(self, number: int) -> None:
        """Do a training step; the number, from 0, decides noise and batch."""

    def score(self) -> float:
        """Return the score of the network."""
        ...


class Trainer(Protocol):
    """The interface for training with a scheme; measuring does not use it.

    A scheme is an instance of a class of the package, a model is an ``nn.Module``.
    """

    def learns_from_rows(self, scheme: Any) -> bool:  # noqa: ANN401  # see the class
        """Return whether the scheme's update needs the inputs of its layers."""

    def refusal(self, scheme: Any, model: Any, exclude: Sequence[str]) -> str:  # noqa: ANN401  # see the class
        """Return the reason why a scheme cannot perturb a model outside the modules ``exclude``, or ""."""

    def prepare(self, recipe: Recipe) -> None:
        """Check that a network of the digits study can be trained.

        Raises:
            UserError: the network is unknown, or its data is missing.
        """

    def train(self, scheme: Any, recipe: Recipe, seed: int, device: str) -> Outcome:  # noqa: ANN401  # see the class
        """Train a network of the digits study and return the outcome.

        Raises:
            UnavailableError: the scheme does not support the network.
        """

    def tasks(self) -> Sequence[Task]:
        """Return the tasks of the study of tasks."""
        ...

    def prepare_task(self, task: Task) -> None:
        """Check that a task can be learned.

        Raises:
            UserError: a package that it needs is missing.
        """

    def begin(self, scheme: Any, task: Task, seed: int, device: str) -> Training:  # noqa: ANN401  see the class
        """Return a training run of a task before its first step.

        Raises:
            UnavailableError: the scheme does not support the network.
        """
        ...

    def effective_members(self, scheme: Any, task: Task, device: str) -> float | None:  # noqa: ANN401  see the class
        """Return n_eff of the antithetic pairs of a task, None if it has no closed form."""

    def sharded_step(
        self,
        scheme: Any,  # noqa: ANN401  # see the class
        recipe: Recipe,
        device: str,
        group: Any,  # noqa: ANN401  # a torch.distributed.ProcessGroup
    ) -> tuple[Callable[[int], None], int]:
        """Return a training step of a network, and the number of its parameters.

        The population is split over the ranks of the group, which all call the step with its number.

        Raises:
            ValueError: the population cannot be split over these ranks, or the scheme does not support the
                network.
        """


@singledispatch
def trainer(scheme: object) -> Trainer | None:  # noqa: ARG001  # dispatched on
    """Return the trainer of a scheme, None if unknown; packages extend this with ``@trainer.register``."""
    return None
