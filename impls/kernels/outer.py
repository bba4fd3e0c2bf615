"""Weighted sum of members' outer products: the update of low-rank, flipped and Hadamard noise.

out[o, i] = sum_n c_n L[n, o] R[n, i] is a product of two matrices over members. Tiles of one of them are
multiplied by the utilities as they are loaded. The sum may be multiplied by a core, or by the signs of a
Hadamard matrix.
"""

import math

import torch
from torch import Tensor

from impls.kernels.gemm import DOT_DTYPES, accumulator_dtype, grid_of, operand, tile_offsets
from impls.kernels.optional_triton import tl, triton
from impls.kernels.tiling import Tiling, block_size, input_precision, tuned

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=4)
"""Default tile sizes for a dtype of 16 bits, with one program on each multiprocessor."""

CORES_TILING = TILING._replace(block_n=64, num_stages=3)
"""The same with several cores: two accumulators, of one core and of all, have to fit in registers."""

ENOUGH_PROGRAMS = 128
"""A sum is split over members up to this many programs: one for each multiprocessor of a GPU."""

FEWEST_ROWS = 256
"""Fewest rows of a part of a split sum: enough for the pipeline of loads."""

STEP = 128
"""Parts have a multiple of this many rows, the largest BLOCK_K."""

MOST_ELEMENTS = 1024
"""Most elements in a tile of :func:`add_parts_kernel`."""


@triton.jit
def hadamard_sign(first, second):
    """Return (-1)^popcount(first & second) of int32, an entry of a Hadamard matrix."""
    bits = first & second
    bits ^= bits >> 16
    bits ^= bits >> 8
    bits ^= bits >> 4
    # 0x6996 is a table of the parity of four bits.
    return 1 - 2 * (0x6996 >> (bits & 15) & 1)


