"""RigL: sparse training that moves its active weights to where the gradient is large.

Two lines make a training loop sparse:

    scheduler = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=int(0.75 * steps))
    ...
    loss.backward()
    if scheduler():
        optimizer.step()

Each call of ``scheduler()`` counts one step. A weight tensor has active elements, which are trained, and
inactive ones, which are zero, with zero gradients and optimizer state. Every ``delta`` steps before ``T_end``
the mask changes instead of an optimizer step: the smallest active elements are dropped (become inactive), and
as many are grown (become active). Masks on dense tensors only simulate sparsity: they save neither time nor
memory.

An *entry* is one element of a weight tensor.

:class:`RigLInBackward` does the same without a separate optimizer: weights are updated in the backward pass,
with one layer's gradients in memory at a time.

Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners. Argument names are those of rigl-torch.
"""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Generator, Tensor, distributed, nn
from torch.optim import Optimizer
from typing_extensions import override

from impls.training.optimizer_in_backward import OptimizerInBackward, Rule, claim
from impls.training.sparse_masks import (
    Distribution,
    drop_and_grow,
    random_masks,
    sparsifiable,
    zero_changed,
)

Growth = Literal["gradient", "random"]

_RIGL_TORCH_KEYS = ("hyperparams", "dense_allocation", "N", "backward_masks", "step", "rigl_steps")
_STATE_KEYS = (
    "ignore_linear_layers",
    "schedule",
    "shapes",
    "step",
    "updates",
    "masks",
    "accumulated",
    "generator",
)


