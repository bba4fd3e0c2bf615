"""Train a network to classify handwritten digits with dropout as the only noise, without backpropagation.

Each member drops random units while it classifies a digit, once with the noise and once with the negative
noise. With dropped outputs the gradient estimate is node perturbation: (difference of the two losses) x
(change of each output) x (inputs), with the inputs recorded by ``population.call_with_activations``. With
dropped inputs only a common factor of each column of weights is learned, and the accuracy is lower.

Example: python examples/dropout_only.py --p 0.1 --members 4096
"""

import argparse
import sys
import time

import torch
from comparison import accuracy, parser, run_example, show
from torch import Tensor, nn

from impls import DropoutMask, perturb
from impls.training import networks


def network(seed: int) -> nn.Sequential:
    """Return the MLP 64-256-10. It has no biases: their noise is Gaussian, not dropout."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 10, bias=False))
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    return model


def train_by_dropout(model: nn.Module, scheme: DropoutMask, options: argparse.Namespace) -> None:
    """Train the model with the noise of dropped outputs or inputs."""
    digits, members = networks.digits(), options.members
    # sigma has no effect: the noise of a weight is the weight times a factor from the mask.
    population = perturb(model, scheme, members=members, sigma=1.0, antithetic=True, seed=options.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        # One digit per member, which reads it twice: the two losses differ by the noise only.
        rows = torch.randint(len(digits.train_y), (members,), generator=generator).repeat(2)
        noise = population.sample(step)
        scores, record = population.call_with_activations(digits.train_x[rows], noise=noise)
        loss: Tensor = nn.functional.cross_entropy(scores, digits.train_y[rows], reduction="none")
        optimizer.zero_grad()
        population.update(noise, -loss, record)
        optimizer.step()
        schedule.step()


def train_by_backpropagation(model: nn.Module, options: argparse.Namespace) -> None:
    """Train the model by backpropagation with the same number of digits per step."""
    digits = networks.digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        rows = torch.randint(len(digits.train_y), (options.members,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.train_x[rows]), digits.train_y[rows]).backward()
        optimizer.step()


def share(text: str) -> float:
    """Read a number above 0 and below 1."""
    if not 0 < (value := float(text)) < 1:
        raise ValueError
    return value


def main() -> None:
    """Train with dropped outputs, with dropped inputs and by backpropagation, and compare."""
    command_line = parser(__doc__, members=2048, steps=200, learning_rate=0.003)
    command_line.add_argument("--p", type=share, default=0.2, help="probability that a unit is dropped (0.2)")
    options = command_line.parse_args()

    networks.digits()  # not timed: loading takes a second
    rows = []
    for name in ("dropped outputs", "dropped inputs", "backpropagation"):
        print(f"training with {name} ...", file=sys.stderr)
        model, start_s = network(options.seed), time.monotonic()
        if name == "backpropagation":
            train_by_backpropagation(model, options)
        else:
            scheme = DropoutMask(options.p, "out" if name == "dropped outputs" else "in")
            train_by_dropout(model, scheme, options)
        rows.append((name, accuracy(model), time.monotonic() - start_s))
    show(rows)


if __name__ == "__main__":
    run_example(main)
