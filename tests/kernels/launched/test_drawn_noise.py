"""Noise drawn in kernels equals the stream's, in every kernel, tile and part of the population."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from impls.kernels import dense_rng
from impls.kernels import tiling as tile_sizes
from impls.kernels.binary import sample_bits
from impls.kernels.dense_rng import FewRowsTiling, dense_rng_product, noise_sum
from impls.kernels.lowrank_rng import down_product, low_rank_rng_product
from impls.kernels.philox import VALUES_PER_CALL, Draw, Law, fill, round_keys
from impls.kernels.tiling import Tiling
from impls.perturbation import philox as plain
from impls.verify.reference import check_close
from tests.kernels.launched.canaries import DEVICE, canaries, generator, normal

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = plain.DrawKey.of(3, 5, "0.weight", "dense")
EACH_LAW = pytest.mark.parametrize("law", VALUES_PER_CALL)
FEW = {
    "normal": FewRowsTiling(block_n=16, line=8, calls=8, block_k=32),
    "uniform": FewRowsTiling(block_n=16, line=8, calls=2, block_k=32),
    "sign": FewRowsTiling(block_n=32, line=16, calls=1, block_k=32),
}
MANY = {
    "normal": Tiling(16, 16, 64, num_stages=2),
    "uniform": Tiling(16, 16, 64, num_stages=2),
    "sign": Tiling(16, 32, 128, num_stages=2),
}


def draw_of(members: range, key: plain.DrawKey = PLACE) -> Draw:
    """Return the draw of some members at a place."""
    return Draw(key.key, key.layer, key.draw, members)


def filled(members: range, start: int, size: int, *, law: Law, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw with the kernel, between canaries."""
    with canaries() as buffers:
        values = buffers.empty(len(members), size, dtype=dtype)
        return fill(values, draw_of(members), start, law).cpu()


