"""Code that the examples share: options, three schemes, and the table of accuracies.

Importing it adds the checkout to the path, so that the examples run from anywhere without an installation.
The dependencies must be installed: ``pip install -e .`` in the repository's root installs them.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

# At the end: an installed project is found first.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from esbench.errors import UserError
from impls import Hadamard, LowRank, Perturbed
from impls.perturbation.scheme import AnyScheme
from impls.training import networks

SCHEMES: Mapping[str, AnyScheme] = {
    "Perturbed": Perturbed(),
    "LowRank": LowRank(rank=1),
    "Hadamard": Hadamard(),
}
"""Dense noise, noise of rank 1, and one noise matrix with signs per member."""

Evolve = Callable[[nn.Module, AnyScheme, argparse.Namespace], None]


def count(text: str) -> int:
    """Read an integer of at least 1."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def seed(text: str) -> int:
    """Read an integer of at least 0."""
    if (value := int(text)) < 0:
        raise ValueError
    return value


def positive(text: str) -> float:
    """Read a finite number above 0."""
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError
    return value


def parser(
    description: str, *, members: int = 0, steps: int, learning_rate: float, each: str = "pairs"
) -> argparse.ArgumentParser:
    """Return a parser of the options of every example, except ``--members`` if ``members`` is 0."""
    command_line = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if members:
        members_help = f"{each} of the population ({members})"
        command_line.add_argument("--members", type=count, default=members, help=members_help)
    command_line.add_argument("--steps", type=count, default=steps, help=f"number of updates ({steps})")
    rate_help = f"initial learning rate of Adam ({learning_rate:g})"
    command_line.add_argument("--learning-rate", type=positive, default=learning_rate, help=rate_help)
    command_line.add_argument("--seed", type=seed, default=0, help="seed of weights, batches and noise (0)")
    return command_line


def arguments(
    description: str, *, steps: int, batch: int, sigma: float, learning_rate: float
) -> argparse.Namespace:
    """Read the command line of an example that compares the schemes."""
    command_line = parser(description, members=128, steps=steps, learning_rate=learning_rate)
    command_line.add_argument(
        "--scheme", action="append", choices=SCHEMES, help="may be repeated (all three)"
    )
    batch_help = f"digits per member and step ({batch})"
    command_line.add_argument("--batch", type=count, default=batch, help=batch_help)
    command_line.add_argument("--sigma", type=positive, default=sigma, help=f"scale of the noise ({sigma:g})")
    return command_line.parse_args()


def run_example(main: Callable[[], None]) -> None:
    """Run an example; on a UserError, print its message and exit with code 2."""
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def compare(network: str, evolve: Evolve, options: argparse.Namespace) -> None:
    """Train the network with each scheme and by backpropagation, and print the accuracies."""
    networks.digits()  # not timed: loading takes a second
    rows = []
    for name in dict.fromkeys(options.scheme or SCHEMES):
        model = networks.untrained(network, options.seed)
        print(f"training {network} with {name} ...", file=sys.stderr)
        start_s = time.monotonic()
        evolve(model, SCHEMES[name], options)
        rows.append((name, networks.accuracy(model), time.monotonic() - start_s))
    start_s = time.monotonic()
    model = networks.trained(network, options.seed)
    rows.append(("backpropagation", networks.accuracy(model), time.monotonic() - start_s))
    show(rows)


def accuracy(model: nn.Module) -> float:
    """Return the share of test digits [rows, 64] that a model classifies correctly."""
    digits = networks.digits()
    with torch.no_grad():
        predicted = model(digits.test_x).argmax(1)
    return float((predicted == digits.test_y).double().mean())


def show(rows: Iterable[tuple[str, float, float]]) -> None:
    """Print a table of (how a network was trained, its accuracy, seconds of training)."""
    print(tabulate(rows, ("trained with", "accuracy", "seconds"), floatfmt=(".0f", ".1%", ".1f")))
