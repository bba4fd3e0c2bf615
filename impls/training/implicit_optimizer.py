"""Layers that have their own optimizers, which update them inside the backward pass.

An optimizer moves with its layer from one candidate of an architecture search to the next, as AutoOptimizer
and ImplicitOpt do in DrChainsaw's NaiveGAflux:

    model = nn.Sequential(AutoOptimizer(nn.Linear(4, 8), rule), nn.ReLU(), AutoOptimizer(...))
    optimizer = ImplicitOptimizer(model)  # all of them, for the training loop
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from impls.training.optimizer_in_backward import (
    AbstractBackwardOptimizer,
    BackwardError,
    OptimizerInBackward,
    Rule,
    State,
    copy_state,
)


class AutoOptimizer(nn.Module):
    """A layer that its own optimizer updates inside the backward pass.

    Copies and pickles get their own optimizer with a copy of the state.

    Args:
        layer: the wrapped layer.
        rule: builds its optimizer.
    """

    def __init__(self, layer: nn.Module, rule: Rule) -> None:
        super().__init__()
        self.layer, self.rule = layer, rule
        self.optimizer = OptimizerInBackward(layer, rule, "module")

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)

    def __getstate__(self) -> State:
        """Return the state for a copy or a pickle, with the state dict of the optimizer in its place.

        An optimizer cannot be copied, because its hooks are on the parameters of this layer.
        """
        return {**vars(self), "optimizer": self.optimizer.state_dict()}

    @override
    def __setstate__(self, state: State) -> None:
        """Restore the layer, and build an optimizer for its parameters with the stored state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer = OptimizerInBackward(self.layer, self.rule, "module")
        self.optimizer.load_state_dict(state["optimizer"])


class ImplicitOptimizer(AbstractBackwardOptimizer):
    """The optimizers of all layers of a model, as one for the training loop.

    Its parameter groups are the layers' own, so a learning-rate scheduler changes them all.

    Args:
        model: every trainable parameter is inside an :class:`AutoOptimizer`.

    Raises:
        ValueError: a trainable parameter is outside.
    """

    def __init__(self, model: nn.Module) -> None:
        self._optimizers = [
            module.optimizer for module in model.modules() if isinstance(module, AutoOptimizer)
        ]
        names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        covered = {parameter for optimizer in self._optimizers for parameter in optimizer.names}
        if outside := [name for parameter, name in names.items() if parameter not in covered]:
            raise ValueError(
                f"{', '.join(outside)}: not updated inside the backward pass: wrap every trainable layer in "
                "an AutoOptimizer"
            )
        super().__init__(names)
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @override
    def end_step(self) -> bool:
        had_gradient, errors = False, []
        for optimizer in self._optimizers:  # the step must end in all of them
            try:
                had_gradient |= optimizer.end_step()
            except BackwardError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return had_gradient

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def close(self) -> None:
        """Close the optimizers of all layers."""
        for optimizer in self._optimizers:
            optimizer.close()

    @override
    def state_dict(self) -> State:
        """Return the states of all layers as one, with the parameters' names in the model."""
        self.state.clear()
        for optimizer in self._optimizers:
            self.state.update(optimizer.state)
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of a state of this model; raise ValueError if it has other parameters."""
        loaded = copy_state(state_dict, self._group_names())
        groups = iter(loaded["param_groups"])
        for optimizer in self._optimizers:
            own_groups = [next(groups) for _ in optimizer.param_groups]
            keys = {key for group in own_groups for key in group["params"]}
            own_state = {key: slots for key, slots in loaded["state"].items() if key in keys}
            optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})
