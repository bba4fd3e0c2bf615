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
import inspect
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

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
    return reference() if reference else None


def claim(targets: Mapping[str, object], owner: object) -> None:
    """Record an object as the owner of named parameters or optimizers; no reference keeps either alive.

    Raises:
        ValueError: one of them has an owner; nothing is recorded then.

    """
    owners = {name: one for name, target in targets.items() if (one := owner_of(target)) is not None}
    if owners:
        kind = type(next(iter(owners.values()))).__name__
        message = f"{', '.join(owners)}: already managed by another {kind}: close() that one first"
        raise ValueError(message)
    for target in targets.values():
        _OWNERS[target] = weakref.ref(owner)


def release(targets: Iterable[object], owner: object) -> None:
    """Remove an object as the owner of targets that it owns."""
    for target in targets:
        if owner_of(target) is owner:
            del _OWNERS[target]


class AbstractBackwardOptimizer(Optimizer):
    """Takes an optimizer's place in a training loop and refuses calls that cannot work in backward."""

    _is_built = False

    def __init__(self, groups: list[list[nn.Parameter]]) -> None:
        """Take the parameters of each group."""
        super().__init__([{"params": group} for group in groups], {})
        self._is_built = True

    @abstractmethod
    def end_step(self) -> bool:
        """End a step; return whether any parameter had a gradient in it.

        Raises:
            BackwardError: the backward pass failed, or the optimizer can no longer update the model.

        """

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss
        """End a step; the parameters were already updated by ``backward()``.

        Raises:
            BackwardError: there was no backward pass since the last step, it failed, or a closure was given.

        """
        if closure is not None:
            message = "a closure would run after the update: call backward() yourself, then step()"
            raise BackwardError(message)
        if not self.end_step():
            message = (
                "no gradient has arrived since the last step: call backward() first. Gradients of another "
                "model or of torch.autograd.grad do not count"
            )
            raise BackwardError(message)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            message = "groups cannot be added: close() this optimizer and create one for the whole model"
            raise BackwardError(message)
        super().add_param_group(param_group)

    @override
    def __getstate__(self) -> NoReturn:
        message = "an optimizer in backward cannot be copied: create another and load its state_dict()"
        raise BackwardError(message)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """GradScaler reads this before it calls ``step()``."""
        message = (
            "GradScaler does not work with updates inside the backward pass: scaled gradients have already "
            "changed the weights, which must be loaded again. Use bfloat16 without a scaler"
        )
        raise BackwardError(message)


