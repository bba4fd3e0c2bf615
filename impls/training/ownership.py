"""Who updates a parameter inside the backward pass: at most one optimizer, and nobody clips what is gone.

Clipping finds no gradient behind such a pass and would say that the norm is 0. So from the first optimizer in
backward on, torch's functions that clip look whose the parameters are that they were given. The one that
takes a norm is given gradients, which are nobody's: it refuses none at all while there is such an optimizer.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class BackwardError(RuntimeError):
    """What an optimizer in backward cannot do right; the message says what to do instead."""


_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> a weak reference to what updates it: neither keeps the other alive."""


def owner_of(parameter: Tensor) -> object | None:
    """Return the optimizer in backward that updates a parameter, if there is one."""
    reference = _OWNERS.get(parameter)
    return reference() if reference else None


def claim(parameters: Iterable[nn.Parameter], owner: object) -> None:
    """Enter an optimizer as the one that updates these parameters."""
    _watch_clipping()
    for parameter in parameters:
        _OWNERS[parameter] = weakref.ref(owner)


def release(parameters: Iterable[nn.Parameter], owner: object) -> None:
    """Strike an optimizer out where it is entered."""
    for parameter in parameters:
        if owner_of(parameter) is owner:
            del _OWNERS[parameter]


def check_outside(parameters: Mapping[str, nn.Parameter]) -> None:
    """Look whether gradients are still there behind the backward pass.

    Raises:
        ValueError: they are used inside it.

    """
    if inside := [name for name, parameter in parameters.items() if owner_of(parameter) is not None]:
        message = (
            f"{', '.join(inside)}: updated inside the backward pass, topology steps included; "
            "RigLInBackward is for that"
        )
        raise ValueError(message)


def _watch_clipping() -> None:
    """Put the question of ownership before torch's clipping, once in a process.

    The functions are wrapped by torch already, and what the wrapper calls is a cell of its closure. That is
    where names that somebody imported early lead as well.
    """
    watched: dict[Callable[..., object], type[_Clipping | _Norm]] = {
        nn.utils.clip_grad_norm_: _Clipping,
        nn.utils.clip_grad_value_: _Clipping,
        nn.utils.clip_grads_with_norm_: _Clipping,
        nn.utils.get_total_norm: _Norm,
    }
    for function, watch in watched.items():
        wrapper: Any = function
        cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
        if not isinstance(cell.cell_contents, watch):
            cell.cell_contents = watch(cell.cell_contents)


_IS_ASKED: ContextVar[bool] = ContextVar("_IS_ASKED", default=False)
"""Whether torch itself takes a norm, of parameters that were asked for already."""


class _Clipping:
    """A function of torch that clips, with the question before it."""

    def __init__(self, plain: Callable[..., object]) -> None:
        self._plain = plain

    def __call__(self, parameters: Tensor | Iterable[Tensor], *args: object, **options: object) -> object:
        """Clip.

        Raises:
            BackwardError: one of the parameters was updated with its gradient already.

        """
        given: Sequence[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(owner_of(one) is not None for one in given):
            message = (
                "nothing is left to be clipped: these gradients were used inside the backward pass. Clip in "
                "a hook of each parameter (register_hook), or train with an ordinary optimizer"
            )
            raise BackwardError(message)
        # Torch warns of a generator that is empty.
        again = (one for one in given) if isinstance(parameters, GeneratorType) else given
        token = _IS_ASKED.set(True)
        try:
            return self._plain(again, *args, **options)
        finally:
            _IS_ASKED.reset(token)


class _Norm:
    """Torch's norm of gradients, with the question before it whether there are any."""

    def __init__(self, plain: Callable[..., object]) -> None:
        self._plain = plain

    def __call__(self, tensors: Tensor | Iterable[Tensor], *args: object, **options: object) -> object:
        """Take the norm.

        Raises:
            BackwardError: there are no gradients, and an optimizer in backward that may have used them.

        """
        given = tensors if isinstance(tensors, Tensor) else list(tensors)
        none = not isinstance(given, Tensor) and not given
        if none and not _IS_ASKED.get() and any(one() is not None for one in _OWNERS.values()):
            message = (
                "no gradients to take a norm of: an optimizer in backward uses them inside the pass. Look at "
                "them in a hook of each parameter (register_hook)"
            )
            raise BackwardError(message)
        return self._plain(given, *args, **options)
