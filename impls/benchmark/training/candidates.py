"""The candidates of an architecture search: random MLPs, how they are trained, and the same written out."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from esbench.registry import REGISTRY
from esbench.schema import Case
from impls.benchmark import inputs
from impls.training.optimizer import OptimizerInBackward, Rule

ARCHITECTURES, COMPILED = REGISTRY.reserve("Architectures", "CompiledArchitectures")
"""``members`` random MLPs from ``in_channels`` to ``out_channels``; ``repeats`` rows a batch.

Those that are compiled have base and naive variants of their own, and so an operator of their own.
"""

STEPS = 12
"""So many batches each candidate is trained on: the reclaiming iterator collects before two of them."""

LEARNING_RATE = 0.05
RULE: Rule = partial(SGD, lr=LEARNING_RATE, foreach=False)

Widths = tuple[int, ...]


class Candidate(NamedTuple):
    """A model, and what ends a step of it; both have to live as long as it is trained."""

    model: nn.Sequential
    step: Callable[[], object]


def population(
    candidates: int, channels: int, rows: int, dtype: str = "float32", operator: str = ARCHITECTURES
) -> Case:
    """Make a case of so many candidates with three labels, as NaiveGAflux's tutorial has."""
    return Case(
        operator=operator,
        out_channels=3,
        in_channels=channels,
        members=candidates,
        repeats=rows,
        dtype=dtype,
    )


def architectures(case: Case, seed: int) -> tuple[Widths, ...]:
    """Draw the widths of each candidate, inputs and outputs included: 1 to 3 hidden layers.

    Hidden layers have half to four times as many channels as there are inputs. The first two are not drawn:
    the smallest and the largest that there can be, so that the largest is the same whatever the seed.
    """
    rng = random.Random(f"{seed} {case.in_channels}")  # noqa: S311  a choice, not a secret
    least, most = max(2, case.in_channels // 2), 4 * case.in_channels
    hidden = [[least], [most] * 3]
    while len(hidden) < case.members:
        hidden.append([rng.randint(least, most) for _ in range(rng.randint(1, 3))])
    return tuple((case.in_channels, *widths, case.out_channels) for widths in hidden[: case.members])


def largest(widths: Iterable[Widths]) -> Widths:
    """Return the architecture with the most weights."""
    return max(widths, key=lambda one: sum(a * b for a, b in itertools.pairwise(one)))


def untrained(widths: Widths, case: Case, device: str, seed: int) -> nn.Sequential:
    """Make a candidate's model, with tanh between its layers and seeded weights of the usual size."""
    dtype, generator = inputs.dtype_of(case), Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inp, out in itertools.pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, inp, out, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(out, inp, generator=generator, dtype=dtype) / math.sqrt(inp))
            layer.bias.zero_()
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device)


def batches(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    """Make the rows [steps, rows, channels] that every candidate is trained on, for each turn."""
    shape = (STEPS, case.repeats, case.in_channels)
    return inputs.normal(*shape, device=device, dtype=inputs.dtype_of(case), seed=seed + 1)


def labels(x: Tensor, case: Case) -> Tensor:
    """Return the class of each row: which of its first channels is the largest."""
    return x[:, : case.out_channels].argmax(1)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, case: Case) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return nn.functional.cross_entropy(model(x), labels(x, case))


def clean(model: nn.Sequential) -> Candidate:
    """Let a model learn inside the backward pass, by what lets go of it."""
    return Candidate(model, OptimizerInBackward(model, RULE, skip_nonfinite=False).step)


def leaky(model: nn.Sequential) -> tuple[Candidate, list[RemovableHandle]]:
    """Do so by the usual recipe: a hook reaches the parameter that it hangs on, which no collection sees."""
    optimizers: dict[Tensor, Optimizer] = {one: RULE([one]) for one in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    return Candidate(model, lambda: None), handles


def train(candidate: Candidate, x: Iterable[Tensor], case: Case) -> list[Tensor]:
    """Train on batches [rows, channels], which updates inside the backward pass; return the losses."""
    losses = []
    for batch in x:
        loss = loss_of(candidate.model, batch, case)
        loss.backward()
        candidate.step()
        losses.append(loss.detach())
    return losses


def written_out(
    weights: Sequence[Tensor], biases: Sequence[Tensor], x: Iterable[Tensor], case: Case
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Train the same without autograd and without optimizers: backpropagation as the chain rule says.

    Args:
        weights: [out, in] of each layer.
        biases: [out] of each.
        x: batches [rows, channels].
        case: the case.

    Returns:
        The losses before each step, the weights and the biases behind the last.

    """
    weights, biases, losses = list(weights), list(biases), []
    for batch in x:
        classes, seen = labels(batch, case), [batch]
        for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            y = seen[-1] @ weight.T + bias
            seen.append(y if place == len(weights) - 1 else y.tanh())
        logarithms = seen[-1] - seen[-1].logsumexp(1, keepdim=True)
        losses.append(-logarithms.gather(1, classes[:, None]).mean())
        credit = (logarithms.exp() - nn.functional.one_hot(classes, case.out_channels)) / len(batch)
        for place in reversed(range(len(weights))):
            inner = credit @ weights[place]
            weights[place] = weights[place] - LEARNING_RATE * credit.T @ seen[place]
            biases[place] = biases[place] - LEARNING_RATE * credit.sum(0)
            credit = inner * (1 - seen[place].square())
    return losses, weights, biases
