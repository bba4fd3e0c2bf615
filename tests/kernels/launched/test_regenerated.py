"""Products with drawn noise are those with the noise written out, with the bits that sums are made of."""

import pytest
import torch
from torch import Tensor

from impls.kernels import dense_rng
from impls.kernels.dense_rng import (
    MAX_FEW_ROWS,
    FewRowsTiling,
    ManyRowsTiling,
    default_tiling,
    dense_rng_product,
    noise_sum,
)
from impls.kernels.gemm import noise_scale
from impls.kernels.philox import Draw, fill
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.operands import guarded

BOTH = pytest.mark.parametrize("signs", [False, True], ids=["normals", "signs"])
SIGMA = 0.25
FEW = {
    False: FewRowsTiling(block_m=16, block_n=16, line=8, calls=8, block_k=32),
    True: FewRowsTiling(block_m=16, block_n=32, line=16, calls=1, block_k=32),
}
"""Tiles that are larger than a GPU's where it saves steps, and smaller than the sizes below."""
MANY = {
    False: ManyRowsTiling(block_m=16, block_n=16, block_k=64),
    True: ManyRowsTiling(block_m=16, block_n=32, block_k=128),
}


def draw_of(members: range) -> Draw:
    """Return some place for members."""
    return Draw((0xFFFFFFFF, 0x80000001), 1, 0xF2345678, members)


def written(members: range, outputs: int, inputs: int, *, signs: bool, dtype: torch.dtype) -> Tensor:
    """Draw the members' noise and write it out, [m, o, i] on the CPU."""
    values = torch.empty(len(members), outputs * inputs, device=DEVICE, dtype=dtype)
    return fill(values, draw_of(members), signs=signs).cpu().unflatten(1, (outputs, inputs))


def slow_product(x: Tensor, weight: Tensor, noise: Tensor, sigma: float | Tensor) -> Tensor:
    """Multiply rows [r, m, p, i] as the plain scheme would, in the type of x."""
    own = torch.einsum("rmpi,moi->rmpo", x, noise)
    scale = sigma.to(x.dtype).view(-1, 1, 1, 1) if isinstance(sigma, Tensor) else sigma
    return torch.einsum("rmpi,oi->rmpo", x, weight) + scale * own


