"""Who keeps weights sparse: known to torch's objects, and not kept alive by them."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

_KEEPERS = WeakIdKeyDictionary()
"""Optimizers and weights -> the RigLScheduler that they have, weakly."""


def check_unkept(owners: Mapping[str, object]) -> None:
    """Look whether optimizers and weights, by what they are called, are without a RigLScheduler.

    Raises:
        ValueError: one of them has one.

    """
    for name, owner in owners.items():
        if owner in _KEEPERS and _KEEPERS[owner]() is not None:
            message = f"{name} has a RigLScheduler already: close() that one first"
            raise ValueError(message)


def keep(owners: Iterable[object], keeper: object) -> None:
    """Enter a RigLScheduler as that of optimizers and weights."""
    for owner in owners:
        _KEEPERS[owner] = weakref.ref(keeper)


def let_go(owners: Iterable[object], keeper: object) -> None:
    """Strike a RigLScheduler out where it is entered."""
    for owner in owners:
        if owner in _KEEPERS and _KEEPERS[owner]() is keeper:
            del _KEEPERS[owner]


class WeakHook:
    """A method as a hook of torch's, which does nothing once its object is gone.

    A weight holds its hooks where no garbage collector looks: one that held an object that holds the weight
    would keep both forever.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        """Take the method of an object."""
        self._method = weakref.WeakMethod(method)

    def __call__(self, *given: Any) -> Any:  # noqa: ANN401  # whatever torch gives and takes
        """Call it, or return nothing."""
        method = self._method()
        return None if method is None else method(*given)
