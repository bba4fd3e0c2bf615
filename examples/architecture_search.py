"""Search for an architecture: a population of small MLPs, each trained, the best kept and varied.

In the style of NaiveGAflux's quick tutorial: five inputs and three labels; one to three hidden layers of 3 to
10 channels, with an activation each; of five models the two best live on and three are bred, the fitter the
more often, by changing widths, removing layers and adding some. Every candidate is trained from scratch, by
layers that carry their optimizer and learn inside the backward pass, and let go of, so that memory is as flat
after 100 of them as after ten: the last column counts parameters of candidates that are still there.

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
from impls.training.memory_reclaim import MODES, Reclaim, reclaim, refusal
from impls.training.optimizer_in_backward import AutoOptimizer, ImplicitOptimizer

INPUTS, LABELS = 5, 3
POPULATION, ELITES = 5, 2
RESIZED, REMOVED, ADDED = 0.6, 0.4, 0.4
"""How likely a child's layer has another width, and that a layer goes or comes."""
RULE = partial(torch.optim.Adam, lr=0.02)
"""How every layer learns."""
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
    """Batches [rows, inputs] with their labels [rows], and rows that nobody learns from."""

    batches: list[tuple[Tensor, Tensor]]
    test_x: Tensor
    test_y: Tensor


@dataclass
class Memory:
    """The parameters of all candidates so far, as far as they are still there."""

    parameters: list["weakref.ref[Tensor]"] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        """Remember a model's parameters without holding them."""
        self.parameters += [weakref.ref(parameter) for parameter in model.parameters()]

    @property
    def alive(self) -> int:
        """How many there are."""
        return sum(parameter() is not None for parameter in self.parameters)


def teacher(steps: int, seed_: int) -> Data:
    """Make rows and name them by a random network that the candidates do not know."""
    generator = Generator().manual_seed(seed_)
    inner = torch.randn(INPUTS, 16, generator=generator)
    outer = torch.randn(16, LABELS, generator=generator)

    def named(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, INPUTS, generator=generator)
        return x, ((x @ inner).tanh() @ outer).argmax(1)

    return Data([named(ROWS) for _ in range(steps)], *named(1000))


def drawn(rng: random.Random) -> Layer:
    """Draw a hidden layer."""
    return Layer(rng.choice(WIDTHS), rng.choice(list(ACTIVATIONS)))


def varied(parent: Architecture, rng: random.Random) -> Architecture:
    """Change an architecture's widths by up to a fifth, remove a layer, add one: each now and then."""
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
    """Make a model of an architecture, whose layers have weights and optimizers of their own."""
    found: list[nn.Module] = []
    widths = [INPUTS, *(layer.width for layer in architecture)]
    generator = Generator().manual_seed(rng.getrandbits(60))
    for (inp, out), layer in zip(itertools.pairwise(widths), architecture, strict=True):
        found += [_linear(inp, out, generator), ACTIVATIONS[layer.activation]()]
    return nn.Sequential(*found, _linear(widths[-1], LABELS, generator))


def fitness(
    architecture: Architecture, data: Data, plan: Reclaim, rng: random.Random, memory: Memory
) -> float:
    """Train an architecture from scratch and return its accuracy on rows that it has not seen."""
    model = made(architecture, rng)
    optimizer = ImplicitOptimizer(model)
    memory.watch(model)
    for x, y in plan.batches(data.batches):
        nn.functional.cross_entropy(model(x), y).backward()  # the weights have changed by now
        optimizer.step()  # sees to it that they have; there is no gradient left to be zeroed
    with torch.no_grad():
        return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def search(options: argparse.Namespace) -> Iterator[tuple[int, int, float, float, float, int]]:
    """Yield each generation: its number, candidates so far, two accuracies, resident MB, what is alive."""
    # A fitness is a draw of weights too; the whole search is one of the seed's.
    rng, memory = random.Random(options.seed), Memory()  # noqa: S311  a search, not a secret
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
    found.add_argument("--candidates", type=count, default=100, help="trained in all (100)")
    found.add_argument("--steps", type=count, default=100, help="batches that each is trained on (100)")
    how = "what is done about memory: see impls/training/memory_reclaim.py (iterator)"
    # Two are for whole processes.
    modes = [mode for mode in MODES if mode not in {"expandable", "subprocess"}]
    found.add_argument("--reclaim", choices=modes, default="iterator", help=how)
    found.add_argument("--seed", type=seed, default=0, help="of data, weights and search (0)")
    return found.parse_args()


def main() -> None:
    """Search, and print a line for each generation."""
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
