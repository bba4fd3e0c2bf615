"""Low-rank products whose factors are drawn in the kernels are those with the factors written out."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from impls.kernels import FusedLowRank, FusedLowRankSign, FusedRegenerated, FusedRegeneratedSign, lowrank_rng
from impls.kernels.gemm import noise_scale
from impls.kernels.lowrank_rng import MAX_RANK, default_tiling, down_product, low_rank_rng_product
from impls.kernels.philox import Draw, fill
from impls.kernels.tiling import Tiling
from impls.perturbation.noise import STREAMS, NoiseStream
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.operands import guarded

BOTH = pytest.mark.parametrize("signs", [False, True], ids=["normals", "signs"])
SIGMA = 0.25
TILING = Tiling(block_m=16, block_n=32, block_k=64)


def draw_of(members: range, draw: int) -> Draw:
    """Return some place for members."""
    return Draw((0x80000001, 0xFFFFFFFF), 0x9ABCDEF0, draw, members)


def written(members: range, draw: int, rank: int, width: int, *, signs: bool, dtype: torch.dtype) -> Tensor:  # noqa: PLR0913  which factor, and its sizes
    """Draw the members' factor and write it out, [m, k, width] on the CPU."""
    values = torch.empty(len(members), rank * width, device=DEVICE, dtype=dtype)
    return fill(values, draw_of(members, draw), signs=signs).cpu().unflatten(1, (rank, width))


