"""The connections of one weight while it trains: its mask, and the dense gradients that growth asks for."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impls.training import ranks, topology


class Connections:
    """Which entries of a weight are connected; the others are zero.

    ``mask`` is bool in the weight's shape. ``gathered`` is the sum of the dense gradients of ``passes``
    backward passes, None where there were none.
    """

    def __init__(self, name: str, weight: nn.Parameter, mask: Tensor) -> None:
        """Take the mask of the first rank; the weight is not changed yet."""
        self.name, self.weight = name, weight
        self._mask = ranks.of_the_first(mask)
        self._others = ~self._mask
        self.gathered: Tensor | None = None
        self.passes = 0
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

    def gather(self, gradient: Tensor) -> None:
        """Add a dense gradient to those that count for the next update."""
        dense = gradient.detach().to(self.weight.dtype)
        self.gathered = dense.clone() if self.gathered is None else self.gathered.add_(dense)
        self.passes += 1

    def forget(self) -> Tensor | None:
        """Return the sum of the dense gradients, and hold it no longer."""
        gathered, self.gathered, self.passes = self.gathered, None, 0
        return gathered

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

    def _follow(self) -> None:
        """Go where the weight was moved to."""
        if self._mask.device != self.weight.device:
            self._mask = self._mask.to(self.weight.device)
            self._others = self._others.to(self.weight.device)


def slots(optimizer: Optimizer, weight: nn.Parameter) -> Sequence[Tensor]:
    """Return what an optimizer keeps for each entry of a weight: momentum, moments."""
    kept = optimizer.state.get(weight, {}).values()
    return [one for one in kept if isinstance(one, Tensor) and one.shape == weight.shape and one.dim()]
