"""The connections of one weight while it trains: its mask, and the dense gradients that growth asks for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from impls.training import ranks, topology
from impls.training.keepers import WeakHook


@dataclass
class Moment:
    """What the gradients are for that come now.

    ``is_gathering``: they count for the next topology update. ``is_evaluation``: they come of a closure that
    an optimizer evaluates inside its step, and not of a backward pass that the training loop asked for.
    ``scaler``: what the loss was multiplied by, if that is known.
    """

    is_gathering: bool = False
    is_evaluation: bool = False
    scaler: GradScaler | None = None

    @contextmanager
    def evaluation(self, *, counts: bool) -> Iterator[None]:
        """Be that of an evaluation of a closure."""
        before = self.is_gathering, self.is_evaluation
        self.is_gathering, self.is_evaluation = self.is_gathering and counts, True
        try:
            yield
        finally:
            self.is_gathering, self.is_evaluation = before


class ActiveWeights:
    """Which entries of a weight are connected; the others are zero.

    ``mask`` is bool in the weight's shape. ``gathered`` is the sum of the dense gradients of ``passes``
    backward passes, those whose gradient was finite, and None where there were none at all; ``stands_in``
    where these were evaluations of closures, for want of others. ``coming`` is a dense gradient that is not
    added to ``.grad`` yet. ``passes`` has no dimensions, and is where the weight is.
    """

    def __init__(self, name: str, weight: nn.Parameter, mask: Tensor) -> None:
        """Take the mask of the first rank; the weight is not changed yet."""
        self.name, self.weight = name, weight
        self._mask = ranks.of_the_first(mask)
        self._others = ~self._mask
        self._moment = Moment()
        self.gathered: Tensor | None = None
        self.coming: Tensor | None = None
        self.passes, self.stands_in = torch.zeros((), dtype=torch.int64), False
        self.kept = int(self._mask.sum())

    @property
    def mask(self) -> Tensor:
        """The mask, where the weight is."""
        self._follow()
        return self._mask

    @property
    def others(self) -> Tensor:
        """What is not connected."""
        self._follow()
        return self._others

    def watch(self, moment: Moment) -> list[RemovableHandle]:
        """Set ``.grad`` to zero where nothing is connected, and gather dense gradients when they count.

        Those that are not added to ``.grad``, as of torch.autograd.grad, are left alone and count nowhere.
        """
        self._moment = moment
        return [
            self.weight.register_hook(WeakHook(self._come)),
            self.weight.register_post_accumulate_grad_hook(WeakHook(self._arrive)),
        ]

    def forget(self) -> tuple[Tensor | None, Tensor]:
        """Return the sum of the dense gradients and of how many passes it is, and hold neither any longer."""
        found = self.gathered, self.passes.to(self.weight.device)
        self.gathered, self.coming, self.stands_in = None, None, False
        self.passes = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        return found

    def move(self, gradient: Tensor, moved: int, optimizer: Optimizer) -> Tensor:
        """Drop and grow so many connections; return whether the gradient was finite, else nothing moves.

        Args:
            gradient: dense, in the weight's shape.
            moved: how many.
            optimizer: its slots of what is new become zero.

        """
        after, is_finite = topology.by_selection(
            self.weight, gradient, self.mask, moved, narrowed=self.weight.device.type == "cpu"
        )
        after = ranks.of_the_first(after)
        topology.restart(self.weight, slots(optimizer, self.weight), self.mask, after)
        self._mask.copy_(after)
        torch.logical_not(after, out=self._others)
        if self.weight.grad is not None:
            self.weight.grad.masked_fill_(self._others, 0)
        return is_finite

    def hold(self, optimizer: Optimizer | None = None) -> None:
        """Set what is not connected to zero, with an optimizer its slots as well."""
        with torch.no_grad():
            for one in (self.weight, *(slots(optimizer, self.weight) if optimizer else ())):
                one.masked_fill_(self.others, 0)

    def _come(self, gradient: Tensor) -> None:
        """Remember a dense gradient that counts, if it is added to ``.grad``."""
        self.coming = gradient.detach() if self._moment.is_gathering else None

    def _arrive(self, weight: nn.Parameter) -> None:
        """Gather what has been added to ``.grad``, and take from that what is not connected."""
        if self.coming is not None:
            dense = self.coming.to(self.weight.dtype)
            scaler = self._moment.scaler
            self._gather(dense if scaler is None else dense / scaler.get_scale())
            self.coming = None
        if weight.grad is not None:
            weight.grad.masked_fill_(self.others, 0)  # a product with 0 would leave what is no number

    def _gather(self, dense: Tensor) -> None:
        """Add a dense gradient to those that count for the next update.

        One that is not finite, as where a scaled loss overflows, adds nothing. Evaluations of closures stand
        in for backward passes of the training loop, where it has none.
        """
        if self._moment.is_evaluation and self.gathered is not None and not self.stands_in:
            return
        if self.stands_in and not self._moment.is_evaluation:
            self.forget()
        is_finite = torch.linalg.vector_norm(dense, torch.inf).isfinite()
        counted = dense.masked_fill(~is_finite, 0)
        self.gathered = counted if self.gathered is None else self.gathered.add_(counted)
        self.passes = self.passes.to(dense.device) + is_finite
        self.stands_in = self._moment.is_evaluation

    def _follow(self) -> None:
        """Go where the weight was moved to."""
        if self._mask.device != self.weight.device:
            self._mask = self._mask.to(self.weight.device)
            self._others = self._others.to(self.weight.device)


def slots(optimizer: Optimizer, weight: nn.Parameter) -> Sequence[Tensor]:
    """Return what an optimizer keeps for each entry of a weight: momentum, moments."""
    kept = optimizer.state.get(weight, {}).values()
    return [one for one in kept if isinstance(one, Tensor) and one.shape == weight.shape and one.dim()]


def forget_curvature(optimizer: Optimizer) -> None:
    """Have LBFGS begin anew: its history of other connections would move what is not connected now."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.state.clear()
