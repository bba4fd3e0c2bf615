"""Search for an architecture: random MLPs, each trained from scratch to classify digits, in constant memory.

Every layer has an optimizer that updates it inside the backward pass. A candidate is freed as soon as it is
tested, and garbage is collected between batches. The last column of the table is the number of parameters, of
all candidates so far, that are still in memory.

Example: python examples/architecture_search.py --candidates 50 --steps 100
"""

import argparse
import itertools
import random
import sys
import weakref
from functools import partial

import torch
from comparison import accuracy, count, parser, run_example
from tabulate import tabulate
from torch import nn

from impls.training import AutoOptimizer, ImplicitOptimizer, ReclaimingIterator, networks


def train(widths: tuple[int, ...], options: argparse.Namespace) -> tuple[float, list["weakref.ref[object]"]]:
    """Train an MLP; return its accuracy on the test digits, and weak references to its parameters."""
    digits = networks.digits()
    make_optimizer = partial(torch.optim.Adam, lr=options.learning_rate)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [AutoOptimizer(nn.Linear(inputs, outputs), make_optimizer), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])  # no activation after the last layer
    optimizer = ImplicitOptimizer(model)
    batches = [torch.randint(len(digits.train_y), (128,)) for _ in range(options.steps)]
    for batch in ReclaimingIterator(batches):
        loss = nn.functional.cross_entropy(model(digits.train_x[batch]), digits.train_y[batch])
        loss.backward()  # updates the weights
        optimizer.step()  # ends the step; there is no gradient to zero
    return accuracy(model), [weakref.ref(parameter) for parameter in model.parameters()]


def search(options: argparse.Namespace) -> None:
    """Train random architectures; print the last one, and each that was better than all before it."""
    networks.digits()  # loaded before the first candidate
    torch.manual_seed(options.seed)
    rng, rows, best = random.Random(options.seed), [], 0.0  # noqa: S311  not a secret
    parameters: list[weakref.ref[object]] = []
    for number in range(1, options.candidates + 1):
        widths = (64, *(rng.randint(8, 128) for _ in range(rng.randint(1, 3))), networks.CLASSES)
        print(f"training candidate {number} of {options.candidates} ...", file=sys.stderr)
        share, references = train(widths, options)
        parameters += references
        if share > best or number == options.candidates:
            best = max(share, best)
            in_memory = sum(reference() is not None for reference in parameters)
            rows.append((number, "-".join(map(str, widths)), share, in_memory))
    print(tabulate(rows, ("candidate", "widths", "accuracy", "in memory"), floatfmt=("", "", ".1%", "")))


if __name__ == "__main__":
    command_line = parser(__doc__, steps=100, learning_rate=0.01)
    command_line.add_argument("--candidates", type=count, default=20, help="models trained in total (20)")
    options = command_line.parse_args()
    run_example(lambda: search(options))
