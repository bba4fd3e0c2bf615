"""Optimizers that update parameters inside the backward pass and free each gradient as soon as it is used.

    optimizer = OptimizerInBackward(model, partial(torch.optim.AdamW, lr=1e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    ...
    loss.backward()      # updates the parameters; no gradient is left afterwards
    optimizer.step()     # ends the step: checks that there was a backward pass, updates nothing
    schedule.step()

Layers with their own optimizers are in :mod:`impls.training.implicit_optimizer`.
"""

import cmath
import copy
import itertools
import weakref
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal, NoReturn, get_args

from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils import parametrize
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

Rule = Callable[[list[nn.Parameter]], Optimizer]
"""Builds an ordinary optimizer of some parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``."""

Granularity = Literal["parameter", "bucket", "module"]

BUCKET_BYTES = 2**20
"""Default number of gradient bytes after which a bucket is updated."""

State = dict[str, Any]


class BackwardError(RuntimeError):
    """An optimizer in backward was used in a way that would give wrong weights."""


_OWNERS = WeakIdKeyDictionary()
"""Parameter or optimizer -> weak reference to the OptimizerInBackward or RigLScheduler that manages it."""


def owner_of(target: object) -> object | None:
    """Return the OptimizerInBackward or RigLScheduler that manages a parameter or an optimizer, if any."""
    reference = _OWNERS.get(target)
    owner: Any = reference and reference()
    return None if owner is None or owner.is_closed else owner


def claim(targets: Mapping[str, object], owner: object) -> None:
    """Record the owner of named parameters or optimizers, or raise ValueError if one has another owner.

    Nothing is kept alive by this record.
    """
    owners = {name: owner_of(target) for name, target in targets.items()}
    if owned := {name: type(current) for name, current in owners.items() if current is not None}:
        owner_name = next(iter(owned.values())).__name__
        raise ValueError(
            f"{', '.join(owned)}: already managed by another {owner_name}: call its close() first"
        )
    for target in targets.values():
        _OWNERS[target] = weakref.ref(owner)


class AbstractBackwardOptimizer(Optimizer):
    """Takes an optimizer's place in a training loop and refuses calls that cannot work in backward."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        """Take the parameters with their names in the model; a subclass replaces the parameter groups."""
        super().__init__(list(names), {})
        self.names = names

    @abstractmethod
    def end_step(self) -> bool:
        """End a step; return whether a parameter had a gradient. Raise BackwardError if the pass failed."""

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss
        """End a step; the parameters were already updated by ``backward()``.

        Raises:
            BackwardError: there was no backward pass since the last step, it failed, or a closure was given.
        """
        if closure is not None:
            raise BackwardError(
                "step() takes no closure, because backward() already updates the model: call backward() "
                "yourself, then step()"
            )
        if not self.end_step():
            raise BackwardError(
                "no gradient has arrived since the last step: call backward() first. Gradients of another "
                "model or of torch.autograd.grad do not count"
            )

    @override
    def state_dict(self) -> State:
        """Return the ordinary optimizer's state, with the names of the parameters in its groups."""
        state = super().state_dict()
        for group, names in zip(state["param_groups"], self._group_names(), strict=True):
            group["param_names"] = names
        return state

    def _group_names(self) -> list[list[str]]:
        return [[self.names[parameter] for parameter in group["params"]] for group in self.param_groups]

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """GradScaler reads this before it calls ``step()``."""
        raise BackwardError(
            "GradScaler does not work with updates inside the backward pass: scaled gradients have already "
            "changed the weights, which must be loaded again. Use bfloat16 without a scaler"
        )


