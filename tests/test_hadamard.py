"""The fast Walsh-Hadamard transform, and the noise made of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation.population import perturb
from impls.schemes import Hadamard, hadamard
from impls.schemes.hadamard import HadamardNoise
from impls.verify.checks import Setting, check
from tests.shared_core_cases import CONV, agrees, check_sums

scipy_linalg = pytest.importorskip("scipy.linalg", reason="scipy's Hadamard matrix is the reference")


def seed(outputs: int, inputs: int) -> Tensor:
    """Make the largest factor of a matrix of this size."""
    largest = max(hadamard.hadamard_factors(hadamard.hadamard_width(outputs, inputs)))
    return hadamard.sylvester(largest, device=torch.device("cpu"), dtype=torch.float64)


def reference(outputs: int, inputs: int) -> Tensor:
    """Return the same part of scipy's matrix."""
    whole = scipy_linalg.hadamard(hadamard.hadamard_width(outputs, inputs))
    return torch.from_numpy(whole[:outputs, :inputs]).double()


@settings(max_examples=60, deadline=None)
@given(outputs=st.integers(1, 200), inputs=st.integers(1, 200), space=st.integers(1, 3))
def test_the_transform_is_a_product_with_scipys_matrix(outputs: int, inputs: int, space: int) -> None:
    """Any width, with and without positions."""
    x = torch.randn(2, inputs, space, generator=torch.Generator().manual_seed(inputs)).double()
    expected = reference(outputs, inputs) @ x
    torch.testing.assert_close(hadamard.walsh_hadamard_transform(x, outputs, seed(outputs, inputs)), expected)
    assert torch.equal(
        hadamard.hadamard_matrix(outputs, inputs, seed(outputs, inputs)), reference(outputs, inputs)
    )


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (4096, 3), (3, 4096), (5000, 1), (1100, 1030), (1, 8192)]
)
def test_wide_transforms_take_two_factors_and_three(outputs: int, inputs: int) -> None:
    """Also where outputs or inputs are far fewer than the matrix has rows; entries by their definition."""
    common = torch.arange(outputs).unsqueeze(1) & torch.arange(inputs)
    for shift in (8, 4, 2, 1):
        common = common ^ (common >> shift)
    for space in (1, 2):
        x = torch.randn(3, inputs, space, generator=torch.Generator().manual_seed(0)).double()
        expected = (1 - 2 * (common & 1)).double() @ x
        found = hadamard.walsh_hadamard_transform(x, outputs, seed(outputs, inputs))
        torch.testing.assert_close(found, expected)


def test_factors_multiply_to_the_width() -> None:
    """Powers of two, none above the limit, none twice as large as needed, the largest first."""
    for bits in range(21):
        for most in (hadamard.FACTOR, hadamard.IMAGE_FACTOR):
            factors = hadamard.hadamard_factors(2**bits, most)
            assert torch.tensor(factors).prod() == 2**bits
            assert factors == sorted(factors, reverse=True)
            assert factors[0] <= min(most, 2 * factors[-1])
            assert factors[0] <= hadamard.hadamard_factors(2**bits)[0], (
                "the kept factor has the smaller ones in it"
            )


def test_kappa_is_zero_for_a_small_part_of_the_matrix() -> None:
    """With one core and several; test_quality_fit.py has other shapes."""
    for cores in (1, 3):
        agrees(Hadamard(cores=cores), (5, 3))


class SharedTaps(Hadamard):
    """Signs for channels alone, which the taps share."""

    @override
    def sample(self, weight: Tensor, stream: Any) -> HadamardNoise:
        noise = super().sample(weight, stream)
        if noise.taps is not None:
            noise.taps.fill_(1)
        return noise

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        return weight[3:].numel() - 1


def test_without_their_own_signs_taps_cost_what_they_share() -> None:
    """Kappa is taps - 1 then."""
    agrees(SharedTaps(), CONV)


def test_cores_bring_fourth_moments_to_those_of_independent_entries() -> None:
    """The inner product of two members has the kurtosis 9 with one core; across cores it falls towards 3."""
    kurtosis = {}
    for cores in (1, 64):
        population = perturb(nn.Linear(16, 16, bias=False), Hadamard(cores=cores), members=64, sigma=1.0)
        values = []
        for step in range(30):
            rows = population.dense_noise(population.sample(step))["weight"].flatten(1)
            values.append((rows @ rows.mT)[~torch.eye(64, dtype=torch.bool)])
        products = torch.cat(values)
        kurtosis[cores] = float(products.pow(4).mean() / products.square().mean() ** 2)
    assert kurtosis[1] > 6
    assert kurtosis[64] < 4


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (1, 7), (9, 1), (65, 3), (3, 65), (17, 33)])
def test_any_width_is_exact(outputs: int, inputs: int) -> None:
    """Widths of 1 and widths that are no power of two agree with the reference."""
    layer = nn.Linear(inputs, outputs).double()
    if outputs * inputs > 1:
        check(Setting(Hadamard(), layer, (inputs,)))
    population = perturb(layer, Hadamard(cores=2), members=3, sigma=0.5)
    noise = population.sample(0)
    assert population.dense_noise(noise)["weight"].abs().eq(1).all()


def test_rows_in_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU goes through members in pieces that fit its cache: one member at a time gives the same."""
    x = torch.randn(4 * 5, 6, 5, 5, generator=torch.Generator().manual_seed(0)).double()
    outputs = []
    for piece in (1, 2**30):
        monkeypatch.setattr(hadamard, "PIECE_BYTES", piece)
        layer = nn.Conv2d(6, 4, 3, padding=1, groups=2, bias=False).double()
        nn.init.ones_(layer.weight)
        population = perturb(layer, Hadamard(cores=2), members=5, sigma=0.5, antithetic=True)
        outputs.append(population(x, population.sample(0)))
    torch.testing.assert_close(outputs[0], outputs[1])


def test_noise_is_a_byte_for_each_channel_and_tap() -> None:
    """The shared factor of the matrix is added."""
    population = perturb(nn.Conv2d(24, 16, 3, bias=False), Hadamard(), members=50, sigma=1.0)
    assert population.noise_bytes == 50 * (24 + 16 + 9) + 4 * 32 * 32


class TapsForgotten(Hadamard):
    """The taps' signs are applied and not summed."""

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        if noise.taps is None:
            return super().weighted_sum(noise, utilities)
        return super().weighted_sum(replace(noise, taps=torch.ones_like(noise.taps)), utilities)


class OtherMatrix(Hadamard):
    """The update multiplies by the matrix of the natural order, the forward by its columns in another."""

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        order = torch.arange(noise.inputs.shape[2]).expand(self.cores, noise.inputs.shape[1], -1)
        return super().weighted_sum(replace(noise, order=order), utilities)


@pytest.mark.parametrize("scheme", [TapsForgotten(), OtherMatrix(cores=2)])
def test_a_wrong_update_is_found(scheme: Hadamard) -> None:
    """Tap signs dropped in the update, and a core's order forgotten."""
    with pytest.raises(WrongResultError, match="update of weight"):
        check_sums(scheme)
