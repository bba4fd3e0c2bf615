"""Gradients of gates have the expectation that enumeration of all gates gives, and gates learn by them."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from impls.schemes.gates import antithetic_gates, disarm, keep_gradient, logit_gradient

PLACES = 2 ** torch.arange(3)
few = settings(max_examples=20)
"""Each example enumerates dozens of masks."""

tables = st.lists(st.floats(-10, 10), min_size=8, max_size=8).map(lambda f: torch.tensor(f).double())
"""The utility of every mask of three gates, any function of them at all."""
keeps = st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3).map(lambda q: torch.tensor(q).double())


def assert_equal(mean: Tensor, exact: Tensor) -> None:
    """Hold a mean over everything there is to its value, but for roundings in float64."""
    torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-9)


def masks() -> Tensor:
    """Return all masks of three gates, [8, 3]."""
    return torch.tensor(list(itertools.product((0, 1), repeat=3)))


def utility(table: Tensor, gates: Tensor) -> Tensor:
    """Look masks [*, 3] up."""
    return table[(gates.long() * PLACES).sum(-1)]


def chance(gates: Tensor, keep: Tensor) -> Tensor:
    """Return how likely masks [*, 3] are, [*]."""
    return torch.where(gates.bool(), keep, 1 - keep).prod(-1)


def derivative(table: Tensor, keep: Tensor) -> Tensor:
    """Differentiate the expected utility, written out, with respect to q."""
    q = keep.clone().requires_grad_()
    expected = (chance(masks(), q) * utility(table, masks())).sum()
    return torch.autograd.grad(expected, q)[0]


def pairs(keep: Tensor) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield what antithetic pairs there are: how likely, and both masks [1, 3]."""
    apart = torch.minimum(keep, 1 - keep)
    for states in itertools.product(("both", "neither", "first", "second"), repeat=3):
        chances = [
            {"both": q - d, "neither": 1 - q - d, "first": d, "second": d}[state]
            for state, q, d in zip(states, keep, apart, strict=True)
        ]
        first = torch.tensor([[state in {"both", "first"} for state in states]])
        second = torch.tensor([[state in {"both", "second"} for state in states]])
        yield float(torch.stack(chances).prod()), first, second


@few
@given(tables, keeps)
def test_the_gradient_of_a_probability_is_what_a_gate_is_worth(table: Tensor, keep: Tensor) -> None:
    """Over all masks of a member, E[f (g - q)] / (q (1 - q)) = E[f | on] - E[f | off] = dF/dq."""
    each, f = masks(), utility(table, masks())
    likely = chance(each, keep)
    mean = torch.zeros(3).double()
    for row in range(8):
        mean += likely[row] * keep_gradient(f[row : row + 1], each[row : row + 1], keep)
    worth = (likely * f).unsqueeze(1)
    contrast = (worth * each).sum(0) / keep - (worth * (1 - each)).sum(0) / (1 - keep)
    assert_equal(mean, contrast)
    assert_equal(mean, derivative(table, keep))


@few
@given(tables, keeps)
def test_centring_utilities_biases_nothing(table: Tensor, keep: Tensor) -> None:
    """Over all populations of two members, the centred estimate's mean is the derivative."""
    mean = torch.zeros(3).double()
    for two in itertools.product(masks(), repeat=2):
        gates = torch.stack(two)
        mean += chance(gates, keep).prod() * logit_gradient(utility(table, gates), gates, keep)
    assert_equal(mean, derivative(table, keep) * keep * (1 - keep))


@few
@given(tables, keeps)
def test_pairs_have_the_derivative_as_their_mean(table: Tensor, keep: Tensor) -> None:
    """Over all antithetic pairs of masks, DisARM's mean is the derivative with respect to the logit."""
    mean = torch.zeros(3).double()
    for likely, first, second in pairs(keep):
        f = torch.stack([utility(table, first), utility(table, second)])
        mean += likely * disarm(f, first, second, keep)
    assert_equal(mean, derivative(table, keep) * keep * (1 - keep))