def expected(members: range, start: int, size: int, *, law: Law) -> Tensor:
    """Compute the same numbers in plain torch."""
    if law == "normal":
        values = torch.empty(len(members), size)
        return plain.fill(values, plain.NORMAL, PLACE, members, range(start, start + size))
    per_word = VALUES_PER_CALL[law] // 2
    words = range(start // per_word, -(-(start + size) // per_word))
    bits = plain.fill(
        torch.empty(len(members), len(words), dtype=torch.int64), plain.BITS, PLACE, members, words
    )
    unpack = plain.fill_signs if law == "sign" else plain.fill_levels
    values = unpack(torch.empty(len(members), per_word * len(words)), bits)
    return values[:, start % per_word : start % per_word + size]


@EACH_LAW
def test_numbers_are_those_of_the_stream(law: Law) -> None:
    """Levels and signs equal the stream's, normals up to a few roundings, up to the last counters."""
    last = VALUES_PER_CALL[law] * 2**32
    places = [(0, 700), (128, 1), (3, 130), (37, 33), (2**31 - 70, 200), (2**32 - 70, 200), (last - 165, 165)]
    far = ((range(2**31 - 2, 2**31 + 3), 3, 130), (range(2**32 - 3, 2**32 - 1), last - 165, 165))
    for members, start, size in (*((range(7, 12), *start_and_size) for start_and_size in places), *far):
        drawn, truth = (draw(members, start, size, law=law) for draw in (filled, expected))
        error = (drawn - truth).abs() / truth.abs().clamp_min(1)
        assert error.max() <= (8 * torch.finfo(torch.float32).eps if law == "normal" else 0), (members, start)
    population = filled(range(4, 14), 0, 900, law=law)
    for start, stop in ((128, 900), (66, 67), (259, 513)):
        piece = filled(range(6, 9), start, stop - start, law=law)
        assert torch.equal(piece, population[2:5, start:stop]), (start, stop)
    for dtype in (torch.float16, torch.float64):
        assert torch.equal(filled(range(4, 14), 0, 900, law=law, dtype=dtype), population.to(dtype))


def test_normals_are_right_in_the_tails_and_in_the_middle() -> None:
    """Normals are accurate to a few roundings, both close to 0 and in the tails beyond 4."""
    drawn, truth = (draw(range(4), 0, 20_000, law="normal") for draw in (filled, expected))
    eps, error = torch.finfo(torch.float32).eps, (drawn - truth).abs()
    assert (error <= 8 * eps * truth.abs().clamp_min(1)).all()
    assert float(error.square().mean().sqrt()) < eps
    assert float(truth.abs().max()) > 4
    assert float(truth.abs().min()) < 1e-4


# --- Products and sums draw the same bits. ---


def dense_written(members: range, outputs: int, inputs: int, *, law: Law, dtype: torch.dtype) -> Tensor:
    """Return members' dense noise, [m, o, i] on the CPU."""
    return filled(members, 0, outputs * inputs, law=law, dtype=dtype).unflatten(1, (outputs, inputs))


def read_out(  # noqa: PLR0913  a draw, and how it is read
    members: range,
    outputs: int,
    inputs: int,
    tiling: FewRowsTiling | Tiling,
    *,
    law: Law,
    dtype: torch.dtype = torch.float32,
    sigma: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return sigma times the noise, [m, o, i], as the product with unit vectors and a weight of 0."""
    rows = torch.eye(inputs, device=DEVICE, dtype=dtype)[:, None, None].expand(-1, len(members), -1, -1)
    y = torch.empty(inputs, len(members), 1, outputs, device=DEVICE, dtype=dtype)
    weight = torch.zeros(outputs, inputs, device=DEVICE, dtype=dtype)
    dense_rng_product(rows, weight, draw_of(members), sigma, y, law=law, tiling=tiling)
    return y.cpu()[:, :, 0].permute(1, 2, 0)


@EACH_LAW
def test_dense_noise_has_the_same_bits_in_every_kernel(law: Law) -> None:
    """Noise has the same bits in products, with any tile and part of the population, and in sums."""
    members, outputs = range(2**31 - 1, 2**31 + 1), 18
    tilings = (
        FEW[law]._replace(rows=16),
        FEW[law]._replace(rows=8, block_m=32, block_n=32, calls=2),
        MANY[law],
        Tiling(32, 16, 32 if law == "sign" else 16, num_stages=2),  # fewer channels than a call has signs
    )
    for inputs, chosen in ((6, tilings[::2]), (16, tilings[1::2])):
        noise = dense_written(members, outputs, inputs, law=law, dtype=torch.float32)
        for tiling in chosen:
            assert torch.equal(read_out(members, outputs, inputs, tiling, law=law), noise), tiling
        later_members = read_out(members[1:], outputs, inputs, tilings[0], law=law)
        assert torch.equal(later_members, noise[1:])
        for index in range(2):
            total = noise_sum(draw_of(members), torch.eye(2, device=DEVICE)[index], noise[0].numel(), law=law)
            assert torch.equal(total.cpu().view(outputs, inputs), noise[index])
    # Drawn values are rounded before they are multiplied: with sigma 3, the rounding of y cannot hide that.
    half = dense_written(members, outputs, 16, law=law, dtype=torch.float16)
    for tiling in (FEW[law], MANY[law]):
        read = read_out(members, outputs, 16, tiling, law=law, dtype=torch.float16, sigma=3.0)
        assert torch.equal(read, (3 * half.float()).half())


@EACH_LAW
def test_factors_have_the_same_bits_in_every_tile(law: Law) -> None:
    """Products with unit vectors give the product of both factors, rounded to the dtype, with any tile."""
    members, outputs, inputs = range(2**31 - 1, 2**31 + 1), 256, 3  # 256 signs are two Philox calls
    down, up = (draw_of(members)._replace(draw=name) for name in (7, 8))
    weight = torch.zeros(outputs, inputs, device=DEVICE)
    for positions, dtype in ((1, torch.float16), (9, torch.float32)):
        factors = [
            fill(torch.empty(2, width, device=DEVICE, dtype=dtype), draw, law=law).float()
            for draw, width in ((down, inputs), (up, outputs))
        ]
        shape = (inputs, 2, positions)
        x = torch.eye(inputs, device=DEVICE, dtype=dtype)[:, None, None].expand(*shape, inputs).contiguous()
        narrow = down_product(x, down, 1, law=law).view(shape)
        assert torch.equal(narrow, factors[0].T[:, :, None].expand(shape))
        exact = torch.einsum("mi,mo->imo", *factors)[:, :, None].expand(-1, -1, positions, -1).to(dtype)
        for tiling in (Tiling(32, 16, 16), Tiling(16, 128, 64)):
            y = torch.empty(*shape, outputs, device=DEVICE, dtype=dtype)
            low_rank_rng_product(x, weight.to(dtype), down, up, 1, 1.0, y, law=law, tiling=tiling)
            assert torch.equal(y, exact), (positions, tiling)


@pytest.fixture
def few_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split a sum of 10 members into two parts, and a sum of 23 into two launches."""
    monkeypatch.setattr(tile_sizes, "MIN_MEMBERS_OF_PART", 5)
    monkeypatch.setattr(dense_rng, "MAX_MEMBERS", 20)


def summed(members: range, utilities: Tensor, elements: int, *, law: Law, calls: int = 128) -> Tensor:
    """Sum with the kernel, between canaries."""
    with canaries() as buffers:
        read = buffers.guard(utilities.to(DEVICE))
        return noise_sum(draw_of(members), read, elements, law, calls=calls).cpu()


@EACH_LAW
@pytest.mark.usefixtures("few_members")
def test_a_sum_is_that_of_the_noise_written_out(law: Law) -> None:
    """A sum in parts and launches equals that of written-out noise; its bits do not depend on tiles."""
    members, elements = range(9, 9 + 23), 333
    for dtype in (torch.float16, torch.float64):
        utilities = normal(0, 23, dtype=dtype).cpu()
        noise = filled(members, 0, elements, law=law, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        slow = torch.zeros(elements, dtype=wide)
        for utility, of_member in zip(utilities, noise, strict=True):
            slow += utility.to(wide) * of_member.to(wide)
        total = summed(members, utilities, elements, law=law)
        assert total.dtype is wide
        check_close("sum", total, utilities.double() @ noise.double(), slow)
    utilities = torch.randn(23, generator=generator(1))
    in_one_call = summed(range(23), utilities, 200, law=law)
    assert torch.equal(in_one_call, summed(range(23), utilities, 200, law=law, calls=32))
    default = noise_sum(draw_of(range(23)), utilities.to(DEVICE), 200, law=law)
    assert torch.equal(in_one_call, default.cpu())
    first, second = (
        summed(half, utilities[half.start : half.stop], 200, law=law) for half in (range(9), range(9, 23))
    )
    assert torch.allclose(first + second, in_one_call, rtol=0, atol=1e-5)


# --- Keys of a step on the device. ---

SCHEDULE = (plain.ROUNDS, plain.WEYL)


def test_keys_are_those_of_the_number() -> None:
    """Keys computed on the device equal the host's, for seeds and steps of any number of digits."""
    most = 2**64 - 1
    numbers = (0, 9, 10, 12345, 10**17, 10**18 - 1, 10**18, 2**63 - 1)
    for seed, number in (*((99999, number) for number in numbers), (0, 0), (most, 0), (most, 2**63 - 1)):
        keys = round_keys(seed, torch.tensor(number, device=DEVICE), *SCHEDULE).cpu()
        assert torch.equal(keys, plain.device_keys(seed, torch.tensor(number))), (seed, number)


def test_kernels_take_keys_on_the_device() -> None:
    """Each kernel that draws gives the same result with keys in device memory as with plain numbers."""
    key = plain.DrawKey.of(3, 17, "0.weight", "dense")
    numbers = draw_of(range(5, 8), key)
    on_device = numbers._replace(key=round_keys(3, torch.tensor(17, device=DEVICE), *SCHEDULE))
    x, weight = normal(0, 1, 3, 1, 40), normal(1, 24, 40)
    y, rows = x.new_empty(1, 3, 1, 24), x.repeat(20, 1, 1, 1)
    planes = torch.arange(9 * 6, device=DEVICE).view(9, 6)
    kernels: list[Callable[[Draw], Tensor]] = [
        lambda draw: fill(x.new_empty(3, 300), draw),
        lambda draw: noise_sum(draw, x.new_ones(3), 300, "sign"),
        lambda draw: dense_rng_product(x, weight, draw, 0.1, y.clone()),
        lambda draw: dense_rng_product(rows, weight, draw, 0.1, y.repeat(20, 1, 1, 1), law="sign"),
        lambda draw: low_rank_rng_product(x, weight, draw, draw._replace(draw=2), 2, 0.1, y.clone()),
        lambda draw: sample_bits(planes, *draw),
    ]
    for kernel in kernels:
        assert torch.equal(kernel(numbers), kernel(on_device))
