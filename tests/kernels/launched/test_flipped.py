"""A flipped product is that of every member's flipped core."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from impls.kernels.flipped import flipped_product
from impls.kernels.tiling import Tiling
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.members import SIZES, TYPES, Drawn, Sizes, check, drawn, signs

SIDES = ["in", "out", "both"]
TILINGS = [Tiling(block_m=32, block_n=16, block_k=16), Tiling(block_m=16, block_n=64, block_k=32, group_m=1)]
SIGMA = 0.3


def flips(sizes: Sizes, side: str) -> tuple[Tensor | None, Tensor | None]:
    """Draw the signs of a side."""
    inputs = signs(2, sizes.members, sizes.inputs) if side != "out" else None
    outputs = signs(3, sizes.members, sizes.outputs) if side != "in" else None
    return inputs, outputs


def core(sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """Draw a core."""
    return torch.randn(sizes.outputs, sizes.inputs, generator=generator(4)).to(DEVICE, dtype)


def written_out(core: Tensor, inputs: Tensor | None, outputs: Tensor | None) -> Tensor:
    """Return every E_m, [m, o, i]."""
    changes = core.unsqueeze(0)
    if inputs is not None:
        changes = changes * inputs.unsqueeze(1)
    return changes if outputs is None else changes * outputs.unsqueeze(2)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_is_that_of_written_out_members(sizes: Sizes, dtype: torch.dtype, side: str) -> None:
    """It errs at most twice as much as products one by one, and touches nothing but its buffers."""
    given, own, (inputs, outputs) = drawn(sizes, dtype), core(sizes, dtype), flips(sizes, side)
    with canaries() as kept:
        y = kept.empty(*sizes.rows, sizes.outputs, dtype=dtype)
        guarded = [
            None if each is None else kept.guard(each)
            for each in (given.x, given.weight, own, inputs, outputs)
        ]
        x, weight, middle, first, second = guarded
        assert x is not None
        assert weight is not None
        assert middle is not None
        found = flipped_product(x, weight, middle, first, second, SIGMA, y)
    assert found is y
    check(y, given, written_out(own, inputs, outputs), SIGMA)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_tiling_will_do(tiling: Tiling, dtype: torch.dtype) -> None:
    """However the product is cut, it is the same up to rounding, in float64 too."""
    sizes = Sizes(2, 45, 1, 150, 70)
    given, own, (inputs, outputs) = drawn(sizes, dtype), core(sizes, dtype), flips(sizes, "both")
    y = torch.empty(*sizes.rows, sizes.outputs, dtype=dtype, device=DEVICE)
    flipped_product(given.x, given.weight, own, inputs, outputs, SIGMA, y, tiling)
    check(y, given, written_out(own, inputs, outputs), SIGMA)


def test_repeats_may_have_scales_of_their_own_and_channels_any_stride() -> None:
    """Antithetic halves turn the sign of the noise; an image's channels lie far apart."""
    sizes = Sizes(2, 3, 7, 33, 40)
    given, own, (inputs, outputs) = (
        drawn(sizes, torch.float32),
        core(sizes, torch.float32),
        flips(sizes, "both"),
    )
    images = given.x.mT.contiguous().mT
    y = torch.empty(2, 3, 40, 7, device=DEVICE).mT
    wide = torch.zeros(40, 66, device=DEVICE)[:, :33].copy_(given.weight)
    sigma = torch.tensor([0.5, -0.5], device=DEVICE)
    flipped_product(images, wide, own.mT.contiguous().mT, inputs, outputs, sigma.view(2, 1, 1, 1, 1), y)
    check(y, given, written_out(own, inputs, outputs), sigma)


def test_without_noise_it_is_the_plain_product() -> None:
    """At sigma 0 signs and core leave no trace: y is exactly that of any other signs."""
    sizes = Sizes(1, 5, 1, 40, 20)
    given, own = drawn(sizes, torch.float32), core(sizes, torch.float32)
    results = [
        flipped_product(*given, own, *flips(sizes, side), 0.0, torch.empty(1, 5, 1, 20, device=DEVICE))
        for side in SIDES
    ]
    assert all(torch.equal(one, other) for one, other in pairwise(results))


def test_no_rows_are_no_work() -> None:
    """Without repeats nothing is launched."""
    given = Drawn(torch.zeros(0, 2, 1, 3, device=DEVICE), torch.zeros(4, 3, device=DEVICE))
    y = torch.empty(0, 2, 1, 4, device=DEVICE)
    assert flipped_product(*given, given.weight, signs(0, 2, 3), None, 1.0, y) is y


@pytest.mark.parametrize(
    ("core", "inputs", "outputs", "message"),
    [
        (torch.zeros(3, 4), None, None, "a core has the dtype"),
        (torch.zeros(4, 3).half(), None, None, "a core has the dtype"),
        (torch.zeros(4, 3), torch.zeros(2, 3), None, "signs of inputs must be"),
        (torch.zeros(4, 3), None, torch.zeros(2, 3, dtype=torch.int8), "signs of outputs must be"),
        (
            torch.zeros(4, 3),
            torch.zeros(3, 2, dtype=torch.int8).mT,
            None,
            "signs of inputs must be contiguous",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    core: Tensor, inputs: Tensor | None, outputs: Tensor | None, message: str
) -> None:
    """Another core or other signs raise, and nothing is launched."""
    with pytest.raises(ValueError, match=message):
        flipped_product(
            torch.zeros(1, 2, 1, 3), torch.zeros(4, 3), core, inputs, outputs, 1.0, torch.zeros(1, 2, 1, 4)
        )