class OptimizerInBackward(AbstractBackwardOptimizer):
    """Updates a model's parameters inside the backward pass by the rule of an ordinary optimizer.

    After ``loss.backward()`` the parameters have changed and no gradient is left; ``step()`` only ends the
    step. The weights are bit for bit those of the ordinary optimizer. Parameter groups and state are the
    ordinary optimizer's too, so learning-rate schedulers work and a ``state_dict()`` can be loaded by either.

    With ``skip_nonfinite``, a NaN or infinite gradient leaves the parameters and the state of its whole layer
    unchanged. A layer is a module's own parameters, including those of its parametrizations; layers that
    share a parameter count as one. Its gradients therefore wait for each other, and this is how many are
    alive at once:

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
    silently.

    The model holds no reference to the optimizer: keep one, and ``close()`` it to train differently.

    Args:
        model: every backward pass updates its trainable parameters from now on.
        rule: builds the ordinary optimizer. Rules that keep counters in their parameter groups do not work.
        granularity: what is updated at once: each parameter, gradients in the order in which they arrive
            until they fill a bucket, or each module.
        bucket_bytes: size of a bucket.
        skip_nonfinite: skip layers with non-finite gradients and count them in ``skipped``, by parameter
            name. Costs one pass over the gradients and, on CUDA, one synchronisation per update.

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
        """Register hooks with every trainable parameter."""
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        learning = [parameter for parameter in self.names if parameter.requires_grad]
        if granularity not in get_args(Granularity):
            message = f"no granularity {granularity!r}; there are: {', '.join(get_args(Granularity))}"
            raise ValueError(message)
        _check_model(model, {self.names[one]: one for one in learning})
        self._ordinary = _build_ordinary(rule, learning, self.names)
        super().__init__([learning])
        self.defaults = self._ordinary.defaults
        self.param_groups = self._ordinary.param_groups
        self.state = self._ordinary.state
        self.skipped: Counter[str] = Counter()
        self._learning = learning
        self._frozen = [parameter for parameter in self.names if not parameter.requires_grad]
        groups = {one: number for number, group in enumerate(self.param_groups) for one in group["params"]}
        self._group_of = [groups[one] for one in learning]
        self._is_rule_checked = False
        self._skip_nonfinite = skip_nonfinite
        self._layer_of = _layers(model, learning)
        waits_for_layer = skip_nonfinite or granularity == "module"
        self._pending = _Pending(
            self._layer_of if waits_for_layer else range(len(learning)),
            [one.nbytes for one in learning],
            bucket_bytes if granularity == "bucket" else 0,
        )
        self._step_number = 1
        self._last_step = [0] * len(learning)  # in which each parameter last had a gradient
        self._is_in_pass = False
        self._first_of_pass = 0
        self._came_first: set[int] = set()  # in any pass
        self._lock = Lock()  # autograd calls hooks from one thread per device
        claim({self.names[one]: one for one in learning}, self)
        me = weakref.ref(self)  # parameters hold their hooks where the garbage collector cannot see them
        self._watches: dict[int, RemovableHandle] = {}
        for place in range(len(learning)):
            self._watch(place)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_on_gradient, me, place))
            for place, parameter in enumerate(learning)
        ]

    @override
    def end_step(self) -> bool:
        if self.is_closed:
            message = "this optimizer was closed: it no longer updates the model"
            raise BackwardError(message)
        if thawed := [self.names[one] for one in self._frozen if one.requires_grad]:
            message = f"{', '.join(thawed)}: frozen when this optimizer was created; close it, create another"
            raise BackwardError(message)
        if self._is_in_pass:
            self._fail(
                "the last backward pass ended in an error: only some parameters were updated, and the other "
                "gradients are dropped. Load earlier weights, or continue with a new step"
            )
        if left := [self.names[one] for one in self._learning if one.grad is not None]:
            self._fail(
                f"{', '.join(left)}: unused gradient, set by hand or left by a backward pass that failed; it "
                "is dropped. Continue with a new step"
            )
        had_gradient = self._step_number in self._last_step
        self._step_number += 1
        return had_gradient

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that a failed backward pass left."""
        if self._is_in_pass:
            self._discard_step()
        elif not self.is_closed:
            self._drop_gradients()

    def close(self) -> None:
        """Stop updating the model. Gradients stay from now on, and the state can still be saved."""
        self.zero_grad()
        for place in [*self._watches]:
            self._unwatch(place)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        release(self._learning, self)

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._handles

    @override
    def state_dict(self) -> State:
        """Return the ordinary optimizer's state, with the names of the parameters in its groups."""
        state = self._ordinary.state_dict()
        for group, names in zip(state["param_groups"], self._group_names(), strict=True):
            group["param_names"] = names
        return state

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of a state of this class or of an ordinary optimizer: by name, otherwise by position.

        Raises:
            ValueError: it is the state of another model; nothing is changed then.

        """
        self._ordinary.load_state_dict(aligned_state(state_dict, self._group_names()))
        # Schedulers hold the group objects: update them in place.
        for group, loaded in zip(self.param_groups, self._ordinary.param_groups, strict=True):
            loaded.pop("param_names", None)
            group.update(loaded)
        self._ordinary.param_groups = self.param_groups
        self.state = self._ordinary.state

    def before_gradient(self, place: int) -> None:
        """Check that the parameter has no older gradient to which the new one would be added.

        Raises:
            BackwardError: the parameter already has a gradient.

        """
        is_known = self._last_step[place] == self._step_number  # then on_gradient() refuses the second one
        if self._learning[place].grad is not None and not is_known:
            self._fail(
                f"{self.names[self._learning[place]]} already had a gradient before this backward pass, set "
                "by hand or left by a pass that failed; it is dropped. This pass may have updated other "
                "parameters: load earlier weights, or continue with a new step"
            )

    def on_gradient(self, place: int) -> None:
        """Take note of a parameter's gradient and update what it completes.

        Raises:
            BackwardError: the parameter already had a gradient in this step, or its gradient has a graph.

        """
        parameter = self._learning[place]
        gradient = parameter.grad
        if self._last_step[place] == self._step_number:
            self._fail(
                f"{self.names[parameter]} has a second gradient in one step: the first one has changed the"
                " weights, so gradients cannot be accumulated over passes or over reentrant checkpoints "
                "of a shared layer. Call step() after each backward pass, checkpoint with "
                "use_reentrant=False, or use an ordinary optimizer"
            )
        if gradient is not None and gradient.requires_grad:
            name = self.names[parameter]
            self._fail(f"{name} has a gradient with a graph (create_graph) of weights that change")
        self._last_step[place] = self._step_number
        if not self._is_in_pass:
            self._begin_pass(place)
        with self._lock:
            if places := self._pending.add(place):
                self._update(places)

    def _begin_pass(self, first: int) -> None:
        if len(self._watches) < len(self._learning):
            for place in range(len(self._learning)):
                if place != first:
                    self.before_gradient(place)
        self._first_of_pass = first
        _call_at_end_of_pass(self._end_pass)
        self._is_in_pass = True

    def _end_pass(self) -> None:
        with self._lock:
            if places := self._pending.flush():
                self._update(places)
        self._is_in_pass = False
        self._watch_what_comes_first()

    def _watch_what_comes_first(self) -> None:
        """Keep only the hooks before gradients that are needed, as each costs a tenth of a small update.

        When the first gradient of a pass arrives, all other parameters can be checked at once. The first one
        itself needs a hook before its gradient is added to an earlier one; until a pass has shown which
        parameter that is, all have one. With several devices the others' gradients may already have come.
        """
        self._came_first.add(self._first_of_pass)
        self._watch(self._first_of_pass)
        if len({parameter.device for parameter in self._learning}) == 1:
            for place in self._watches.keys() - self._came_first:
                self._unwatch(place)

    def _watch(self, place: int) -> None:
        """Check a parameter before its gradient comes."""
        if place not in self._watches:
            hook = partial(_before_gradient, weakref.ref(self), place)
            self._watches[place] = self._learning[place].register_hook(hook)

    def _unwatch(self, place: int) -> None:
        self._watches.pop(place).remove()
        parameter = self._learning[place]
        if not parameter._backward_hooks:  # noqa: SLF001  there is no public way to ask
            parameter._backward_hooks = None  # noqa: SLF001  an empty dict costs as much as a hook

    def _fail(self, message: str) -> NoReturn:
        self._discard_step()
        raise BackwardError(message)

    def _discard_step(self) -> None:
        """Drop the gradients of a failed pass, and begin another step."""
        self._pending.flush()
        self._drop_gradients()
        self._is_in_pass = False
        self._step_number += 1

    def _drop_gradients(self) -> None:
        for parameter in self._learning:
            parameter.grad = None

    def _update(self, places: Sequence[int]) -> None:
        """Step the ordinary optimizer with only these parameters in its groups."""
        if self._skip_nonfinite:
            self._drop_nonfinite(places)
        parts: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for place in places:
            parts[self._group_of[place]].append(self._learning[place])
        wholes = [group["params"] for group in self.param_groups]
        options = None if self._is_rule_checked else self._options()
        try:
            for group, part in zip(self.param_groups, parts, strict=True):
                group["params"] = part
            self._ordinary.param_groups = [group for group in self.param_groups if group["params"]]
            self._ordinary.step()
        finally:
            self._ordinary.param_groups = self.param_groups
            for group, whole in zip(self.param_groups, wholes, strict=True):
                group["params"] = whole
            for place in places:
                self._learning[place].grad = None
        if not self._is_rule_checked and options != [
            {**group, "params": None} for group in self.param_groups
        ]:
            message = (
                f"{type(self._ordinary).__name__} changes options of its groups in every step, such as a "
                "counter, and a backward pass has several steps: use it as an ordinary optimizer"
            )
            raise BackwardError(message)
        self._is_rule_checked = True

    def _options(self) -> list[State]:
        return [{**group, "params": None} for group in self.param_groups]

    def _drop_nonfinite(self, places: Sequence[int]) -> None:
        """Remove the gradients of layers with a non-finite gradient, so that no rule changes anything."""
        gradients = {
            place: gradient for place in places if (gradient := self._learning[place].grad) is not None
        }
        if _are_surely_finite(list(gradients.values())):
            return
        bad = {
            self._layer_of[place]
            for place, gradient in gradients.items()
            if not bool(_values(gradient).isfinite().all())
        }
        for place in places:
            if self._layer_of[place] in bad:
                self._learning[place].grad = None
                self.skipped[self.names[self._learning[place]]] += 1

    def _group_names(self) -> list[list[str]]:
        return [[self.names[one] for one in group["params"]] for group in self.param_groups]


def _call_at_end_of_pass(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running has ended without an error.

    A reentrant checkpoint runs a backward pass inside another one, and torch reports the end of the inner
    pass. The function is then registered again in the outer pass, by the first node after the checkpoint.
    """

    def on_end() -> None:
        checkpoint = torch._C._current_autograd_node()  # noqa: SLF001  torch has no public name for it
        following = [node for node, _ in checkpoint.next_functions if node] if checkpoint else []
        if not following:
            callback()
            return

        def before_next_node(_: object) -> None:
            handle.remove()
            _call_at_end_of_pass(callback)

        handle = following[0].register_prehook(before_next_node)

    Variable._execution_engine.queue_callback(on_end)  # noqa: SLF001  as torch.distributed does; no public name


