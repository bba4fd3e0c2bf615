"""What the examples share: their options, the three schemes, and the table at the end."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from tabulate import tabulate
from torch import nn

from impls import Hadamard, LowRank, Perturbed, networks
from impls.scheme import AnyScheme

SCHEMES: Mapping[str, AnyScheme] = {
    "Perturbed": Perturbed(),
    "LowRank": LowRank(rank=1),
    "Hadamard": Hadamard(),
}
"""Noise of each member's own for every weight, for two vectors, and for the signs of one shared matrix."""

Evolve = Callable[[nn.Module, AnyScheme, argparse.Namespace], None]


def arguments(description: str, **defaults: float) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="repeatable; by default all three")
    parser.add_argument("--members", type=int, default=128, help="pairs of the population (128)")
    parser.add_argument("--steps", type=int, default=200, help="updates (200)")
    parser.add_argument("--batch", type=int, default=32, help="digits that every member sees in a step")
    parser.add_argument("--sigma", type=float, default=0.05, help="the scale of the noise")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="Adam's, at the start")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise (0)")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def compare(network: str, evolve: Evolve, options: argparse.Namespace) -> None:
    """Train the network with each scheme and by backpropagation, and print how well each reads."""
    networks.digits()  # loading them takes a second that is nobody's
    rows = []
    for name in options.scheme or SCHEMES:
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
