"""Product with dense noise drawn inside the kernel and never stored, and the weighted sum of that noise.

Each row has the noise of its member: y_row = W x + s E_m x, where the entries of E_m are one Philox draw, in
the order of the weight. A tile draws E_m once for a block of rows of a member; here rows are numbered within
a member, row = repeat * positions + position.

With few rows of a member the noise is multiplied in the registers that it was drawn in, without tensor cores:
:func:`few_rows_kernel`. With more rows E_m is an operand of the tensor cores: :func:`many_rows_kernel`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    DOT_DTYPES,
    accumulator_dtype,
    gemm_loop,
    gemm_of,
    grid_of,
    load_sigma,
    load_x,
    noise_scale,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.philox import (
    COUNTERS,
    VALUES_PER_CALL,
    Draw,
    Law,
    as_uint32,
    draw_of,
    draw_values,
    flip_by_high_bit,
    four_level_words,
    four_normals,
    four_words,
    interleave,
    level_of,
    seed_of,
    unpack_signs,
)
from impls.kernels.scheme import NARROW, AbstractFused
from impls.kernels.tiling import MIN_BLOCK, Tiling, block_size, input_precision, member_parts
from impls.schemes.regenerated import Regenerated, RegeneratedSign, StreamNoise

MAX_FEW_ROWS = 4
"""Rows of a member up to which noise is multiplied without tensor cores."""


class FewRowsTiling(NamedTuple):
    """Tile sizes of :func:`few_rows_kernel`.

    Attributes:
        rows: rows of a member in a tile, at most.
        block_m: rows of a tile, of several members.
        block_n: outputs of a tile.
        line: neighboring outputs that one warp computes.
        calls: Philox calls in a tile, for each member and output.
        block_k: channels of the shared product that are multiplied at once.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline of loads.
    """

    rows: int = 4
    block_m: int = 16
    block_n: int = 32
    line: int = 8
    calls: int = 4
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 2


def default_tiling(rows: int, dtype: torch.dtype, law: Law, *, aligned: bool) -> FewRowsTiling | Tiling:
    """Return the default tile sizes for members of this many rows.

    A thread holds the values of about eight Philox calls in registers. With ``aligned`` each output's
    noise begins with a new call; otherwise values are parts of two calls, which takes twice the registers.
    Products of wide operands keep all of them, noise and weight, in registers.
    """
    is_wide = dtype.itemsize > 2 and input_precision(dtype) != "tf32"  # noqa: PLR2004  bytes
    if rows > MAX_FEW_ROWS:
        # Without a pipeline of loads, fewer than 128 rows of levels or signs would spill on capability 8.0.
        stages = 1 if law != "normal" and rows <= 64 else 2  # noqa: PLR2004  rows of half a tile
        if is_wide:
            return Tiling(64, 32, 32 if law == "sign" else MIN_BLOCK, num_stages=stages)
        is_narrow = dtype.itemsize <= 2  # noqa: PLR2004  bytes
        block_k = {"normal": 32, "uniform": 64, "sign": 128}[law] if is_narrow else 32
        return Tiling(128, 64, block_k, num_stages=stages)
    block_n, line, calls = (128, 32, 1) if law == "sign" else (32 if aligned else MIN_BLOCK, 8, 4)
    if dtype is torch.float64:
        block_n = max(MIN_BLOCK, block_n // 4)
    block_k = MIN_BLOCK if is_wide else 64
    return FewRowsTiling(block_n=block_n, line=line, calls=calls, block_k=block_k)


UNROLLED = tl.constexpr(8)
"""Bits of a word in the body of the unrolled loop over its bits."""


@triton.jit(do_not_specialize=COUNTERS)
def few_rows_kernel(
    y, x, weight, sigmas, sigma,
    outputs, inputs, positions, rows,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    key0, key1, layer, draw, first_member, members, member_tiles, tiles_n,
    LAW: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, CALLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of each of MEMBERS members; the grid is tiles of outputs, of members and of rows.

    The outputs of a tile are LINES lines of equal length. A warp computes neighboring outputs of a line, and
    each thread the same position in every line: it draws noise for many outputs but loads few values of x.
    """
    pid = tl.program_id(0).to(tl.int64)
    start_n = (pid % tiles_n) * BLOCK_N
    start_member = (pid // tiles_n % member_tiles) * MEMBERS
    row = tl.arange(0, ROWS * MEMBERS)
    offs_m = pid // tiles_n // member_tiles * ROWS + row // MEMBERS
    member, repeat, position = start_member + row % MEMBERS, offs_m // positions, offs_m % positions
    mask_m = (offs_m < rows) & (member < members)
    x += repeat * stride_xr + member * stride_xm + position * stride_xp
    line: tl.constexpr = BLOCK_N // LINES
    seed, layer, draw = seed_of(key0, key1), as_uint32(layer), as_uint32(draw)
    counter = (
        as_uint32(first_member) + (start_member + tl.arange(0, MEMBERS)).to(tl.uint32)[None, :, None, None]
    )
    offs_n = (
        start_n + tl.arange(0, LINES)[:, None, None, None] * line + tl.arange(0, line)[None, None, :, None]
    )
    # Summed over calls after the loop.
    noise = tl.zeros((ROWS, LINES, MEMBERS, line, CALLS), dtype=ACC)
    for start in range(0, tl.cdiv(inputs, WIDTH), CALLS):
        call = start + tl.arange(0, CALLS)
        first = offs_n * inputs + call[None, None, None, :] * WIDTH
        if LAW == "sign":
            drawn = four_words(seed, first, counter, layer, draw, ALIGNED)
            for lane in tl.static_range(4):
                word = drawn[lane]
                # From the highest bit down: shifting the word by one brings each bit to the sign bit. A set
                # bit is +1 but negates, hence the subtraction.
                for bit in tl.range(0, 32, loop_unroll_factor=UNROLLED):
                    offs_k = call * WIDTH + (lane * 32 + 31 - bit)
                    values = load_x(x, stride_xi, mask_m, offs_k, inputs).to(ACC)
                    noise -= flip_by_high_bit(
                        values.reshape(ROWS, 1, MEMBERS, 1, CALLS), word[None, :, :, :, :]
                    )
                    word += word
        elif LAW == "uniform":
            drawn = four_level_words(seed, first, counter, layer, draw, ALIGNED)
            for index in tl.static_range(16):
                offs_k = call * WIDTH + index
                values = load_x(x, stride_xi, mask_m, offs_k, inputs).to(ACC)
                # The stream rounds its values to the weight's dtype.
                level = level_of(drawn[index // 4] << 24 - index % 4 * 8).to(x.dtype.element_ty).to(ACC)
                noise += values.reshape(ROWS, 1, MEMBERS, 1, CALLS) * level[None, :, :, :, :]
        else:
            drawn = four_normals(seed, first, counter, layer, draw, ALIGNED)
            for lane in tl.static_range(4):
                offs_k = call * WIDTH + lane
                values = load_x(x, stride_xi, mask_m, offs_k, inputs).to(ACC)
                # The stream rounds its values to the weight's dtype.
                normal = drawn[lane].to(x.dtype.element_ty).to(ACC)
                noise += values.reshape(ROWS, 1, MEMBERS, 1, CALLS) * normal[None, :, :, :, :]
    acc = tl.sum(noise, axis=4).permute(0, 2, 1, 3).reshape(ROWS * MEMBERS, BLOCK_N)
    scale = load_sigma(sigmas, sigma, repeat, mask_m, ACC)
    base = tl.zeros((ROWS * MEMBERS, BLOCK_N), dtype=ACC)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    base = gemm_loop(
        base, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, 0, inputs, ACC, PRECISION, BLOCK_K
    )
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(
        y[:, None] + offs_n[None, :] * stride_yo,
        (base + scale[:, None] * acc).to(y.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def draw_signs(seed, offs_n, start, inputs, member, layer, draw, BLOCK_K: tl.constexpr):
    """Return the signs [n, BLOCK_K] of BLOCK_K channels from ``start`` on; BLOCK_K is 32 or 64."""
    first = offs_n[:, None] * inputs + (start + tl.arange(0, BLOCK_K // 32) * 32)[None, :]
    word, _, _, _ = four_words(seed, first, member, layer, draw, False)  # noqa: FBT003  Triton's own function
    return unpack_signs(word).reshape(offs_n.shape[0], BLOCK_K)


@triton.jit(do_not_specialize=COUNTERS)
def many_rows_kernel(
    y, x, weight, sigmas, sigma,
    outputs, inputs, positions, rows,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    key0, key1, layer, draw, first_member, tiles_m, tiles_n,
    LAW: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of one member; the grid is tiles of outputs, of rows, and members.

    Tiles are transposed, so that the drawn noise is the left operand, which may stay in registers.
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    member = pid // tiles_n // tiles_m
    repeat, position = offs_m // positions, offs_m % positions
    mask_m, mask_n = offs_m < rows, offs_n < outputs
    x += repeat * stride_xr + member * stride_xm + position * stride_xp
    seed, layer, draw = seed_of(key0, key1), as_uint32(layer), as_uint32(draw)
    counter = as_uint32(first_member) + member.to(tl.uint32)
    base = tl.zeros((BLOCK_N, BLOCK_M), dtype=ACC)
    noise = tl.zeros((BLOCK_N, BLOCK_M), dtype=ACC)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < inputs
        values = tl.load(
            x[None, :] + offs_k[:, None].to(tl.int64) * stride_xi,
            mask=mask_k[:, None] & mask_m[None, :],
            other=0,
        )
        shared = tl.load(
            weight + offs_n[:, None] * stride_wo + offs_k[None, :],
            mask=mask_n[:, None] & mask_k[None, :],
            other=0,
        )
        base = tl.dot(shared, values, acc=base, out_dtype=ACC, input_precision=PRECISION)
        if LAW == "sign" and WIDTH > BLOCK_K:
            drawn = draw_signs(seed, offs_n, start, inputs, counter, layer, draw, BLOCK_K)
        else:
            first = offs_n[:, None] * inputs + (start + tl.arange(0, BLOCK_K // WIDTH) * WIDTH)[None, :]
            drawn = draw_values(seed, first, counter, layer, draw, LAW, ALIGNED)
        drawn = drawn.to(values.dtype)
        noise = tl.dot(drawn, values, acc=noise, out_dtype=ACC, input_precision=PRECISION)
    scale = load_sigma(sigmas, sigma, repeat, mask_m, ACC)
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    tl.store(
        y[None, :] + offs_n[:, None] * stride_yo,
        (base + noise * scale[None, :]).to(y.dtype.element_ty),
        mask=mask_n[:, None] & mask_m[None, :],
    )


def dense_rng_product(
    x: Tensor,
    weight: Tensor,
    draw: Draw,
    sigma: float | Tensor,
    y: Tensor,
    *,
    law: Law = "normal",
    tiling: FewRowsTiling | Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma E_m, into ``y``, which is returned; E_m is drawn and never stored.

    Entry [o, i] of E_m is element o * inputs + i of the member's draw by this law in float32, rounded to x's
    dtype. It is drawn once for each block of the member's rows.
    A tiling of class FewRowsTiling selects :func:`few_rows_kernel`. Other arguments are those of all
    launchers, see :mod:`impls.kernels.gemm`. For m members:

    * bytes: e R (i + o) + e i o of the product; x and W are reread from cache for each tile of the
      other axis.
    * flops: 2 R i o on tensor cores, and as many for the noise, without tensor cores where members have few
      rows.
    * Philox calls: m i o / 4 for each block of rows, m i o / 16 of levels, m i o / 128 of signs; twice as
      many where i is not a multiple of 4, 16 or 128. At 1e12 normals a second drawing bounds the time; with
      few rows of signs it is the three operations for each sign and row.

    Raises:
        ValueError: shapes or dtypes do not match, or the counter of a member or an element exceeds 32 bits.
    """
    gemm = gemm_of(x, weight, y)
    width = VALUES_PER_CALL[law]
    counters = draw.arguments(gemm.members, weight.numel(), width)
    if not y.numel():
        return y
    repeats, members, positions, inputs = x.shape
    outputs, rows = len(weight), repeats * positions
    is_aligned = inputs % width == 0
    tiling = tiling or default_tiling(rows, x.dtype, law, aligned=is_aligned)
    block_n = block_size(outputs, tiling.block_n, MIN_BLOCK)
    tiles_n = -(-outputs // block_n)
    arguments = (
        y, x, gemm.weight, *noise_scale(sigma, x), outputs, inputs, positions, rows, *gemm.strides, *counters,
    )  # fmt: skip
    options = {
        "LAW": law,
        "WIDTH": width,
        "ALIGNED": is_aligned,
        "ACC": accumulator_dtype(x.dtype),
        "PRECISION": input_precision(x.dtype),
        "BLOCK_N": block_n,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    with torch.cuda.device_of(x):
        if isinstance(tiling, FewRowsTiling):
            tile_rows = block_size(rows, tiling.rows)
            tile_members = tiling.block_m // tile_rows
            member_tiles = -(-members // tile_members)
            few_rows_kernel[grid_of(tiles_n, member_tiles, -(-rows // tile_rows))](
                *arguments, members, member_tiles, tiles_n, **options,
                ROWS=tile_rows, MEMBERS=tile_members,
                LINES=max(1, block_n // tiling.line), CALLS=block_size(-(-inputs // width), tiling.calls),
                BLOCK_K=block_size(inputs, tiling.block_k, MIN_BLOCK),
            )  # fmt: skip
        else:
            block_m = block_size(rows, tiling.block_m, MIN_BLOCK)
            tiles_m = -(-rows // block_m)
            many_rows_kernel[grid_of(tiles_n, tiles_m, members)](
                *arguments, tiles_m, tiles_n, **options, BLOCK_M=block_m,
                BLOCK_K=block_size(inputs, tiling.block_k, max(MIN_BLOCK, width)),
            )  # fmt: skip
    return y


MAX_MEMBERS = 2**14
"""Largest number of members in a launch; results of several launches are added."""

CALLS: Mapping[Law, int] = {"normal": 256, "uniform": 256, "sign": 128}
"""Philox calls in a tile of a sum: one or two for each thread.

With signs each thread has 128 sums in registers.
"""


@triton.jit(do_not_specialize=[*COUNTERS, "members", "part_members"])
def noise_sum_kernel(  # noqa: PLR0915  three laws
    out, utilities, key0, key1, layer, draw, first_member, members, part_members, elements, tiles,
    LAW: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Write the weighted sum of ``part_members`` members' noise to ``out`` [parts, elements].

    A program sums the values of CALLS Philox calls; the grid is tiles of elements times parts of the members.
    """
    pid = tl.program_id(0).to(tl.int64)
    pid_part = pid // tiles
    first = ((pid % tiles) * CALLS + tl.arange(0, CALLS)) * WIDTH
    seed, layer, draw = seed_of(key0, key1), as_uint32(layer), as_uint32(draw)
    start = as_uint32(first_member)
    end = tl.minimum((pid_part + 1) * part_members, members)
    out += pid_part * elements
    if LAW == "sign":
        # Each thread has a call, whose bits are rows: threads exchange no values. A set bit is +1 but
        # negates, hence the subtractions.
        bit = tl.arange(0, 32)[:, None]
        shift = (31 - bit).to(tl.uint32)
        s0 = tl.zeros((32, CALLS), dtype=ACC)
        s1 = tl.zeros((32, CALLS), dtype=ACC)
        s2 = tl.zeros((32, CALLS), dtype=ACC)
        s3 = tl.zeros((32, CALLS), dtype=ACC)
        for member in range(pid_part * part_members, end):
            counter = (start + member).to(tl.uint32)
            utility = tl.load(utilities + member).to(ACC)
            r0, r1, r2, r3 = four_words(seed, first, counter, layer, draw, ALIGNED=True)
            s0 -= flip_by_high_bit(utility, r0[None, :] << shift)
            s1 -= flip_by_high_bit(utility, r1[None, :] << shift)
            s2 -= flip_by_high_bit(utility, r2[None, :] << shift)
            s3 -= flip_by_high_bit(utility, r3[None, :] << shift)
        offsets = first[None, :] + bit
        tl.store(out + offsets, s0, mask=offsets < elements)
        tl.store(out + offsets + 32, s1, mask=offsets + 32 < elements)
        tl.store(out + offsets + 64, s2, mask=offsets + 64 < elements)
        tl.store(out + offsets + 96, s3, mask=offsets + 96 < elements)
    elif LAW == "uniform":
        # As for signs, each thread has a call, whose bytes are rows.
        byte = tl.arange(0, 4)[:, None]
        shift = (24 - byte * 8).to(tl.uint32)
        s0 = tl.zeros((4, CALLS), dtype=ACC)
        s1 = tl.zeros((4, CALLS), dtype=ACC)
        s2 = tl.zeros((4, CALLS), dtype=ACC)
        s3 = tl.zeros((4, CALLS), dtype=ACC)
        for member in range(pid_part * part_members, end):
            counter = (start + member).to(tl.uint32)
            utility = tl.load(utilities + member).to(ACC)
            r0, r1, r2, r3 = four_level_words(seed, first, counter, layer, draw, ALIGNED=True)
            # The stream rounds its values to the weight's dtype.
            s0 += level_of(r0[None, :] << shift).to(utilities.dtype.element_ty).to(ACC) * utility
            s1 += level_of(r1[None, :] << shift).to(utilities.dtype.element_ty).to(ACC) * utility
            s2 += level_of(r2[None, :] << shift).to(utilities.dtype.element_ty).to(ACC) * utility
            s3 += level_of(r3[None, :] << shift).to(utilities.dtype.element_ty).to(ACC) * utility
        offsets = first[None, :] + byte
        tl.store(out + offsets, s0, mask=offsets < elements)
        tl.store(out + offsets + 4, s1, mask=offsets + 4 < elements)
        tl.store(out + offsets + 8, s2, mask=offsets + 8 < elements)
        tl.store(out + offsets + 12, s3, mask=offsets + 12 < elements)
    else:
        s0 = tl.zeros((CALLS,), dtype=ACC)
        s1 = tl.zeros((CALLS,), dtype=ACC)
        s2 = tl.zeros((CALLS,), dtype=ACC)
        s3 = tl.zeros((CALLS,), dtype=ACC)
        for member in range(pid_part * part_members, end):
            counter = (start + member).to(tl.uint32)
            utility = tl.load(utilities + member).to(ACC)
            n0, n1, n2, n3 = four_normals(seed, first, counter, layer, draw, ALIGNED=True)
            # The stream rounds its values to the weight's dtype.
            s0 += n0.to(utilities.dtype.element_ty).to(ACC) * utility
            s1 += n1.to(utilities.dtype.element_ty).to(ACC) * utility
            s2 += n2.to(utilities.dtype.element_ty).to(ACC) * utility
            s3 += n3.to(utilities.dtype.element_ty).to(ACC) * utility
        offsets = (pid % tiles) * CALLS * 4 + tl.arange(0, CALLS * 4)
        tl.store(out + offsets, interleave(s0, s1, s2, s3), mask=offsets < elements)


def noise_sum(
    draw: Draw, utilities: Tensor, elements: int, law: Law = "normal", *, calls: int | None = None
) -> Tensor:
    """Sum utilities[m] * E_m over members, [elements] in float32, or in float64 if utilities are.

    E_m has the first elements of the member's draw, rounded to the dtype of the utilities: the values that
    :func:`~impls.kernels.philox.fill` writes. Only the sum is stored. The order of additions follows from the
    sizes alone: members of a part one after another, then parts, then launches of 2^14 members. So the bits
    are the same every time and for every ``calls``. For m members:

    * bytes: 4 written for each element, and 4 for each part of the members where elements are too few to fill
      a GPU; utilities are read from a cache.
    * Philox calls: m / 4 for each element, at about 1e12 normals a second; m / 16 of levels; m / 128 of
      signs, and three operations for each sign.

    Args:
        draw: the noise, of one member for each utility.
        utilities: [m], floating.
        elements: number of elements of a member's noise.
        law: the distribution of the noise.
        calls: Philox calls in a tile, a power of two, by default CALLS.

    Raises:
        ValueError: utilities do not match the members, or the counter of a member or an element exceeds 32
            bits.
    """
    width = VALUES_PER_CALL[law]
    draw.arguments(utilities.numel(), elements, width)
    dtype = torch.promote_types(utilities.dtype, torch.float32)
    total = torch.zeros(elements, device=utilities.device, dtype=dtype)
    if not elements:
        return total
    calls = calls or CALLS[law]
    tiles = -(-elements // (calls * width))
    # The parts of a sum do not depend on ``calls``, so neither do its bits.
    default_tiles = -(-elements // (CALLS[law] * width))
    for start in range(0, len(utilities), MAX_MEMBERS):
        piece = utilities[start : start + MAX_MEMBERS].contiguous()
        counters = draw._replace(members=draw.members[start : start + MAX_MEMBERS]).arguments(
            len(piece), elements, width
        )
        parts, part_members = member_parts(len(piece), default_tiles)
        out = torch.empty(parts, elements, device=utilities.device, dtype=dtype)
        with torch.cuda.device_of(utilities):
            noise_sum_kernel[grid_of(tiles, parts)](
                out, piece, *counters, len(piece), part_members, elements, tiles,
                LAW=law, WIDTH=width, ACC=accumulator_dtype(utilities.dtype), CALLS=calls,
            )  # fmt: skip
        total += out[0] if parts == 1 else out.sum(0)
    return total


class AbstractFusedRegenerated(AbstractFused[StreamNoise]):
    """Dense noise drawn in the kernels of forward and update."""

    @property
    @abstractmethod
    def law(self) -> Law:
        """The distribution of the entries."""

    @property
    @override
    def stream(self) -> str:
        return "philox"

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: StreamNoise, sigma: float | Tensor, y: Tensor) -> None:
        dense_rng_product(x, weight, draw_of(noise.stream, "dense"), sigma, y, law=self.law)

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        draw = draw_of(noise.stream, "dense")
        total = noise_sum(draw, utilities, noise.shape.numel(), self.law)
        return total.view(noise.shape).to(utilities.dtype)


@variant(values="uniform", source="FusedRegenerated, with entries made of a random byte each")
@variant(source="Salimans et al. 2017, arXiv:1703.03864, with noise drawn in the kernels; those are ours")
@dataclass(frozen=True)
class FusedRegenerated(AbstractFusedRegenerated):
    """:class:`~impls.schemes.regenerated.Regenerated` in one kernel for the forward and one for the update.

    Drawn normals differ from the stream's by a few float32 roundings, so float64 is refused; uniform entries
    are the stream's in every dtype.

    Memory    nothing: noise stays in the registers that it is drawn in.
    Work      same as the wrapped scheme. Drawing bounds the time: n o i normals, at 1e12 a second, in the
              forward for each block of a member's rows, and in the update. Uniform entries take a fourth
              of the instructions.
    Quality   same as the wrapped scheme.
    """

    PLAIN = Regenerated

    values: Literal["normal", "uniform"] = "normal"

    @property
    @override
    def law(self) -> Law:
        return self.values

    @property
    @override
    def dtypes(self) -> frozenset[torch.dtype]:
        return NARROW if self.values == "normal" else DOT_DTYPES


@variant(source="FusedRegenerated, with the cheapest entries of unit variance")
@dataclass(frozen=True)
class FusedRegeneratedSign(AbstractFusedRegenerated):
    """:class:`~impls.schemes.regenerated.RegeneratedSign` in kernels, as :class:`FusedRegenerated`.

    Memory    nothing.
    Work      same as the wrapped scheme. A Philox call draws 128 signs, so the time is bounded by three
              operations for each sign and row.
    Quality   same as the wrapped scheme.
    """

    PLAIN = RegeneratedSign

    @property
    @override
    def law(self) -> Law:
        return "sign"
