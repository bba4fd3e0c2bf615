"""Utilities have mean 0, follow the order of the fitness, and give ties the same value."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impls import centered_ranks, log_ranks, top_k, z_scores

SHAPINGS: list[Callable[[Tensor], Tensor]] = [centered_ranks, z_scores, log_ranks, partial(top_k, k=1)]


def test_known_values() -> None:
    """Shapes are kept; ties share the mean of their ranks' utilities."""
    fitness = torch.tensor([[3.0, -1.0, 100.0], [0.5, 2.0, 0.0]])
    expected = torch.tensor([[0.3, -0.5, 0.5], [-0.1, 0.1, -0.3]], dtype=torch.float64)
    torch.testing.assert_close(centered_ranks(fitness), expected)
    assert torch.equal(centered_ranks(fitness), centered_ranks(1e-3 * fitness - 7))
    assert centered_ranks(torch.tensor([1.0, 0.0, 1.0, 2.0])).tolist() == pytest.approx([0.0, -0.5, 0.0, 0.5])
    assert z_scores(torch.tensor([1.0, 3.0])).tolist() == [-1, 1]
    weights = [max(0.0, math.log(3) - math.log(i)) for i in (1, 2, 3, 4)]
    log_utilities = [weight / sum(weights) - 1 / 4 for weight in weights]
    assert log_ranks(torch.tensor([7.0, 5.0, 1.0, 0.0])).tolist() == pytest.approx(log_utilities)
    best_two = top_k(torch.tensor([[5.0, 1.0], [7.0, -math.inf]]), 2)
    assert best_two.tolist() == [[0.25, -0.25], [0.25, -0.25]]
    assert top_k(torch.tensor([2.0, 1.0, 2.0, 0.0]), 1).tolist() == [0.25, -0.25, 0.25, -0.25]


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=30), st.sampled_from(SHAPINGS))
def test_order_and_mean(numbers: list[int], shaping: Callable[[Tensor], Tensor]) -> None:
    """A higher fitness never has a lower utility; equal fitness has the same; the mean is 0."""
    utilities = shaping(torch.tensor(numbers).float())
    assert utilities.dtype == torch.float64
    assert abs(float(utilities.mean())) < 1e-12
    pairs = sorted(zip(numbers, utilities.tolist(), strict=True))
    for (low, first), (high, second) in itertools.pairwise(pairs):
        assert first == pytest.approx(second, abs=1e-12) if low == high else first <= second + 1e-12


@pytest.mark.parametrize("scale", [0.1, -1e-300, 1e300])
def test_z_scores_of_any_scale(scale: float) -> None:
    """Scores do not depend on the scale, and are 0 where all are equal, whatever the mean rounds to."""
    equal, different = torch.ones(3).double(), torch.tensor([0.0, 1.0, 3.0, 4.0]).double()
    assert not z_scores(scale * equal).any()
    expected = math.copysign(1, scale) * torch.tensor([-2.0, -1.0, 1.0, 2.0]).double() / math.sqrt(2.5)
    torch.testing.assert_close(z_scores(scale * different), expected)


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_bad_fitness_is_refused(shaping: Callable[[Tensor], Tensor]) -> None:
    """In a sort, NaN would be the highest fitness."""
    with pytest.raises(ValueError, match="the fitness of 1 of 3 evaluations is not "):
        shaping(torch.tensor([0.0, math.nan, 1.0]))
    with pytest.raises(ValueError, match=r"at least two members|from 1 to 0"):
        shaping(torch.ones(1))


def test_k_is_smaller_than_the_population() -> None:
    """All members cannot be the best."""
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"a k from 1 to 3, got {k}"):
            top_k(torch.rand(4), k)
