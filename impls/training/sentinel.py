"""What a training loop calls where updates happen inside the backward pass."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from impls.training.ownership import BackwardError


class AbstractSentinel(Optimizer):
    """Stands in a training loop where an optimizer stands, and refuses what it could only do wrong."""

    def __init__(self, groups: list[list[nn.Parameter]]) -> None:
        """Take the parameters of each group."""
        self._is_made = False
        super().__init__([{"params": group} for group in groups], {})
        self._is_made = True

    @override
    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what a backward pass left that ended in an error: all else is gone as soon as it was used."""

    @abstractmethod
    def end(self) -> bool:
        """End a step; return whether any parameter had a gradient in it.

        Raises:
            BackwardError: the step cannot have done what was wanted.

        """

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss
        """End a step: look whether there was a backward pass since the last. Nothing is updated here.

        Raises:
            BackwardError: there was none, or it cannot have done what was wanted.

        """
        if closure is not None:
            message = "a closure would be evaluated after the update: call backward() yourself, then step()"
            raise BackwardError(message)
        if not self.end():
            message = (
                "no gradient has come since the last step: call backward() first. Gradients of another "
                "model, of torch.autograd.grad or from before the optimizer was made are not used"
            )
            raise BackwardError(message)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the groups that it is made with, and none later.

        Raises:
            BackwardError: it has been made already.

        """
        if self._is_made:
            message = "groups cannot be added: close() this optimizer and make another of the whole model"
            raise BackwardError(message)
        super().add_param_group(param_group)

    @override
    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: hooks would stay behind.

        Raises:
            BackwardError: always.

        """
        message = "an optimizer in backward cannot be copied: make another, and load its state_dict()"
        raise BackwardError(message)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Answer a GradScaler, which asks before it steps.

        Raises:
            BackwardError: always.

        """
        message = (
            "GradScaler: scaled gradients were used inside the backward pass and have changed the weights, "
            "which must be loaded again. Train in bfloat16 without a scaler, or with an ordinary optimizer"
        )
        raise BackwardError(message)
