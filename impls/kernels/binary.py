"""Kernels for binary weights: members' bits are drawn, multiplied and summed, each in one launch.

Torch still copies the patches of a convolution, adds thresholds and their noise, packs outputs into bits, and
computes max-pooling on words: all of them are few bytes next to a product.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from impls.binary.operators import AbstractPackedOperator, packed_shape
from impls.kernels.binary_matmul import HALVES, bit_product, halves, int8_product, load_words
from impls.kernels.gemm import DOT_DTYPES, grid_of, operand
from impls.kernels.optional_triton import tl, triton
from impls.kernels.philox import COUNTERS, Draw, as_uint32, draw_of, five_words, interleave, seed_of
from impls.kernels.scheme import no_dtype_reason, no_kernels_reason
from impls.kernels.tiling import block_size, member_parts
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.noise import NoiseStream, PhiloxStream
from impls.perturbation.scheme import check_count
from impls.schemes.binary import OPERATORS, AbstractBitScheme, Binary, BinaryNoise, probabilities

PLANE_BLOCK_N = 64
"""Words in a tile of :func:`bit_planes`: 16 probabilities for each of 128 threads."""

PLANES = 9
"""Bit planes of 256 P for probabilities from 0 to 1: nine bits, lowest first."""


@triton.jit
def bit_planes_kernel(
    out, p, outputs, inputs, taps, depth, width, tiles_n, plane_words,
    PLANES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Split 256 p into bits: plane b holds bit b of each of these integers, 32 inputs to a word.

    ``p`` is [group, output, input, tap], ``out`` is [plane, row, column], ``plane_words`` words in a plane.
    Row (group * taps + tap) * depth + d and column 2 * output + half hold inputs 32 (2 d + half) and the next
    31.
    The grid is rows times tiles of BLOCK_N columns.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // tiles_n
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    bit = tl.arange(0, 32)
    # A word of 64 bits is two columns; the high half has the next 32 inputs.
    offs_k = ((row % depth) * HALVES + offs_n % HALVES)[:, None] * 32 + bit[None, :]
    tap, group = row // depth % taps, row // depth // taps
    offsets = ((group * outputs + offs_n // HALVES)[:, None] * inputs + offs_k) * taps + tap
    mask = (offs_n < width)[:, None] & (offs_k < inputs)
    out += row * width + offs_n
    counts = (tl.load(p + offsets, mask=mask, other=0).to(tl.float32) * 256).to(tl.uint32)
    for plane_bit in tl.static_range(PLANES):
        words = tl.sum(((counts >> plane_bit) & 1) << bit.to(tl.uint32)[None, :], axis=1)
        tl.store(out, words.to(tl.int32, bitcast=True), mask=offs_n < width)
        out += plane_words


def bit_planes(p: Tensor) -> Tensor:
    """Pack the bits of 256 p into planes, lowest bit first, in the layout of a product.

    One launch instead of about seventy of torch. It reads 4 bytes and writes 9/8 of a byte for each float32
    probability: 5.4 MB for a weight of 1024 x 1024, 1.3 us of an H200's memory.

    Args:
        p: multiples of 1/256 from 0 to 1, floating [g, o, i, *taps].

    Returns:
        Planes [9, g, *taps, words, o] of int64; bits after the last input are 0.
    """
    groups, outputs, inputs, *taps = p.shape
    depth, width = -(-inputs // 64), 2 * outputs
    out = torch.empty(PLANES, groups, *taps, depth, outputs, device=p.device, dtype=torch.int64)
    if not out.numel():
        return out
    tap_count, block_n = math.prod(taps), block_size(width, PLANE_BLOCK_N)
    tiles, rows = -(-width // block_n), groups * tap_count * depth
    with torch.cuda.device_of(p):
        bit_planes_kernel[grid_of(tiles, rows)](
            out.view(torch.int32), p.contiguous(), outputs, inputs, tap_count, depth, width, tiles,
            rows * width, PLANES=PLANES, BLOCK_N=block_n,
        )  # fmt: skip
    return out


MEMBERS_PER_PROGRAM = 8
"""Members that a program draws with the same planes in registers."""

MAX_CALLS = 128
"""Most Philox calls in a tile, one for each thread: of one member, or of several with few words each."""


@triton.jit
def _random_words(seed, first, member, layer, draw, ALIGNED: tl.constexpr):
    """Return words first to first + 3 of members' draws, uint32 [n, 4]; ``first`` and ``member`` are [n]."""
    r0, r1, r2, r3, _ = five_words(seed, first, member, layer, draw, ALIGNED)
    return interleave(r0, r1, r2, r3).reshape(first.shape[0], 4)


