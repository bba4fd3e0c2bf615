"""Train a policy to balance a pole by evolution strategies, with three schemes in turn.

Every step plays an episode of CartPole-v1 with each of 32 perturbed copies of the policy and their antithetic
counterparts, all in one vector environment, and moves the weights towards the copies that balanced longer.
The reward of an episode is its length, at most 500. Training ends as soon as the policy itself reaches a mean
reward of 475 in 100 new episodes.

It needs gymnasium: pip install gymnasium

Example: python examples/cartpole.py --scheme LowRank --seed 1
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from comparison import SCHEMES, parser, positive, run_example
from tabulate import tabulate
from torch import Tensor, nn

from esbench.errors import UserError
from impls import centered_ranks, perturb
from impls.perturbation.scheme import AnyScheme

GOAL = 475.0
TESTED = 100
"""Episodes whose mean reward is compared with the goal."""


def environments(count: int) -> Any:  # noqa: ANN401  gymnasium is optional
    """Return a vector environment that plays ``count`` episodes at once."""
    try:
        import gymnasium  # noqa: PLC0415  optional
    except ModuleNotFoundError as error:
        raise UserError("this example needs gymnasium: pip install gymnasium") from error
    return gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")


def play(envs: Any, policy: Callable[[Tensor], Tensor], seed: int) -> Tensor:  # noqa: ANN401  the same
    """Return the reward of the first episode of each environment, [environments]; row i plays in the i-th."""
    observations, _ = envs.reset(seed=seed)
    rewards, is_running = torch.zeros(envs.num_envs), torch.ones(envs.num_envs, dtype=torch.bool)
    while is_running.any():
        actions = policy(torch.from_numpy(observations)).argmax(1)
        observations, reward, ended, truncated, _ = envs.step(actions.numpy())
        rewards += torch.from_numpy(reward).float() * is_running
        is_running &= ~torch.from_numpy(ended | truncated)
    return rewards


def evolve(scheme: AnyScheme, options: argparse.Namespace) -> tuple[float, int]:
    """Train a policy; return its mean reward in new episodes, and the number of episodes of training."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    population = perturb(
        model,
        scheme,
        members=options.members,
        sigma=options.sigma,
        antithetic=True,
        seed=options.seed,
        warn=False,  # layers this small have few different perturbations of rank 1
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    envs, tests, score = environments(2 * options.members), environments(TESTED), 0.0
    x = torch.zeros(2 * options.members, 4)
    for step in range(options.steps):
        noise = population.sample(step)
        # Row = repeat * members + member: the second repeat has the negated noise.
        rewards = play(envs, population.prepare(noise, x), seed=10_000 * options.seed + step)
        optimizer.zero_grad()
        population.update(noise, centered_ranks(population.fitness(rewards)))
        optimizer.step()
        with torch.no_grad():
            score = float(play(tests, model, seed=10_000 * options.seed + 5_000 + step).mean())
        if step % 10 == 0:
            print(f"step {step}, mean reward {score:.0f}", file=sys.stderr)
        if score >= GOAL:
            return score, 2 * options.members * (step + 1)
    return score, 2 * options.members * options.steps


def compare(options: argparse.Namespace) -> None:
    """Train a policy with each scheme, and print rewards, episodes and seconds."""
    rows = []
    for name in dict.fromkeys(options.scheme or SCHEMES):
        print(f"training with {name} ...", file=sys.stderr)
        start_s = time.monotonic()
        score, episodes = evolve(SCHEMES[name], options)
        rows.append((name, score, episodes, time.monotonic() - start_s))
    print(tabulate(rows, ("trained with", "mean reward", "episodes", "seconds"), floatfmt=".1f"))


if __name__ == "__main__":
    command_line = parser(__doc__, members=32, steps=300, learning_rate=0.05)
    command_line.add_argument(
        "--scheme", action="append", choices=SCHEMES, help="may be repeated (all three)"
    )
    command_line.add_argument("--sigma", type=positive, default=0.2, help="scale of the noise (0.2)")
    run_example(lambda: compare(command_line.parse_args()))