@triton.jit
def member_products(
    left, right, utilities, offs_m, offs_n, begin, end, offset, ranks, cores, stride_l, stride_r,
    outputs, inputs,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum the outer products of rows ``begin`` to ``end`` of a core's members: a tile [m, n]."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for start in range(begin, end, BLOCK_K):
        step = start + tl.arange(0, BLOCK_K)
        there = step < end
        member = offset + (step // ranks) * cores
        n = (member * ranks + step % ranks).to(tl.int64)
        utility = tl.load(utilities + member, mask=there, other=0)
        mine = tl.load(
            left + n[:, None] * stride_l + offs_m[None, :],
            mask=there[:, None] & (offs_m < outputs)[None, :],
            other=0,
        )
        other = tl.load(
            right + n[:, None] * stride_r + offs_n[None, :],
            mask=there[:, None] & (offs_n < inputs)[None, :],
            other=0,
        )
        # Rounded once to the dtype of the product, as a weighted copy in memory would be.
        weighted = mine.to(utility.dtype) * utility[:, None]
        acc = tl.dot(
            tl.trans(weighted), other.to(utility.dtype), acc=acc, out_dtype=ACC, input_precision=PRECISION
        )
    return acc


@triton.jit
def weighted_outer_kernel(
    out, left, right, utilities, core, factor,
    members, outputs, inputs, ranks, cores, first, part, stride_l, stride_r, tiles_m, tiles_n,
    HADAMARD: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum a part of each core's rows for one tile; the grid is tiles times parts, out [parts, o, i]."""
    offs_m, offs_n = tile_offsets(tiles_m, tiles_n, GROUP_M, BLOCK_M, BLOCK_N)
    begin = tl.program_id(1) * part
    if core is not None:
        mask = (offs_m < outputs)[:, None] & (offs_n < inputs)[None, :]
        at = core + offs_m[:, None] * inputs + offs_n[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for own in range(cores):
            # Members take cores in turn; ``first`` is the core of the first member.
            offset = (own + cores - first) % cores
            end = min(begin + part, (members - offset + cores - 1) // cores * ranks)
            acc = member_products(
                left, right, utilities, offs_m, offs_n, begin, end, offset, ranks, cores, stride_l, stride_r,
                outputs, inputs, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            shared = tl.load(at + tl.cast(own, tl.int64) * outputs * inputs, mask=mask, other=0)
            total += acc * shared.to(ACC)
    else:
        total = member_products(
            left, right, utilities, offs_m, offs_n, begin, min(begin + part, members * ranks), 0, ranks, 1,
            stride_l, stride_r, outputs, inputs, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if HADAMARD:
        sign = hadamard_sign(offs_m.to(tl.int32)[:, None], offs_n.to(tl.int32)[None, :])
        total = tl.where(sign < 0, -total, total)
    mask = (offs_m < outputs)[:, None] & (offs_n < inputs)[None, :]
    out += tl.program_id(1).to(tl.int64) * outputs * inputs
    total = (total * factor).to(out.dtype.element_ty)
    tl.store(out + offs_m[:, None] * inputs + offs_n[None, :], total, mask=mask)


@triton.jit
def add_parts_kernel(out, parts, count, size, ACC: tl.constexpr, ELEMENTS: tl.constexpr):
    """Add parts [count, size] in their order; the grid is tiles of elements."""
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask_m = element < size
    acc = tl.zeros((ELEMENTS,), dtype=ACC)
    for part in range(count):
        acc += tl.load(parts + tl.cast(part, tl.int64) * size + element, mask=mask_m, other=0)
    tl.store(out + element, acc.to(out.dtype.element_ty), mask=mask_m)


def weighted_outer(
    left: Tensor,
    right: Tensor,
    utilities: Tensor,
    core: Tensor | None = None,
    *,
    hadamard: bool = False,
    factor: float = 1.0,
    first: int = 0,
    is_part: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Sum outer products of rows by their members' utilities, c_m L[n, o] R[n, i]: [o, i].

    With a core C the sum is multiplied by C[o, i], with ``hadamard`` by (-1)^popcount(o & i), in registers.
    Sums are float32, or float64 for float64. Where there are fewer tiles than multiprocessors, members are
    split into parts, whose number follows from the sizes alone. So the same tiles give the same bits every
    time.

    For N rows with e bytes per number:

    * bytes: N e (o + i), read again from a cache for each tile of the other axis; the result; cores. With P >
      1 parts another 8 P o i.
    * flops: 2 N o i on matrix units, and a multiplication for each number of a tile of L.

    Args:
        left: [n, o], int8 or the dtype of the utilities.
        right: [n, i], likewise.
        utilities: [m], each of n / m adjacent rows; the sum has their dtype.
        core: [cores, o, i], of which member j has core (first + j) modulo their number.
        hadamard: whether to multiply by entries of a Hadamard matrix.
        factor: what the sum is multiplied by.
        first: the core of the first member.
        is_part: whether to return the sum in float32, or float64, because others will be added to it.
        tiling: tile sizes, by default tuned ones, :data:`TILING` or :data:`CORES_TILING`; ``block_k`` is of
            rows.

    Raises:
        ValueError: shapes or dtypes do not match.

    """
    (count, outputs), (members,), dtype = left.shape, utilities.shape, utilities.dtype
    inputs = right.shape[1]
    if len(right) != count or (count % members if members else count):
        message = f"L and R must have the same multiple of {members} rows, got {count} and {len(right)}"
        raise ValueError(message)
    if dtype not in DOT_DTYPES or not {left.dtype, right.dtype} <= {torch.int8, dtype}:
        message = f"L and R must be int8 or a floating {dtype}, got {left.dtype} and {right.dtype}"
        raise ValueError(message)
    cores = 1 if core is None else len(core)
    if core is not None:
        core = operand("core", core, (cores, outputs, inputs), dtype)
    left, right = (one if one.stride(1) == 1 else one.contiguous() for one in (left, right))
    wider = torch.promote_types(torch.float32, dtype)
    out = torch.empty(outputs, inputs, device=left.device, dtype=wider if is_part else dtype)
    if not out.numel():
        return out
    if not count:
        return out.zero_()
    if dtype is torch.float64:
        # A number that is passed to a kernel is float32, and Triton cannot make float64 operands from bytes.
        utilities, factor = utilities * factor if factor != 1 else utilities, 1.0
        left, right = left.to(dtype), right.to(dtype)
    ranks = count // members
    default = (TILING if cores == 1 else CORES_TILING.keep_warps(dtype)).for_dtype(dtype)
    depth = -(-members // cores) * ranks
    # From sizes alone, so that other tiles have the same parts.
    enough = default.clipped(outputs, inputs, count)
    tiles = -(-outputs // enough.block_m) * -(-inputs // enough.block_n)
    parts = max(1, min(ENOUGH_PROGRAMS // tiles, depth // FEWEST_ROWS))
    part = math.ceil(depth / parts / STEP) * STEP
    parts = -(-depth // part)
    name = "outer products of signs" if left.dtype is torch.int8 else "outer products"
    tiling = tiling or tuned(name, utilities, outputs, inputs, count, cores) or default
    tiling = tiling.clipped(outputs, inputs, count)
    row_tiles, column_tiles = -(-outputs // tiling.block_m), -(-inputs // tiling.block_n)
    sums = out
    if parts > 1:
        sums = torch.empty(parts, outputs, inputs, device=left.device, dtype=wider)
    with torch.cuda.device_of(left):
        weighted_outer_kernel[(*grid_of(row_tiles, column_tiles), parts)](
            sums, left, right, utilities.contiguous(), core, factor,
            members, outputs, inputs, ranks, cores, first % cores, part,
            left.stride(0), right.stride(0), row_tiles, column_tiles,
            HADAMARD=hadamard, ACC=accumulator_dtype(dtype),
            PRECISION=input_precision(dtype), **tiling.options,
        )  # fmt: skip
        if parts > 1:
            elements = block_size(out.numel(), MOST_ELEMENTS)
            add_parts_kernel[grid_of(-(-out.numel() // elements))](
                out, sums, parts, out.numel(), ACC=accumulator_dtype(dtype), ELEMENTS=elements
            )
    return out


def summed(
    weight: torch.Size,
    outputs: Tensor,
    inputs: Tensor,
    utilities: Tensor,
    core: Tensor | None = None,
    *,
    hadamard: bool = False,
    factor: float = 1.0,
    first: int = 0,
) -> Tensor:
    """Sum utilities[m] * outputs[m] inputs[m]^T over members in one kernel, times shared factors.

    It is the update of low-rank noise; with a core that of flips on both sides, with ``hadamard`` that of a
    Hadamard matrix between signs.

    Args:
        weight: [1, o, i, *taps], the shape of the sum.
        outputs: [m, 1, o] or, with several ranks, [m, 1, k, o]: int8 or the dtype of the utilities.
        inputs: [m, 1, i, *taps] or [m, 1, k, i, *taps], likewise.
        utilities: [m]; the sum has their dtype.
        core: [1, o, i, *taps] or [cores, 1, o, i, *taps], which members take in turn.
        hadamard: whether to multiply by (-1)^popcount(o & i), for a weight without taps.
        factor: what the sum is multiplied by.
        first: index of the first member in the population: member j has core j modulo their number.

    """
    shape = (weight[1], weight[2:].numel())
    left, right = (values.reshape(-1, width) for values, width in zip((outputs, inputs), shape, strict=True))
    if core is not None:
        core = core.reshape(-1, *shape)
    total = weighted_outer(left, right, utilities, core, hadamard=hadamard, factor=factor, first=first)
    return total.view(weight)