@dataclass(frozen=True)
class Schedule:
    """Settings of RigL, under the names of rigl-torch: when the mask changes, and by how much.

    Every ``delta`` steps before ``T_end``, the share alpha / 2 (1 + cos(pi step / T_end)) of the active
    entries is dropped and grown elsewhere (Evci et al. 2020, section 3).

    Args:
        dense_allocation: share of the weights that is active, in (0, 1].
        T_end: the first step without a move, a whole number; three quarters of all steps work well.
        delta: steps between two updates, a whole number.
        alpha: share of the active entries that moves at the start; it falls to zero at ``T_end``.
        grad_accumulation_n: average the dense gradients of this many steps up to and including the update.
        sparsity_distribution: ``uniform``, which leaves the first layer of the network dense, or ``erk``.
        static_topo: never move entries.
        growth: where the ``gradient`` is largest, or at ``random`` as in SET (Mocanu et al. 2018).

    Raises:
        ValueError: a setting is out of range.
    """

    dense_allocation: float
    T_end: float | None = None
    delta: int = 100
    alpha: float = 0.3
    grad_accumulation_n: int = 1
    sparsity_distribution: Distribution = "uniform"
    static_topo: bool = False
    growth: Growth = "gradient"

    def __post_init__(self) -> None:
        most_passes = max(self.delta - 1, 1) if _is_whole(self.delta) else 1
        requirements = {
            "dense_allocation": (
                _is_share(self.dense_allocation) and self.dense_allocation > 0,
                "a share of the weights in (0, 1]",
            ),
            "static_topo": (self.static_topo in (True, False), "True or False"),
            "T_end": (
                self.static_topo if self.T_end is None else _is_whole(self.T_end),
                "the step from which entries stay, a whole number, such as int(0.75 * steps)",
            ),
            "delta": (_is_whole(self.delta), "a whole number of steps, at least 1"),
            "alpha": (_is_share(self.alpha), "a share of the active entries in [0, 1]"),
            "grad_accumulation_n": (
                _is_whole(self.grad_accumulation_n) and self.grad_accumulation_n <= most_passes,
                f"a whole number from 1 to {most_passes:.0f}, less than delta",
            ),
            "sparsity_distribution": (self.sparsity_distribution in get_args(Distribution), "uniform or erk"),
            "growth": (self.growth in get_args(Growth), "gradient or random"),
        }
        for name, (is_met, expected) in requirements.items():
            if not is_met:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected {expected}")

    def warn_if_nothing_moves(self) -> None:
        """Warn, at the line that calls the caller, if no update comes before ``T_end``."""
        is_static = self.static_topo or self.dense_allocation == 1
        if self.T_end is not None and self.delta >= self.T_end and not is_static:
            message = (
                f"entries will never move: the first update is due at step {self.delta}, but updates end "
                f"before step T_end = {self.T_end}; pass static_topo=True if that is intended"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def random_masks(
        self, weights: Mapping[str, Tensor], generator: Generator, first: str
    ) -> dict[str, Tensor]:
        """Return random masks of the weights that are not dense; ``first`` is the network's first weight."""
        return random_masks(weights, self.dense_allocation, self.sparsity_distribution, generator, first)

    def updates_at(self, step: int) -> bool:
        """Return whether entries move at a step; the first step is 1."""
        if self.static_topo or self.T_end is None:
            return False
        return 0 < step < self.T_end and step % self.delta == 0

    def accumulates_after(self, step: int) -> bool:
        """Return whether the next backward pass adds to the gradients that an update uses."""
        next_steps = range(step + 1, step + int(self.grad_accumulation_n) + 1)
        return self.growth == "gradient" and any(map(self.updates_at, next_steps))

    def fraction(self, step: int) -> float:
        """Return the share of active entries that moves at a step."""
        if self.T_end is None or step >= self.T_end:
            return 0.0
        return self.alpha / 2 * (1 + math.cos(math.pi * step / self.T_end))


def _is_whole(value: object) -> bool:
    """Return whether a setting is a whole number of at least 1, of any type."""
    return isinstance(value, Real) and float(value) >= 1 and float(value).is_integer()


def _is_share(value: object) -> bool:
    """Return whether a setting is a number in [0, 1]."""
    return isinstance(value, Real) and 0 <= float(value) <= 1


class WeakHook:
    """A bound method as a torch hook that does not keep its object alive.

    A parameter's hooks are invisible to the garbage collector: a hook that held an object that holds the
    parameter would leak both.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401  the types that torch passes and expects
        """Call the method, or return None once its object is gone."""
        method = self._method()
        return None if method is None else method(*args)


class ActiveWeights:
    """The mask of one weight in training, and the dense gradients that determine which entries grow."""

    def __init__(self, name: str, weight: nn.Parameter, mask: Tensor) -> None:
        """Copy the mask (of the first rank) to the weight's device; the weight is not modified yet."""
        self.name, self.weight = name, weight
        self.mask = first_ranks_mask(mask.to(weight.device, copy=True))
        self.inactive = ~self.mask
        self.nonzero = int(self.mask.sum())
        self.accumulates = False  # whether backward passes add their dense gradients to ``accumulated``
        self.accumulated: Tensor | None = None  # sum over the passes so far
        self.pass_gradient: Tensor | None = None  # of the current pass, before it is added

    def watch(self) -> list[Any]:
        """Mask ``.grad`` in every backward pass, and add up dense gradients while ``accumulates`` is set.

        Gradients that are not added to ``.grad``, such as those of torch.autograd.grad, are ignored.
        Returns the handles of the hooks.
        """
        return [
            self.weight.register_hook(WeakHook(self._on_gradient)),
            self.weight.register_post_accumulate_grad_hook(WeakHook(self._on_accumulated)),
        ]

    def take_gradient(self) -> Tensor:
        """Return the accumulated dense gradient, summed over ranks, and reset it; NaN if there is none."""
        gradient = torch.full_like(self.weight, torch.nan) if self.accumulated is None else self.accumulated
        self.accumulated = self.pass_gradient = None
        if has_other_ranks():
            distributed.all_reduce(gradient)
        return gradient

    def update_topology(self, gradient: Tensor, count: int, optimizer: Optimizer) -> Tensor:
        """Drop and grow ``count`` entries; zero the weight and the optimizer's state of new ones.

        Returns whether the dense gradient was finite, a bool tensor; otherwise nothing changes.
        """
        after, is_finite = drop_and_grow(self.weight, gradient, self.mask, count)
        after = first_ranks_mask(after)  # ranks may break ties differently
        zero_changed([self.weight, *entry_state(optimizer, self.weight)], self.mask, after)
        self.mask.copy_(after)
        torch.logical_not(after, out=self.inactive)
        if self.weight.grad is not None:
            self.weight.grad.masked_fill_(self.inactive, 0)
        return is_finite

    @torch.no_grad()
    def apply_mask(self, optimizer: Optimizer | None = None) -> None:
        """Zero the inactive entries of the weight, and of its state in an optimizer if one is given."""
        for tensor in (self.weight, *(entry_state(optimizer, self.weight) if optimizer else ())):
            tensor.masked_fill_(self.inactive, 0)

    def _on_gradient(self, gradient: Tensor) -> None:
        self.pass_gradient = gradient.detach() if self.accumulates else None

    def _on_accumulated(self, weight: nn.Parameter) -> None:
        if self.pass_gradient is not None:
            if self.accumulated is None:
                self.accumulated = self.pass_gradient.to(weight.dtype, copy=True)
            else:
                self.accumulated += self.pass_gradient
            self.pass_gradient = None
        if weight.grad is not None:
            weight.grad.masked_fill_(self.inactive, 0)  # a product with the mask would keep NaN


class RigLScheduler:
    """Keeps a model's weights sparse and moves their active entries.

    With GradScaler, unscale and update in every step, whether or not the optimizer takes it:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # gradients may be clipped now
        if scheduler():
            scaler.step(optimizer)
        scaler.update()

    Without ``unscale_``, call ``update`` only in steps that are taken. Every backward pass counts for the
    choice of new entries, also those of a closure. Learning-rate schedulers may be created before or after.
    Under torch.distributed every rank creates a scheduler, and all use the first rank's masks.

    Args:
        model: changed in place: entries beyond each layer's density become zero.
        optimizer: any torch optimizer except LBFGS; it must have all of the sparse weights.
        dense_allocation, T_end, sparsity_distribution, delta, alpha, static_topo, grad_accumulation_n: see
            :class:`Schedule`; they have the names, the places and the defaults of rigl-torch.
        ignore_linear_layers: leave linear layers dense, which is the default of rigl-torch.
        state_dict: state of an earlier scheduler, whose settings and masks are used instead; it may be one of
            rigl-torch.
        growth: see :class:`Schedule`.
        ignore: names of modules that stay dense, with everything below them.
        seed: seed of the first masks and of random growth.

    Raises:
        ValueError: a setting is out of range, the model has nothing to make sparse, the optimizer lacks one
            of its weights, another object manages one of them, or ``state_dict`` has other weights than the
            model. Nothing is changed.
    """

    def __init__(  # noqa: PLR0913, PLR0917  the order of rigl-torch
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dense_allocation: float = 1.0,
        T_end: float | None = None,  # noqa: N803  the name in rigl-torch
        sparsity_distribution: Distribution = "uniform",
        ignore_linear_layers: bool = True,  # noqa: FBT001, FBT002  positional in rigl-torch
        delta: int = 100,
        alpha: float = 0.3,
        static_topo: bool = False,  # noqa: FBT001, FBT002  the same
        grad_accumulation_n: int = 1,
        state_dict: Mapping[str, Any] | None = None,
        *,
        growth: Growth = "gradient",
        ignore: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        if state_dict is not None:
            _check_keys(state_dict)
            ignore_linear_layers = state_dict.get("hyperparams", state_dict)["ignore_linear_layers"]
        self.model, self.optimizer, self._ignores_linear = model, optimizer, ignore_linear_layers
        self._weights = sparsifiable(_unwrap(model), ignore_linear_layers=ignore_linear_layers, ignore=ignore)
        self._hooks: list[Any] = []
        self._generator = Generator().manual_seed(seed)
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if missing := [name for name, weight in self._weights.items() if id(weight) not in optimized]:
            raise ValueError(
                f"the optimizer does not have {', '.join(missing)}: "
                "ignore them with ignore=[...], or add them to the optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(  # noqa: TRY004  as for every other unsuitable argument
                "LBFGS is not supported: its history would mix masks; use a first-order optimizer"
            )
        claimed = {"the optimizer": optimizer, **self._weights}
        if state_dict is not None:
            self._check_state(self._own_state(state_dict))
            claim(claimed, self)
            self.load_state_dict(state_dict)
            return
        self.schedule = Schedule(
            dense_allocation=dense_allocation,
            T_end=T_end,
            sparsity_distribution=sparsity_distribution,
            delta=delta,
            alpha=alpha,
            static_topo=static_topo,
            grad_accumulation_n=grad_accumulation_n,
            growth=growth,
        )
        self.step, self.updates = 0, 0
        self.schedule.warn_if_nothing_moves()
        first = next(iter(sparsifiable(_unwrap(model))), "")
        masks = self.schedule.random_masks(self._weights, self._generator, first)
        claim(claimed, self)
        self._start(masks, {})

    def __call__(self) -> bool:
        """Count a step after its backward pass; return whether the optimizer should step.

        If not, entries have moved instead, and the gradients are to be dropped. A layer keeps its entries,
        with a warning, if an accumulated gradient is not finite or missing on some rank.
        """
        self.step += 1
        for layer in self.layers:
            layer.accumulates = self.schedule.accumulates_after(self.step)
        if not self.layers or not self.schedule.updates_at(self.step):
            return True
        fraction, were_finite = self.schedule.fraction(self.step), []
        for layer in self.layers:
            if self.schedule.growth == "random":
                gradient = torch.rand(layer.weight.shape, generator=self._generator).to(layer.weight)
            else:
                gradient = layer.take_gradient()
            count = int(fraction * layer.nonzero)
            were_finite.append(layer.update_topology(gradient, count, self.optimizer))
        # Read only now: each read waits for the device.
        unchanged = [
            layer.name for layer, was_finite in zip(self.layers, were_finite, strict=True) if not was_finite
        ]
        _warn_if_unchanged(self.step, unchanged)
        self.updates += 1
        return False

    @property
    def W(self) -> list[nn.Parameter]:  # noqa: N802  this and the following are names of rigl-torch
        """All weights of linear and convolutional layers, in model order; some may be dense."""
        return list(sparsifiable(_unwrap(self.model)).values())

    @property
    def N(self) -> list[int]:  # noqa: N802  as in rigl-torch
        """The number of entries of each weight in ``W``."""
        return [weight.numel() for weight in self.W]

    @property
    def S(self) -> list[float]:  # noqa: N802  as in rigl-torch
        """The share of inactive entries of each weight in ``W``."""
        return [0.0 if mask is None else 1 - int(mask.sum()) / mask.numel() for mask in self.backward_masks]

    @property
    def backward_masks(self) -> list[Tensor | None]:
        """The mask of each weight in ``W``; None: it is dense."""
        masks = {layer.weight: layer.mask for layer in self.layers}
        return [masks.get(weight) for weight in self.W]

    @property
    def rigl_steps(self) -> int:
        """The number of topology updates."""
        return self.updates

    def close(self) -> None:
        """Release the model and the optimizer: entries that are zero now may change from here on.

        The state can still be saved.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._hooks

    @override
    def __getstate__(self) -> NoReturn:
        """Refuse copies and pickles, whose hooks would be on the weights of this scheduler.

        Raises:
            TypeError: always.
        """
        raise TypeError("a RigLScheduler cannot be copied or pickled: save its state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that another scheduler needs to continue."""
        return {
            "schedule": asdict(self.schedule),
            "ignore_linear_layers": self._ignores_linear,
            "shapes": self._shapes,
            "step": self.step,
            "updates": self.updates,
            "masks": {layer.name: layer.mask.clone() for layer in self.layers},
            "accumulated": {
                layer.name: layer.accumulated.clone()
                for layer in self.layers
                if layer.accumulated is not None
            },
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a scheduler, here or in rigl-torch, including its settings, and apply its masks.

        Load the model and the optimizer first: the state contains neither.

        Raises:
            ValueError: it is no such state, or weights have other names or shapes in it than in the model;
                nothing is changed.
        """
        _check_keys(state)
        state = self._own_state(state)
        self._check_state(state)
        self.schedule = Schedule(**state["schedule"])
        self.step, self.updates = state["step"], state["updates"]
        self._generator.set_state(state["generator"].cpu())
        self._start(state["masks"], state["accumulated"])

    def __str__(self) -> str:
        """Return the number of non-zero entries of each layer and of the model, and the schedule."""
        parts = {
            **{name: [weight] for name, weight in self._weights.items()},
            "these weights": list(self._weights.values()),
            "the model": list(_unwrap(self.model).parameters()),
        }
        lines = []
        for name, tensors in parts.items():
            nonzero = sum(int(tensor.count_nonzero()) for tensor in tensors)
            size = sum(tensor.numel() for tensor in tensors)
            lines.append(f"{name}: {nonzero}/{size} nonzero, a sparsity of {1 - nonzero / size:.2%}")
        rule = self.schedule
        moves = "never" if rule.static_topo else f"every {rule.delta} steps before {rule.T_end}"
        lines.append(f"step {self.step}, {self.updates} topology updates; entries move {moves}")
        return "\n".join(lines)

    def apply_masks(self, *_: object) -> None:
        """Set the inactive entries of all weights to zero; called after each step of the optimizer."""
        for layer in self.layers:
            layer.apply_mask()

    def _start(self, masks: Mapping[str, Tensor], accumulated: Mapping[str, Tensor]) -> None:
        """Apply masks and register hooks with the optimizer and the sparse weights."""
        self.close()
        self._hooks.append(self.optimizer.register_step_post_hook(WeakHook(self.apply_masks)))
        self.layers = [ActiveWeights(name, self._weights[name], mask) for name, mask in masks.items()]
        for layer in self.layers:
            layer.accumulates = self.schedule.accumulates_after(self.step)
            layer.apply_mask(self.optimizer)
            self._hooks += layer.watch()
            if layer.name in accumulated:
                layer.accumulated = accumulated[layer.name].to(layer.weight, copy=True)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def _own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state, or that of rigl-torch in our format.

        rigl-torch lists the masks of all modules with a weight but BatchNorm2d, with None where it is dense.
        Release 0.5.1 lists those of BatchNorm2d too.

        Raises:
            ValueError: the weights of the model have other sizes than those in the state of rigl-torch.
        """
        if "backward_masks" not in state:
            return state
        weights = {
            f"{name}.weight".lstrip("."): module.weight
            for name, module in _unwrap(self.model).named_modules()
            if isinstance(getattr(module, "weight", None), Tensor) and type(module) is not nn.BatchNorm2d
        }
        sizes = [weight.numel() for weight in weights.values()]
        if sizes != state["N"]:
            raise ValueError(
                f"the state of rigl-torch has weights of {state['N']} entries, and the model has {sizes}: "
                "load a state that was saved with this model, and not by release 0.5.1 if it has BatchNorm2d"
            )
        masks = zip(weights, state["backward_masks"], strict=True)
        sparse = {name: mask for name, mask in masks if mask is not None}
        settings = {"dense_allocation": state["dense_allocation"], **state["hyperparams"]}
        return {
            "ignore_linear_layers": settings.pop("ignore_linear_layers"),
            "schedule": {"delta": settings.pop("delta_T"), **settings},
            "shapes": {**self._shapes, **{name: tuple(mask.shape) for name, mask in sparse.items()}},
            "step": state["step"],
            "updates": state["rigl_steps"],
            "masks": sparse,
            "accumulated": {},
            "generator": self._generator.get_state(),
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        shapes, saved = self._shapes, state["shapes"]
        for name in sorted(shapes.keys() | saved.keys()):
            if saved.get(name) != shapes.get(name):
                raise ValueError(
                    f"the sparse weight {name} is {saved.get(name, 'missing')} in the saved state and "
                    f"{shapes.get(name, 'missing')} in the model: load a state that was saved with this model"
                )


def _check_keys(state: Mapping[str, Any]) -> None:
    """Check that a mapping has the entries of a scheduler's state, here or in rigl-torch.

    Raises:
        ValueError: one is missing.
    """
    names = _RIGL_TORCH_KEYS if "backward_masks" in state else _STATE_KEYS
    if missing := [name for name in names if name not in state]:
        raise ValueError(
            f"not the state of a RigLScheduler, because it has no {missing[0]!r}: pass what state_dict() "
            "returned"
        )


class RigLInBackward:
    """Trains a model sparsely inside its backward pass, with one layer's gradients in memory at a time.

        training = RigLInBackward(model, partial(torch.optim.SGD, lr=0.1), dense_allocation=0.1, T_end=750)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 1000)
        ...
        loss.backward()  # updates the weights or moves entries; no gradient is left afterwards
        training()       # counts the step
        rates.step()

    ``optimizer`` is the :class:`OptimizerInBackward` that updates the weights: create learning-rate
    schedulers with it. It leaves a layer with a non-finite gradient unchanged and counts it in ``skipped``.

    Args:
        model: changed in place, and by every backward pass from now on.
        rule: builds the ordinary optimizer of its parameters.
        ignore_linear_layers: leave linear layers dense.
        seed: seed of the first masks.
        settings: those of :class:`Schedule`; ``grad_accumulation_n`` must be 1.

    Raises:
        ValueError: see :class:`Schedule` and :class:`OptimizerInBackward`; nothing is changed.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        *,
        ignore_linear_layers: bool = True,
        seed: int = 0,
        **settings: Any,  # noqa: ANN401  the fields of Schedule
    ) -> None:
        self.schedule = Schedule(**settings)
        self.schedule.warn_if_nothing_moves()
        if has_other_ranks():
            raise ValueError(
                "RigLInBackward does not support training on several ranks, whose gradients are averaged "
                "only after the backward pass: use RigLScheduler"
            )
        if self.schedule.grad_accumulation_n > 1:
            raise ValueError(
                f"grad_accumulation_n must be 1, not {self.schedule.grad_accumulation_n}: gradients are "
                "freed during the backward pass"
            )
        weights = sparsifiable(model, ignore_linear_layers=ignore_linear_layers)
        first = next(iter(sparsifiable(model)), "")
        masks = self.schedule.random_masks(weights, Generator().manual_seed(seed), first)
        self.layers = [ActiveWeights(name, weights[name], mask) for name, mask in masks.items()]
        self._layer_of = {layer.weight: layer for layer in self.layers}
        self.step = 0
        self._skipped: Counter[str] = Counter()

        def build_with_hooks(parameters: list[nn.Parameter]) -> Optimizer:
            inner_optimizer = rule(parameters)
            inner_optimizer.register_step_pre_hook(WeakHook(self._before_step))
            inner_optimizer.register_step_post_hook(WeakHook(self._after_step))
            return inner_optimizer

        self.optimizer = OptimizerInBackward(model, build_with_hooks)
        for layer in self.layers:
            layer.apply_mask()

    def __call__(self) -> bool:
        """Count a step; return True if it trained the weights, False if it moved entries.

        A layer with a non-finite gradient keeps its entries, with a warning.

        Raises:
            BackwardError: there was no backward pass.
        """
        self.optimizer.step()
        is_update = self._is_update
        self.step += 1
        skipped, self._skipped = self.optimizer.skipped - self._skipped, self.optimizer.skipped.copy()
        if is_update:
            _warn_if_unchanged(self.step, [layer.name for layer in self.layers if layer.name in skipped])
        return not is_update

    def close(self) -> None:
        """Release the model: from now on gradients are kept, as usual."""
        self.optimizer.close()

    @property
    def _is_update(self) -> bool:
        """Whether entries move in the current step."""
        return bool(self.layers) and self.schedule.updates_at(self.step + 1)

    def _before_step(self, inner_optimizer: Optimizer, *_: object) -> None:
        """Mask the gradients that the rule is about to use, or move entries and drop the gradients."""
        is_update = self._is_update
        for parameter in _parameters_of(inner_optimizer):
            layer = self._layer_of.get(parameter)
            if layer is not None and parameter.grad is not None:
                if is_update:
                    count = int(self.schedule.fraction(self.step + 1) * layer.nonzero)
                    layer.update_topology(parameter.grad, count, inner_optimizer)
                else:
                    parameter.grad.masked_fill_(layer.inactive, 0)
            if is_update:
                parameter.grad = None

    def _after_step(self, inner_optimizer: Optimizer, *_: object) -> None:
        for parameter in _parameters_of(inner_optimizer):
            if parameter in self._layer_of:
                self._layer_of[parameter].apply_mask()


def entry_state(optimizer: Optimizer, weight: nn.Parameter) -> list[Tensor]:
    """Return the state that an optimizer keeps per entry of a weight, such as momentum."""
    slots = optimizer.state.get(weight, {}).values()
    return [slot for slot in slots if isinstance(slot, Tensor) and slot.shape == weight.shape]


def has_other_ranks() -> bool:
    """Return whether torch.distributed runs with more than one rank."""
    is_running = distributed.is_available() and distributed.is_initialized()
    return is_running and distributed.get_world_size() > 1


def first_ranks_mask(mask: Tensor) -> Tensor:
    """Return the first rank's mask."""
    if not has_other_ranks():
        return mask
    numbers = mask.to(torch.uint8)
    distributed.broadcast(numbers, 0)
    return numbers.bool()


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or torch.compile, whose names are the model's own."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    plain = getattr(inner, "_orig_mod", inner)  # torch.compile has no public name for it
    return plain if isinstance(plain, nn.Module) else inner


def _warn_if_unchanged(step: int, names: Collection[str]) -> None:
    """Warn, at the line that calls the caller, about layers without a finite gradient at an update."""
    if names:
        message = f"step {step}: masks did not change, as there was no finite gradient: {', '.join(names)}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
