"""A population of random MLPs that are trained one after another, as in an architecture search."""

import gc
import itertools
import math
import random
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD
from torch.utils.hooks import RemovableHandle

from esbench.registry import REGISTRY
from esbench.schema import Case
from esbench.workload import WrongResultError
from impls.benchmark import inputs
from impls.benchmark.training.workload import (
    add_leaking_hooks,
    case_of,
    check_against_reference,
    loss_and_gradients,
)
from impls.training.memory_reclaim import Mode, Reclaim, ReleaseCache, call_in_fresh_process
from impls.training.optimizer_in_backward import OptimizerInBackward, Rule

ARCHITECTURES, COMPILED = REGISTRY.reserve("Architectures", "CompiledArchitectures")
"""``members`` MLPs from ``in_channels`` to ``out_channels``; ``repeats`` rows per batch.

Compiled ones have other base and naive variants, and therefore another operator.
"""

STEPS = 12
"""Batches per candidate: the reclaiming iterator collects before two of them."""

LEARNING_RATE = 0.05
RULE: Rule = partial(SGD, lr=LEARNING_RATE, foreach=False)

Widths = tuple[int, ...]


def search_case(
    candidates: int, channels: int, rows: int, dtype: str = "float32", operator: str = ARCHITECTURES
) -> Case:
    """Return a case of a search among candidates with three labels, as in NaiveGAflux's tutorial."""
    return msgspec.structs.replace(case_of(operator, 3, channels, rows, dtype), members=candidates)


def architectures(case: Case, seed: int) -> tuple[Widths, ...]:
    """Draw each candidate's widths, inputs and outputs included, with 1 to 3 hidden layers.

    Hidden layers have half to four times as many channels as there are inputs. The first two candidates are
    the smallest and the largest possible, so that the largest does not depend on the seed.
    """
    rng = random.Random(f"{seed} {case.in_channels}")  # noqa: S311  not a secret
    least, most = max(2, case.in_channels // 2), 4 * case.in_channels
    hidden = [[least], [most] * 3]
    while len(hidden) < case.members:
        hidden.append([rng.randint(least, most) for _ in range(rng.randint(1, 3))])
    return tuple((case.in_channels, *widths, case.out_channels) for widths in hidden[: case.members])


def largest_architecture(widths: Iterable[Widths]) -> Widths:
    """Return the architecture with the most weights."""
    return max(widths, key=lambda sizes: sum(a * b for a, b in itertools.pairwise(sizes)))


def untrained(widths: Widths, case: Case, device: str, seed: int) -> nn.Sequential:
    """Return a candidate with tanh between its layers and seeded weights N(0, 1 / fan in)."""
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
    """Return rows [steps, rows, channels] that every candidate is trained on, for each turn."""
    shape = (STEPS, case.repeats, case.in_channels)
    return inputs.normal(*shape, device=device, dtype=inputs.dtype_of(case), seed=seed + 1)


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    """Return the mean cross-entropy; a row's class is the index of the largest of its first channels."""
    return nn.functional.cross_entropy(y, x[:, : y.shape[1]].argmax(1))


@dataclass(frozen=True)
class Search:
    """How a population is trained; the seed is that of weights and batches."""

    case: Case
    device: str
    seed: int
    mode: Mode = "nothing"
    leaky: bool = False  # update in hooks that leak their parameters
    linked: bool = False  # every layer references its model, so that only the garbage collector frees it


@dataclass
class Outcome:
    """Results of a search, weak references to the parameters of its candidates, and hooks that leak."""

    losses: Tensor = field(default_factory=lambda: torch.empty(0))  # [candidates, steps]
    parameters: list["weakref.ref[Tensor]"] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def alive(self) -> int:
        """Number of parameters of candidates that still exist."""
        return sum(parameter() is not None for parameter in self.parameters)

    def release(self) -> None:
        """Free leaked models, as the end of a process does."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.alive:
            gc.collect()


def run(
    search: Search,
    widths: Iterable[Widths],
    x: Tensor,
    release_cache: ReleaseCache = torch.cuda.empty_cache,
) -> Outcome:
    """Train each architecture on batches [steps, rows, channels], one after another."""
    plan, outcome = Reclaim(search.mode, release_cache), Outcome()
    losses: list[Tensor] = []
    for number, architecture in enumerate(widths):
        candidate = replace(search, seed=search.seed + number)
        with plan.candidate():
            if search.mode == "subprocess":
                losses.append(call_in_fresh_process(_train_alone, candidate, architecture, x.cpu()))
            else:
                losses.append(_train(candidate, architecture, plan.batches(x), outcome))
    outcome.losses = torch.stack(losses)
    return outcome


def _train_alone(candidate: Search, widths: Widths, x: Tensor) -> Tensor:
    """Train one candidate in this process; return its losses [steps]."""
    return run(replace(candidate, mode="nothing"), [widths], x.to(candidate.device)).losses[0].cpu()


def _train(candidate: Search, widths: Widths, rows: Iterable[Tensor], outcome: Outcome) -> Tensor:
    """Train a candidate; return its losses [steps]."""
    model = untrained(widths, candidate.case, candidate.device, candidate.seed)
    outcome.parameters += [weakref.ref(parameter) for parameter in model.parameters()]
    optimizer = None
    if candidate.leaky:
        outcome.handles += add_leaking_hooks(model, RULE)[1]
    else:
        optimizer = OptimizerInBackward(model, RULE, skip_nonfinite=False)
    if candidate.linked:
        for layer in model:
            object.__setattr__(layer, "graph", model)  # not as a submodule, which would be a cycle of modules
    losses = []
    for x in rows:
        loss = loss_of(model(x), x)
        loss.backward()  # updates the model
        if optimizer is not None:
            optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def reference_losses(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the losses [steps] of a training run without optimizers and without hooks."""
    weights: dict[str, Tensor] = {name: weight.detach() for name, weight in model.named_parameters()}
    losses = []
    for batch in x:
        loss, gradients = loss_and_gradients(model, weights, batch, loss_of)
        losses.append(loss)
        weights = {name: weight - LEARNING_RATE * gradients[name] for name, weight in weights.items()}
    return {"losses": torch.stack(losses)}


def check_losses(search: Search, widths: Iterable[Widths], losses: Iterable[Tensor], x: Tensor) -> None:
    """Raise WrongResultError if losses are not the reference's: a wrong update shows in the next loss."""
    for number, (architecture, candidate_losses) in enumerate(zip(widths, losses, strict=True)):
        model = untrained(architecture, search.case, search.device, search.seed + number)
        try:
            check_against_reference({"losses": candidate_losses}, reference_losses, model, x)
        except WrongResultError as error:
            raise WrongResultError(f"candidate {number}: {error}") from error