def _before_gradient(optimizer: "weakref.ref[OptimizerInBackward]", place: int, _: Tensor) -> None:
    if (found := optimizer()) is not None:
        found.before_gradient(place)


def _on_gradient(optimizer: "weakref.ref[OptimizerInBackward]", place: int, parameter: nn.Parameter) -> None:
    if (found := optimizer()) is not None:
        found.on_gradient(place)
    elif owner_of(parameter) is None:  # otherwise the hook of a newer optimizer follows
        parameter.grad = None
        message = "the optimizer in backward was deleted: keep a reference to it, or close() it first"
        raise BackwardError(message)


class _Pending:
    """Parameters, by place, whose gradients are ready and that are not yet updated.

    Args:
        layers: number of each parameter's layer; a layer's parameters are released together.
        sizes_bytes: size of each parameter's gradient.
        bucket_bytes: complete layers wait until their gradients have this size.

    """

    def __init__(self, layers: Sequence[int], sizes_bytes: Sequence[int], bucket_bytes: int) -> None:
        self._layers, self._bucket_bytes = layers, bucket_bytes
        self._count = Counter(layers)
        self._layer_bytes = Counter[int]()
        for layer, size_bytes in zip(layers, sizes_bytes, strict=True):
            self._layer_bytes[layer] += size_bytes
        self._incomplete: dict[int, list[int]] = {layer: [] for layer in layers}
        self._complete: list[int] = []
        self._complete_bytes = 0

    def add(self, place: int) -> list[int]:
        """Add a parameter; return the ones to update now."""
        layer = self._layers[place]
        waiting = self._incomplete[layer]
        waiting.append(place)
        if len(waiting) < self._count[layer]:
            return []
        self._complete += waiting
        self._complete_bytes += self._layer_bytes[layer]
        waiting.clear()
        return self._take_complete() if self._complete_bytes >= self._bucket_bytes else []

    def flush(self) -> list[int]:
        """Return all that are left."""
        incomplete = [place for waiting in self._incomplete.values() for place in waiting]
        for waiting in self._incomplete.values():
            waiting.clear()
        return [*self._take_complete(), *incomplete]

    def _take_complete(self) -> list[int]:
        taken, self._complete, self._complete_bytes = self._complete, [], 0
        return taken


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_model(model: nn.Module, learning: Mapping[str, nn.Parameter]) -> None:
    message = ""
    if not learning:
        message = "the model has no trainable parameter"
    elif any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        message = "DistributedDataParallel averages gradients only after they would have been used"
    elif shapeless := [name for name, one in learning.items() if isinstance(one, UninitializedParameter)]:
        message = f"{', '.join(shapeless)}: no shape yet: run a batch through the model first"
    elif used := [name for name, one in learning.items() if one.grad is not None]:
        message = f"{', '.join(used)}: already has a gradient, which would be added to: set it to None first"
    if message:
        raise ValueError(message)