class OptimizerInBackward(AbstractBackwardOptimizer):
    """Updates a model's parameters inside the backward pass by the rule of an ordinary optimizer.

    After ``loss.backward()`` the parameters have changed and no gradient is left; ``step()`` only ends the
    step. The weights are bit for bit those of the ordinary optimizer. Parameter groups and state are the
    ordinary optimizer's too, so learning-rate schedulers work and a ``state_dict()`` can be loaded by either.

    With ``skip_nonfinite``, a NaN or infinite gradient leaves the parameters and the state of its whole layer
    unchanged. A layer is a module's own parameters, including those of its parametrizations; layers that
    share a parameter count as one. Its gradients are therefore kept until all of them have arrived. These
    gradients are alive at the same time:

    ============  =============================  ===================================
    granularity   ``skip_nonfinite=True``        ``skip_nonfinite=False``
    ============  =============================  ===================================
    parameter     the largest layer's            the largest parameter's
    module        the largest layer's            the largest layer's
    bucket        layers, up to a full bucket    parameters, up to a full bucket
    ============  =============================  ===================================

    Gradients cannot be accumulated over several passes, and none are left to be clipped after the pass: clip
    each in a hook (``Tensor.register_hook``). A backward pass that raises has updated the parameters whose
    gradients came first; ``step()`` then raises and drops the other gradients, ``zero_grad()`` drops them
    silently. All pending parameters are updated at the end of a reentrant checkpoint.

    The model holds no reference to the optimizer: keep one, and ``close()`` it to train differently.

    Args:
        model: every backward pass updates its trainable parameters from now on.
        rule: builds the ordinary optimizer. Rules that keep counters in their parameter groups do not work.
        granularity: what is updated at once: each parameter, gradients in the order in which they arrive
            until they fill a bucket, or each module.
        bucket_bytes: size of a bucket.
        skip_nonfinite: skip layers with non-finite gradients and count them in ``skipped``, by parameter
            name. Costs one pass over the gradients and, on CUDA, one synchronization per update.

    Raises:
        ValueError: the model or the rule cannot be used like this.
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
        if granularity not in get_args(Granularity):
            raise ValueError(f"no granularity {granularity!r}; available: {', '.join(get_args(Granularity))}")
        names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        _check_model(model, names)
        self._trainable = list(names)
        self._ordinary = _build_ordinary(rule, names)
        super().__init__(names)
        self.defaults = self._ordinary.defaults
        self.param_groups = self._ordinary.param_groups
        self.state = self._ordinary.state
        self.skipped: Counter[str] = Counter()
        groups = {
            parameter: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        self._group_of = [groups[parameter] for parameter in self._trainable]
        self._is_rule_checked = False
        self._skip_nonfinite = skip_nonfinite
        self._layer_of = _layers(model, self._trainable)
        waits_for_layer = skip_nonfinite or granularity == "module"
        self._pending = _Pending(
            self._layer_of if waits_for_layer else range(len(names)),
            [parameter.nbytes for parameter in names],
            bucket_bytes if granularity == "bucket" else 0,
        )
        self._arrived: set[int] = set()  # indices of the parameters that had a gradient in this step
        self._is_in_pass = False
        self._lock = Lock()  # autograd calls hooks from one thread per device
        # Parameters hold their hooks where the garbage collector cannot see them: use a weak reference.
        hook = partial(_on_gradient, weakref.ref(self))
        self._handles: list[Any] = []
        claim({name: parameter for parameter, name in names.items()}, self)
        for index, parameter in enumerate(names):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(hook, index)))

    @override
    def end_step(self) -> bool:
        if self.is_closed:
            raise BackwardError("this optimizer was closed and no longer updates the model: create another")
        if self._is_in_pass:
            self._fail(
                "the last backward pass ended in an error: only some parameters were updated, and the other "
                "gradients are dropped. Load earlier weights, or continue with a new step"
            )
        had_gradient = bool(self._arrived)
        self._arrived.clear()
        return had_gradient

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin another step: drop the gradients of a failed pass; a pass without ``step()`` is ended."""
        if self._is_in_pass or not self.is_closed:
            self._discard_step()

    def close(self) -> None:
        """Stop updating the model. Gradients stay from now on, and the state can still be saved."""
        self.zero_grad()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._handles

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of a state of this class or of an ordinary optimizer.

        Raises:
            ValueError: the state has other parameters than the model, or in another order; nothing is changed
                then.
        """
        self._ordinary.load_state_dict(copy_state(state_dict, self._group_names()))
        # An ImplicitOptimizer holds the group objects: update them in place.
        for group, loaded in zip(self.param_groups, self._ordinary.param_groups, strict=True):
            group.update(loaded)
        self._ordinary.param_groups = self.param_groups
        self.state = self._ordinary.state

    def on_gradient(self, index: int) -> None:
        """Record that a parameter's gradient has arrived; update the layer or bucket that it completes."""
        if index in self._arrived:
            self._fail(
                f"{self.names[self._trainable[index]]} has a second gradient in one step: the first one has "
                "changed the weights, so gradients cannot be accumulated over passes or over reentrant "
                "checkpoints of a shared layer. Call step() after each backward pass, checkpoint with "
                "use_reentrant=False, or use an ordinary optimizer"
            )
        with self._lock:
            self._arrived.add(index)
            if not self._is_in_pass:
                self._is_in_pass = True
                # as torch.distributed does; there is no public name
                Variable._execution_engine.queue_callback(self._end_pass)  # noqa: SLF001  see above
            if complete := self._pending.add(index):
                self._update(complete)

    def _end_pass(self) -> None:
        with self._lock:
            if pending := self._pending.flush():
                self._update(pending)
        self._is_in_pass = False

    def _fail(self, message: str) -> NoReturn:
        self._discard_step()
        raise BackwardError(message)

    def _discard_step(self) -> None:
        """Drop the gradients of a failed pass, and begin another step."""
        self._pending.flush()
        for parameter in self._trainable:
            parameter.grad = None
        self._is_in_pass = False
        self._arrived.clear()

    def _update(self, indices: Sequence[int]) -> None:
        """Step the ordinary optimizer with only these parameters in its groups; drop their gradients."""
        if self._skip_nonfinite:
            self._drop_nonfinite(indices)
        ready: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for index in indices:
            ready[self._group_of[index]].append(self._trainable[index])
        all_parameters = [group["params"] for group in self.param_groups]
        options = None if self._is_rule_checked else self._options()  # the first update checks the rule
        try:
            for group, parameters in zip(self.param_groups, ready, strict=True):
                group["params"] = parameters
            self._ordinary.param_groups = [group for group in self.param_groups if group["params"]]
            self._ordinary.step()
        finally:
            self._ordinary.param_groups = self.param_groups
            for group, parameters in zip(self.param_groups, all_parameters, strict=True):
                group["params"] = parameters
            for index in indices:
                self._trainable[index].grad = None
        if options is not None and options != self._options():
            raise BackwardError(
                f"{type(self._ordinary).__name__} changes options of its groups in every step, such as a "
                "counter, and a backward pass has several steps: use it as an ordinary optimizer"
            )
        self._is_rule_checked = True

    def _options(self) -> list[State]:
        """Return the parameter groups without their parameters."""
        return [{**group, "params": None} for group in self.param_groups]

    def _drop_nonfinite(self, indices: Sequence[int]) -> None:
        """Remove the gradients of layers with a non-finite gradient, so that no rule changes anything."""
        gradients = {
            index: gradient for index in indices if (gradient := self._trainable[index].grad) is not None
        }
        if _are_surely_finite(list(gradients.values())):
            return
        nonfinite_layers = {
            self._layer_of[index]
            for index, gradient in gradients.items()
            if not bool(_values(gradient).isfinite().all())
        }
        for index in indices:
            if self._layer_of[index] in nonfinite_layers:
                parameter = self._trainable[index]
                parameter.grad = None
                self.skipped[self.names[parameter]] += 1