def rows_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Draw activations [r, m, p, c] as a convolution has them: channels far apart."""
    repeats, members, positions, channels = shape
    drawn = torch.randn(repeats, members, channels, positions, generator=generator(seed))
    return drawn.to(dtype).mT


def check(  # noqa: PLR0913  a case, and how it is cut
    shape: tuple[int, ...],
    outputs: int,
    dtype: torch.dtype,
    tiling: FewRowsTiling | ManyRowsTiling | None,
    *,
    signs: bool,
    members: range | None = None,
    sigma: float | Tensor = SIGMA,
) -> None:
    """Hold a product to the slow one, between canaries."""
    members = range(5, 5 + shape[1]) if members is None else members
    x, weight = rows_of(shape, 1, dtype), torch.randn(outputs, shape[3], generator=generator(2)).to(dtype)
    noise = written(members, outputs, shape[3], signs=signs, dtype=dtype)
    with canaries() as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_rng, "noise_scale", lambda *given: guarded(kept, noise_scale(*given)))
        read = kept.guard(x.mT.to(DEVICE)).mT
        y = kept.empty(*shape[:2], outputs, shape[2], dtype=dtype).mT
        scale = sigma.to(DEVICE) if isinstance(sigma, Tensor) else sigma
        dense_rng_product(
            read, kept.guard(weight.to(DEVICE)), draw_of(members), scale, y, signs=signs, tiling=tiling
        )
    truth = slow_product(x.double(), weight.double(), noise.double(), sigma)
    compare("product", y.cpu(), truth, slow_product(x, weight, noise, sigma))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 19, 1, 40), (2, 9, 1, 131), (1, 5, 3, 128), (3, 2, 3, 33)],
    ids=["one row", "two repeats", "positions", "more rows than a tile"],
)
def test_few_rows_see_their_members_noise(shape: tuple[int, ...], dtype: torch.dtype, signs: bool) -> None:
    """Sizes are no multiple of a tile, there are several tiles each way, and calls begin anywhere."""
    check(shape, 35, dtype, FEW[signs], signs=signs)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 9, 128), (5, 3, 1, 150)], ids=["images", "repeats"])
def test_many_rows_see_their_members_noise(shape: tuple[int, ...], dtype: torch.dtype, signs: bool) -> None:
    """The same on matrix units."""
    check(shape, 35, dtype, MANY[signs], signs=signs)


@BOTH
@pytest.mark.parametrize("rows", [1, MAX_FEW_ROWS + 1])
@pytest.mark.parametrize("inputs", [9, 128])
def test_a_default_launch_is_right(rows: int, inputs: int, signs: bool) -> None:
    """The tiles that a launch has by default give the product too."""
    check((rows, 2, 1, inputs), 17, torch.float32, None, signs=signs)
    assert isinstance(
        default_tiling(rows, signs=signs, whole=False), FewRowsTiling if rows == 1 else ManyRowsTiling
    )


@BOTH
@pytest.mark.parametrize("tilings", [FEW, MANY], ids=["few", "many"])
def test_repeats_may_have_scales_of_their_own(
    tilings: dict[bool, FewRowsTiling | ManyRowsTiling], signs: bool
) -> None:
    """One signed scale for each repeat: what antithetic halves are."""
    check((2, 3, 2, 20), 18, torch.float32, tilings[signs], signs=signs, sigma=torch.tensor([0.5, -2.0]))


@BOTH
@pytest.mark.parametrize("tilings", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("first", [2**31 - 1, 2**32 - 4])
def test_members_may_have_any_counter(
    tilings: dict[bool, FewRowsTiling | ManyRowsTiling], first: int, signs: bool
) -> None:
    """Members across 2^31, and the last ones that there are."""
    check((1, 3, 2, 12), 8, torch.float32, tilings[signs], signs=signs, members=range(first, first + 3))


def probed(  # noqa: PLR0913  which noise, and how it is read
    members: range,
    outputs: int,
    inputs: int,
    tiling: FewRowsTiling | ManyRowsTiling | None,
    *,
    signs: bool,
    dtype: torch.dtype = torch.float32,
    sigma: float = 1.0,
) -> Tensor:
    """Read sigma times the noise out by rows that have a single 1, of a weight of zeros: [m, o, i]."""
    rows = torch.eye(inputs, device=DEVICE, dtype=dtype)[:, None, None].expand(-1, len(members), -1, -1)
    y = torch.empty(inputs, len(members), 1, outputs, device=DEVICE, dtype=dtype)
    weight = torch.zeros(outputs, inputs, device=DEVICE, dtype=dtype)
    dense_rng_product(rows, weight, draw_of(members), sigma, y, signs=signs, tiling=tiling)
    return y.cpu()[:, :, 0].permute(1, 2, 0)


@BOTH
@pytest.mark.parametrize("inputs", [6, 16])
def test_noise_has_the_same_bits_in_every_tile_and_in_the_update(inputs: int, signs: bool) -> None:
    """Whatever kernel draws, however it is cut: the forward's noise is the update's, bit for bit."""
    members, outputs = range(2**31 - 1, 2**31 + 1), 18
    noise = written(members, outputs, inputs, signs=signs, dtype=torch.float32)
    tilings = (
        FEW[signs]._replace(rows=16),
        FEW[signs]._replace(rows=8, block_m=32, block_n=32, calls=2),
        MANY[signs],
        MANY[signs]._replace(block_n=16, block_m=32),
    )
    for tiling in tilings:
        assert torch.equal(probed(members, outputs, inputs, tiling, signs=signs), noise)
    for index in range(len(members)):
        utilities = torch.eye(2, device=DEVICE)[index]
        total = noise_sum(draw_of(members), utilities, outputs * inputs, signs=signs)
        assert torch.equal(total.cpu().view(outputs, inputs), noise[index])


@BOTH
@pytest.mark.parametrize("tilings", [FEW, MANY], ids=["few", "many"])
def test_noise_of_16_bits_has_the_bits_of_the_stream_s(
    tilings: dict[bool, FewRowsTiling | ManyRowsTiling], signs: bool
) -> None:
    """What is drawn is rounded as the stream's values are, before it meets rows.

    It is read out three times as large: read as it is, rounding the output would make up for it.
    """
    members, outputs, inputs = range(3, 5), 18, 16
    noise = written(members, outputs, inputs, signs=signs, dtype=torch.float16)
    expected = (3 * noise.float()).half()
    found = probed(members, outputs, inputs, tilings[signs], signs=signs, dtype=torch.float16, sigma=3.0)
    assert torch.equal(found, expected)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inputs", [150, 256])
def test_tiles_of_wide_types_see_the_same_noise(inputs: int, dtype: torch.dtype, signs: bool) -> None:
    """Where they have fewer channels than a call has signs, a call comes in parts."""
    tiling = MANY[signs].for_dtype(dtype, "ieee")
    assert tiling.block_k < MANY[signs].block_k
    check((5, 3, 1, inputs), 35, dtype, tiling, signs=signs)
    members = range(2**31 - 1, 2**31 + 1)
    if dtype is torch.float32:
        noise = written(members, 18, 48, signs=signs, dtype=dtype)
        assert torch.equal(probed(members, 18, 48, tiling, signs=signs), noise)


@BOTH
def test_a_member_is_the_same_in_any_part_of_the_population(signs: bool) -> None:
    """Split at any member, noise has the bits of the whole."""
    whole = probed(range(6), 5, 8, FEW[signs]._replace(rows=8), signs=signs)
    for start, stop in ((0, 1), (1, 6), (2, 5)):
        part = probed(range(start, stop), 5, 8, FEW[signs]._replace(rows=8), signs=signs)
        assert torch.equal(part, whole[start:stop])


def test_what_does_not_fit_is_refused() -> None:
    """Noise of other members, tensors that are no product, and numbers without a counter raise."""
    x, weight, y = torch.zeros(1, 2, 1, 4), torch.zeros(3, 4), torch.zeros(1, 2, 1, 3)
    with pytest.raises(ValueError, match="noise of 3 members does not match 2"):
        dense_rng_product(x, weight, draw_of(range(3)), 0.1, y)
    with pytest.raises(ValueError, match="a product takes x"):
        dense_rng_product(x, weight.T, draw_of(range(2)), 0.1, y)
    with pytest.raises(ValueError, match="members must be"):
        dense_rng_product(x, weight, draw_of(range(2**32 - 1, 2**32 + 1)), 0.1, y)
    x, weight, y = (
        torch.zeros(size).expand(*shape, size)
        for shape, size in (((1, 2, 1), 2**17), ((2**18,), 2**17), ((1, 2, 1), 2**18))
    )
    with pytest.raises(ValueError, match="more calls than a counter"):
        dense_rng_product(x, weight, draw_of(range(2)), 0.1, y)


@BOTH
@pytest.mark.parametrize("shape", [(0, 2, 1, 4), (1, 2, 0, 4)])
def test_nothing_is_nothing(shape: tuple[int, ...], signs: bool) -> None:
    """Without rows nothing is launched."""
    y = torch.empty(*shape[:3], 3)
    assert (
        dense_rng_product(torch.zeros(shape), torch.zeros(3, 4), draw_of(range(2)), 0.1, y, signs=signs) is y
    )
