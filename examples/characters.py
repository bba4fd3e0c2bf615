"""Train a small transformer to predict the next character of a text, by evolution strategies.

The text is of Genesis. Every step evaluates 512 perturbed copies of the transformer and their
antithetic counterparts on the same eight windows of the text. The result is compared with the text's bigram
entropy, below which no model gets that sees one character.

Example: python examples/characters.py --scheme LowRank --steps 300
"""

import argparse
import sys
import time

import torch
from comparison import SCHEMES, parser, positive, run_example
from tabulate import tabulate
from torch import nn

from impls import centered_ranks, perturb
from impls.perturbation.scheme import AnyScheme
from impls.training import tasks


def evolve(model: nn.Module, scheme: AnyScheme, options: argparse.Namespace) -> None:
    """Train the transformer on random windows: characters [rows, 8], each followed by the next one."""
    population = perturb(
        model, scheme, members=options.members, sigma=options.sigma, antithetic=True, seed=options.seed
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    windows = tasks.characters().unfold(0, tasks.CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        batch = windows[torch.randint(len(windows), (8,), generator=generator)]
        x, y = population.rows(batch[:, :-1]), population.rows(batch[:, 1:])
        noise = population.sample(step)
        logits = population(x, noise=noise)  # [rows, 8, alphabet]
        loss = nn.functional.cross_entropy(logits.mT, y, reduction="none").mean(1)
        optimizer.zero_grad()
        population.update(noise, centered_ranks(population.fitness(-loss)))
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}, cross-entropy {float(loss.mean()):.3f}", file=sys.stderr)


def compare(options: argparse.Namespace) -> None:
    """Train a transformer with each scheme, and print bits per character."""
    task = tasks.TASKS["Characters"]
    rows: list[tuple[str, float, float | None]] = []
    for name in dict.fromkeys(options.scheme or ("LowRank",)):
        print(f"training with {name} ...", file=sys.stderr)
        model, start_s = task.model(options.seed), time.monotonic()
        evolve(model, SCHEMES[name], options)
        rows.append((name, task.score(model), time.monotonic() - start_s))
    rows.append(("bigram entropy", tasks.bigram_entropy(), None))
    print(tabulate(rows, ("trained with", "bits per character", "seconds"), floatfmt=("", ".3f", ".1f")))


if __name__ == "__main__":
    command_line = parser(__doc__, members=512, steps=300, learning_rate=0.02)
    command_line.add_argument("--scheme", action="append", choices=SCHEMES, help="may be repeated (LowRank)")
    command_line.add_argument("--sigma", type=positive, default=0.05, help="scale of the noise (0.05)")
    run_example(lambda: compare(command_line.parse_args()))
