"""Layers that have their own optimizers, which update them inside the backward pass.

An optimizer moves with its layer from one candidate of an architecture search to the next, as AutoOptimiser
and ImplicitOpt do in DrChainsaw's NaiveGAflux:

    model = nn.Sequential(AutoOptimizer(nn.Linear(4, 8), rule), nn.ReLU(), AutoOptimizer(...))
    optimizer = ImplicitOptimizer(model)  # all of them, for the training loop
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from impls.training.optimizer_in_backward import (
    AbstractBackwardOptimizer,
    BackwardError,
    OptimizerInBackward,
    Rule,
    State,
    aligned_state,
    parameters_of,
)


class AutoOptimizer(nn.Module):
    """A layer that its own optimizer updates inside the backward pass.

    Copies and pickles get their own optimizer with a copy of the state.

    Args:
        layer: the wrapped layer.
        rule: builds its optimizer; leave it out until :meth:`initialize`.
        skip_nonfinite: see :class:`OptimizerInBackward`.

    """

    def __init__(self, layer: nn.Module, rule: Rule | None = None, *, skip_nonfinite: bool = True) -> None:
        """Wrap the layer."""
        super().__init__()
        self.layer = layer
        self.rule: Rule | None = None
        self.optimizer: OptimizerInBackward | None = None
        self._skip_nonfinite = skip_nonfinite
        if rule is not None:
            self.initialize(rule)

    def initialize(self, rule: Rule) -> None:
        """Create the layer's optimizer."""
        if self.optimizer is not None:
            message = "the layer already has a rule"
            raise BackwardError(message)
        self.optimizer = OptimizerInBackward(self.layer, rule, "module", skip_nonfinite=self._skip_nonfinite)
        self.rule = rule

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and torch.is_grad_enabled():
            message = "the layer has no rule yet: call initialize(rule), or run it under torch.no_grad()"
            raise BackwardError(message)
        return self.layer(*args, **kwargs)

    def __getstate__(self) -> State:
        """Replace the optimizer by the arguments that create it again."""
        one = self.optimizer
        return {**vars(self), "optimizer": one and (one.state_dict(), one.skipped, one.is_closed)}

    @override
    def __setstate__(self, state: State) -> None:
        super().__setstate__({**state, "optimizer": None})  # type: ignore[no-untyped-call]  # torch's own
        if state["optimizer"] is None:
            return
        saved, skipped, is_closed = state["optimizer"]
        self.optimizer = OptimizerInBackward(
            self.layer, state["rule"], "module", skip_nonfinite=self._skip_nonfinite
        )
        self.optimizer.load_state_dict(saved)
        self.optimizer.skipped.update(skipped)
        if is_closed:
            self.optimizer.close()


class ImplicitOptimizer(AbstractBackwardOptimizer):
    """The optimizers of all layers of a model, as one for the training loop.

    Its parameter groups are the layers' own, so a learning-rate scheduler changes them all.

    Args:
        model: every trainable parameter is inside an :class:`AutoOptimizer`.

    Raises:
        ValueError: a trainable parameter is outside, or a layer has no rule.

    """

    def __init__(self, model: nn.Module) -> None:
        """Collect the layers' optimizers."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, AutoOptimizer)}
        if missing := [name for name, layer in layers.items() if layer.optimizer is None]:
            message = f"{', '.join(missing)}: no rule yet, call initialize(rule)"
            raise ValueError(message)
        found = {name: layer.optimizer for name, layer in layers.items() if layer.optimizer is not None}
        covered = {one for optimizer in found.values() for one in parameters_of(optimizer)}
        outside = [name for name, one in model.named_parameters() if one.requires_grad and one not in covered]
        if outside or not found:
            message = (
                f"{', '.join(outside) or 'the model'}: not updated inside the backward pass; wrap all layers "
                "in AutoOptimizer, or none"
            )
            raise ValueError(message)
        super().__init__([parameters_of(one) for one in found.values()])
        self._optimizers = {f"{name}.layer." if name else "layer.": one for name, one in found.items()}
        self.param_groups = [group for optimizer in found.values() for group in optimizer.param_groups]

    @override
    def end_step(self) -> bool:
        had_gradient, errors = False, []
        for optimizer in self._optimizers.values():  # the step must end in all of them
            try:
                had_gradient |= optimizer.end_step()
            except BackwardError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return had_gradient

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def close(self) -> None:
        """Close the optimizers of all layers."""
        for optimizer in self._optimizers.values():
            optimizer.close()

    @override
    def state_dict(self) -> State:
        """Return the states of all layers as one, with the parameters' names in the model."""
        found: State = {"state": {}, "param_groups": []}
        first = 0
        for prefix, optimizer in self._optimizers.items():
            state = optimizer.state_dict()
            for group in state["param_groups"]:
                group["params"] = [first + key for key in group["params"]]
                group["param_names"] = [prefix + name for name in group["param_names"]]
            found["state"] |= {first + key: slots for key, slots in state["state"].items()}
            found["param_groups"] += state["param_groups"]
            first += sum(len(group["params"]) for group in state["param_groups"])
        return found

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of a state of this model, by name or else by position.

        Raises:
            ValueError: it is the state of another model; nothing is changed then.

        """
        names = [group["param_names"] for group in self.state_dict()["param_groups"]]
        whole = aligned_state(state_dict, names)
        groups = iter(whole["param_groups"])
        for prefix, optimizer in self._optimizers.items():
            part = [next(groups) for _ in optimizer.param_groups]
            for group in part:
                group["param_names"] = [name.removeprefix(prefix) for name in group["param_names"]]
            optimizer.load_state_dict({"state": whole["state"], "param_groups": part})