def _build_ordinary(rule: Rule, learning: list[nn.Parameter], names: Mapping[nn.Parameter, str]) -> Optimizer:
    """Build a rule's optimizer and check that it can step with some of its parameters at a time."""
    if isinstance(rule, Optimizer) or not callable(rule):
        message = (
            f"the rule is a {type(rule).__name__}: pass a function that builds an optimizer, such as "
            "functools.partial(torch.optim.SGD, lr=0.1)"
        )
        raise ValueError(message)  # noqa: TRY004  as for every other unsuitable rule
    ordinary = rule(learning)
    if differing := {*learning} ^ {*parameters_of(ordinary)}:
        named = ", ".join(names.get(one, "a parameter of another model") for one in differing)
        message = f"the rule's optimizer must hold exactly the parameters it is given; it differs in {named}"
        raise ValueError(message)
    closure = inspect.signature(type(ordinary).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        message = f"{type(ordinary).__name__} evaluates the model itself and needs all gradients at once"
        raise ValueError(message)
    return ordinary


def _layers(model: nn.Module, learning: Sequence[nn.Parameter]) -> list[int]:
    """Number each parameter's layer, see :class:`OptimizerInBackward`."""
    found: dict[nn.Parameter, int] = {}
    for number, module in enumerate(model.modules()):
        own = list(module.parameters(recurse=False))
        if parametrize.is_parametrized(module):
            own += module.get_submodule("parametrizations").parameters()
        shared = {found[one] for one in own if one in found}
        own += [one for one, layer in found.items() if layer in shared]
        found.update(dict.fromkeys(own, number))
    return [found[parameter] for parameter in learning]


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _are_surely_finite(gradients: Sequence[Tensor]) -> bool:
    """Test all gradients at once; False may also mean that a sum or a norm overflowed."""
    if all(one.is_cpu for one in gradients):
        return cmath.isfinite(sum([one.sum().item() for one in gradients]))
    return bool(nn.utils.get_total_norm([_values(one) for one in gradients]).isfinite())


def aligned_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> State:
    """Return a copy of an optimizer's state in the order of the given parameter groups, numbered from 0.

    Args:
        state: in torch's form; without ``param_names`` in its groups it is matched by position.
        names: names of the parameters of each group.

    Raises:
        ValueError: it is the state of another model, or parameters of one group have different options.

    """
    groups = state["param_groups"]
    if not all("param_names" in group for group in groups):
        if [len(group["params"]) for group in groups] != [len(those) for those in names]:
            message = "the state has no parameter names and another number of parameters"
            raise ValueError(message)
        groups = [{**group, "param_names": those} for group, those in zip(groups, names, strict=True)]
    source = {
        name: (group, key)
        for group in groups
        for name, key in zip(group["param_names"], group["params"], strict=True)
    }
    if differing := {name for those in names for name in those} ^ source.keys():
        message = f"the state of another model: it differs in {', '.join(sorted(differing))}"
        raise ValueError(message)
    aligned: State = {"state": {}, "param_groups": []}
    count = 0
    for those in names:
        options, *others = [{**source[name][0], "params": None, "param_names": None} for name in those]
        if any(other != options for other in others):
            message = f"{', '.join(those)}: one group here, several in the state"
            raise ValueError(message)
        places = range(count, count + len(those))
        aligned["param_groups"].append({**options, "params": list(places), "param_names": list(those)})
        for place, name in zip(places, those, strict=True):
            if entries := state["state"].get(source[name][1]):
                aligned["state"][place] = entries
        count += len(those)
    return copy.deepcopy(aligned)
