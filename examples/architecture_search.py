"""Search for an architecture: a population of small MLPs, each trained, the best kept and varied.

After NaiveGAflux's quick tutorial: five inputs and three labels, and one to three hidden layers of 3 to 10
channels, each with an activation. Of five models the two best are kept, and three are bred from them, the
fitter ones more often, by changing widths and by removing and adding layers. Every candidate is trained from
scratch by layers with their own optimizers, which update inside the backward pass, and is then freed. Memory
is as flat after 100 candidates as after ten: the last column counts parameters of candidates that are left.

Example: python examples/architecture_search.py --candidates 100 --reclaim collect
"""

import argparse
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import psutil
import torch
from comparison import count, ended, seed
from tabulate import tabulate
from torch import Generator, Tensor, nn

from esbench.errors import UserError
from impls.training.implicit_optimizer import AutoOptimizer, ImplicitOptimizer
from impls.training.memory_reclaim import MODES, Reclaim, reclaim, refusal

INPUTS, LABELS = 5, 3
POPULATION, ELITES = 5, 2
RESIZED, REMOVED, ADDED = 0.6, 0.4, 0.4
"""Probabilities that a layer of a child gets another width, and that a layer is removed or added."""
RULE = partial(torch.optim.Adam, lr=0.02)
"""Optimizer of every layer."""
ROWS = 32
WIDTHS = range(3, 11)
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
}


class Layer(NamedTuple):
    """A hidden layer of an architecture."""

    width: int
    activation: str


Architecture = tuple[Layer, ...]


class Data(NamedTuple):
    """Training batches [rows, inputs] with labels [rows], and test rows with theirs."""

    batches: list[tuple[Tensor, Tensor]]
    test_x: Tensor
    test_y: Tensor


@dataclass
class Memory:
    """Weak references to the parameters of all candidates so far."""

    parameters: list["weakref.ref[Tensor]"] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        """Add a model's parameters."""
        self.parameters += [weakref.ref(parameter) for parameter in model.parameters()]

    @property
    def alive(self) -> int:
        """Number of parameters that still exist."""
        return sum(parameter() is not None for parameter in self.parameters)


def teacher(steps: int, seed_: int) -> Data:
    """Return random rows with the labels that a random network gives them."""
    generator = Generator().manual_seed(seed_)
    inner = torch.randn(INPUTS, 16, generator=generator)
    outer = torch.randn(16, LABELS, generator=generator)

    def labelled(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, INPUTS, generator=generator)
        return x, ((x @ inner).tanh() @ outer).argmax(1)

    return Data([labelled(ROWS) for _ in range(steps)], *labelled(1000))


def drawn(rng: random.Random) -> Layer:
    """Return a random hidden layer."""
    return Layer(rng.choice(WIDTHS), rng.choice(list(ACTIVATIONS)))


def varied(parent: Architecture, rng: random.Random) -> Architecture:
    """Return an architecture with some widths changed by up to a fifth, a layer removed or added."""
    layers = list(parent)
    for place, layer in enumerate(layers):
        if rng.random() < RESIZED:
            change = rng.choice((-1, 1)) * max(1, round(0.2 * layer.width * rng.random()))
            layers[place] = layer._replace(width=max(WIDTHS[0], layer.width + change))
    if len(layers) > 1 and rng.random() < REMOVED:
        layers.pop(rng.randrange(len(layers)))
    if rng.random() < ADDED:
        layers.insert(rng.randint(0, len(layers)), drawn(rng))
    return tuple(layers)


def made(architecture: Architecture, rng: random.Random) -> nn.Sequential:
    """Return a model of an architecture whose layers have random weights and their own optimizers."""
    found: list[nn.Module] = []
    widths = [INPUTS, *(layer.width for layer in architecture)]
    generator = Generator().manual_seed(rng.getrandbits(60))
    for (inp, out), layer in zip(itertools.pairwise(widths), architecture, strict=True):
        found += [_linear(inp, out, generator), ACTIVATIONS[layer.activation]()]
    return nn.Sequential(*found, _linear(widths[-1], LABELS, generator))


def fitness(
    architecture: Architecture, data: Data, plan: Reclaim, rng: random.Random, memory: Memory
) -> float:
    """Train an architecture from scratch and return its accuracy on the test rows."""
    model = made(architecture, rng)
    optimizer = ImplicitOptimizer(model)
    memory.watch(model)
    for x, y in plan.batches(data.batches):
        nn.functional.cross_entropy(model(x), y).backward()  # updates the weights
        optimizer.step()  # ends the step; there is no gradient to zero
    with torch.no_grad():
        return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def search(options: argparse.Namespace) -> Iterator[tuple[int, int, float, float, float, int]]:
    """Yield each generation: number, candidates, best and mean accuracy, resident MB, live parameters."""
    rng, memory = random.Random(options.seed), Memory()  # noqa: S311  not a secret
    data, plan = teacher(options.steps, options.seed), reclaim(options.reclaim)

    def rated(architecture: Architecture) -> tuple[float, Architecture]:
        with plan.candidate():
            return fitness(architecture, data, plan, rng, memory), architecture

    population = [
        rated(tuple(drawn(rng) for _ in range(rng.randint(1, 3))))
        for _ in range(min(POPULATION, options.candidates))
    ]
    trained = len(population)
    for generation in itertools.count(1):
        population.sort(key=lambda one: one[0], reverse=True)
        scores = [score for score, _ in population]
        resident = psutil.Process().memory_info().rss / 1e6
        yield generation, trained, scores[0], sum(scores) / len(scores), resident, memory.alive
        children = min(POPULATION - ELITES, options.candidates - trained)
        if children < 1:
            return
        parents = rng.choices([one for _, one in population], [score + 1e-9 for score in scores], k=children)
        population = [*population[:ELITES], *(rated(varied(parent, rng)) for parent in parents)]
        trained += children


def arguments() -> argparse.Namespace:
    """Read the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--candidates", type=count, default=100, help="models trained in total (100)")
    found.add_argument("--steps", type=count, default=100, help="training batches per candidate (100)")
    how = "how memory is reclaimed: see impls/training/memory_reclaim.py (iterator)"
    # The other two are for whole processes.
    modes = [mode for mode in MODES if mode not in {"expandable", "subprocess"}]
    found.add_argument("--reclaim", choices=modes, default="iterator", help=how)
    found.add_argument("--seed", type=seed, default=0, help="seed of data, weights and search (0)")
    return found.parse_args()


def main() -> None:
    """Search, and print a row per generation."""
    options = arguments()
    if reason := refusal(options.reclaim, "cpu"):
        message = f"--reclaim {options.reclaim}: {reason}"
        raise UserError(message)
    rows = []
    for row in search(options):
        print(f"generation {row[0]}: {row[1]} of {options.candidates} candidates trained", file=sys.stderr)
        rows.append(row)
    names = ("generation", "candidates", "best", "mean", "resident (MB)", "alive")
    print(tabulate(rows, names, floatfmt=(".0f", ".0f", ".1%", ".1%", ".1f", ".0f")))


def _linear(inp: int, out: int, generator: Generator) -> AutoOptimizer:
    layer = nn.Linear(inp, out)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(out, inp, generator=generator) / inp**0.5)
        layer.bias.zero_()
    return AutoOptimizer(layer, RULE)


if __name__ == "__main__":
    ended(main)
