"""The slow truth of a sparse training step: dense products, masked gradients, SGD's own formulas."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esbench.registry import WrongResultError
from impls.benchmark.training.sparse_trainers import MOMENTUM, SHARE, AbstractTrainer, loss_of
from impls.benchmark.training.written_updates import check
from impls.verify import reference

RATE = 0.1
"""The learning rate of the steps that are held to the written-out ones."""


def check_steps(trainer: AbstractTrainer, plain: nn.Sequential, rows: Sequence[Tensor], eps: float) -> None:
    """Hold steps to the same ones written out: dense products, masked gradients, SGD with momentum.

    Raises:
        WrongResultError: they lead elsewhere, or something is not zero that is not connected.

    """
    weights, masks = trainer.written, trainer.masks
    for x in rows:
        trainer.step(x)
    found, wide = trainer.written, reference.double(plain)
    slows = written_steps(plain, weights, masks, rows)
    truths = written_steps(
        wide, {name: one.double() for name, one in weights.items()}, masks, [x.double() for x in rows]
    )
    for name, value in found.items():
        # What moved is compared, and not the weight, beside which it would be small.
        before = weights[name]
        reference.compare(
            f"change of {name}", value - before, truths[name] - before.double(), slows[name] - before, eps
        )
        if name in masks and bool(value[~masks[name]].any()):
            message = f"{name} is not zero everywhere that nothing is connected"
            raise WrongResultError(message)


def check_moves(trainer: AbstractTrainer, plain: nn.Module, rows: Sequence[Tensor]) -> None:
    """Hold steps, at every other of which connections move, to the rule, and to what holds of any of them.

    The rule is looked at in float64, where no two scores are alike by rounding.

    Raises:
        WrongResultError: other connections have moved, more or fewer, or what is none is not zero.

    """
    for number, x in enumerate(itertools.islice(itertools.cycle(rows), 5)):
        weights, before = trainer.written, {name: mask.clone() for name, mask in trainer.masks.items()}
        trainer.step(x)
        after, written = trainer.masks, trainer.written
        if number % 2 and x.dtype is torch.float64:
            found = dict(zip(weights, gradients(plain, weights, x), strict=True))
            for name, mask in after.items():
                moved = int(SHARE * int(mask.sum()))
                check(weights[name], found[name], before[name], mask, moved)
        for name, mask in after.items():
            if int(mask.sum()) != int(before[name].sum()) or bool(written[name][~mask].any()):
                message = (
                    f"{name} has {int(mask.sum())} connections, not {int(before[name].sum())}, or others"
                )
                raise WrongResultError(message)
        if number % 2 and all(torch.equal(mask, before[name]) for name, mask in after.items()):
            message = "no connection has moved"
            raise WrongResultError(message)


def gradients(plain: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Return the dense gradients of weights."""
    learning = {name: one.detach().requires_grad_() for name, one in weights.items()}
    loss = loss_of(torch.func.functional_call(plain, learning, (x,)))
    return torch.autograd.grad(loss, list(learning.values()))


def written_steps(
    plain: nn.Module, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], rows: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return weights after steps of SGD with momentum, by dense products and the formulas themselves."""
    now = {name: one.clone() for name, one in weights.items()}
    velocity = {name: torch.zeros_like(one) for name, one in now.items()}
    for x in rows:
        for name, gradient in zip(now, gradients(plain, now, x), strict=True):
            masked = gradient * masks[name] if name in masks else gradient
            velocity[name] = MOMENTUM * velocity[name] + masked
            now[name] = now[name] - RATE * velocity[name]
    return now