def _on_gradient(optimizer: "weakref.ref[OptimizerInBackward]", index: int, parameter: nn.Parameter) -> None:
    if (owner := optimizer()) is not None:
        owner.on_gradient(index)
    elif owner_of(parameter) is None:  # otherwise the hook of a newer optimizer follows
        parameter.grad = None
        raise BackwardError(
            "the optimizer in backward was deleted: keep a reference to it, or call its close() first"
        )


class _Pending:
    """Indices of parameters whose gradients are ready and that are not yet updated.

    The parameters of a layer are updated together, when the gradients of complete layers fill a bucket.
    """

    def __init__(self, layers: Sequence[int], sizes_bytes: Sequence[int], bucket_bytes: int) -> None:
        self._layers, self._sizes_bytes, self._bucket_bytes = layers, sizes_bytes, bucket_bytes
        self._layer_size = Counter(layers)
        self._incomplete: defaultdict[int, list[int]] = defaultdict(list)
        self._complete: list[int] = []
        self._complete_bytes = 0

    def add(self, index: int) -> list[int]:
        """Add a parameter; return the ones to update now."""
        layer = self._layers[index]
        waiting = self._incomplete[layer]
        waiting.append(index)
        if len(waiting) < self._layer_size[layer]:
            return []
        self._complete += self._incomplete.pop(layer)
        self._complete_bytes += sum(self._sizes_bytes[number] for number in waiting)
        if self._complete_bytes < self._bucket_bytes:
            return []
        ready, self._complete, self._complete_bytes = self._complete, [], 0
        return ready

    def flush(self) -> list[int]:
        """Return and forget all parameters."""
        pending = [*self._complete, *itertools.chain(*self._incomplete.values())]
        self._incomplete.clear()
        self._complete, self._complete_bytes = [], 0
        return pending


