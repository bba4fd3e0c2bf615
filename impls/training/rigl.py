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

import itertools
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Generator, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from impls.training import keepers, ranks, snapshots
from impls.training.connections import ActiveWeights, Moment, forget_curvature
from impls.training.keepers import WeakHook
from impls.training.ownership import check_outside
from impls.training.schedule import Growth, Schedule
from impls.training.snapshots import Snapshot
from impls.training.sparsity import Distribution, sparsifiable, table, unwrapped

__all__ = ["RigLScheduler"]


class RigLScheduler:
    """Keeps a model sparse and moves its connections.

    With GradScaler, unscale in every step, and update in every step, taken or not, as torch asks for:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # gradients may be clipped now
        if scheduler():
            scaler.step(optimizer)
        scaler.update()

    Without ``unscale_`` the update belongs to the steps that are taken. A closure may be given to the
    optimizer's step; what it evaluates says what to grow only where no backward pass comes before the
    scheduler's call. LBFGS forgets its history when connections move. Learning-rate schedulers may be made
    before or after. Under torch.distributed every rank makes its own, and all have the same masks.

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
        ignore: names of layers that stay dense, with all that is below them; or one name.
        begin: no update is earlier; they are at ``begin``, ``begin + delta``, ...
        growth: ``gradient``, or ``random`` as SET has it (Mocanu et al. 2018).
        seed: of the first masks and of random growth, the same on all ranks.
        scaler: what scales the loss. Without it gradients count as they come, so that where the scale changes
            between two of ``grad_accumulation_n`` passes the mean is one of different units.
        state_dict: of an earlier scheduler; its settings are taken as well, whatever other arguments say,
            but for the scaler.

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
        scaler: GradScaler | None = None,
        state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the model sparse."""
        plain = unwrapped(model)
        weights = sparsifiable(plain, ignore_linear_layers=ignore_linear_layers, ignore=ignore)
        if state_dict is not None:
            found = snapshots.read(state_dict, weights)
        elif dense_allocation is None:
            message = "dense_allocation is missing: the share of the weights that is kept"
            raise ValueError(message)
        else:
            schedule = Schedule(
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
            found = snapshots.first(schedule, weights, seed)
        _check_owner(optimizer, weights)
        if not isinstance(scaler, GradScaler | None):
            message = f"scaler {scaler!r}: expected a torch.amp.GradScaler"
            raise ValueError(message)  # noqa: TRY004  # as for every setting that cannot be
        self._model, self._optimizer, self._weights = plain, optimizer, weights
        self._generator, self._is_closed = Generator(), False
        self._moment = Moment(scaler=scaler)
        self._hooks: list[Any] = []
        self._take(found)
        if state_dict is None:
            forget_curvature(optimizer)
        self._steps = [
            optimizer.register_step_pre_hook(WeakHook(self._before_step)),
            optimizer.register_step_post_hook(WeakHook(self._after_step)),
        ]
        keepers.keep((optimizer, *weights.values()), self)

    def __call__(self) -> bool:
        """Count a step, behind its backward pass; return whether the optimizer is to take it.

        Where it is not, connections have moved instead, and the gradients are to be dropped. A layer whose
        gradient was not finite keeps its connections, with a warning.
        """
        self._check_open()
        self.step += 1
        self._moment.is_gathering = self.schedule.gathers_after(self.step)
        if not self.layers or not self.schedule.updates_at(self.step):
            return True
        self._update(self.schedule.fraction(self.step))
        self.updates += 1
        return False

    def close(self) -> None:
        """Let go of model and optimizer: what is zero by now stays zero no longer.

        Called, or given a state, it raises RuntimeError from now on; its state can still be saved.
        """
        self._is_closed = True
        for handle in (*self._hooks, *self._steps):
            handle.remove()
        keepers.let_go((self._optimizer, *self._weights.values()), self)

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of what another scheduler needs to go on: it shares nothing with this one."""
        now = Snapshot(
            self.schedule,
            self.step,
            self.updates,
            {one.name: one.mask.clone() for one in self.layers},
            {
                one.name: (one.gathered.clone(), int(one.passes), one.stands_in)
                for one in self.layers
                if one.gathered is not None
            },
            self._generator.get_state(),
        )
        return now.stored(self._weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another scheduler was, with its settings; weights and slots are made zero by its masks.

        Load the model and the optimizer before: nothing of theirs is in the state.

        Raises:
            ValueError: it is the state of another model, damaged, or none; nothing is changed then.

        """
        self._check_open()
        self._take(snapshots.read(state, self._weights))

    def __str__(self) -> str:
        """Return how sparse the model really is, layer by layer and in all, and when connections move."""
        rule = self.schedule
        moves = "never" if rule.static_topo else f"every {rule.delta} steps before {rule.T_end}"
        when = f"step {self.step}, {self.updates} topology updates; connections move {moves}"
        return f"{table(self._weights, self._model)}\n{when}"

    def hold(self) -> None:
        """Set what is not connected to zero, whatever an optimizer did."""
        self._check_open()
        for layer in self.layers:
            layer.hold()

    def _check_open(self) -> None:
        if self._is_closed:
            message = "this scheduler was closed: make another, of its state_dict() if that is meant"
            raise RuntimeError(message)

    def _take(self, found: Snapshot) -> None:
        """Be where a snapshot is, and watch the gradients of its weights."""
        self.schedule, self.step, self.updates = found.schedule, found.step, found.updates
        self._generator.set_state(found.generator)
        self._moment.is_gathering = self.schedule.gathers_after(self.step)
        while self._hooks:
            self._hooks.pop().remove()
        self.layers = [ActiveWeights(name, self._weights[name], mask) for name, mask in found.masks.items()]
        for layer in self.layers:
            layer.hold(self._optimizer)
            self._hooks += layer.watch(self._moment)
            if layer.name in found.gathered:
                layer.gathered, passes, layer.stands_in = found.gathered[layer.name]
                layer.passes = torch.tensor(passes, device=layer.weight.device)

    def _before_step(
        self, _: Optimizer, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Have a closure evaluated at weights that are zero where nothing is connected.

        A line search may have moved them. Of many evaluations in a step the first may count for an update.
        """
        closure = named.get("closure", given[1] if len(given) > 1 else None)
        if not callable(closure):
            return None

        evaluations = itertools.count()

        def evaluated() -> Any:  # noqa: ANN401  # what the closure returns
            self.hold()
            with self._moment.evaluation(counts=next(evaluations) == 0):
                return closure()

        if "closure" in named:
            return given, {**named, "closure": evaluated}
        return (given[0], evaluated, *given[2:]), named

    def _after_step(self, *_: object) -> None:
        self.hold()

    def _update(self, fraction: float) -> None:
        reached = ranks.totals(
            [int(one.gathered is not None) for one in self.layers], self.layers[0].weight.device
        )
        finite, left = [], list[str]()
        for layer, count in zip(self.layers, reached, strict=True):
            gathered, passes = layer.forget()
            if self.schedule.growth == "random":
                gradient = torch.rand(layer.weight.shape, generator=self._generator).to(layer.weight)
            elif not count:
                left.append(f"{layer.name} (no backward pass has reached it)")
                continue
            else:
                gradient = torch.zeros_like(layer.weight) if gathered is None else gathered
                gradient = ranks.summed(gradient)  # which ranks entries as their mean does, if it is of any
                gradient.masked_fill_(ranks.summed(passes) == 0, torch.nan)
            finite.append((layer.name, layer.move(gradient, int(fraction * layer.kept), self._optimizer)))
        forget_curvature(self._optimizer)
        flags = torch.stack([flag for _, flag in finite]).tolist() if finite else []
        left += [
            f"{name} (its gradient is not finite)"
            for (name, _), flag in zip(finite, flags, strict=True)
            if not flag
        ]
        if left:
            message = f"topology update at step {self.step}: nothing moved in {', '.join(left)}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _check_owner(optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
    if not isinstance(optimizer, Optimizer):
        message = f"optimizer {optimizer!r}: expected a torch.optim.Optimizer"
        raise ValueError(message)  # noqa: TRY004  # as for every argument that cannot be
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if missing := [name for name, weight in weights.items() if id(weight) not in held]:
        message = f"the optimizer does not have {', '.join(missing)}: ignore them, or give them to it"
        raise ValueError(message)
    check_outside(weights)
    keepers.check_unkept({"this optimizer": optimizer, **weights})
