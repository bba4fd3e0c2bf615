"""Training whose update happens inside the backward pass.

    optimizer = OptimizerInBackward(model, partial(torch.optim.AdamW, lr=1e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    ...
    loss.backward()      # the parameters have changed by now, and no gradient is left
    optimizer.step()     # looks whether each had its turn, and changes nothing
    schedule.step()

Or in the words of NaiveGAflux (DrChainsaw, AutoOptimiser and ImplicitOpt), where a layer carries its
optimizer with it, from one candidate of an architecture search to the next:

    model = nn.Sequential(AutoOptimizer(nn.Linear(4, 8), rule), nn.ReLU(), AutoOptimizer(...))
    optimizer = ImplicitOptimizer(model)
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from impls.training import states
from impls.training.optimizer import BUCKET_BYTES, OptimizerInBackward, Rule
from impls.training.ownership import BackwardError, owner_of
from impls.training.sentinel import AbstractSentinel

__all__ = [
    "BUCKET_BYTES",
    "AutoOptimizer",
    "BackwardError",
    "ImplicitOptimizer",
    "OptimizerInBackward",
    "Rule",
    "check_optimizer",
]


class AutoOptimizer(nn.Module):
    """A layer that is updated by its own optimizer inside the backward pass; it takes its state with it.

    Copies and pickles have an optimizer of their own, with a copy of the state, closed where the first is.
    They begin a step.

    Args:
        layer: what is run; its parameters that learn are updated together.
        rule: how, or nothing as long as the layer is not to be trained.
        skip_nonfinite: see :class:`OptimizerInBackward`.

    Raises:
        ValueError: see :class:`OptimizerInBackward`.

    """

    def __init__(self, layer: nn.Module, rule: Rule | None = None, *, skip_nonfinite: bool = True) -> None:
        """Wrap the layer."""
        super().__init__()
        self.layer = layer
        self.rule: Rule | None = None
        self.optimizer: OptimizerInBackward | None = None
        self._skip = skip_nonfinite
        if rule is not None:
            self.initialize(rule)

    def initialize(self, rule: Rule) -> None:
        """Give the layer its rule.

        Raises:
            BackwardError: it has one.
            ValueError: see :class:`OptimizerInBackward`.

        """
        if self.optimizer is not None:
            message = "the layer has a rule already"
            raise BackwardError(message)
        self.optimizer = OptimizerInBackward(self.layer, rule, "module", skip_nonfinite=self._skip)
        self.rule = rule

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer.

        Raises:
            BackwardError: gradients are recorded, and nobody would use them.

        """
        if self.optimizer is None and torch.is_grad_enabled():
            message = "the layer has no rule yet: call initialize(rule), or run it under torch.no_grad()"
            raise BackwardError(message)
        return self.layer(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return all that copies take over; in the place of the optimizer what another is made from."""
        made = None if self.optimizer is None else _Made.of(self.optimizer)
        return {**vars(self), "optimizer": made}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copy of everything, and make an optimizer of its own."""
        made = state["optimizer"]
        super().__setstate__({**state, "optimizer": None})  # type: ignore[no-untyped-call]  # torch's own
        if made is not None and self.rule is not None:
            self.optimizer = made.again(self.layer, self.rule, skip_nonfinite=self._skip)


class ImplicitOptimizer(AbstractSentinel):
    """Stands for the optimizers of a model's layers in a training loop.

    Its groups are those of the layers, so a learning-rate scheduler of it changes them all.

    Args:
        model: made of :class:`AutoOptimizer` wherever it learns.

    Raises:
        ValueError: a part that learns is outside of them, or one of them has no rule.

    """

    def __init__(self, model: nn.Module) -> None:
        """Look through the model."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, AutoOptimizer)}
        if bare := [name for name, layer in layers.items() if layer.optimizer is None]:
            message = f"{', '.join(bare)}: no rule yet, call initialize(rule)"
            raise ValueError(message)
        found = {name: layer.optimizer for name, layer in layers.items() if layer.optimizer is not None}
        covered = {one for optimizer in found.values() for one in _parameters(optimizer)}
        explicit = _learning_names(model, lambda parameter: parameter not in covered)
        if explicit or not found:
            message = (
                f"{', '.join(explicit) or 'the model'}: not updated inside the backward pass; wrap all "
                "layers in AutoOptimizer, or none"
            )
            raise ValueError(message)
        super().__init__([_parameters(one) for one in found.values()])
        self._optimizers = found
        self._prefixes = {name: f"{name}.layer." if name else "layer." for name in found}
        self.param_groups = [group for optimizer in found.values() for group in optimizer.param_groups]

    @override
    def end(self) -> bool:
        had, errors = False, []
        for optimizer in self._optimizers.values():  # each must end
            try:
                had |= optimizer.end()
            except BackwardError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return had

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def close(self) -> None:
        """Let go of all layers."""
        for optimizer in self._optimizers.values():
            optimizer.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all layers in torch's form, with the parameters' names in the model."""
        return states.joined([self._named(name) for name in self._optimizers])

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a copy of a state of this model, by name, or else by place.

        Raises:
            ValueError: it is no state, or that of another model.

        """
        mine = self.state_dict()
        names = [group["param_names"] for group in mine["param_groups"]]
        shapes = {
            prefix + name: tuple(parameter.shape)
            for key, prefix in self._prefixes.items()
            for parameter, name in self._optimizers[key].names.items()
        }
        whole = states.aligned(state_dict, names, shapes)
        groups = iter(whole["param_groups"])
        for key, optimizer in self._optimizers.items():
            part = [dict(next(groups)) for _ in optimizer.param_groups]
            for group in part:
                group["param_names"] = [
                    name.removeprefix(self._prefixes[key]) for name in group["param_names"]
                ]
            optimizer.load_state_dict({"state": whole["state"], "param_groups": part})

    def _named(self, name: str) -> states.State:
        state = self._optimizers[name].state_dict()
        prefix = self._prefixes[name]
        for group in state["param_groups"]:
            group["param_names"] = [prefix + one for one in group["param_names"]]
        return state


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Hold a model and the optimizer of its training loop to each other, before anything is trained.

    Raises:
        ValueError: parts of the model learn inside the backward pass and others do not, or the optimizer is
            not the one that the model is updated by.

    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    implicit = _learning_names(model, lambda parameter: owner_of(parameter) is not None)
    explicit = _learning_names(model, lambda parameter: owner_of(parameter) is None)
    left = _learning_names(model, lambda parameter: id(parameter) not in held)
    message = ""
    if implicit and explicit:
        message = f"{', '.join(implicit)}: updated inside the backward pass, and {', '.join(explicit)}: not"
    elif implicit and not isinstance(optimizer, AbstractSentinel):
        message = (
            f"the model is updated inside the backward pass: {type(optimizer).__name__} would change nothing"
        )
    elif explicit and isinstance(optimizer, AbstractSentinel):
        message = (
            f"{', '.join(explicit)}: nobody updates it; was the optimizer closed, or made of another model?"
        )
    elif left:
        message = f"the optimizer lacks {', '.join(left)}"
    if message:
        raise ValueError(message)


def _learning_names(model: nn.Module, holds: Callable[[nn.Parameter], bool]) -> list[str]:
    found = model.named_parameters()
    return [name for name, parameter in found if parameter.requires_grad and holds(parameter)]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class _Made:
    """What makes an optimizer again, of a copy of its layer."""

    state: states.State
    skipped: Counter[str]
    is_closed: bool

    @classmethod
    def of(cls, optimizer: OptimizerInBackward) -> "_Made":
        return cls(optimizer.state_dict(), optimizer.skipped, optimizer.is_closed)

    def again(self, layer: nn.Module, rule: Rule, *, skip_nonfinite: bool) -> OptimizerInBackward:
        """Make it; parameters that were frozen or thawed since count as they did when it was made first."""
        learning = {name for group in self.state["param_groups"] for name in group["param_names"]}
        flags = {one: one.requires_grad for one in layer.parameters()}
        try:
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name in learning)
            optimizer = OptimizerInBackward(layer, rule, "module", skip_nonfinite=skip_nonfinite)
        finally:
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)
        optimizer.load_state_dict(self.state)
        optimizer.skipped.update(self.skipped)
        if self.is_closed:
            optimizer.close()
        return optimizer