def rows_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw activations [r, m, p, c] as a convolution has them: channels far apart."""
    repeats, members, positions, channels = shape
    return torch.randn(repeats, members, channels, positions, generator=generator(1)).to(dtype).mT


def slow_product(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, sigma: float | Tensor) -> Tensor:
    """Multiply rows [r, m, p, i] as the plain scheme would, in the type of x."""
    scale = sigma.to(x.dtype).view(-1, 1, 1, 1) if isinstance(sigma, Tensor) else sigma
    narrow = torch.einsum("rmpi,mki->rmpk", x, down) * (scale / math.sqrt(down.shape[1]))
    return torch.einsum("rmpi,oi->rmpo", x, weight) + torch.einsum("rmpk,mko->rmpo", narrow, up)


def check(  # noqa: PLR0913  a case, and how it is cut
    shape: tuple[int, ...],
    outputs: int,
    rank: int,
    dtype: torch.dtype,
    tiling: Tiling | None = TILING,
    *,
    signs: bool,
    members: range | None = None,
    sigma: float | Tensor = SIGMA,
) -> None:
    """Hold a product to the slow one, between canaries."""
    members = range(5, 5 + shape[1]) if members is None else members
    x, weight = rows_of(shape, dtype), torch.randn(outputs, shape[3], generator=generator(2)).to(dtype)
    down = written(members, 7, rank, shape[3], signs=signs, dtype=dtype)
    up = written(members, 8, rank, outputs, signs=signs, dtype=dtype)
    with canaries() as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank_rng, "noise_scale", lambda *given: guarded(kept, noise_scale(*given)))
        y = kept.empty(*shape[:2], outputs, shape[2], dtype=dtype).mT
        low_rank_rng_product(
            kept.guard(x.mT.to(DEVICE)).mT,
            kept.guard(weight.to(DEVICE)),
            draw_of(members, 7),
            draw_of(members, 8),
            rank,
            sigma.to(DEVICE) if isinstance(sigma, Tensor) else sigma,
            y,
            signs=signs,
            tiling=tiling,
        )
    truth = slow_product(x.double(), weight.double(), down.double(), up.double(), sigma)
    compare("product", y.cpu(), truth, slow_product(x, weight, down, up, sigma))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(
    "shape",
    [(1, 19, 1, 150), (2, 3, 9, 128), (2, 9, 2, 33)],
    ids=["one row", "images", "small images"],
)
def test_rows_see_their_members_factors(
    shape: tuple[int, ...], rank: int, dtype: torch.dtype, signs: bool
) -> None:
    """Sizes are no multiple of a tile, there are several tiles each way, and calls begin anywhere."""
    check(shape, 70, rank, dtype, signs=signs)


@BOTH
@pytest.mark.parametrize("outputs", [128, 130, 256])
def test_columns_come_as_calls_do(outputs: int, signs: bool) -> None:
    """Tiles as wide as a call of signs, and wider, draw the right ones of them."""
    for columns in (128, 256):
        check(
            (1, 3, 1, 20),
            outputs,
            2,
            torch.float32,
            Tiling(block_m=16, block_n=columns, block_k=32),
            signs=signs,
        )


@BOTH
@pytest.mark.parametrize(
    ("shape", "rank"),
    [((1, 3, 1, 9), 2), ((1, 2, 20, 9), 2), ((1, 3, 1, 9), MAX_RANK)],
    ids=["rows", "images", "ranks"],
)
def test_a_default_launch_is_right(shape: tuple[int, ...], rank: int, signs: bool) -> None:
    """The tiles that a launch has by default give the product too."""
    check(shape, 17, rank, torch.float32, None, signs=signs)


@BOTH
def test_repeats_may_have_scales_of_their_own(signs: bool) -> None:
    """One signed scale for each repeat: what antithetic halves are."""
    check((2, 3, 2, 20), 18, 2, torch.float32, signs=signs, sigma=torch.tensor([0.5, -2.0]))


@BOTH
@pytest.mark.parametrize("first", [2**31 - 1, 2**32 - 4])
def test_members_may_have_any_counter(first: int, signs: bool) -> None:
    """Members across 2^31, and the last ones that there are."""
    check((1, 3, 1, 12), 8, 1, torch.float32, signs=signs, members=range(first, first + 3))
    check((1, 3, 9, 12), 8, 1, torch.float32, signs=signs, members=range(first, first + 3))


@BOTH
@pytest.mark.parametrize("shape", [(1, 3, 1, 600), (3, 2, 20, 30)], ids=["steps", "blocks of rows"])
def test_rows_are_narrowed_by_their_members_own_factor(shape: tuple[int, ...], signs: bool) -> None:
    """What meets the rows is ``down``, in float32, for any number of channels and of rows of a member."""
    members, x = range(4, 4 + shape[1]), rows_of(shape, torch.float32)
    with canaries() as kept:
        found = down_product(kept.guard(x.to(DEVICE)), draw_of(members, 7), 2, signs=signs)
    down = written(members, 7, 2, shape[3], signs=signs, dtype=torch.float32)
    slow = torch.einsum("rmpi,mki->rmpk", x, down).flatten(0, 2)
    compare(
        "narrow", found.cpu(), torch.einsum("rmpi,mki->rmpk", x.double(), down.double()).flatten(0, 2), slow
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("positions", [1, 9])
def test_factors_have_the_same_bits_in_every_tile(positions: int, dtype: torch.dtype, signs: bool) -> None:
    """Rows that have a single 1 read the noise out, of a weight of zeros: the factors written out.

    In 16 bits both factors are rounded as the stream's values are, and their product once.
    """
    members, outputs, inputs = range(2), 40, 3
    shape = (inputs, 2, positions, inputs)
    x = torch.eye(inputs, device=DEVICE, dtype=dtype)[:, None, None].expand(shape).contiguous()
    factors = [
        written(members, draw, 1, width, signs=signs, dtype=dtype)[:, 0].float()
        for draw, width in ((7, inputs), (8, outputs))
    ]
    expected = torch.einsum("mi,mo->imo", *factors)[:, :, None].expand(-1, -1, positions, -1).to(dtype)
    narrow = down_product(x, draw_of(members, 7), 1, signs=signs).view(shape[:3])
    assert torch.equal(narrow.cpu(), factors[0].T[:, :, None].expand(shape[:3]))
    weight = torch.zeros(outputs, inputs, device=DEVICE, dtype=dtype)
    down, up = draw_of(members, 7), draw_of(members, 8)
    for tiling in (
        TILING,
        Tiling(block_m=32, block_n=16, block_k=16),
        Tiling(block_m=16, block_n=128, block_k=16),
    ):
        y = torch.empty(*shape[:3], outputs, device=DEVICE, dtype=dtype)
        low_rank_rng_product(x, weight, down, up, 1, 1.0, y, signs=signs, tiling=tiling)
        assert torch.equal(y.cpu(), expected)


def test_what_does_not_fit_is_refused() -> None:
    """A rank that is no power of two, noise of other members and numbers without a counter raise."""
    x, weight, y = torch.zeros(1, 2, 1, 4), torch.zeros(3, 4), torch.zeros(1, 2, 1, 3)
    two, three = draw_of(range(2), 7), draw_of(range(3), 8)
    with pytest.raises(ValueError, match=r"power of two.* got 3"):
        low_rank_rng_product(x, weight, two, two, 3, 0.1, y)
    with pytest.raises(ValueError, match=f"at most {MAX_RANK} .* got {2 * MAX_RANK}"):
        low_rank_rng_product(x, weight, two, two, 2 * MAX_RANK, 0.1, y)
    with pytest.raises(ValueError, match="noise of 3 members does not match 2"):
        low_rank_rng_product(x, weight, two, three, 1, 0.1, y)
    with pytest.raises(ValueError, match="noise of 3 members does not match 2"):
        low_rank_rng_product(x, weight, three, two, 1, 0.1, y)
    with pytest.raises(ValueError, match="members must be"):
        low_rank_rng_product(x, weight, two, draw_of(range(2**32 - 1, 2**32 + 1), 8), 1, 0.1, y)
    assert default_tiling(torch.float16, signs=True).block_n == 128


DRAWING: list[AnyScheme] = [
    FusedRegenerated(),
    FusedRegeneratedSign(),
    FusedLowRank(2, regenerated=True),
    FusedLowRankSign(regenerated=True),
]


@pytest.mark.parametrize("scheme", DRAWING, ids=str)
def test_noise_is_drawn_from_counters_alone(scheme: AnyScheme) -> None:
    """By default the stream is philox; another one is refused with the reason, and nothing is stored."""
    layer = nn.Linear(6, 5, bias=False, device=DEVICE)
    population = perturb(layer, scheme, members=4, sigma=0.1)
    assert population.noise_bytes == 0
    assert population.shard_multiple == 1
    with pytest.raises(ValueError, match="inside a kernel, from the stream philox"):
        perturb(layer, scheme, members=4, sigma=0.1, stream="block")


@pytest.mark.parametrize("scheme", DRAWING, ids=str)
def test_normals_are_refused_in_float64(scheme: AnyScheme) -> None:
    """A kernel's normals are float32's; signs are signs in every type."""
    layer = nn.Linear(6, 5, device=DEVICE, dtype=torch.float64)
    if isinstance(scheme, FusedRegeneratedSign | FusedLowRankSign):
        perturb(layer, scheme, members=4, sigma=0.1)
        return
    with pytest.raises(ValueError, match="does not compute in float64"):
        perturb(layer, scheme, members=4, sigma=0.1)


@pytest.mark.parametrize("scheme", DRAWING, ids=str)
def test_a_part_of_a_population_has_the_rows_and_the_update_of_the_whole(scheme: AnyScheme) -> None:
    """Split at any member, rows see the noise that they see in the whole, and updates add up to its own."""
    layer = nn.Linear(6, 5, bias=False, device=DEVICE)
    population = perturb(layer, scheme, members=7, sigma=0.1, seed=3)
    x, utilities = torch.randn(7, 6, generator=generator(0)).to(DEVICE), torch.arange(7.0).sub(3)
    whole = population.sample(2)
    y = population(x, whole)
    population.update(whole, utilities.to(DEVICE))
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad, None
    for part in (range(2), range(2, 7)):
        noise = population.sample(2, part)
        rows = slice(part.start, part.stop)
        assert torch.allclose(population(x[rows], noise), y[rows], rtol=0, atol=1e-5)
        population.update(noise, utilities[rows].to(DEVICE))
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", DRAWING, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_only_streams_that_count_are_sampled_from(scheme: AnyScheme, stream: str) -> None:
    """The refusal is the scheme's own, whoever samples."""
    names: tuple[int, int, str, range] = (0, 0, "0.weight", range(2))
    drawn: NoiseStream = STREAMS[stream](*names, device=torch.device("meta"), dtype=torch.float32)
    weight = torch.zeros(1, 5, 6)
    if stream == "philox":
        assert scheme.sample(weight, drawn).nbytes == 0
        assert scheme.sample(weight, replace(drawn, step=1)).nbytes == 0
        return
    with pytest.raises(ValueError, match="stream philox"):
        scheme.sample(weight, drawn)
