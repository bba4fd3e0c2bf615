"""An optimizer that steps inside the backward pass: a gradient is used as soon as it is ready, and freed.

Where gradients live for a whole step there is memory for all of them; here only for those of a parameter, of
a bucket or of a module. What needs all gradients at once has no place here and is refused in words.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from typing_extensions import override

from impls.training import states
from impls.training.gathering import AbstractGathering, Buckets, Granularity, Modules, Singly
from impls.training.ownership import BackwardError, claim, owner_of, release
from impls.training.refusals import check_model, check_rule
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

    The model does not keep it alive: hold a reference, and ``close()`` it before letting go.

    Args:
        model: its parameters that learn are updated from now on by every backward pass.
        rule: makes the ordinary optimizer of all of them.
        granularity: what is updated at once: each parameter, ``bucket``: those that come in a row, or the
            parameters that a module has of its own.
        bucket_bytes: gradients that a bucket holds.
        skip_nonfinite: where a gradient is NaN or infinite, leave the parameters of the same module that are
            updated with it, and their state, as they are, and count them in ``skipped``. Costs one pass over
            gradients, and on CUDA one synchronisation, for each update.

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
        self._ordinary = rule(learning)
        check_rule(self._ordinary, self.names, learning)
        super().__init__([learning])
        self.defaults = self._ordinary.defaults
        self.param_groups = self._ordinary.param_groups
        self.state = self._ordinary.state
        self.skipped: Counter[str] = Counter()
        self._frozen = [parameter for parameter in self.names if not parameter.requires_grad]
        self._groups = {
            one: place for place, group in enumerate(self.param_groups) for one in group["params"]
        }
        self._skip = skip_nonfinite
        self._layers = {
            parameter: number
            for number, module in enumerate(model.modules())
            for parameter in module.parameters(recurse=False)
            if parameter in self._groups
        }
        kinds: Mapping[str, Callable[[], AbstractGathering]] = {
            "parameter": Singly,
            "bucket": lambda: Buckets(bucket_bytes),
            "module": lambda: Modules(self._layers, learning),
        }
        if granularity not in kinds:
            message = f"no granularity {granularity!r}; there are: {', '.join(kinds)}"
            raise ValueError(message)
        self._gathering = kinds[granularity]()
        self._waits = granularity != "parameter"
        self._turn = 1
        self._turns = [0] * len(learning)
        self._is_queued = False
        self._lock = Lock()  # each device of a model has a thread of its own that calls hooks
        me = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_Hook(me, place))
            for place, parameter in enumerate(learning)
        ]
        claim(learning, self)

    @override
    def end(self) -> bool:
        if not self._handles:
            message = "this optimizer was closed: it updates nothing any more"
            raise BackwardError(message)
        if thawed := [self.names[one] for one in self._frozen if one.requires_grad]:
            message = (
                f"{', '.join(thawed)} did not learn when this optimizer was made: close it, make another"
            )
            raise BackwardError(message)
        self._flush()
        had = self._turn in self._turns
        self._turn += 1
        return had

    def close(self) -> None:
        """Let go of the model: from now on its gradients stay, as usual. The state can still be saved."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        release(self._groups, self)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the ordinary optimizer's state, with the parameters' names in its groups."""
        return states.named(self._ordinary.state_dict(), self._group_names())

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a copy of a state, of this class or of an ordinary optimizer: by name, else by place.

        Raises:
            ValueError: it is the state of another model.

        """
        shapes = {name: tuple(parameter.shape) for parameter, name in self.names.items()}
        self._ordinary.load_state_dict(states.aligned(dict(state_dict), self._group_names(), shapes))
        # The groups stay the same objects: others may hold them.
        for group, loaded in zip(self.param_groups, self._ordinary.param_groups, strict=True):
            del loaded["param_names"]
            group.update(loaded)
        self._ordinary.param_groups = self.param_groups
        self.state = self._ordinary.state

    def ready(self, parameter: nn.Parameter, place: int) -> None:
        """Take note of a gradient; update what is complete with it. Hooks call this.

        Raises:
            BackwardError: the parameter has had its turn in this step, or its gradient has a graph.

        """
        gradient = parameter.grad
        if self._turns[place] == self._turn:
            self._refuse(
                parameter,
                "has a second gradient in one step: gradients of several backward passes, or of a weight "
                "that reentrant checkpoints use twice, cannot be added up, since the first changed the "
                "weights. Call step() after each backward pass, checkpoint with use_reentrant=False, or use "
                "an ordinary optimizer",
            )
        if gradient is not None and gradient.requires_grad:
            self._refuse(parameter, "has a gradient with a graph (create_graph), of weights that change")
        self._turns[place] = self._turn
        if self._waits and not self._is_queued:
            # What is left in a bucket is used at the end of the pass, for which torch has no public name.
            Variable._execution_engine.queue_callback(self._flush)  # noqa: SLF001  see above
            self._is_queued = True
        with self._lock:
            if complete := self._gathering.add(parameter):
                self._update(complete)

    def _flush(self) -> None:
        """Use what still waits."""
        self._is_queued = False
        with self._lock:
            if rest := self._gathering.rest():
                self._update(rest)

    def _refuse(self, parameter: nn.Parameter, why: str) -> NoReturn:
        """Drop all gradients that wait: none may be added to later.

        Raises:
            BackwardError: always.

        """
        self._is_queued = False
        for one in (parameter, *self._gathering.rest()):
            one.grad = None
        message = f"{self.names[parameter]} {why}"
        raise BackwardError(message)

    def _update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step with the ordinary optimizer, which sees no other parameters meanwhile."""
        if self._skip:
            self._drop_nonfinite(parameters)
        ordinary, groups = self._ordinary, self.param_groups
        wholes = [group["params"] for group in groups]
        parts: list[list[nn.Parameter]] = [[] for _ in groups]
        for parameter in parameters:
            parts[self._groups[parameter]].append(parameter)
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            ordinary.param_groups = [group for group in groups if group["params"]]
            ordinary.step()
        finally:
            ordinary.param_groups = groups
            for group, whole in zip(groups, wholes, strict=True):
                group["params"] = whole
            for parameter in parameters:
                parameter.grad = None

    def _drop_nonfinite(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients away from layers that have one that is not finite: no rule touches them then."""
        gradients = [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if _are_finite(gradients):
            return
        bad = {
            self._layers[parameter]
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if not bool(gradient.isfinite().all())
        }
        for parameter in parameters:
            if self._layers[parameter] in bad:
                parameter.grad = None
                self.skipped[self.names[parameter]] += 1

    def _group_names(self) -> states.Names:
        return [[self.names[one] for one in group["params"]] for group in self.param_groups]


class _Hook:
    """What a parameter calls; it reaches the optimizer, and so the parameter, by a weak reference only."""

    def __init__(self, owner: "weakref.ref[OptimizerInBackward]", place: int) -> None:
        self._owner, self._place = owner, place

    def __call__(self, parameter: nn.Parameter) -> None:
        """Say that a gradient is ready.

        Raises:
            BackwardError: nobody is there to use it.

        """
        owner = self._owner()
        if owner is None and owner_of(parameter) is not None:
            return  # the next hook is that of the optimizer that came after
        if owner is None:
            parameter.grad = None
            message = (
                "the optimizer in backward is gone: hold a reference to it, or close() it before letting go"
            )
            raise BackwardError(message)
        owner.ready(parameter, self._place)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether all are, as far as that can be told fast: no stands for perhaps not."""
    if any(gradient.device.type != "cpu" for gradient in gradients):
        return bool(nn.utils.get_total_norm(gradients, torch.inf).isfinite())
    # On a CPU a sum takes a tenth of a norm's time. What is not finite stays so in it; it may overflow.
    wide = (one.sum(dtype=torch.promote_types(one.dtype, torch.float32)) for one in gradients)
    return all(math.isfinite(one.item()) for one in wide)
