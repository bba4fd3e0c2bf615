"""The rule that steps are measured with, AdamW, and its slow truth."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impls.benchmark import inputs
from impls.training.optimizer import Rule

Kernel = Literal["loop", "foreach", "fused"]
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01


def adamw(kernel: Kernel, device: str, dtype: torch.dtype = torch.float32) -> Rule:
    """Return what makes the ordinary optimizer of parameters of a type, with one of torch's kernels.

    On CUDA steps are counted on the device, so that a graph of a step counts them. That count is float32, as
    are the bias corrections that torch computes from it, so float64 is left out.
    """
    return partial(
        torch.optim.AdamW,
        lr=inputs.LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        foreach=kernel == "foreach",
        fused=kernel == "fused",
        capturable=device == "cuda" and dtype is not torch.float64,
    )


def loss_of(y: Tensor) -> Tensor:
    """Return the mean square of what a model gives."""
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()


def slots(optimizers: Iterable[Optimizer], parameter: nn.Parameter) -> tuple[int, Tensor, Tensor]:
    """Return copies of the steps that a parameter took, and of its moments; zeros before the first."""
    for optimizer in optimizers:
        if found := optimizer.state.get(parameter):
            return int(found["step"]), found["exp_avg"].clone(), found["exp_avg_sq"].clone()
    zeros = torch.zeros_like(parameter)
    return 0, zeros, zeros.clone()


def written_gradients(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Return the gradients at these weights, in their type."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    y = torch.func.functional_call(model, leaves, (x,))
    return dict(zip(leaves, torch.autograd.grad(loss_of(y), list(leaves.values())), strict=True))


@torch.no_grad()
def written_step(
    weight: Tensor, gradient: Tensor, steps: int, first: Tensor, second: Tensor
) -> dict[str, Tensor]:
    """Write a step of AdamW out (Loshchilov and Hutter 2019, algorithm 2): weight and moments after it."""
    beta1, beta2 = BETAS
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient * gradient
    rate, steps = inputs.LEARNING_RATE, steps + 1
    change = first / (1 - beta1**steps) / ((second / (1 - beta2**steps)).sqrt() + EPS)
    return {
        "weight": weight - rate * DECAY * weight - rate * change,
        "first moment": first,
        "second moment": second,
    }
