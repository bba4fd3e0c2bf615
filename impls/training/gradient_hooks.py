"""What a parameter calls when its gradient comes, without keeping alive whom it tells."""

from typing import Protocol
from weakref import ReferenceType

from torch import nn

from impls.training.ownership import BackwardError, owner_of


class Owner(Protocol):
    """Who uses gradients; parameters go by place."""

    def ready(self, parameter: nn.Parameter, place: int) -> None:
        """Take note of a gradient."""


class GradientHook:
    """What a parameter calls; it reaches the optimizer, and so the parameter, by a weak reference only."""

    def __init__(self, owner: ReferenceType[Owner], place: int) -> None:
        """Call for the parameter at a place."""
        self._owner, self._place = owner, place

    def __call__(self, parameter: nn.Parameter) -> None:
        """Say that a gradient is ready.

        Raises:
            BackwardError: nobody is there to use it.

        """
        owner = self._owner()
        if owner is not None:
            owner.ready(parameter, self._place)
        elif owner_of(parameter) is None:  # or else the next hook is that of the optimizer that came after
            parameter.grad = None
            message = (
                "the optimizer in backward is gone: hold a reference to it, or close() it before letting go"
            )
            raise BackwardError(message)
