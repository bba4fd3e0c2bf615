"""RigL: training that stays sparse and moves its connections to where the gradient is large.

Two lines are added to a training loop:

    scheduler = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=int(0.75 * steps))
    ...
    loss.backward()
    if scheduler():
        optimizer.step()

A call counts a step. Every ``delta`` of them, before ``T_end``, connections are dropped and grown instead of
a step of the optimizer. In between, what is not connected is zero and stays zero: its gradient is, and so are
the optimizer's slots for it. Masks on dense tensors simulate sparsity: they save neither time nor memory.

Evci et al., Rigging the Lottery: Making All Tickets Winners, 2020. The names are those of rigl-torch.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from impls.training import ranks, topology
from impls.training.connections import Connections
from impls.training.ownership import check_outside
from impls.training.schedule import Growth, Schedule
from impls.training.sparsity import Distribution, sparsifiable, table, unwrapped, zeros

__all__ = ["RigLScheduler"]

_SERVED = WeakIdKeyDictionary()
"""Optimizers and weights -> the scheduler that they have, weakly."""


class RigLScheduler:
    """Keeps a model sparse and moves its connections.

    With GradScaler, ``if scheduler(): scaler.step(optimizer); scaler.update()``. A closure may be given to
    the optimizer's step. Learning-rate schedulers may be made before or after. Under torch.distributed every
    rank makes its own, and all have the same masks.

    Args:
        model: changed in place: entries beyond each layer's density become zero.
        optimizer: any of torch's, which has all of the sparse weights.
        dense_allocation: the share of weights that is kept, in (0, 1].
        T_end: the step from which connections stay where they are; three quarters of all steps do well.
        delta: steps between two topology updates.
        alpha: the share of connections that moves at the start; it falls to nothing at ``T_end``.
        grad_accumulation_n: steps before an update, itself included, whose dense gradients are averaged.
        sparsity_distribution: ``uniform``, where the first layer of several stays dense, or ``erk``.
        static_topo: never move a connection.
        ignore_linear_layers: keep linear layers dense.
        ignore: names of layers that stay dense, with all that is below them.
        begin: no update is earlier; they are at ``begin``, ``begin + delta``, ...
        growth: ``gradient``, or ``random`` as SET has it (Mocanu et al. 2018).
        seed: of the first masks and of random growth, the same on all ranks.
        state_dict: of an earlier scheduler; its settings are taken as well, whatever other arguments say.

    Raises:
        ValueError: a setting cannot be, the model has nothing to make sparse, the optimizer lacks one of its
            weights, either has a scheduler already, or the state is of another model; nothing is changed.

    """

    def __init__(  # noqa: PLR0913  # the settings of rigl-torch
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        dense_allocation: float | None = None,
        T_end: int | None = None,  # noqa: N803  # rigl-torch's name
        delta: int = 100,
        alpha: float = 0.3,
        grad_accumulation_n: int = 1,
        sparsity_distribution: Distribution = "uniform",
        static_topo: bool = False,
        ignore_linear_layers: bool = False,
        ignore: Collection[str] = (),
        begin: int = 0,
        growth: Growth = "gradient",
        seed: int = 0,
        state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the model sparse."""
        if state_dict is not None:
            self.schedule = Schedule(**_entry(state_dict, "schedule"))
        elif dense_allocation is None:
            message = "dense_allocation is missing: the share of the weights that is kept"
            raise ValueError(message)
        else:
            self.schedule = Schedule(
                dense_allocation=dense_allocation,
                T_end=T_end,
                delta=delta,
                alpha=alpha,
                grad_accumulation_n=grad_accumulation_n,
                sparsity_distribution=sparsity_distribution,
                static_topo=static_topo,
                begin=begin,
                growth=growth,
            )
        plain = unwrapped(model)
        weights = sparsifiable(plain, ignore_linear_layers=ignore_linear_layers, ignore=ignore)
        self._check_owner(optimizer, weights)
        parts = zeros(weights, self.schedule.dense_allocation, self.schedule.sparsity_distribution)
        self._model, self._optimizer, self._weights = plain, optimizer, weights
        self._generator = Generator().manual_seed(seed)
        self.step, self.updates = 0, 0
        self.layers: list[Connections] = []
        self._hooks: list[Any] = []
        if state_dict is None:
            masks = {
                one.name: topology.scattered(one.weight, one.kept, self._generator)
                for one in parts
                if one.zeros
            }
            self._connect(masks)
        else:
            self.load_state_dict(state_dict)
        me = weakref.ref(self)
        self._after = optimizer.register_step_post_hook(_AfterStep(me))
        for owner in (optimizer, *weights.values()):
            _SERVED[owner] = me

    def __call__(self) -> bool:
        """Count a step, behind its backward pass; return whether the optimizer is to take it.

        Where it is not, connections have moved instead, and the gradients are to be dropped. A layer whose
        gradient was not finite keeps its connections, with a warning.
        """
        self.step += 1
        if not self.layers or not self.schedule.updates_at(self.step):
            return True
        self._update(self.schedule.fraction(self.step))
        self.updates += 1
        return False

    def close(self) -> None:
        """Let go of model and optimizer: what is zero by now stays zero no longer."""
        for handle in (*self._hooks, self._after):
            handle.remove()
        for owner in (self._optimizer, *self._weights.values()):
            _SERVED.pop(owner, None)

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of what another scheduler needs to go on: it shares nothing with this one."""
        return {
            "schedule": dataclasses.asdict(self.schedule),
            "shapes": {name: tuple(weight.shape) for name, weight in self._weights.items()},
            "step": self.step,
            "updates": self.updates,
            "masks": {one.name: one.mask.clone() for one in self.layers},
            "gathered": {
                one.name: (one.gathered.clone(), one.passes)
                for one in self.layers
                if one.gathered is not None
            },
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another scheduler was, with its settings; weights and slots are made zero by its masks.

        Load the model and the optimizer before: nothing of theirs is in the state.

        Raises:
            ValueError: it is the state of another model, or none; nothing is changed then.

        """
        found: dict[str, Any] = {name: _entry(state, name) for name in _STATE}
        shapes = {name: tuple(shape) for name, shape in found["shapes"].items()}
        expected = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        if shapes != expected:
            other, own = (
                ", ".join(f"{name} {shape}" for name, shape in one.items()) for one in (shapes, expected)
            )
            message = f"the state is that of another model: it has {other}; this one has {own}"
            raise ValueError(message)
        if wrong := [name for name, mask in found["masks"].items() if tuple(mask.shape) != shapes.get(name)]:
            message = f"the state is damaged: the masks of {', '.join(wrong)} have other shapes than weights"
            raise ValueError(message)
        self.schedule = Schedule(**found["schedule"])
        self.step, self.updates = int(found["step"]), int(found["updates"])
        self._generator.set_state(found["generator"].cpu())
        self._connect(
            {
                name: mask.to(self._weights[name].device, torch.bool, copy=True)
                for name, mask in found["masks"].items()
            }
        )
        for layer in self.layers:
            if layer.name in found["gathered"]:
                gathered, layer.passes = found["gathered"][layer.name]
                layer.gathered = gathered.to(layer.weight, copy=True)

    def __str__(self) -> str:
        """Return how sparse the model really is, layer by layer and in all, and when connections move."""
        rule = self.schedule
        moves = "never" if rule.static_topo else f"every {rule.delta} steps before {rule.T_end}"
        when = f"step {self.step}, {self.updates} topology updates; connections move {moves}"
        return f"{table(self._weights, self._model)}\n{when}"

    def hold(self) -> None:
        """Set what is not connected to zero, whatever an optimizer did."""
        for layer in self.layers:
            layer.hold()

    def _connect(self, masks: Mapping[str, Tensor]) -> None:
        """Take these masks, and watch the gradients of their weights."""
        while self._hooks:
            self._hooks.pop().remove()
        self.layers = [Connections(name, self._weights[name], mask) for name, mask in masks.items()]
        me = weakref.ref(self)
        for layer in self.layers:
            layer.hold(self._optimizer)
            self._hooks.append(layer.weight.register_hook(_Hook(me, weakref.ref(layer))))

    def _update(self, fraction: float) -> None:
        check_outside(self._weights)
        passes = ranks.totals([one.passes for one in self.layers], self.layers[0].weight.device)
        finite, left = [], list[str]()
        for layer, count in zip(self.layers, passes, strict=True):
            gathered = layer.forget()
            if self.schedule.growth == "random":
                gradient = torch.rand(layer.weight.shape, generator=self._generator).to(layer.weight)
            elif not count:
                left.append(f"{layer.name} (no backward pass has reached it)")
                continue
            else:
                gradient = torch.zeros_like(layer.weight) if gathered is None else gathered
                gradient = ranks.summed(gradient)  # which ranks entries as their mean does
            finite.append((layer.name, layer.move(gradient, int(fraction * layer.kept), self._optimizer)))
        flags = torch.stack([flag for _, flag in finite]).tolist() if finite else []
        left += [
            f"{name} (its gradient is not finite)"
            for (name, _), flag in zip(finite, flags, strict=True)
            if not flag
        ]
        if left:
            message = f"topology update at step {self.step}: nothing moved in {', '.join(left)}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    @staticmethod
    def _check_owner(optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if missing := [name for name, weight in weights.items() if id(weight) not in held]:
            message = f"the optimizer does not have {', '.join(missing)}: ignore them, or give them to it"
            raise ValueError(message)
        check_outside(weights)
        owners: Sequence[tuple[str, object]] = (("this optimizer", optimizer), *weights.items())
        for name, owner in owners:
            if owner in _SERVED and _SERVED[owner]() is not None:
                message = f"{name} has a RigLScheduler already: close() that one first"
                raise ValueError(message)


_STATE = ("schedule", "shapes", "step", "updates", "masks", "gathered", "generator")
Owner = Callable[[], RigLScheduler | None]


class _Hook:
    """What becomes of a gradient: gathered where an update is near, and zero where nothing is connected."""

    def __init__(self, scheduler: Owner, layer: Callable[[], Connections | None]) -> None:
        # A weight holds its hooks: one that held the scheduler, which holds the weight, would outlive both.
        self._scheduler, self._layer = scheduler, layer

    def __call__(self, gradient: Tensor) -> Tensor:
        scheduler, layer = self._scheduler(), self._layer()
        if scheduler is None or layer is None:
            return gradient
        if scheduler.schedule.growth == "gradient" and scheduler.schedule.gathers_after(scheduler.step):
            layer.gather(gradient)
        # Half the time of filling; what is no number stays none here, and reaches no weight: see hold().
        return gradient * layer.mask


class _AfterStep:
    """What follows a step of the optimizer."""

    def __init__(self, scheduler: Owner) -> None:
        self._scheduler = scheduler

    def __call__(self, *_: object) -> None:
        if (scheduler := self._scheduler()) is not None:
            scheduler.hold()


def _entry(state: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  # whatever was stored
    if name not in state:
        known = ", ".join(map(str, state))
        message = f"this is no state of a RigLScheduler: it has no {name!r}, only {known}"
        raise ValueError(message)
    return state[name]
