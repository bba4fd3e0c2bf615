"""RigL: sparse training that moves its active weights to where the gradient is large.

Two lines make a training loop sparse:

    scheduler = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=int(0.75 * steps))
    ...
    loss.backward()
    if scheduler():
        optimizer.step()

A call counts a step. Every ``delta`` steps before ``T_end``, entries are dropped and grown instead of an
optimizer step. Inactive entries are zero and stay zero, as do their gradients and optimizer state. Masks on
dense tensors only simulate sparsity: they save neither time nor memory.

:class:`RigLInBackward` does the same inside the backward pass, with one layer's gradients at a time.

Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners. Argument names are those of rigl-torch.
"""

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Generator, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from impls.training.active_weights import (
    ActiveWeights,
    WeakHook,
    has_other_ranks,
    sum_over_ranks,
)
from impls.training.optimizer_in_backward import (
    OptimizerInBackward,
    Rule,
    claim,
    release,
)
from impls.training.sparse_masks import Distribution, allocate, random_mask, sparsifiable

Growth = Literal["gradient", "random"]


@dataclass(frozen=True)
class Schedule:
    """The schedule of mask updates: RigL's settings, under the names of rigl-torch.

    Every ``delta`` steps until ``T_end`` a share alpha / 2 (1 + cos(pi t / T_end)) of the active entries
    moves. With a later ``begin`` the cosine starts there too: t and ``T_end`` are counted from it. (The
    paper's code, sparse_optimizers_base.py of google-research/rigl, counts only ``T_end`` from ``begin``, so
    that the share starts below alpha.)

    Args:
        dense_allocation: share of the weights that is active, in (0, 1].
        T_end: the first step without a move; three quarters of all steps work well.
        delta: steps between two updates.
        alpha: share of the active entries that moves at the start; it falls to zero at ``T_end``.
        grad_accumulation_n: average the dense gradients of this many steps up to and including the update.
        sparsity_distribution: ``uniform``, which leaves the first of several layers dense, or ``erk``.
        static_topo: never move entries.
        begin: the first update; the next ones are at ``begin + delta``, ...
        growth: where the ``gradient`` is largest, or at ``random`` as in SET (Mocanu et al. 2018).

    Raises:
        ValueError: a setting is out of range.

    """

    dense_allocation: float
    T_end: int | None = None
    delta: int = 100
    alpha: float = 0.3
    grad_accumulation_n: int = 1
    sparsity_distribution: Distribution = "uniform"
    static_topo: bool = False
    begin: int = 0
    growth: Growth = "gradient"

    def __post_init__(self) -> None:
        """Check the settings."""
        last = max(self.delta - 1, 1)
        is_static = self.T_end is None and self.static_topo
        requirements = {
            "dense_allocation": (0 < self.dense_allocation <= 1, "a share of the weights in (0, 1]"),
            "T_end": (
                is_static or (self.T_end is not None and self.T_end >= 1),
                "the step from which entries stay; three quarters of all steps work well",
            ),
            "delta": (self.delta >= 1, "a number of steps, at least 1"),
            "alpha": (0 <= self.alpha <= 1, "a share of the active entries in [0, 1]"),
            "grad_accumulation_n": (1 <= self.grad_accumulation_n <= last, f"1 to {last}, less than delta"),
            "begin": (self.begin >= 0, "a step, at least 0"),
            "sparsity_distribution": (self.sparsity_distribution in get_args(Distribution), "uniform or erk"),
            "growth": (self.growth in get_args(Growth), "gradient or random"),
        }
        for name, (is_met, expected) in requirements.items():
            if not is_met:
                message = f"{name} {getattr(self, name)!r}: expected {expected}"
                raise ValueError(message)

    def warn_if_nothing_moves(self) -> None:
        """Warn, at the line that calls the caller, if no update comes before ``T_end``."""
        first, is_static = self.begin or self.delta, self.static_topo or self.dense_allocation == 1
        if self.T_end is not None and first >= self.T_end and not is_static:
            message = (
                f"entries will never move: the first update would be at step {first}, not before T_end "
                f"{self.T_end}; if that is intended, pass static_topo=True"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def updates_at(self, step: int) -> bool:
        """Return whether entries move at a step; the first step is 1."""
        if self.static_topo or self.T_end is None:
            return False
        return max(self.begin, 1) <= step < self.T_end and (step - self.begin) % self.delta == 0

    def gathers_after(self, step: int) -> bool:
        """Return whether the dense gradients of the backward pass after a step count for an update."""
        ahead = range(step + 1, step + self.grad_accumulation_n + 1)
        return self.growth == "gradient" and any(map(self.updates_at, ahead))

    def fraction(self, step: int) -> float:
        """Return the share of active entries that moves at a step."""
        if self.T_end is None or step >= self.T_end:
            return 0.0
        elapsed = max(step - self.begin, 0) / (self.T_end - self.begin)
        return self.alpha / 2 * (1 + math.cos(math.pi * elapsed))


class RigLScheduler:
    """Keeps a model's weights sparse and moves their active entries.

    With GradScaler, unscale and update in every step, whether or not the optimizer takes it:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # gradients may be clipped now
        if scheduler():
            scaler.step(optimizer)
        scaler.update()

    Without ``unscale_``, call ``update`` only in steps that are taken. Every backward pass counts for what
    grows, also those of a closure. Learning-rate schedulers may be created before or after. Under
    torch.distributed every rank creates a scheduler, and all use the first rank's masks.

    Args:
        model: changed in place: entries beyond each layer's density become zero.
        optimizer: any of torch's but LBFGS that has all of the sparse weights.
        ignore_linear_layers: leave linear layers dense.
        ignore: names of modules or parameters that stay dense, with everything below them.
        seed: for the first masks and for random growth.
        scaler: what scales the loss, needed if ``grad_accumulation_n`` passes may have different scales.
        state_dict: of an earlier scheduler, whose settings and masks continue; then give no settings.
        settings: those of :class:`Schedule`.

    Raises:
        ValueError: a setting is out of range, the model has nothing to make sparse, the optimizer lacks one
            of its weights, either is already managed, or the state is of another model. Nothing is changed.

    """

    def __init__(  # noqa: PLR0913  options that are passed by name
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        ignore_linear_layers: bool = False,
        ignore: str | Collection[str] = (),
        seed: int = 0,
        scaler: GradScaler | None = None,
        state_dict: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401  the fields of Schedule
    ) -> None:
        """Make the model sparse."""
        self._model, self._optimizer = _unwrapped(model), optimizer
        self._weights = sparsifiable(self._model, ignore_linear_layers=ignore_linear_layers, ignore=ignore)
        if state_dict is None:
            schedule = Schedule(**settings)
            schedule.warn_if_nothing_moves()
            state = _initial_state(schedule, self._weights, seed)
        elif settings:
            message = f"the state has its own settings: leave out {', '.join(settings)}"
            raise ValueError(message)
        else:
            _check_state(state_dict, self._weights)
            state = dict(state_dict)
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if missing := [name for name, weight in self._weights.items() if id(weight) not in held]:
            message = f"the optimizer does not have {', '.join(missing)}: ignore them, or give them to it"
            raise ValueError(message)
        if isinstance(optimizer, torch.optim.LBFGS):
            message = "LBFGS would step along directions of earlier masks: use a first-order optimizer"
            raise ValueError(message)  # noqa: TRY004  as for every other unsuitable argument
        claim({"the optimizer": optimizer, **self._weights}, self)
        self._generator, self._scaler, self._is_closed = Generator(), scaler, False
        self._hooks: list[Any] = []
        self._load(state)
        self._step_hook = optimizer.register_step_post_hook(WeakHook(self._after_step))

    def __call__(self) -> bool:
        """Count a step after its backward pass; return whether the optimizer should step.

        If not, entries have moved instead, and the gradients are to be dropped. A layer without a finite
        gradient keeps its entries, with a warning.
        """
        self._check_open()
        self.step += 1
        for layer in self.layers:
            layer.gathers = self.schedule.gathers_after(self.step)
        if not self.layers or not self.schedule.updates_at(self.step):
            return True
        self._update(self.schedule.fraction(self.step))
        self.updates += 1
        return False

    def close(self) -> None:
        """Release the model and the optimizer: entries that are zero now may change from here on.

        The state can still be saved.
        """
        self._is_closed = True
        for handle in (*self._hooks, self._step_hook):
            handle.remove()
        release((self._optimizer, *self._weights.values()), self)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that another scheduler needs to continue."""
        return {
            "schedule": asdict(self.schedule),
            "shapes": _shapes(self._weights),
            "step": self.step,
            "updates": self.updates,
            "masks": {one.name: one.mask.clone() for one in self.layers},
            "gathered": {
                one.name: (one.gathered.clone(), int(one.passes))
                for one in self.layers
                if one.gathered is not None
            },
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a scheduler, including its settings, and apply its masks.

        Load the model and the optimizer first: the state contains neither.

        Raises:
            ValueError: it is not the state of a RigLScheduler for such a model; nothing is changed then.

        """
        self._check_open()
        _check_state(state, self._weights)
        self._load(state)

    def __str__(self) -> str:
        """Return the number of non-zero entries of each layer and of the model, and the schedule."""
        counts = {name: (int(one.count_nonzero()), one.numel()) for name, one in self._weights.items()}
        for whole, parts in (
            ("these weights", self._weights.values()),
            ("the model", self._model.parameters()),
        ):
            sizes = [(int(one.count_nonzero()), one.numel()) for one in parts]
            counts[whole] = sum(nonzero for nonzero, _ in sizes), sum(size for _, size in sizes)
        lines = [
            f"{name}: {nonzero}/{size} nonzero, a sparsity of {1 - nonzero / size:.2%}"
            for name, (nonzero, size) in counts.items()
        ]
        rule = self.schedule
        moves = "never" if rule.static_topo else f"every {rule.delta} steps before {rule.T_end}"
        lines.append(f"step {self.step}, {self.updates} topology updates; entries move {moves}")
        return "\n".join(lines)

    def apply_masks(self) -> None:
        """Set the inactive entries of all weights to zero."""
        self._check_open()
        for layer in self.layers:
            layer.apply_mask()

    def _check_open(self) -> None:
        if self._is_closed:
            message = "this scheduler was closed: create another, from its state_dict() to continue"
            raise RuntimeError(message)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over a checked state and watch the gradients of its weights."""
        self.schedule = Schedule(**state["schedule"])
        self.step, self.updates = state["step"], state["updates"]
        self._generator.set_state(state["generator"].cpu())
        while self._hooks:
            self._hooks.pop().remove()
        self.layers = []
        for name, mask in state["masks"].items():
            weight = self._weights[name]
            layer = ActiveWeights(name, weight, mask.to(weight.device, copy=True), self._scaler)
            layer.gathers = self.schedule.gathers_after(self.step)
            layer.apply_mask(self._optimizer)
            self._hooks += layer.watch()
            if name in state["gathered"]:
                gathered, passes = state["gathered"][name]
                layer.gathered = gathered.to(weight, copy=True)
                layer.passes += passes
            self.layers.append(layer)

    def _after_step(self, *_: object) -> None:
        self.apply_masks()

    def _update(self, fraction: float) -> None:
        moved = []
        for layer in self.layers:
            gathered, passes = layer.take_gradient()
            if self.schedule.growth == "random":
                gradient = torch.rand(layer.weight.shape, generator=self._generator).to(layer.weight)
            else:
                # The sum over passes and ranks ranks entries as their mean does.
                gradient = sum_over_ranks(torch.zeros_like(layer.weight) if gathered is None else gathered)
                gradient.masked_fill_(sum_over_ranks(passes) == 0, torch.nan)
            moved.append(layer.move(gradient, int(fraction * layer.nonzero), self._optimizer))
        if stuck := [one.name for one, did_move in zip(self.layers, moved, strict=True) if not did_move]:
            message = (
                f"topology update at step {self.step}: nothing moved in {', '.join(stuck)}: there was no "
                "backward pass with a finite gradient"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)


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
        seed: for the first masks.
        settings: those of :class:`Schedule`; ``grad_accumulation_n`` has to be 1.

    Raises:
        ValueError: see :class:`Schedule` and :class:`OptimizerInBackward`; nothing is changed.

    """

    def __init__(self, model: nn.Module, rule: Rule, *, seed: int = 0, **settings: Any) -> None:  # noqa: ANN401  the fields of Schedule
        """Make the model sparse and register hooks with its parameters."""
        self.schedule = Schedule(**settings)
        self.schedule.warn_if_nothing_moves()
        if has_other_ranks():
            message = (
                "gradients of several ranks are averaged only after the backward pass: use RigLScheduler"
            )
            raise ValueError(message)
        if self.schedule.grad_accumulation_n > 1:
            message = "grad_accumulation_n has to be 1: no gradient outlives its backward pass"
            raise ValueError(message)
        weights = sparsifiable(model)
        masks = _initial_state(self.schedule, weights, seed)["masks"]
        self.layers = [ActiveWeights(name, weights[name], mask) for name, mask in masks.items()]
        self._layer_of = {layer.weight: layer for layer in self.layers}
        self.step = 0
        self._skipped: Counter[str] = Counter()

        def hooked(parameters: list[nn.Parameter]) -> Optimizer:
            ordinary = rule(parameters)
            ordinary.register_step_pre_hook(WeakHook(self._before_step))
            ordinary.register_step_post_hook(WeakHook(self._after_step))
            return ordinary

        self.optimizer = OptimizerInBackward(model, hooked)
        for layer in self.layers:
            layer.apply_mask()

    def __call__(self) -> bool:
        """Count a step; return whether weights were trained in it rather than entries moved.

        A layer with a non-finite gradient keeps its entries, with a warning.

        Raises:
            BackwardError: there was no backward pass.

        """
        self.optimizer.step()
        is_update = self._is_update
        self.step += 1
        skipped, self._skipped = self.optimizer.skipped - self._skipped, self.optimizer.skipped.copy()
        if is_update and (stuck := [layer.name for layer in self.layers if layer.name in skipped]):
            message = f"step {self.step}: nothing moved in {', '.join(stuck)}: a gradient is not finite"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return not is_update

    def close(self) -> None:
        """Release the model: gradients stay from now on, as usual."""
        self.optimizer.close()

    @property
    def _is_update(self) -> bool:
        """Whether entries move in the current step."""
        return bool(self.layers) and self.schedule.updates_at(self.step + 1)

    def _before_step(self, ordinary: Optimizer, *_: object) -> None:
        """Mask the gradients that the rule is about to use, or move entries and drop the gradients."""
        is_update = self._is_update
        for group in ordinary.param_groups:
            for parameter in group["params"]:
                layer = self._layer_of.get(parameter)
                if layer is not None and parameter.grad is not None:
                    if is_update:
                        count = int(self.schedule.fraction(self.step + 1) * layer.nonzero)
                        layer.move(parameter.grad, count, ordinary)
                    else:
                        parameter.grad.masked_fill_(layer.inactive, 0)
                if is_update:
                    parameter.grad = None

    def _after_step(self, ordinary: Optimizer, *_: object) -> None:
        for group in ordinary.param_groups:
            for parameter in group["params"]:
                if parameter in self._layer_of:
                    self._layer_of[parameter].apply_mask()


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or torch.compile, whose names are the model's own."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    plain = getattr(inner, "_orig_mod", inner)  # torch.compile has no public name for it
    return plain if isinstance(plain, nn.Module) else inner


def _shapes(weights: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _initial_state(schedule: Schedule, weights: Mapping[str, nn.Parameter], seed: int) -> dict[str, Any]:
    """Return the state of a scheduler with random masks."""
    generator = Generator().manual_seed(seed)
    parts = allocate(weights, schedule.dense_allocation, schedule.sparsity_distribution)
    masks = {one.name: random_mask(one.weight, one.nonzero, generator) for one in parts if one.zeros}
    return {
        "schedule": asdict(schedule),
        "shapes": _shapes(weights),
        "step": 0,
        "updates": 0,
        "masks": masks,
        "gathered": {},
        "generator": generator.get_state(),
    }


def _check_state(state: Mapping[str, Any], weights: Mapping[str, nn.Parameter]) -> None:
    """Check that a state was made by a RigLScheduler for such weights, before anything is changed.

    Raises:
        ValueError: it was not.

    """
    try:
        settings, shapes, masks, *_ = (
            state[key] for key in ("schedule", "shapes", "masks", "step", "updates", "gathered", "generator")
        )
        schedule = Schedule(**settings)
        found = {name: (mask.shape, int(mask.count_nonzero())) for name, mask in masks.items()}
    except (KeyError, TypeError) as error:
        message = f"not the state of a RigLScheduler: {error!r}"
        raise ValueError(message) from error
    if shapes != _shapes(weights):
        message = f"the state of another model: its weights are {shapes}, here {_shapes(weights)}"
        raise ValueError(message)
    parts = allocate(weights, schedule.dense_allocation, schedule.sparsity_distribution)
    expected = {one.name: (one.weight.shape, one.nonzero) for one in parts if one.zeros}
    if found != expected:
        message = f"the state is damaged: its masks (shape, active entries) are {found}, expected {expected}"
        raise ValueError(message)
