"""Active weights in training: gradients are masked in every backward pass and gathered for the next update.

Under torch.distributed all ranks use the first rank's masks and the sums of all ranks' gradients.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from impls.training.sparse_masks import drop_and_grow, zero_changed


class WeakHook:
    """A bound method as a torch hook that does not keep its object alive.

    A parameter's hooks are invisible to the garbage collector: a hook that held an object that holds the
    parameter would leak both.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        """Take a bound method."""
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401  whatever torch passes and expects
        """Call the method, or return None once its object is gone."""
        method = self._method()
        return None if method is None else method(*args)


class ActiveWeights:
    """The mask of one weight in training, and the dense gradients that determine which entries grow.

    Args:
        name: the weight's name in the model.
        weight: inactive entries become zero with :meth:`apply_mask`.
        mask: bool, same shape; that of the first rank is used.
        scaler: what multiplies the loss.

    Attributes:
        nonzero: number of active entries.
        gathers: whether the gradients of the next backward pass decide what the next update grows.
        gathered: sum of the finite dense gradients of several passes, None before the first pass.
        passes: number of these gradients, a tensor without dimensions.
        arriving: dense gradient of the current pass, before it is added to ``gathered``.

    """

    def __init__(
        self, name: str, weight: nn.Parameter, mask: Tensor, scaler: GradScaler | None = None
    ) -> None:
        """Take the mask; the weight is not changed yet."""
        self.name, self.weight = name, weight
        self._mask = first_ranks_mask(mask)
        self._inactive = ~self._mask
        self._scaler = scaler
        self.nonzero = int(self._mask.sum())
        self.gathers = False
        self.gathered: Tensor | None = None
        self.passes = torch.zeros((), dtype=torch.int64, device=weight.device)
        self.arriving: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The mask, on the weight's device."""
        self._mask = self._mask.to(self.weight.device)
        return self._mask

    @property
    def inactive(self) -> Tensor:
        """The inverted mask, on the weight's device."""
        self._inactive = self._inactive.to(self.weight.device)
        return self._inactive

    def watch(self) -> list[RemovableHandle]:
        """Mask ``.grad`` in every backward pass, and add up dense gradients while ``gathers`` is set.

        Gradients that are not added to ``.grad``, such as those of torch.autograd.grad, are ignored.
        """
        return [
            self.weight.register_hook(WeakHook(self._on_gradient)),
            self.weight.register_post_accumulate_grad_hook(WeakHook(self._on_accumulated)),
        ]

    def take_gradient(self) -> tuple[Tensor | None, Tensor]:
        """Return and forget the sum of the gathered dense gradients and their number."""
        found = self.gathered, self.passes.to(self.weight.device)
        self.gathered = self.arriving = None
        self.passes = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        return found

    def move(self, gradient: Tensor, count: int, optimizer: Optimizer) -> Tensor:
        """Drop and grow ``count`` entries; zero the weight and the optimizer's state of new ones.

        Returns whether the dense gradient was finite, a bool tensor; otherwise nothing changes.
        """
        after, is_finite = drop_and_grow(
            self.weight, gradient, self.mask, count, narrowed=self.weight.device.type == "cpu"
        )
        after = first_ranks_mask(after)
        zero_changed([self.weight, *entry_state(optimizer, self.weight)], self.mask, after)
        self._mask.copy_(after)
        torch.logical_not(after, out=self._inactive)
        if self.weight.grad is not None:
            self.weight.grad.masked_fill_(self._inactive, 0)
        return is_finite

    @torch.no_grad()
    def apply_mask(self, optimizer: Optimizer | None = None) -> None:
        """Zero the inactive entries of the weight, and of the optimizer's state if one is given."""
        for one in (self.weight, *(entry_state(optimizer, self.weight) if optimizer else ())):
            one.masked_fill_(self.inactive, 0)

    def _on_gradient(self, gradient: Tensor) -> None:
        self.arriving = gradient.detach() if self.gathers else None

    def _on_accumulated(self, weight: nn.Parameter) -> None:
        if self.arriving is not None:
            dense = self.arriving.to(weight.dtype)
            self._gather(dense if self._scaler is None else dense / self._scaler.get_scale())
            self.arriving = None
        if weight.grad is not None:
            weight.grad.masked_fill_(self.inactive, 0)  # a product with the mask would keep NaN

    def _gather(self, dense: Tensor) -> None:
        """Add a dense gradient; a non-finite one, such as an overflow with GradScaler, adds nothing."""
        is_finite = torch.linalg.vector_norm(dense, torch.inf).isfinite()
        counted = dense.masked_fill(~is_finite, 0)
        self.gathered = counted if self.gathered is None else self.gathered.add_(counted)
        self.passes = self.passes.to(dense.device) + is_finite


def entry_state(optimizer: Optimizer, weight: nn.Parameter) -> list[Tensor]:
    """Return the state that an optimizer keeps per entry of a weight, such as momentum."""
    slots = optimizer.state.get(weight, {}).values()
    return [one for one in slots if isinstance(one, Tensor) and one.shape == weight.shape and one.dim()]


def has_other_ranks() -> bool:
    """Return whether torch.distributed runs with more than one rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, in place."""
    if has_other_ranks():
        distributed.all_reduce(tensor)
    return tensor


def first_ranks_mask(mask: Tensor) -> Tensor:
    """Return the first rank's mask: other ranks may break ties differently."""
    if not has_other_ranks():
        return mask
    numbers = mask.to(torch.uint8)
    distributed.broadcast(numbers, 0)
    return numbers.bool()
