"""What the examples share: their options, the three schemes, and the table at the end.

Importing it makes the checkout importable, so that the examples run from anywhere without an installation.
What the project depends on has to be there: ``pip install -e .`` in the repository's root brings all of it.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tabulate import tabulate
from torch import nn

# Behind everything else: a project that is installed is found first.
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
"""Noise of each member's own for every weight, for two vectors, and for the signs of one shared matrix."""

Evolve = Callable[[nn.Module, AnyScheme, argparse.Namespace], None]


def count(text: str) -> int:
    """Read a number of things, at least one."""
    if not 1 <= (value := int(text)) <= 2**31 - 1:
        raise ValueError
    return value


def seed(text: str) -> int:
    """Read a seed, 0 or more."""
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
    """Make the parser of the options that every example has; of 0 members there is no option."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if members:
        words = f"{each} of the population ({members})"
        found.add_argument("--members", type=count, default=members, help=words)
    found.add_argument("--steps", type=count, default=steps, help=f"updates ({steps})")
    rate = f"Adam's, at the start ({learning_rate:g})"
    found.add_argument("--learning-rate", type=positive, default=learning_rate, help=rate)
    found.add_argument("--seed", type=seed, default=0, help="of weights, digits and noise (0)")
    return found


def arguments(
    description: str, *, steps: int, batch: int, sigma: float, learning_rate: float
) -> argparse.Namespace:
    """Read the command line of an example that compares the schemes."""
    found = parser(description, members=128, steps=steps, learning_rate=learning_rate)
    found.add_argument("--scheme", action="append", choices=SCHEMES, help="repeatable; by default all three")
    found.add_argument(
        "--batch", type=count, default=batch, help=f"digits that every member sees in a step ({batch})"
    )
    found.add_argument("--sigma", type=positive, default=sigma, help=f"the scale of the noise ({sigma:g})")
    return found.parse_args()


def ended(main: Callable[[], None]) -> None:
    """Run an example; what a person has to mend first ends it in one line and exit code 2."""
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def compare(network: str, evolve: Evolve, options: argparse.Namespace) -> None:
    """Train the network with each scheme and by backpropagation, and print how well each reads."""
    networks.digits()  # loading them takes a second that is nobody's
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
    """Print a table: trained with what, the share of digits read rightly, and the seconds that it took."""
    print(tabulate(rows, ("trained with", "accuracy", "seconds"), floatfmt=(".0f", ".1%", ".1f")))
