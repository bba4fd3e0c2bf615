"""RigL inside the backward pass: a layer's dense gradient is used as soon as it is ready, and freed.

    training = RigLInBackward(model, partial(torch.optim.SGD, lr=0.1), dense_allocation=0.1, T_end=750)
    ...
    loss.backward()  # weights, or connections, have changed by now, and no gradient is left
    training()       # counts the step

RigLScheduler leaves all gradients to the optimizer's step, and keeps the dense ones beside them where
connections move. Here never more than one parameter's gradient is held.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from impls.training import ranks, topology
from impls.training.connections import Connections
from impls.training.ownership import claim, owner_of, release
from impls.training.schedule import Schedule
from impls.training.sparsity import sparsifiable, zeros

Rule = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an ordinary optimizer of parameters, such as ``partial(torch.optim.SGD, lr=0.1)``."""


class RigLInBackward:
    """Trains a model sparsely inside its backward pass: one backward pass for each step.

    What needs all gradients at once has no place here: clipping, which is refused, scaling, averaging over
    several passes.

    Args:
        model: changed in place, and by every backward pass from now on.
        rule: how its parameters learn.
        seed: of the first masks.
        settings: those of :class:`impls.training.schedule.Schedule`.

    Raises:
        ValueError: a setting cannot be, the model has nothing to make sparse or is updated inside the
            backward pass already, or there are other ranks.

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
        generator = Generator().manual_seed(seed)
        learning = [one for one in model.parameters() if one.requires_grad]
        if any(owner_of(one) is not None for one in learning):
            message = "the model is updated inside the backward pass already: close() that one first"
            raise ValueError(message)
        parts = zeros(
            sparsifiable(model), self.schedule.dense_allocation, self.schedule.sparsity_distribution
        )
        layers = {
            one.weight: Connections(one.name, one.weight, topology.scattered(one.weight, one.kept, generator))
            for one in parts
            if one.zeros
        }
        self.layers, self.step = list(layers.values()), 0
        self._finite: list[tuple[str, Tensor]] = []
        self._had: set[nn.Parameter] = set()
        me = weakref.ref(self)
        self._turns = {one: (rule([one]), layers.get(one)) for one in learning}
        self._handles = [one.register_post_accumulate_grad_hook(_Turn(me)) for one in learning]
        for layer in self.layers:
            layer.hold()
        claim(learning, self)

    def __call__(self) -> bool:
        """Count a step; return whether weights were trained in it, or else connections moved.

        Raises:
            RuntimeError: there was no backward pass.

        """
        if not self._had:
            message = "no backward pass since the last step"
            raise RuntimeError(message)
        self._had.clear()
        self.step += 1
        finite, self._finite = self._finite, []
        flags = torch.stack([flag for _, flag in finite]).tolist() if finite else []
        if left := [name for (name, _), flag in zip(finite, flags, strict=True) if not flag]:
            message = f"step {self.step}: nothing moved in {', '.join(left)}: gradients that are not finite"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return not self.schedule.updates_at(self.step)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The ordinary optimizers, one for each parameter, whose learning rates may be changed."""
        return [optimizer for optimizer, _ in self._turns.values()]

    def close(self) -> None:
        """Let go of the model: from now on its gradients stay, as usual."""
        for handle in self._handles:
            handle.remove()
        release(self._turns, self)

    def take(self, parameter: nn.Parameter) -> None:
        """Use a gradient that is ready, and free it.

        Raises:
            RuntimeError: the parameter has had its turn in this step.

        """
        if parameter in self._had:
            message = (
                "a second backward pass in one step: its gradient cannot be added to one that is used up"
            )
            raise RuntimeError(message)
        self._had.add(parameter)
        optimizer, layer = self._turns[parameter]
        gradient, step = parameter.grad, self.step + 1
        if gradient is None:
            return
        if self.layers and self.schedule.updates_at(step):
            if layer is not None:
                moved = int(self.schedule.fraction(step) * layer.kept)
                self._finite.append((layer.name, layer.move(gradient, moved, optimizer)))
        else:
            if layer is not None:
                gradient.masked_fill_(layer.others, 0)
            optimizer.step()
            if layer is not None:
                layer.hold()
        parameter.grad = None


class _Turn:
    """What becomes of a parameter's gradient.

    A parameter holds its hooks, where no garbage collector looks: one that held the training, or an
    optimizer, which hold the parameter, would keep all of them forever.
    """

    def __init__(self, training: Callable[[], RigLInBackward | None]) -> None:
        self._training = training

    def __call__(self, parameter: nn.Parameter) -> None:
        if (training := self._training()) is not None:
            training.take(parameter)
