"""Networks of bits by kernels: members' bits drawn, multiplied and summed up, each in one launch.

What stays torch's, and why:

* A convolution's patches are one copy of words, two with padding. For 64 channels and nine taps it is 72
  bytes written and read for each position, whose 64 outputs are 256 bytes in float32. A kernel of its own
  would be one launch of as many bytes; only a product that finds its own patches would save them.
* Thresholds and their noise are added outside of schemes, for all of them once, so a product ends with real
  outputs, and :func:`impls.kernels.bits.bit_product_threshold` has no place here. Packing the bits that
  follow is then six launches, of a byte or two for each output.
* A max-pool is a launch for each row and each column of its window, over words: a 32nd of what a product
  writes. No member's weights are in it, and no scheme is asked.
* Writing bits out as numbers is for the slow truth alone: a product unpacks them in registers.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from impls.binary.operators import AbstractPackedOperator, packed_shape
from impls.kernels.binary_matmul import GROUPS, bit_product, halves, int8_product, load_words
from impls.kernels.gemm import grid_of
from impls.kernels.optional_triton import tl, triton
from impls.kernels.philox import COUNTERS, Draw, draw_of, five_words, seed_of, side_by_side, unsigned
from impls.kernels.scheme import FLOATING, without_dtype, without_kernels
from impls.kernels.tiling import block_size
from impls.perturbation.noise import NoiseStream, PhiloxStream
from impls.perturbation.scheme import check_count
from impls.schemes.binary import OPERATORS, AbstractBitScheme, Binary, BinaryNoise, probabilities

PLANE_BLOCK_N = 64
"""Columns of words in a tile: with 128 threads, 16 probabilities in the registers of each."""

PLANES = 9
"""Planes of a probability in steps of 1/256: eight bits of a fraction from the lowest up, and always on."""


@triton.jit
def bit_planes_kernel(
    out, p, outputs, inputs, taps, depth, width, tiles, plane,
    PLANES: tl.constexpr, HALVES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pack the planes of COLUMNS words of 32 bits: the grid is tiles times rows of words."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // tiles
    columns = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    bit = tl.arange(0, 32)
    # A word of 64 bits is two columns here, and its high half has inputs 32 further on.
    k = ((row % depth) * HALVES + columns % HALVES)[:, None] * 32 + bit[None, :]
    tap, group = row // depth % taps, row // depth // taps
    at = ((group * outputs + columns // HALVES)[:, None] * inputs + k) * taps + tap
    here = (columns < width)[:, None] & (k < inputs)
    out += row * width + columns
    counts = (tl.load(p + at, mask=here, other=0).to(tl.float32) * 256).to(tl.uint32)
    for one in tl.static_range(PLANES):
        words = tl.sum(((counts >> one) & 1) << bit.to(tl.uint32)[None, :], axis=1)
        tl.store(out, words.to(tl.int32, bitcast=True), mask=columns < width)
        out += plane


def bit_planes(p: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pack probabilities by the bits of 256 P, lowest first, in the layout of a product.

    Plain torch packs each plane by several passes, some seventy launches for all. Here is one: 4 bytes read
    and 9/8 of a byte written for a probability in float32, which is 5.4 MB for a weight of 1024 x 1024 and
    1.3 us at an H200's 4.3 TB/s, beside 174 us to draw the bits of 1024 members.

    Args:
        p: multiples of 1/256 from 0 to 1, [g, o, i, *taps], of a floating type.
        dtype: of the words.

    Returns:
        Planes [9, g, *taps, words, o]; bits behind the last input are 0.

    Raises:
        ValueError: words are of another type.

    """
    if dtype not in GROUPS:
        message = f"planes must be words of int32 or int64, got {dtype}"
        raise ValueError(message)
    groups, outputs, inputs, *taps = p.shape
    group = GROUPS[dtype]
    depth, width = -(-inputs // (32 * group)), outputs * group
    out = torch.empty(PLANES, groups, *taps, depth, outputs, device=p.device, dtype=dtype)
    if not out.numel():
        return out
    count, columns = math.prod(taps), block_size(width, PLANE_BLOCK_N)
    tiles, rows = -(-width // columns), groups * count * depth
    with torch.cuda.device_of(p):
        bit_planes_kernel[grid_of(tiles, rows)](
            out.view(torch.int32), p.contiguous(), outputs, inputs, count, depth, width, tiles, rows * width,
            PLANES=PLANES, HALVES=group, BLOCK_N=columns,
        )  # fmt: skip
    return out


OWN_MEMBERS = 8
"""Members that a program draws with the same planes in its registers."""

MOST_CALLS = 128
"""Calls of Philox in a tile, one for each thread: of one member, or of several with few words each."""


@triton.jit
def _random(seed, first, member, layer, draw, WHOLE: tl.constexpr):
    """Return words first, first + 1, + 2 and + 3 of a member's draw, for rows of both, as [rows, 4]."""
    r0, r1, r2, r3, _ = five_words(seed, first, member, layer, draw, WHOLE)
    return side_by_side(r0, r1, r2, r3).reshape(first.shape[0], 4)


@triton.jit(do_not_specialize=[*COUNTERS, "members"])
def sample_bits_kernel(
    out, planes, words, tiles, key0, key1, layer, draw, first_member, members,
    WHOLE: tl.constexpr, OWN: tl.constexpr, AT_ONCE: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Draw OWN members' words of CALLS calls, AT_ONCE of them: the grid is tiles times groups of members."""
    pid = tl.program_id(0).to(tl.int64)
    words = tl.cast(words, tl.int64)
    layer = unsigned(layer)
    draw = unsigned(draw)
    first_member = unsigned(first_member)
    seed = seed_of(key0, key1)
    # A row is a call of one of the members that are drawn at once.
    row = tl.arange(0, AT_ONCE * CALLS)
    fours = ((pid % tiles) * CALLS + row % CALLS) * 4
    at = fours[:, None] + tl.arange(0, 4)[None, :]
    mask_m = at < words
    p0 = load_words(planes + at, mask_m)
    p1 = load_words(planes + at + words, mask_m)
    p2 = load_words(planes + at + words * 2, mask_m)
    p3 = load_words(planes + at + words * 3, mask_m)
    p4 = load_words(planes + at + words * 4, mask_m)
    p5 = load_words(planes + at + words * 5, mask_m)
    p6 = load_words(planes + at + words * 6, mask_m)
    p7 = load_words(planes + at + words * 7, mask_m)
    always = load_words(planes + at + words * 8, mask_m)
    fraction = (p0, p1, p2, p3, p4, p5, p6, p7)
    own = (pid // tiles) * OWN
    for first in range(own, tl.minimum(own + OWN, members), AT_ONCE):
        member = first + row // CALLS
        counter = (member + first_member).to(tl.uint32)
        on = tl.zeros_like(always)
        for plane in tl.static_range(8):
            r = _random(seed, fours + words * plane, counter, layer, draw, WHOLE)
            # A plane's bit 1 makes on | r of them, its bit 0 makes on & r.
            on = (on & r) | (fraction[plane] & (on | r))
        into = out + (member * words)[:, None] + at
        tl.store(into, (on | always).to(tl.int32, bitcast=True), mask=mask_m & (member < members)[:, None])


def sample_bits(
    planes: Tensor, key: tuple[int, int] | Tensor, layer: int, draw: int, members: range
) -> Tensor:
    """Draw packed bits for consecutive members: [m, *shape], of the type of ``planes``.

    A bit is on with the probability that its planes say. A member has the same bits in any range of members:
    those made of ``words(draw, 8, *shape)``, in int64, of the stream
    :class:`impls.perturbation.noise.PhiloxStream`, with
    the key, layer and draw of its :class:`impls.perturbation.philox.Place`. For W words of 32 bits of a
    member:

    * read: 36 W bytes for every OWN_MEMBERS members, mostly from the cache; written: 4 W for each member.
    * two calls of Philox for each word, four where W is no multiple of 4: a call is 20 wide multiplications
      and 20 xor of three; and eight majorities of three bits.

    Args:
        planes: [9, *shape] words of int32 or int64: bits of round(256 P) from the lowest up. Where bits are
            0 in every plane, as behind the last one, they are 0 in the result.
        key: of seed and step.
        layer: a word, of the layer's name.
        draw: a word, of the draw's name.
        members: counters of the members.

    Raises:
        ValueError: these are no nine planes of words, or a counter does not fit in 32 bits.

    """
    if planes.shape[0] != PLANES:
        message = f"a probability has {PLANES} planes, got {list(planes.shape)}"
        raise ValueError(message)
    flat = halves(planes, "planes").flatten(1)
    words = flat.shape[1]
    counters = Draw(key, layer, draw, members).arguments(words * (PLANES - 1), 4)
    out = torch.empty((len(members), *planes.shape[1:]), device=planes.device, dtype=planes.dtype)
    if not out.numel():
        return out
    calls = block_size(-(-words // 4), MOST_CALLS)
    tiles, at_once = -(-words // (4 * calls)), min(OWN_MEMBERS, MOST_CALLS // calls)
    with torch.cuda.device_of(planes):
        sample_bits_kernel[grid_of(tiles, -(-len(members) // OWN_MEMBERS))](
            out.view(torch.int32), flat, words, tiles, *counters, len(members),
            WHOLE=words % 4 == 0, OWN=OWN_MEMBERS, AT_ONCE=at_once, CALLS=calls,
        )  # fmt: skip
    return out


ENOUGH_PROGRAMS = 512
"""A sum is split over members until it has about this many programs: a few for each processor of a GPU."""

FEWEST_MEMBERS = 64
"""What a part of a split sum has at least."""

SUM_BLOCK_N = 128
"""Columns in a tile: with 128 threads, 32 sums in the registers of each."""

AT_ONCE = 4
"""Members whose words are loaded at once."""


@triton.jit
def weighted_sum_kernel(
    out, words, weights, centre, members, part, depth, width, length, rows, tiles, taps,
    out_part, out_lead, out_tap, out_bit, out_column,
    CENTRED: tl.constexpr, HALVES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum ``part`` members' 32 bits of COLUMNS words: the grid is tiles times rows of words times parts.

    With CENTRED every member's bits are counted from ``centre``, which lies as a part of ``out`` does.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // tiles % rows
    slice_ = pid // tiles // rows
    columns = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = columns < width
    bit = tl.arange(0, 32)
    mask = (tl.full((32,), 1, tl.uint32) << bit.to(tl.uint32))[:, None]
    words += row * width + columns
    size = tl.cast(rows, tl.int64) * width
    sums = tl.zeros((32, BLOCK_N), dtype=out.dtype.element_ty)
    whole = tl.zeros((), dtype=out.dtype.element_ty)
    end = tl.minimum((slice_ + 1) * part, members)
    for first in range(slice_ * part, end, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            member = first + ahead
            weight = tl.load(weights + member, mask=member < end, other=0.0)
            word = load_words(words + member * size, mask_m & (member < end))
            sums = tl.where((word[None, :] & mask) != 0, sums + weight, sums)
            whole += weight
    # A word of 64 bits is two columns here, and its high half belongs 32 bits further down.
    lead, tap = row // depth // taps, row // depth % taps
    first = ((row % depth) * HALVES + columns % HALVES) * 32
    at = lead * out_lead + tap * out_tap + first * out_bit + columns // HALVES * out_column
    at = at[None, :] + (bit.to(tl.int64) * out_bit)[:, None]
    left = tl.where(mask_m, length - first, 0)
    edge = bit[:, None] < tl.minimum(left, 32).to(tl.int32)[None, :]
    if CENTRED:
        sums -= whole * tl.load(centre + at, mask=edge, other=0.0).to(sums.dtype)
    tl.store(out + slice_ * out_part + at, sums, mask=edge)


class Sum(NamedTuple):
    """A sum over members' words, as a kernel takes it.

    Attributes:
        words: [m, *lead, K, o], halves of words.
        weights: [m].
        group: halves in a word.
        length: bits of a column that are wanted.
        taps: how many of the rows of words lie side by side in the result.

    """

    words: Tensor
    weights: Tensor
    group: int
    length: int
    taps: int

    def launch(self, shape: tuple[int, ...], strides: tuple[int, ...], centre: Tensor | None) -> Tensor:
        """Sum up: a contiguous result of this shape, of the type of the weights.

        Args:
            shape: of the result.
            strides: in it, of the axes before the taps, the taps, bits and columns.
            centre: what bits are counted from, laid out as the result.

        """
        members, depth, width = len(self.words), *self.words.shape[-2:]
        rows = self.words[0].numel() // max(1, width) if members else 0
        columns = block_size(width, SUM_BLOCK_N, 32)
        tiles = -(-width // columns)
        parts = max(1, min(ENOUGH_PROGRAMS // max(1, tiles * rows), members // FEWEST_MEMBERS))
        part = -(-members // parts)
        parts = -(-members // max(1, part))
        out = torch.empty(parts, *shape, device=self.words.device, dtype=self.weights.dtype)
        if not out.numel():
            return out.sum(0)
        with torch.cuda.device_of(self.words):
            weighted_sum_kernel[grid_of(tiles, rows, parts)](
                out, self.words, self.weights, self.weights if centre is None else centre,
                members, part, depth, width, self.length, rows, tiles, self.taps, out.stride(0), *strides,
                CENTRED=centre is not None, HALVES=self.group, AT_ONCE=AT_ONCE, BLOCK_N=columns,
            )  # fmt: skip
        return out[0] if parts == 1 else out.sum(0)


def weighted_sum(words: Tensor, weights: Tensor, length: int) -> Tensor:
    """Sum bits by their members' weights, sum_m c_m bit_m: [*taps, length, o], of the type of the weights.

    In one order, without atomics: the same bits every time. For W words of 32 bits of a member:

    * bytes: 4 W for each member once, and 128 W written; once more for each part of the members, and read,
      where W is too small to fill a GPU. Numbers are of 4 bytes, in float64 of 8.
    * operations: 32 W tests of a bit, and as many additions and selections, for each member.

    Args:
        words: [m, *taps, K, o] words of int32 or int64, o contiguous.
        weights: [m] of float32 or float64.
        length: bits of a column that are wanted, of the 32 K or 64 K that there are.

    Raises:
        ValueError: shapes or types do not fit.

    """
    _check(words, weights, length)
    *taps, outputs = *words.shape[1:-2], words.shape[-1]
    strides = (length * outputs, 0, outputs, 1)
    return _sum_of(words, weights, length, 1).launch((*taps, length, outputs), strides, None)


def centred_sum(words: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """Sum what members' bits are above their mean, sum_m c_m (bit_m - P): what an update is made of.

    As :func:`weighted_sum`, and P is subtracted before the sums are written, so that no pass follows. For W
    words of 32 bits of a member P has 32 W numbers, which are read, and so many are written. For 1024 members
    with a weight of 1024 x 1024 that is 142 MB, 33 us at an H200's 4.3 TB/s, and 2.1e9 operations, 73 us at
    2.9e13 a second: it is bound by these, and has two parts, whose sum is 3 us more.

    Args:
        words: [m, g, *taps, K, o] words of int32 or int64.
        weights: [m] of float32 or float64.
        p: the means of bits, [g, o, i, *taps], in any floating type.

    Returns:
        The sums, [g, o, i, *taps] of the type of the weights.

    Raises:
        ValueError: shapes or types do not fit.

    """
    groups, outputs, length, *taps = p.shape
    _check(words, weights, length)
    if (groups, *taps, outputs) != (*words.shape[1:-2], words.shape[-1]):
        message = f"means must be [g, o, i, *taps] of words [m, g, *taps, K, o], got {list(p.shape)}"
        raise ValueError(message)
    count = math.prod(taps)
    strides = (outputs * length * count, 1, count, length * count)
    return _sum_of(words, weights, length, count).launch((*p.shape,), strides, p.contiguous())


def _check(words: Tensor, weights: Tensor, length: int) -> None:
    """Hold words [m, *lead, K, o], weights [m] and a number of bits to each other.

    Raises:
        ValueError: they do not fit.

    """
    is_known = weights.dtype in {torch.float32, torch.float64} and words.dtype in GROUPS
    if not is_known or weights.shape != words.shape[:1] or words.dim() < 3:  # noqa: PLR2004  m, K and o
        message = (
            "a weighted sum takes words [m, *taps, K, o] and weights [m] of float32 or float64, got "
            f"{list(words.shape)} and {weights.dtype} {list(weights.shape)}"
        )
        raise ValueError(message)
    size = 32 * GROUPS[words.dtype]
    if length > size * words.shape[-2]:
        message = f"{words.shape[-2]} words of {size} bits have no {length} bits"
        raise ValueError(message)


def _sum_of(words: Tensor, weights: Tensor, length: int, taps: int) -> Sum:
    """Look at words and weights."""
    return Sum(halves(words.contiguous(), "words"), weights.contiguous(), GROUPS[words.dtype], length, taps)


@variant(operators=OPERATORS, source="Bernoulli weights, score function: Williams 1992; the kernels are ours")
@dataclass(frozen=True)
class FusedBinary(AbstractBitScheme[BinaryNoise]):
    """:class:`~impls.schemes.binary.Binary` by kernels, with its very bits of the stream ``philox``.

    Args:
        few: up to how many rows of a member differing bits are counted, by exclusive or and popcount; more
            rows are multiplied on int8 matrix units, which weights are unpacked for. By arithmetic a word is
            counted for eight rows in the time that it is unpacked in; nobody has measured it yet.

    Memory    that of the plain scheme.
    Work      two calls of Philox for 32 bits that are drawn, behind a few passes over logits; a bit read once
              by a forward with up to four rows; a bit read once, and two operations for it, by an update. By
              arithmetic that is 174, 31 and 73 us on an H200 for 1024 members with a weight of 1024 x 1024.
    Quality   that of the plain scheme.
    """

    few: int = 8

    def __post_init__(self) -> None:
        """Refuse what is no number of rows; with 0 all products are those of matrices."""
        check_count("few", self.few, 0)

    @property
    def plain(self) -> Binary:
        """The scheme that is accelerated."""
        return Binary()

    @property
    @override
    def stream(self) -> str:
        return "philox"

    @override
    def supports(self, module: nn.Module) -> str:
        weight = module.weight
        assert isinstance(weight, Tensor)  # noqa: S101  every layer that is perturbed has one
        return (
            self.plain.supports(module)
            or without_kernels(weight.device)
            or without_dtype(weight.dtype, weight.device, FLOATING)
        )

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BinaryNoise:
        if not isinstance(stream, PhiloxStream):
            message = (
                f"{self}: its kernel draws by the counters of the stream philox, not {type(stream).__name__}"
            )
            raise ValueError(message)  # noqa: TRY004  a person's choice of a stream, by name
        # Shapes and counters are held to what the stream can draw; on meta nothing is drawn.
        replace(stream, device=torch.device("meta")).words("bits", 8, *packed_shape(weight.shape))
        if weight.is_meta:
            return self.plain.sample(weight, stream)
        p = probabilities(weight)
        return BinaryNoise(p, 1.0, sample_bits(bit_planes(p), *draw_of(stream, "bits")))

    @override
    def product(self, op: AbstractPackedOperator, noise: BinaryNoise, x: Tensor) -> Tensor:
        return op.bits(x, noise.words, self._multiply)

    def _multiply(self, rows: Tensor, columns: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Multiply bits, by the kernel for so many rows of a member."""
        kernel = bit_product if rows.shape[1] <= self.few else int8_product
        return kernel(rows, columns, length, dtype)

    @override
    def written(self, noise: BinaryNoise) -> Tensor:
        return self.plain.written(noise)

    @override
    def weighted_sum(self, noise: BinaryNoise, utilities: Tensor) -> Tensor:
        # In a wide type: utilities about their mean leave little of two large sums.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        return centred_sum(noise.words, utilities.to(wide) * noise.sigma, noise.p)

    @override
    def read_bytes(self, weight: Tensor, noise: BinaryNoise) -> int:
        return self.plain.read_bytes(weight, noise)

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa_of(weight, members)
