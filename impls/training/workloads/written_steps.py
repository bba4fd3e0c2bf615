"""The slow truth of a sparse training step: dense products, masked gradients, SGD's own formulas."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esbench.registry import WrongResultError
from impls import truth
from impls.training.workloads.sparse_trainers import MOMENTUM, AbstractTrainer, loss_of

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
    found, wide = trainer.written, truth.double(plain)
    slows = written_steps(plain, weights, masks, rows)
    truths = written_steps(
        wide, {name: one.double() for name, one in weights.items()}, masks, [x.double() for x in rows]
    )
    for name, value in found.items():
        # What moved is compared, and not the weight, beside which it would be small.
        before = weights[name]
        truth.compare(
            f"change of {name}", value - before, truths[name] - before.double(), slows[name] - before, eps
        )
        if name in masks and bool(value[~masks[name]].any()):
            message = f"{name} is not zero everywhere that nothing is connected"
            raise WrongResultError(message)


def check_moves(trainer: AbstractTrainer, rows: Sequence[Tensor]) -> None:
    """Hold steps at which connections move to what holds of them: other masks of as many entries.

    Raises:
        WrongResultError: they are not.

    """
    before = {name: mask.clone() for name, mask in trainer.masks.items()}
    for x in itertools.islice(itertools.cycle(rows), 4):
        trainer.step(x)
    written = trainer.written
    for name, mask in trainer.masks.items():
        if int(mask.sum()) != int(before[name].sum()) or bool(written[name][~mask].any()):
            message = f"{name} has {int(mask.sum())} connections, not {int(before[name].sum())}, or others"
            raise WrongResultError(message)
    if all(torch.equal(mask, before[name]) for name, mask in trainer.masks.items()):
        message = "no connection has moved"
        raise WrongResultError(message)


def written_steps(
    plain: nn.Module, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], rows: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return weights after steps of SGD with momentum, by dense products and the formulas themselves."""
    now = {name: one.clone() for name, one in weights.items()}
    velocity = {name: torch.zeros_like(one) for name, one in now.items()}
    for x in rows:
        learning = {name: one.requires_grad_() for name, one in now.items()}
        loss = loss_of(torch.func.functional_call(plain, learning, (x,)))
        gradients = torch.autograd.grad(loss, list(learning.values()))
        for name, gradient in zip(learning, gradients, strict=True):
            masked = gradient * masks[name] if name in masks else gradient
            velocity[name] = MOMENTUM * velocity[name] + masked
            now[name] = now[name].detach() - RATE * velocity[name]
    return now
