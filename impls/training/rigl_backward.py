"""RigL inside the backward pass: a layer's dense gradient is used as soon as it is ready, and freed.

    training = RigLInBackward(model, partial(torch.optim.SGD, lr=0.1), dense_allocation=0.1, T_end=750)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 1000)
    ...
    loss.backward()  # weights, or connections, have changed by now, and no gradient is left
    training()       # counts the step
    rates.step()

RigLScheduler leaves all gradients to the optimizer's step, and keeps the dense ones beside them where
connections move. Here never more than one parameter's gradient is held.
"""

import warnings
from collections import Counter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from impls.training import ranks, topology
from impls.training.connections import ActiveWeights
from impls.training.keepers import WeakHook
from impls.training.optimizer import OptimizerInBackward, Rule
from impls.training.schedule import Schedule
from impls.training.sparsity import sparsifiable, zeros


class RigLInBackward:
    """Trains a model sparsely inside its backward pass: one backward pass for each step.

    ``optimizer`` is the :class:`impls.training.optimizer.OptimizerInBackward` that the weights learn by:
    learning-rate schedulers are made of it, and what it refuses is refused here. It leaves a parameter whose
    gradient is not finite as it is, with its state and its connections, and counts it in ``skipped``.

    Args:
        model: changed in place, and by every backward pass from now on.
        rule: makes the ordinary optimizer of its parameters.
        seed: of the first masks.
        settings: those of :class:`impls.training.schedule.Schedule`.

    Raises:
        ValueError: a setting cannot be, the model has nothing to make sparse, has a RigLScheduler already or
            cannot be trained like this, or there are other ranks; nothing is changed.

    """

    def __init__(self, model: nn.Module, rule: Rule, *, seed: int = 0, **settings: Any) -> None:  # noqa: ANN401  # the fields of Schedule
        """Make the model sparse, and register with its parameters."""
        self.schedule = Schedule(**settings)
        if ranks.are_others():
            message = "gradients of several ranks come together behind the backward pass: use RigLScheduler"
            raise ValueError(message)
        if self.schedule.grad_accumulation_n > 1:
            message = "no gradient outlives its backward pass here: grad_accumulation_n has to be 1"
            raise ValueError(message)
        parts = zeros(
            sparsifiable(model), self.schedule.dense_allocation, self.schedule.sparsity_distribution
        )
        generator = topology.seeded(seed)
        self._layers = {
            one.weight: ActiveWeights(
                one.name, one.weight, topology.scattered(one.weight, one.kept, generator)
            )
            for one in parts
            if one.zeros
        }
        self.layers, self.step = list(self._layers.values()), 0
        self._skipped: Counter[str] = Counter()

        def watched(parameters: list[nn.Parameter]) -> Optimizer:
            ordinary = rule(parameters)
            ordinary.register_step_pre_hook(WeakHook(self._before))
            ordinary.register_step_post_hook(WeakHook(self._after))
            return ordinary

        self.optimizer = OptimizerInBackward(model, watched)
        for layer in self.layers:
            layer.hold()

    def __call__(self) -> bool:
        """Count a step; return whether weights were trained in it, or else connections moved.

        A layer whose gradient was not finite keeps its connections, with a warning.

        Raises:
            BackwardError: there was no backward pass.

        """
        self.optimizer.step()
        moves = self._moves
        self.step += 1
        skipped, self._skipped = self.optimizer.skipped - self._skipped, self.optimizer.skipped.copy()
        if left := [layer.name for layer in self.layers if moves and layer.name in skipped]:
            message = f"step {self.step}: nothing moved in {', '.join(left)}: gradients that are not finite"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return not moves

    def close(self) -> None:
        """Let go of the model: from now on its gradients stay, as usual."""
        self.optimizer.close()

    @property
    def _moves(self) -> bool:
        """Whether connections move in the step that is under way."""
        return bool(self.layers) and self.schedule.updates_at(self.step + 1)

    def _before(self, ordinary: Optimizer, *_: object) -> None:
        """Mask the gradients that a rule is about to use, or use them up where connections move instead."""
        moves = self._moves
        for parameter in _parameters(ordinary):
            layer = self._layers.get(parameter)
            if parameter.grad is not None and layer is not None:
                if moves:
                    moved = int(self.schedule.fraction(self.step + 1) * layer.kept)
                    layer.move(parameter.grad, moved, ordinary)
                else:
                    parameter.grad.masked_fill_(layer.others, 0)
            if moves:
                parameter.grad = None

    def _after(self, ordinary: Optimizer, *_: object) -> None:
        """Keep zero what is not connected, whatever the rule did."""
        for parameter in _parameters(ordinary):
            if parameter in self._layers:
                self._layers[parameter].hold()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
