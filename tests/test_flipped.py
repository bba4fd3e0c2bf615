"""Flipped noise: closed forms, memory and planted bugs."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation.member_ops import add_flipped_signs, append_axes, group_by_core, sum_outer_products
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Flipped, FlippedSign
from impls.schemes.flipped import FlippedNoise
from tests.shared_core_cases import CONV, GROUPED, LINEAR, agrees, check_sums, closed

SIDES: tuple[Literal["in", "out", "both"], ...] = ("in", "out", "both")


@pytest.mark.parametrize("shape", [LINEAR, GROUPED], ids=str)
def test_the_closed_form_of_kappa_is_what_members_have(shape: tuple[int, ...]) -> None:
    """Sign cores flipped on one side, one core and several; test_quality_fit.py has all variants."""
    for side in SIDES[:2]:
        for cores in (1, 3):
            agrees(FlippedSign(side, cores=cores), shape)


def test_closed_forms_in_figures() -> None:
    """Unflipped length (1 for both sides) times taps, plus 1 for Gaussian cores and minus 1 for signs."""
    for shape, taps in ((LINEAR, 1), (CONV, 9)):
        outputs, inputs = shape[:2]
        for side, length in zip(SIDES, (outputs, inputs, 1), strict=True):
            assert closed(Flipped(side), shape, 64) == length * taps + 1
            assert closed(FlippedSign(side), shape, 64) == length * taps - 1
    assert closed(Flipped("in", cores=32), (64, 64), 2**20) == pytest.approx(65 / 32, rel=1e-3)
    assert closed(Flipped("in", cores=64), (64, 64), 64) == 0


def test_signs_take_a_byte_each() -> None:
    """Noise of the whole population is its signs and the cores."""
    layer = nn.Linear(24, 16, bias=False)
    population = perturb(layer, Flipped("both", cores=3), members=50, sigma=1.0)
    assert population.noise_bytes == 50 * (24 + 16) + 3 * layer.weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_byte_flips_any_type(dtype: torch.dtype) -> None:
    """Adding flipped values keeps the type, with a number as with a tensor of signed sigmas."""
    y, values = torch.ones(2, 3, 1, 4, dtype=dtype), torch.full((2, 3, 1, 4), 2.0, dtype=dtype)
    signs = torch.tensor([1, -1, 1, -1], dtype=torch.int8).expand(3, 1, 4)
    expected = torch.tensor([2.0, 0.0, 2.0, 0.0], dtype=dtype).expand(2, 3, 1, 4)
    assert torch.equal(add_flipped_signs(y.clone(), values.clone(), signs, 0.5), expected)
    sigma = torch.full((2, 1, 1, 1), 0.5, dtype=dtype)
    assert torch.equal(add_flipped_signs(y.clone(), values.clone(), signs, sigma), expected)


def test_sign_cores_are_signs() -> None:
    """Every entry of every member is +1 or -1, whichever side is flipped."""
    for side in SIDES:
        population = perturb(nn.Conv2d(4, 6, 3), FlippedSign(side, cores=2), members=5, sigma=1.0)
        assert population.dense_noise(population.sample(0))["weight"].abs().eq(1).all()


class SquaredFitness(Flipped):
    """Utilities weigh both sides' signs, so that they enter squared."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        assert noise.inputs is not None
        assert noise.outputs is not None
        total = torch.zeros_like(noise.core[0])
        parts = (
            group_by_core(part, len(noise.core), noise.members)
            for part in (utilities, noise.outputs, noise.inputs)
        )
        for core, c, r, s in zip(noise.core, *parts, strict=True):
            total += core * append_axes(sum_outer_products(c, r, s * c.view(-1, 1, 1)), core)
        return total


class OneSideSummed(FlippedSign):
    """Only the inputs' signs are in the update, both in the forward."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(FlippedNoise(noise.core, noise.inputs, None, noise.members), utilities)


@pytest.mark.parametrize("scheme", [SquaredFitness("both"), SquaredFitness("both", cores=2), OneSideSummed()])
def test_a_wrong_sum_of_signs_is_found(scheme: AnyScheme) -> None:
    """Fitness squared in the two-sided update, and signs of one side left out."""
    with pytest.raises(WrongResultError, match="update of weight"):
        check_sums(scheme)


def test_an_unknown_side_is_refused() -> None:
    """The message names the valid sides."""
    kinds: tuple[Any, ...] = (Flipped, FlippedSign)
    for kind in kinds:
        with pytest.raises(ValueError, match="side must be 'in', 'out' or 'both', got 'left'"):
            kind("left")
