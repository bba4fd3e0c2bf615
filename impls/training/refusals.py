"""What an optimizer in backward cannot be made of, in words."""

import inspect
from collections.abc import Callable, Mapping
from numbers import Real

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from impls.training.keepers import check_unkept
from impls.training.ownership import owner_of


def check_model(model: nn.Module, learning: Mapping[str, nn.Parameter]) -> None:
    """Look whether a model can be trained inside the backward pass.

    Raises:
        ValueError: it cannot, and why.

    """
    if not learning:
        message = "the model has no parameter that learns"
        raise ValueError(message)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        message = (
            "DistributedDataParallel adds gradients up after they would have been used: train without it"
        )
        raise ValueError(message)
    found: Mapping[str, Callable[[nn.Parameter], bool]] = {
        "updated inside the backward pass already: close() that optimizer first": lambda one: (
            owner_of(one) is not None
        ),
        "without a shape yet: let the model see a batch first": _is_shapeless,
        "with a gradient already, which would be added to: set it to None first": lambda one: (
            one.grad is not None
        ),
    }
    for what, holds in found.items():
        if names := [name for name, parameter in learning.items() if holds(parameter)]:
            message = f"{', '.join(names)}: {what}"
            raise ValueError(message)
    check_unkept(learning)


def check_settings(rule: object, bucket_bytes: object) -> None:
    """Look at what an optimizer in backward is to be made with, whatever somebody gave.

    Raises:
        ValueError: it cannot be, and what would do.

    """
    is_rule = callable(rule) and not isinstance(rule, Optimizer)
    if not is_rule:
        message = (
            f"the rule is {type(rule).__name__} itself: give what makes an optimizer of parameters, such as "
            "functools.partial(torch.optim.SGD, lr=0.1)"
        )
        raise ValueError(message)
    if not isinstance(bucket_bytes, Real) or not float(bucket_bytes) >= 0:
        message = f"bucket_bytes has to be a number of bytes from 0 up, and is {bucket_bytes!r}"
        raise ValueError(message)


def check_rule(ordinary: Optimizer, names: Mapping[nn.Parameter, str], learning: list[nn.Parameter]) -> None:
    """Look whether an ordinary optimizer can be used for some parameters at a time.

    Raises:
        ValueError: it cannot, and why.

    """
    given = {parameter for group in ordinary.param_groups for parameter in group["params"]}
    if missing := [names[parameter] for parameter in learning if parameter not in given]:
        message = f"the rule's optimizer lacks {', '.join(missing)}"
        raise ValueError(message)
    if len(given) > len(learning):
        message = "the rule's optimizer holds parameters that it was not given"
        raise ValueError(message)
    closure = inspect.signature(type(ordinary).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        message = f"{type(ordinary).__name__} evaluates the model itself: it needs all gradients at once"
        raise ValueError(message)


def _is_shapeless(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, UninitializedParameter)
