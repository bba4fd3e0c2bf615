"""A Hadamard product is that of every member's flipped Hadamard matrix."""

import pytest
import torch
from torch import Tensor

from impls.kernels.hadamard import hadamard_product
from impls.kernels.tiling import Tiling
from impls.schemes import hadamard
from tests.kernels.launched.canaries import DEVICE, canaries
from tests.kernels.launched.members import SIZES, TYPES, Drawn, Sizes, check, drawn, signs

WIDER = [Sizes(1, 3, 1, 300, 270), Sizes(1, 3, 1, 10, 300), Sizes(1, 3, 1, 300, 10), Sizes(1, 2, 1, 128, 256)]
"""More outputs than inputs and the other way around, and many blocks of the transform."""

TILINGS = [
    Tiling(block_m=16, block_n=16, block_k=16),
    Tiling(block_m=16, block_n=16, block_k=64),
    Tiling(block_m=16, block_n=64, block_k=32, group_m=1),
    Tiling(block_m=16, block_n=256, block_k=16),
    Tiling(block_m=16, block_n=128, block_k=128),
]
"""A tile is one block, a part of one, two of them, would be more of them."""

SIGMA = 0.3


def written_out(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return every E_m, [m, o, i]."""
    widths = outputs.shape[1], inputs.shape[1]
    largest = max(hadamard.hadamard_factors(hadamard.hadamard_width(*widths)))
    seed = hadamard.sylvester(largest, device=inputs.device, dtype=torch.float64)
    return hadamard.hadamard_matrix(*widths, seed) * outputs.unsqueeze(2) * inputs.unsqueeze(1)


def flips(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Draw signs for inputs and outputs."""
    return signs(2, sizes.members, sizes.inputs), signs(3, sizes.members, sizes.outputs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, *WIDER], ids=str)
def test_a_product_is_that_of_written_out_members(sizes: Sizes, dtype: torch.dtype) -> None:
    """It errs at most twice as much as products one by one, and touches nothing but its buffers."""
    given, (inputs, outputs) = drawn(sizes, dtype), flips(sizes)
    with canaries() as kept:
        y = kept.empty(*sizes.rows, sizes.outputs, dtype=dtype)
        x, weight, first, second = map(kept.guard, (given.x, given.weight, inputs, outputs))
        found = hadamard_product(x, weight, first, second, SIGMA, y)
    assert found is y
    check(y, given, written_out(inputs, outputs), SIGMA)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_tiling_will_do(tiling: Tiling, dtype: torch.dtype) -> None:
    """However blocks and tiles meet, the product is the same up to rounding, in float64 too."""
    sizes = Sizes(2, 9, 1, 150, 140)
    given, (inputs, outputs) = drawn(sizes, dtype), flips(sizes)
    y = torch.empty(*sizes.rows, sizes.outputs, dtype=dtype, device=DEVICE)
    hadamard_product(*given, inputs, outputs, SIGMA, y, tiling)
    check(y, given, written_out(inputs, outputs), SIGMA)


def test_noise_alone_is_the_transform_exactly() -> None:
    """With whole numbers and no weight, y is r H (s x) without any rounding."""
    sizes = Sizes(1, 4, 1, 100, 200)
    inputs, outputs = flips(sizes)
    x = torch.randint(-9, 9, (1, 4, 1, 100), device=DEVICE).float()
    y = torch.empty(1, 4, 1, 200, device=DEVICE)
    hadamard_product(x, torch.zeros(200, 100, device=DEVICE), inputs, outputs, 1.0, y)
    expected = torch.einsum("moi,rmpi->rmpo", written_out(inputs, outputs), x.double())
    assert torch.equal(y.double(), expected)


def test_repeats_may_have_scales_of_their_own_and_channels_any_stride() -> None:
    """Antithetic halves turn the sign of the noise; an image's channels lie far apart."""
    sizes = Sizes(2, 3, 7, 33, 40)
    given, (inputs, outputs) = drawn(sizes, torch.float32), flips(sizes)
    y = torch.empty(2, 3, 40, 7, device=DEVICE).mT
    sigma = torch.tensor([0.5, -0.5], device=DEVICE)
    images = given.x.mT.contiguous().mT
    hadamard_product(images, given.weight, inputs, outputs, sigma.view(2, 1, 1, 1, 1), y)
    check(y, given, written_out(inputs, outputs), sigma)


def test_no_rows_are_no_work() -> None:
    """Without repeats nothing is launched."""
    given = Drawn(torch.zeros(0, 2, 1, 3, device=DEVICE), torch.zeros(4, 3, device=DEVICE))
    y = torch.empty(0, 2, 1, 4, device=DEVICE)
    assert hadamard_product(*given, signs(0, 2, 3), signs(0, 2, 4), 1.0, y) is y


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 4), "signs of inputs must be contiguous int8"),
        (torch.zeros(2, 3).char(), torch.zeros(3, 4).char(), "signs of outputs must be contiguous int8"),
    ],
)
def test_signs_that_do_not_fit_are_refused(inputs: Tensor, outputs: Tensor, message: str) -> None:
    """Other signs raise, and nothing is launched."""
    x, y = torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match=message):
        hadamard_product(x, torch.zeros(4, 3), inputs, outputs, 1.0, y)
