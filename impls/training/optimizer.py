"""An optimizer that steps inside the backward pass: a gradient is used as soon as it is ready, and freed.

Where gradients live for a whole step there is memory for all of them; here only for those of a parameter, of
a layer or of a bucket. What needs all gradients at once has no place here and is refused in words.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from impls.training import gathering, passes, states
from impls.training.gathering import AbstractGathering, Granularity, Places
from impls.training.gradient_hooks import GradientHook, Owner
from impls.training.guard import bad_layers
from impls.training.ownership import BackwardError, claim, release
from impls.training.parts import PartialSteps
from impls.training.refusals import check_model, check_rule, check_settings
from impls.training.sentinel import AbstractSentinel

Rule = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an ordinary optimizer of parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``."""

BUCKET_BYTES = 2**20
"""A bucket is used when its gradients have so many bytes, or more where the last of them is large."""


class OptimizerInBackward(AbstractSentinel):
    """Updates a model's parameters inside the backward pass, by the rule of an ordinary optimizer.

    After ``loss.backward()`` the parameters have changed and no gradient is left; ``step()`` ends the step
    and changes nothing. The weights are bit for bit those of the ordinary optimizer with the same kernels.
    Groups and state are those of the ordinary optimizer, so learning-rate schedulers work, and
    ``state_dict()`` goes from one to the other.

    A gradient that is not finite changes nothing in its layer, which is what a module has of its own and its
    parametrizations have; layers that share a parameter are one. Whether all of a layer's gradients are
    finite is known with the last of them, so behind this guard they wait for each other, whatever the
    granularity. Of a bucket the layers concerned are left out, and the others updated. So many gradients live
    at once:

    ============  ============================  ==================================================
    granularity   with the guard                ``skip_nonfinite=False``
    ============  ============================  ==================================================
    parameter     those of the largest layer    that of the largest parameter
    module        those of the largest layer    those of the largest layer
    bucket        layers in a row until they    parameters in a row until they have
                  have ``bucket_bytes``         ``bucket_bytes``
    ============  ============================  ==================================================

    The rule takes several steps in a pass, each with some of the parameters. What it counts for a parameter
    is right; what it counts in its groups would count each of them, and is refused at the first.

    A backward pass that ends in an error has updated what came before the error. What it left is dropped: by
    ``step()``, which says so, or by ``zero_grad()``.

    The model does not keep it alive: hold a reference, and ``close()`` it before letting go.

    Args:
        model: its parameters that learn are updated from now on by every backward pass.
        rule: makes the ordinary optimizer of all of them.
        granularity: what is updated at once: each parameter (each layer, with the guard), ``bucket``: those
            that come in a row, or what each module has of its own.
        bucket_bytes: gradients that a bucket holds.
        skip_nonfinite: the guard: where a gradient is NaN or infinite, leave its layer's parameters and their
            state as they are, and count them in ``skipped``. Costs one pass over gradients, and on CUDA one
            synchronisation, for each update.

    Raises:
        ValueError: the model has nothing to learn, or what cannot be trained like this, and why.

    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        granularity: Granularity = "parameter",
        *,
        bucket_bytes: int = BUCKET_BYTES,
        skip_nonfinite: bool = True,
    ) -> None:
        """Register with every parameter that learns."""
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        """Parameter -> its name in the model."""
        learning = [parameter for parameter in self.names if parameter.requires_grad]
        check_model(model, {self.names[one]: one for one in learning})
        check_settings(rule, bucket_bytes)
        self._ordinary = rule(learning)
        check_rule(self._ordinary, self.names, learning)
        super().__init__([learning])
        self.defaults = self._ordinary.defaults
        self.param_groups = self._ordinary.param_groups
        self.state = self._ordinary.state
        self.skipped: Counter[str] = Counter()
        self._frozen = [parameter for parameter in self.names if not parameter.requires_grad]
        groups = {one: number for number, group in enumerate(self.param_groups) for one in group["params"]}
        self._groups = [groups[one] for one in learning]
        self._steps = PartialSteps(self._ordinary)
        self._skip = skip_nonfinite
        self._learning = learning
        self._layers = gathering.layers_of(model, learning)
        layers = gathering.Layers(self._layers)
        parts = layers if skip_nonfinite else gathering.Singly()
        kinds: Mapping[str, AbstractGathering] = {
            "parameter": parts,
            "bucket": gathering.Buckets(bucket_bytes, [one.nbytes for one in learning], parts),
            "module": layers,
        }
        if granularity not in kinds:
            message = f"no granularity {granularity!r}; there are: {', '.join(kinds)}"
            raise ValueError(message)
        self._gathering = kinds[granularity]
        self._turn = 1
        self._turns = [0] * len(learning)
        self._is_open = False  # a backward pass has begun, and not come to its end
        self._lock = Lock()  # each device of a model has a thread of its own that calls hooks
        me: weakref.ref[Owner] = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(GradientHook(me, place))
            for place, parameter in enumerate(learning)
        ]
        self._stale = frozenset[int]()  # places that had a gradient before the pass under way
        passes.watch(self)
        claim(learning, self)

    @override
    def end(self) -> bool:
        if self.is_closed:
            message = "this optimizer was closed: it updates nothing any more"
            raise BackwardError(message)
        if thawed := [self.names[one] for one in self._frozen if one.requires_grad]:
            message = (
                f"{', '.join(thawed)} did not learn when this optimizer was made: close it, make another"
            )
            raise BackwardError(message)
        if self._is_open:
            self._discard()
            message = (
                "the last backward pass ended in an error: what came before it is updated, the rest is not, "
                "and the gradients left are dropped. Load the weights of before, or go on with a new step"
            )
            raise BackwardError(message)
        if left := [self.names[one] for one in self._learning if one.grad is not None]:
            self._discard()
            message = (
                f"{', '.join(left)}: a gradient that nobody used, set by hand or left by a backward pass "
                "that ended in an error; it is dropped. Go on with a new step"
            )
            raise BackwardError(message)
        had = self._turn in self._turns
        self._turn += 1
        return had

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.is_closed:
            return
        if self._is_open:
            self._discard()
        self._drop()

    def close(self) -> None:
        """Let go of the model: from now on its gradients stay, as usual. The state can still be saved."""
        self.zero_grad()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        release(self._learning, self)
        passes.leave(self)

    @property
    def is_closed(self) -> bool:
        """Whether it let go of the model."""
        return not self._handles

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the ordinary optimizer's state, with the parameters' names in its groups."""
        return states.named(self._ordinary.state_dict(), self._group_names())

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a copy of a state, of this class or of an ordinary optimizer: by name, else by place.

        Raises:
            ValueError: it is no state, or that of another model.

        """
        shapes = {name: tuple(parameter.shape) for parameter, name in self.names.items()}
        self._ordinary.load_state_dict(states.aligned(state_dict, self._group_names(), shapes))
        # The groups stay the same objects: others may hold them.
        for group, loaded in zip(self.param_groups, self._ordinary.param_groups, strict=True):
            del loaded["param_names"]
            group.update(loaded)
        self._ordinary.param_groups = self.param_groups
        self.state = self._ordinary.state

    def look(self) -> None:
        """Take note of gradients that are there before a backward pass, which would be added to."""
        self._stale = frozenset(
            place  # of those that had their turn ready() says so
            for place, one in enumerate(self._learning)
            if one.grad is not None and self._turns[place] != self._turn
        )

    def ready(self, parameter: nn.Parameter, place: int) -> None:
        """Take note of a gradient; update what is complete with it. Hooks call this.

        Raises:
            BackwardError: the parameter had a gradient or its turn already, or its gradient has a graph.

        """
        gradient = parameter.grad
        if place in self._stale:
            self._gathering.rest()
            self._drop()
            why = "set by hand or left by a pass that ended in an error, which would be added to"
            message = f"{self.names[parameter]} has a gradient of before, {why}; it is dropped: go on anew"
            raise BackwardError(message)
        if self._turns[place] == self._turn:
            self._refuse(
                place,
                "has a second gradient in one step: gradients of several backward passes, or of a weight "
                "that reentrant checkpoints use twice, cannot be added up, since the first changed the "
                "weights. Call step() after each backward pass, checkpoint with use_reentrant=False, or use "
                "an ordinary optimizer",
            )
        if gradient is not None and gradient.requires_grad:
            self._refuse(place, "has a gradient with a graph (create_graph), of weights that change")
        self._turns[place] = self._turn
        if not self._is_open:
            passes.at_end(self._finish)
            self._is_open = True
        with self._lock:
            if complete := self._gathering.add(place):
                self._update(complete)

    def _finish(self) -> None:
        """Use what still waits at the end of a backward pass."""
        with self._lock:
            if rest := self._gathering.rest():
                self._update(rest)
        self._is_open = False

    def _discard(self) -> None:
        """Drop what a backward pass left that ended in an error, and begin another step."""
        self._gathering.rest()
        self._drop()
        self._is_open = False
        self._turn += 1

    def _drop(self) -> None:
        self._stale = frozenset()
        for parameter in self._learning:
            parameter.grad = None

    def _refuse(self, place: int, why: str) -> NoReturn:
        """Drop all gradients that wait: none may be added to later.

        Raises:
            BackwardError: always.

        """
        self._is_open = False
        for one in (place, *self._gathering.rest()):
            self._learning[one].grad = None
        message = f"{self.names[self._learning[place]]} {why}"
        raise BackwardError(message)

    def _update(self, places: Places) -> None:
        """Step with the ordinary optimizer, which sees no other parameters meanwhile."""
        if self._skip:
            self._drop_nonfinite(places)
        parts: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for place in places:
            parts[self._groups[place]].append(self._learning[place])
        try:
            self._steps.step(parts)
        finally:
            for place in places:
                self._learning[place].grad = None

    def _drop_nonfinite(self, places: Places) -> None:
        """Take the gradients away from layers that have one that is not finite: no rule touches them then."""
        gradients = [self._learning[place].grad for place in places]
        bad = bad_layers(gradients, [self._layers[place] for place in places])
        for place in places:
            if self._layers[place] in bad:
                self._learning[place].grad = None
                self.skipped[self.names[self._learning[place]]] += 1

    def _group_names(self) -> states.Names:
        return [[self.names[one] for one in group["params"]] for group in self.param_groups]
