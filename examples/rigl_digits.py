"""Train an MLP with a tenth and a twentieth of its weights to classify handwritten digits, by RigL.

Two lines make a training loop sparse: one creates a scheduler, and one asks it whether the optimizer takes
a step. Every 25 steps, active weights of small magnitude are dropped, and others are grown where the gradient
is large. RigL is compared with static masks and with the dense network.

Example: python examples/rigl_digits.py --density 0.02 --steps 400
"""

import argparse
import sys
import time

import torch
from comparison import accuracy, parser, run_example
from tabulate import tabulate
from torch import nn

from impls.training import networks
from impls.training.rigl import RigLScheduler


def network() -> nn.Sequential:
    """Return the MLP 64-128-128-10."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, networks.CLASSES)
    )


def share(text: str) -> float:
    """Read a number in (0, 1]."""
    if not 0 < (value := float(text)) <= 1:
        raise ValueError
    return value


def train(density: float, options: argparse.Namespace, *, static: bool = False) -> nn.Module:
    """Train a network: a usual PyTorch loop, and two lines for RigL."""
    torch.manual_seed(options.seed)
    digits, model = networks.digits(), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    scheduler = RigLScheduler(
        model,
        optimizer,
        dense_allocation=density,
        T_end=max(1, 3 * options.steps // 4),
        delta=25,
        sparsity_distribution="erk",
        ignore_linear_layers=False,
        static_topo=static,
        seed=options.seed,
    )
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for _ in range(options.steps):
        batch = torch.randint(len(digits.train_y), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.train_x[batch]), digits.train_y[batch]).backward()
        if scheduler():
            optimizer.step()
        rates.step()
    print(scheduler, file=sys.stderr)
    return model


def compare(options: argparse.Namespace) -> None:
    """Train networks of each density, and the dense one, and print their accuracies."""
    networks.digits()  # not timed: loading takes a second
    torch.set_num_threads(1)  # small steps: several threads would mostly wait
    sparse = [(density, static) for density in options.density or (0.1, 0.05) for static in (False, True)]
    rows = []
    for density, static in (*sparse, (1.0, False)):
        name = f"{'static' if static else 'RigL'} at {1 - density:.0%}" if density < 1 else "backpropagation"
        print(f"training with {name} ...", file=sys.stderr)
        start_s = time.monotonic()
        model = train(density, options, static=static)
        taken_s = time.monotonic() - start_s
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        nonzero = sum(int(weight.count_nonzero()) for weight in weights)
        total = sum(weight.numel() for weight in weights)
        rows.append((name, f"{nonzero}/{total}", accuracy(model), taken_s))
    print(
        tabulate(
            rows,
            ("trained with", "nonzero/total", "accuracy", "seconds"),
            floatfmt=("", "", ".1%", ".1f"),
            colalign=("left", "right", "right", "right"),
        )
    )


if __name__ == "__main__":
    command_line = parser(__doc__, steps=800, learning_rate=5e-3)
    command_line.add_argument(
        "--density",
        type=share,
        action="append",
        help="share of active weights; may be repeated (0.1 and 0.05)",
    )
    options = command_line.parse_args()
    run_example(lambda: compare(options))
