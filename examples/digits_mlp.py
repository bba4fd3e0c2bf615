"""Train an MLP to classify handwritten digits by evolution strategies, with three schemes in turn.

Every step evaluates 128 perturbed copies of the network and their antithetic counterparts in one call, ranks
them by their loss on a batch of digits, and moves the weights towards the better ones. The accuracy on test
digits is compared with that of backpropagation.

Example: python examples/digits_mlp.py --scheme Hadamard --steps 200
"""

import argparse
import sys

import torch
from comparison import arguments, compare, run_example
from torch import nn

from impls import centered_ranks, perturb
from impls.perturbation.scheme import AnyScheme
from impls.training import networks


def evolve(model: nn.Module, scheme: AnyScheme, options: argparse.Namespace) -> None:
    """Train the model: a usual PyTorch loop whose gradients come from ``population.update``."""
    digits = networks.digits()
    population = perturb(
        model, scheme, members=options.members, sigma=options.sigma, antithetic=True, seed=options.seed
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(options.seed)

    for step in range(options.steps):
        batch = torch.randint(len(digits.train_y), (options.batch,), generator=generator)
        # Row = repeat * members + member: every member sees the batch, then with the negated noise.
        rows = batch.repeat(2).repeat_interleave(options.members)

        noise = population.sample(step)
        logits = population(digits.train_x[rows], noise=noise)
        loss = nn.functional.cross_entropy(logits, digits.train_y[rows], reduction="none")
        fitness = -loss.view(2, options.batch, options.members).mean(1)

        optimizer.zero_grad()
        population.update(noise, centered_ranks(fitness))
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}, mean fitness {float(fitness.mean()):.3f}", file=sys.stderr)


if __name__ == "__main__":
    options = arguments(__doc__, steps=120, batch=32, sigma=0.05, learning_rate=0.02)
    run_example(lambda: compare("DigitsMLP", evolve, options))
