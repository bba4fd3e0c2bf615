"""Fitness shaping: utilities for :meth:`Population.update` from the fitness of the members.

Each function takes fitness [members], or [2, members] with antithetic sampling, as a tensor, an array or a
list of numbers, and returns float64 utilities of the same shape whose mean is 0. Members of equal fitness
have equal utilities.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = Tensor | NDArray[Any] | Sequence[float] | Sequence[Sequence[float]]
"""What :func:`to_tensor` converts."""


def to_tensor(name: str, values: Numbers) -> Tensor:
    """Convert real numbers to a tensor; lists, bools and unsigned integers become float64.

    Args:
        name: the argument's name, for the error.
        values: a tensor, an array, or a list.

    Raises:
        TypeError: they are something else, such as complex numbers, a sparse tensor or a ragged list.
    """
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_complex():
            message = (
                f"{name} must be real numbers in a dense tensor, got {values.dtype} in {values.layout}: "
                "pass its .real or .to_dense()"
            )
            raise TypeError(message)
        # Torch cannot sort or rank some unsigned integers.
        return values if values.dtype.is_signed else values.double()
    try:
        # Copied: torch.as_tensor() would warn of read-only arrays, such as those of JAX.
        numbers = torch.tensor(values, dtype=None if isinstance(values, np.ndarray) else torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"{name} cannot be converted from {type(values).__name__} ({error}): pass a tensor"
        raise TypeError(message) from error
    return to_tensor(name, numbers)


def centered_ranks(fitness: Numbers) -> Tensor:
    """Return utilities from -1/2 for the lowest fitness to 1/2 for the highest.

    utility = rank / (n - 1) - 1/2 with ranks 0 to n - 1; equal fitness gets its mean rank. The scale of the
    fitness does not matter (Wierstra et al. 2014, JMLR 15).

    Raises:
        TypeError: fitness is not made of real numbers.
        ValueError: there are fewer than two numbers, or one is not a number.
    """
    fitness = to_tensor("fitness", fitness)
    first_rank, end_rank = _ranks(fitness)
    return (first_rank + end_rank - 1).double() / (2 * (fitness.numel() - 1)) - 0.5


def z_scores(fitness: Numbers) -> Tensor:
    """Return (fitness - mean) / standard deviation; zeros if all are equal.

    Raises:
        TypeError: fitness is not made of real numbers.
        ValueError: there are fewer than two numbers, or one is not finite.
    """
    fitness = to_tensor("fitness", fitness)
    _check(fitness, fitness.isfinite(), "finite")
    values = fitness.double()
    # From 0 to 1 equal numbers are exactly 0, and squares neither overflow nor vanish.
    values = values - values.min()
    largest = values.max()
    values = values / largest.where(largest > 0, 1.0)
    differences = values - values.mean()
    deviation = differences.square().mean().sqrt()
    return differences / deviation.where(deviation > 0, 1.0)


def log_ranks(fitness: Numbers) -> Tensor:
    """Return utilities that are large for the best members and equal for the worse half.

    utility = max(0, log(n / 2 + 1) - log(i)) / sum - 1 / n for the i-th best of n members: those of natural
    evolution strategies (Wierstra et al. 2014, JMLR 15), after the weights of CMA-ES.

    Raises:
        TypeError: fitness is not made of real numbers.
        ValueError: there are fewer than two numbers, or one is not a number.
    """
    fitness = to_tensor("fitness", fitness)
    n = fitness.numel()
    position = torch.arange(n, 0, -1, dtype=torch.float64, device=fitness.device)
    weights = (torch.tensor(n / 2 + 1).log() - position.log()).clamp(min=0)
    return _by_rank(fitness, weights / weights.sum())


def top_k(fitness: Numbers, k: int) -> Tensor:
    """Return equal utilities for the best k members, and equal ones for all others: 1 / k - 1 / n and -1 / n.

    Raises:
        TypeError: fitness is not made of real numbers.
        ValueError: k is not from 1 to n - 1, there are fewer than two numbers, or one is not a number.
    """
    fitness = to_tensor("fitness", fitness)
    n = fitness.numel()
    if not 1 <= k < n:
        message = f"top_k of {n} numbers takes a k from 1 to {n - 1}, got {k}"
        raise ValueError(message)
    weights = torch.zeros(n, dtype=torch.float64, device=fitness.device)
    weights[n - k :] = 1 / k
    return _by_rank(fitness, weights)


def _by_rank(fitness: Tensor, weights: Tensor) -> Tensor:
    """Return weights [n] of the ranks from lowest to highest, less their mean; ties share theirs."""
    first_rank, end_rank = _ranks(fitness)
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    return (sums[end_rank] - sums[first_rank]) / (end_rank - first_rank) - weights.mean()


def _ranks(fitness: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many numbers are lower than each, and how many are lower or equal."""
    _check(fitness, ~fitness.isnan(), "a number")
    ordered, values = fitness.flatten().sort().values, fitness.contiguous()
    return torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)


def _check(fitness: Tensor, is_valid: Tensor, wanted: str) -> None:
    if fitness.numel() < 2:  # noqa: PLR2004  one has no others to be compared with
        message = f"utilities need the fitness of at least two members, got shape {list(fitness.shape)}"
        raise ValueError(message)
    if not is_valid.all():
        invalid = fitness.numel() - int(is_valid.sum())
        message = (
            f"the fitness of {invalid} of {fitness.numel()} evaluations is not {wanted}: make it finite, for "
            "example by torch.nan_to_num(fitness, nan=-1e9)"
        )
        raise ValueError(message)