@triton.jit(do_not_specialize=[*COUNTERS, "members"])
def sample_bits_kernel(
    out, planes, words, tiles, key0, key1, layer, draw, first_member, members,
    ALIGNED: tl.constexpr, MEMBERS: tl.constexpr, AT_ONCE: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Draw 4 * CALLS words of 32 bits of MEMBERS members, AT_ONCE members at a time.

    The grid is tiles of words times groups of MEMBERS members.
    """
    pid = tl.program_id(0).to(tl.int64)
    words = tl.cast(words, tl.int64)
    layer = as_uint32(layer)
    draw = as_uint32(draw)
    first_member = as_uint32(first_member)
    seed = seed_of(key0, key1)
    # Rows of the tile: CALLS Philox calls of each of AT_ONCE members.
    row = tl.arange(0, AT_ONCE * CALLS)
    first_of_call = ((pid % tiles) * CALLS + row % CALLS) * 4
    offs_n = first_of_call[:, None] + tl.arange(0, 4)[None, :]
    mask = offs_n < words
    p0 = load_words(planes + offs_n, mask)
    p1 = load_words(planes + offs_n + words, mask)
    p2 = load_words(planes + offs_n + words * 2, mask)
    p3 = load_words(planes + offs_n + words * 3, mask)
    p4 = load_words(planes + offs_n + words * 4, mask)
    p5 = load_words(planes + offs_n + words * 5, mask)
    p6 = load_words(planes + offs_n + words * 6, mask)
    p7 = load_words(planes + offs_n + words * 7, mask)
    always = load_words(planes + offs_n + words * 8, mask)
    fraction = (p0, p1, p2, p3, p4, p5, p6, p7)
    start_member = (pid // tiles) * MEMBERS
    for group_start in range(start_member, tl.minimum(start_member + MEMBERS, members), AT_ONCE):
        member = group_start + row // CALLS
        counter = (member + first_member).to(tl.uint32)
        on = tl.zeros_like(always)
        for plane in tl.static_range(8):
            r = _random_words(seed, first_of_call + words * plane, counter, layer, draw, ALIGNED)
            # Where a plane's bit is 1 the result is on | r, where it is 0 on & r.
            on = (on & r) | (fraction[plane] & (on | r))
        pointers = out + (member * words)[:, None] + offs_n
        tl.store(pointers, (on | always).to(tl.int32, bitcast=True), mask=mask & (member < members)[:, None])


def sample_bits(
    planes: Tensor, key: tuple[int, int] | Tensor, layer: int, draw: int, members: range
) -> Tensor:
    """Draw packed bits for consecutive members: [m, *shape] of int64.

    A bit is 1 with the probability that the nine planes encode, see :func:`bit_planes`. A member has the same
    bits in any range of members: those made of ``words(draw, 8, *shape)`` of
    :class:`impls.perturbation.noise.PhiloxStream`. For W words of 32 bits of a member:

    * bytes: 36 W read for every MEMBERS_PER_PROGRAM members, mostly from a cache, and 4 W written for each
      member.
    * operations: two Philox calls for each word, four where W is not a multiple of 4, and a selection by each
      of its eight random words.

    Args:
        planes: [9, *shape] words of int64. Bits that are 0 in each plane, as
            after the last input, are 0 in the result.
        key: two words made of seed and step, or the keys of a step on the device.
        layer: a word made of the layer's name.
        draw: a word made of the draw's name.
        members: counters of the members.

    Raises:
        ValueError: there are not nine planes of words, or a counter exceeds 32 bits.
    """
    flat = halves(operand("planes", planes, (PLANES, *planes.shape[1:]), torch.int64)).flatten(1)
    words = flat.shape[1]
    counters = Draw(key, layer, draw, members).arguments(len(members), elements=words * (PLANES - 1), width=4)
    out = torch.empty((len(members), *planes.shape[1:]), device=planes.device, dtype=planes.dtype)
    if not out.numel():
        return out
    calls = block_size(-(-words // 4), MAX_CALLS)
    tiles, at_once = -(-words // (4 * calls)), min(MEMBERS_PER_PROGRAM, MAX_CALLS // calls)
    with torch.cuda.device_of(planes):
        sample_bits_kernel[grid_of(tiles, -(-len(members) // MEMBERS_PER_PROGRAM))](
            out.view(torch.int32), flat, words, tiles, *counters, len(members),
            ALIGNED=words % 4 == 0, MEMBERS=MEMBERS_PER_PROGRAM, AT_ONCE=at_once, CALLS=calls,
        )  # fmt: skip
    return out


SUM_BLOCK_N = 128
"""Words in a tile of a sum: 32 sums for each of 128 threads."""

MIDDLE = tl.constexpr(2.0**64)
"""Multiplies weights that powers of :func:`bit_as_power` multiply: those of 2^-65 to 2^62 then stay exact."""

AT_ONCE = 8
"""Members whose words are loaded at a time; half as many in float64, whose sums fill the registers."""


@triton.jit
def bit_as_power(words, bit):
    """Return 0 where bit ``bit`` [32, 1] of words [32, n] is 0, else a power of two that depends on ``bit``.

    The bit is put into the exponent of a float32. So two instructions add a weight where a bit is 1, the mask
    and the multiplication with addition; a comparison, an addition and a selection would be three.
    """
    place = 24 + bit % 7  # powers from 2^-125 to 2
    left = (24 - bit // 7 * 7 % 28).to(tl.uint32)
    words = tl.where(bit < 28, words << left, words >> 4)  # noqa: PLR2004  four times seven bits
    mask = tl.full(bit.shape, 1, tl.uint32) << place.to(tl.uint32)
    return (words & mask).to(tl.float32, bitcast=True)


@triton.jit
def centered_sum_kernel(
    out, words, weights, p, members, part_members, depth, width, length, rows, tiles_n, taps,
    stride_part, stride_group, stride_tap, stride_input, stride_output,
    AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum (bit - p) * weight over ``part_members`` members; the grid is tiles x rows of words x parts.

    A tile is BLOCK_N words of 32 bits of a row. Members' words are [group, tap, depth, output], two to each
    int64. ``out`` [part, ...] has the given strides, and ``p`` those of one part.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // tiles_n % rows
    pid_part = pid // tiles_n // rows
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < width
    bit = tl.arange(0, 32)
    bit_mask = (tl.full((32,), 1, tl.uint32) << bit.to(tl.uint32))[:, None]
    words += row * width + offs_n
    member_words = tl.cast(rows, tl.int64) * width
    sums = tl.zeros((32, BLOCK_N), dtype=out.dtype.element_ty)
    is_double: tl.constexpr = out.dtype.element_ty == tl.float64
    weight_sum = tl.zeros((), dtype=out.dtype.element_ty)
    begin = (pid_part * part_members).to(tl.int32)
    end = tl.minimum(begin + part_members, members)
    words += begin * member_words
    for first in range(begin, end, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            member = first + index
            weight = tl.load(weights + member, mask=member < end, other=0.0)
            word = load_words(words + index * member_words, mask_n & (member < end))
            if is_double:
                sums = tl.where((word[None, :] & bit_mask) != 0, sums + weight, sums)
            else:
                sums += bit_as_power(word[None, :], bit[:, None]) * (weight * MIDDLE)
            weight_sum += weight
        words += AT_ONCE * member_words
    if not is_double:
        sums *= 1 / (bit_as_power(tl.full((1, 1), 0xFFFFFFFF, tl.uint32), bit[:, None]) * MIDDLE)
    # A word of 64 bits is two columns; the high half has the next 32 inputs.
    group, tap = row // depth // taps, row // depth % taps
    first_input = ((row % depth) * HALVES + offs_n % HALVES) * 32
    offsets = (
        group * stride_group
        + tap * stride_tap
        + first_input * stride_input
        + offs_n // HALVES * stride_output
    )
    offsets = offsets[None, :] + (bit.to(tl.int64) * stride_input)[:, None]
    remaining = tl.where(mask_n, length - first_input, 0)
    mask = bit[:, None] < tl.minimum(remaining, 32).to(tl.int32)[None, :]
    sums -= weight_sum * tl.load(p + offsets, mask=mask, other=0.0).to(sums.dtype)
    tl.store(out + pid_part * stride_part + offsets, sums, mask=mask)


def centered_sum(words: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """Return the weighted sum of centered bits, sum_m weights[m] (bit_m - p): the update of binary weights.

    Additions have a fixed order, without atomics, so the result has the same bits every time. For W words of
    32 bits of a member:

    * bytes: 4 W read for each member, and 128 W written, or 256 W in float64; for a W too small to fill a GPU
      also for each part of the members.
    * operations: 32 W masks and multiplications with addition for each member.

    For 1024 members with a weight of 1024 x 1024 it moves 142 MB, 33 us of an H200's memory, and takes 2.1e9
    operations, 73 us at 2.9e13 a second, and 3 us to add its two parts.

    Args:
        words: [m, g, *taps, K, o] words of int64.
        weights: [m] of float32 or float64.
        p: the means of bits, floating [g, o, i, *taps].

    Returns:
        The sums, [g, o, i, *taps] in the dtype of the weights.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    groups, outputs, length, *taps = p.shape
    members, depth = len(weights), -(-length // 64)
    words = operand("words", words, (members, groups, *taps, depth, outputs), torch.int64)
    tap_count, width = math.prod(taps), 2 * outputs
    rows = groups * tap_count * depth
    block_n = block_size(width, SUM_BLOCK_N, 32)
    tiles = -(-width // block_n)
    parts, part_members = member_parts(members, tiles * rows)
    out = torch.empty(parts, *p.shape, device=words.device, dtype=weights.dtype)
    if not out.numel():
        return out.sum(0)
    with torch.cuda.device_of(words):
        centered_sum_kernel[grid_of(tiles, rows, parts)](
            out, halves(words), weights.contiguous(), p.contiguous(),
            members, part_members, depth, width, length, rows, tiles, tap_count,
            p.numel(), outputs * length * tap_count, 1, tap_count, length * tap_count,  # strides
            AT_ONCE=AT_ONCE if weights.dtype is torch.float32 else AT_ONCE // 2, BLOCK_N=block_n,
        )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


@variant(operators=OPERATORS, source="Bernoulli weights, score function: Williams 1992; the kernels are ours")
@dataclass(frozen=True)
class FusedBinary(AbstractBitScheme[BinaryNoise]):
    """:class:`~impls.schemes.binary.Binary` by kernels, with the same bits of the stream ``philox``.

    Args:
        few: largest number of rows of a member that is multiplied by exclusive or and popcount. Products
            of more rows use int8 tensor cores, with weights unpacked in registers. Unpacking a word should
            take as long as counting it for eight rows; this has not been measured.

    Memory    same as the wrapped scheme.
    Work      two Philox calls for each 32 drawn bits; a bit read once by a forward with up to four rows; a
              bit read once, and two operations for it, by an update. Estimated times on an H200 for 1024
              members with a weight of 1024 x 1024 are 174, 31 and 73 us.
    Quality   same as the wrapped scheme.
    """

    few: int = 8

    def __post_init__(self) -> None:
        check_count("few", self.few, 0)

    @property
    def plain(self) -> Binary:
        """The wrapped scheme."""
        return Binary()

    @property
    @override
    def stream(self) -> str:
        return "philox"

    @override
    def why_unsupported(self, module: nn.Module) -> str:
        weight = next(module.parameters())
        return (
            self.plain.why_unsupported(module)
            or no_kernels_reason(weight.device)
            or no_dtype_reason(weight.dtype, weight.device, DOT_DTYPES)
        )

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BinaryNoise:
        if not isinstance(stream, PhiloxStream):
            raise UnsupportedError(
                f"{self}: its kernel draws the noise of the stream 'philox' only, not of "
                f"{type(stream).__name__}: use stream='philox'"
            )
        # Raises where the stream cannot draw these shapes and members; nothing is drawn on meta.
        replace(stream, device=torch.device("meta")).words("bits", 8, *packed_shape(weight.shape))
        if weight.is_meta:
            return self.plain.sample(weight, stream)
        p = probabilities(weight)
        return BinaryNoise(p, 1.0, sample_bits(bit_planes(p), *draw_of(stream, "bits")))

    @override
    def product(self, op: AbstractPackedOperator, noise: BinaryNoise, x: Tensor) -> Tensor:
        return op.apply_packed(x, noise.words, self._multiply)

    def _multiply(self, rows: Tensor, columns: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Multiply packed bits: by popcount for few rows of a member, else on tensor cores."""
        product = bit_product if rows.shape[1] <= self.few else int8_product
        return product(rows, columns, length, dtype)

    @override
    def packed_bits(self, noise: BinaryNoise) -> Tensor:
        return self.plain.packed_bits(noise)

    @override
    def weighted_sum(self, noise: BinaryNoise, utilities: Tensor) -> Tensor:
        # In at least float32, because the difference of two large sums is small.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        return centered_sum(noise.words, utilities.to(wide) * noise.sigma, noise.p)

    @override
    def read_bytes(self, weight: Tensor, noise: BinaryNoise) -> int:
        return self.plain.read_bytes(weight, noise)

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa(weight, members)
