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
    """Read a number of at least 1."""
    if not 1 <= (value := int(text)) <= 2**31 - 1:
        raise ValueError
    return value


def seed(text: str) -> int:
    """Read a seed of at least 0."""
    if not 0 <= (value := int(text)) <= 2**62:
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
    """Return a parser of the options of every example; with 0 members, without ``--members``."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if members:
        words = f"{each} of the population ({members})"
        found.add_argument("--members", type=count, default=members, help=words)
    found.add_argument("--steps", type=count, default=steps, help=f"number of updates ({steps})")
    rate = f"Adam's initial learning rate ({learning_rate:g})"
    found.add_argument("--learning-rate", type=positive, default=learning_rate, help=rate)
    found.add_argument("--seed", type=seed, default=0, help="seed of weights, batches and noise (0)")
    return found


def arguments(
    description: str, *, steps: int, batch: int, sigma: float, learning_rate: float
) -> argparse.Namespace:
    """Read the command line of an example that compares the schemes."""
    found = parser(description, members=128, steps=steps, learning_rate=learning_rate)
    found.add_argument("--scheme", action="append", choices=SCHEMES, help="may be repeated (all three)")
    found.add_argument("--batch", type=count, default=batch, help=f"digits per member and step ({batch})")
    found.add_argument("--sigma", type=positive, default=sigma, help=f"scale of the noise ({sigma:g})")
    return found.parse_args()


def ended(main: Callable[[], None]) -> None:
    """Run an example; a UserError ends it with one line and exit code 2."""
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


def show(rows: Iterable[tuple[str, float, float]]) -> None:
    """Print a table of how networks were trained, their accuracy, and the seconds it took."""
    print(tabulate(rows, ("trained with", "accuracy", "seconds"), floatfmt=(".0f", ".1%", ".1f")))