def _check_model(model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "an optimizer in backward uses gradients before DistributedDataParallel averages them: use an "
            "ordinary optimizer"
        )
    if used := [name for parameter, name in names.items() if parameter.grad is not None]:
        raise ValueError(
            f"these parameters already have a gradient, to which new ones would be added: {', '.join(used)}; "
            "set .grad to None first"
        )


def _build_ordinary(rule: Rule, names: Mapping[nn.Parameter, str]) -> Optimizer:
    """Build a rule's optimizer and check that it can step with some of its parameters at a time."""
    ordinary = rule(list(names))
    if isinstance(ordinary, LBFGS):
        raise ValueError(  # noqa: TRY004  as for every other rule
            "LBFGS evaluates the loss several times per step, but each backward pass has only one loss: "
            "use a first-order optimizer"
        )
    parameters = {parameter for group in ordinary.param_groups for parameter in group["params"]}
    if differing := names.keys() ^ parameters:
        named = ", ".join(names.get(parameter, "a parameter of another model") for parameter in differing)
        raise ValueError(
            "the rule must return an optimizer of exactly the parameters that it is called with; missing or "
            f"additional: {named}"
        )
    return ordinary


def _layers(model: nn.Module, trainable: Sequence[nn.Parameter]) -> list[int]:
    """Return the number of each parameter's layer.

    Layers that share a parameter have one number; a parametrized layer includes its parametrizations.
    """
    layers: dict[nn.Parameter, int] = {}
    for number, module in enumerate(model.modules()):
        parameters = list(module.parameters(recurse=False))
        if parametrize.is_parametrized(module):
            parameters += module.get_submodule("parametrizations").parameters()
        sharing = {layers[parameter] for parameter in parameters if parameter in layers}
        parameters += [parameter for parameter, layer in layers.items() if layer in sharing]
        layers.update(dict.fromkeys(parameters, number))
    return [layers[parameter] for parameter in trainable]


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _are_surely_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all gradients are finite, by one number; False may also mean that it overflowed."""
    if all(gradient.is_cpu for gradient in gradients):
        return cmath.isfinite(sum([gradient.sum().item() for gradient in gradients]))  # may be complex
    return bool(nn.utils.get_total_norm([_values(gradient) for gradient in gradients]).isfinite())


def copy_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> State:
    """Return a copy of an optimizer's state without ``param_names``.

    Args:
        state: the state.
        names: the names of the parameters in each group of the model.

    Raises:
        ValueError: the state has groups of other sizes or, if it has names, with other names.
    """
    copied = copy.deepcopy({"state": state["state"], "param_groups": state["param_groups"]})
    sizes = [len(group["params"]) for group in copied["param_groups"]]
    expected_sizes = [len(group_names) for group_names in names]
    if sizes != expected_sizes:
        raise ValueError(
            f"the saved state has parameter groups of sizes {sizes}, the model {expected_sizes}: load a "
            "state that was saved with this model"
        )
    for group, group_names in zip(copied["param_groups"], names, strict=True):
        if (saved := group.pop("param_names", group_names)) != group_names:
            raise ValueError(
                f"the saved state has {', '.join(saved)} instead of {', '.join(group_names)}: load a state "
                "that was saved with this model"
            )
    return copied