def second_moments(table: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[estimate^2] of one pair, by enumeration: DisARM, ARM, and two independent members."""
    of_disarm, of_arm, of_two = torch.zeros(3, 3).double()
    larger = torch.maximum(keep, 1 - keep)
    for likely, first, second in pairs(keep):
        f = torch.stack([utility(table, first), utility(table, second)])
        of_disarm += likely * disarm(f, first, second, keep).square()
        # ARM is (f - f') (u - 1/2), with u uniform where it gives these two gates.
        agree = (larger - 0.5).square() / 3
        apart = ((0.5**3 - (larger - 0.5) ** 3) / 3) / (1 - larger)
        between = torch.where((first != second)[0], apart, agree)
        of_arm += likely * (f[0] - f[1]).square() * between
    for two in itertools.product(masks(), repeat=2):
        gates = torch.stack(two)
        estimate = logit_gradient(utility(table, gates), gates, keep)
        of_two += chance(gates, keep).prod() * estimate.square()
    return of_disarm, of_arm, of_two


@few
@given(tables, keeps)
def test_pairs_never_vary_more_than_arm(table: Tensor, keep: Tensor) -> None:
    """The means are the same, so the smaller second moment is the smaller variance."""
    of_disarm, of_arm, _ = second_moments(table, keep)
    assert bool((of_disarm <= of_arm + 1e-9).all())


@few
@given(tables)
def test_pairs_of_fair_gates_never_vary_more_than_two_members(table: Tensor) -> None:
    """At q = 1/2 antithetic pairs are at least as good as as many independent members."""
    of_disarm, _, of_two = second_moments(table, torch.full((3,), 0.5).double())
    assert bool((of_disarm <= of_two + 1e-9).all())


def test_pairs_of_unfair_gates_can_vary_more_than_two_members() -> None:
    """A gate that matters and is fair adds its difference to every pair: others suffer where they are not."""
    first_gate = torch.tensor([0.0, 1.0]).double().repeat(4)
    of_disarm, _, of_two = second_moments(first_gate, torch.tensor([0.5, 0.9, 0.9]).double())
    assert bool((of_disarm[1:] > of_two[1:]).all())


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
def test_partners_are_on_as_often_and_disagree_as_often_as_they_can(keep: float) -> None:
    """Over an even grid of uniform numbers, both gates are on with probability q."""
    uniform = (torch.arange(1000) + 0.5) / 1000
    gates, opposite = antithetic_gates(uniform, keep)
    assert gates.sum() == opposite.sum() == round(1000 * keep)
    assert (gates != opposite).sum() == round(2000 * min(keep, 1 - keep))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_utilities_of_narrow_types_are_centred_before_they_are_narrow(dtype: torch.dtype) -> None:
    """Utilities near the end of a type's range give what they give in float64, not infinity."""
    generator = Generator().manual_seed(0)
    largest = torch.finfo(dtype).max
    f = (largest * (1 - 0.1 * torch.rand(2, 40, generator=generator).double())).to(dtype)
    f[1] *= -1  # differences of pairs are beyond the type
    uniform = torch.rand(40, 3, generator=generator)
    gates, opposite = antithetic_gates(uniform, 0.5)
    for got, exact in (
        (logit_gradient(f[0], gates, 0.5), logit_gradient(f[0].double(), gates, 0.5)),
        (disarm(f, gates, opposite, 0.5), disarm(f.double(), gates, opposite, 0.5)),
    ):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got / largest, (exact / largest).float(), rtol=1e-4, atol=1e-6)


def test_utilities_of_another_length_are_refused() -> None:
    """Each member has one utility, and there is at least one member."""
    with pytest.raises(ValueError, match="one for each member"):
        logit_gradient(torch.ones(3), torch.ones(4, 2), 0.5)
    with pytest.raises(ValueError, match="one for each member"):
        keep_gradient(torch.ones(0), torch.ones(0, 2), 0.5)
    with pytest.raises(ValueError, match="one for each member"):
        disarm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(4, 2), 0.5)


@pytest.mark.parametrize("antithetic", [False, True])
def test_gates_learn_to_switch_harmful_inputs_off(*, antithetic: bool) -> None:
    """Of twelve inputs with given weights six fit a target and six spoil it: only these end up off."""
    generator = Generator().manual_seed(0)
    x, weight = torch.randn(64, 12, generator=generator), torch.randn(12, generator=generator).sign()
    target = x[:, :6] @ weight[:6]
    logits = torch.zeros(12)
    optimizer = torch.optim.Adam([logits], 0.2)
    for _ in range(60):
        keep, uniform = logits.sigmoid(), torch.rand(32, 12, generator=generator)
        first, second = antithetic_gates(uniform, keep)
        gates = torch.cat([first, second]) if antithetic else torch.rand(64, 12, generator=generator) < keep
        error = (gates * weight) @ x.T - target
        utilities = -error.square().mean(1)
        if antithetic:
            gradient = disarm(utilities.view(2, -1), first, second, keep)
        else:
            gradient = logit_gradient(utilities, gates, keep)
        logits.grad = -gradient
        optimizer.step()
    assert logits.sigmoid()[:6].min() > 0.9
    assert logits.sigmoid()[6:].max() < 0.1


@pytest.mark.parametrize("narrow", [torch.float32, torch.float16, torch.bfloat16])
def test_wider_probabilities_are_no_error(narrow: torch.dtype) -> None:
    """Utilities of a narrow type meet a q in float64: the gradient is what float64 utilities give."""
    utilities, gates = torch.randn(8, generator=Generator().manual_seed(0)).to(narrow), masks()
    keep = torch.full((3,), 0.3, dtype=torch.float64)
    for estimate in (logit_gradient, keep_gradient):
        found = estimate(utilities, gates, keep)
        assert found.dtype == torch.float64
        assert_equal(found, estimate(utilities.double(), gates, keep))
    found = disarm(torch.stack([utilities, -utilities]), gates, 1 - gates, keep)
    assert_equal(found, disarm(torch.stack([utilities, -utilities]).double(), gates, 1 - gates, keep))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_utilities_that_are_not_finite_are_refused(bad: float) -> None:
    """No gradient is made of them, and the error says how many there are."""
    gates, utilities = masks(), torch.ones(8)
    utilities[3] = bad
    for estimate in (logit_gradient, keep_gradient):
        with pytest.raises(ValueError, match="1 of 8 utilities are not finite"):
            estimate(utilities, gates, 0.5)
    with pytest.raises(ValueError, match="1 of 8 utilities are not finite"):
        disarm(torch.stack([torch.ones(8), utilities]), gates, 1 - gates, 0.5)
