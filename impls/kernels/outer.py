"""Weighted sum of members' outer products: the update of low-rank, flipped and Hadamard noise.

out[o, i] = sum_n c_n L[n, o] R[n, i] is a product of two matrices over members. Tiles of one of them are
multiplied by the utilities as they are loaded. The sum may be multiplied by a core, or by the signs of a
Hadamard matrix.
"""

import math

import torch
from torch import Tensor

from impls.kernels.gemm import (
    DOT_DTYPES,
    accumulator_dtype,
    can_begin_early,
    describe,
    grid_of,
    operand,
    tile_index,
)
from impls.kernels.optional_triton import TensorDescriptor, tl, triton
from impls.kernels.tiling import Tiling, block_size, find_tuned_tiling, input_precision

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=4)
"""Default tile sizes for a 16-bit dtype, with one program on each multiprocessor."""

SIGNS_TILING = Tiling(block_m=64, block_n=128, block_k=64, group_m=8, num_warps=4, num_stages=3, programs=2)
"""Those for int8: one program on a multiprocessor unpacks signs while another one multiplies."""

ENOUGH_PROGRAMS = 128
"""A sum is split over members up to this many times :attr:`Tiling.programs`: for each multiprocessor."""

FEWEST_ROWS = 256
"""Smallest number of rows of a part of a split sum: enough for the pipeline of loads."""

STEP = 128
"""Parts have a multiple of this many rows, the largest BLOCK_K."""

MAX_ELEMENTS = 1024
"""Largest number of elements in a tile of :func:`add_parts_kernel`."""


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
def multiply_signs(words, values):
    """Multiply rows of signs, four bytes to an int32 of words [k, n], by values [k] of 16 bits: [k, 4 n].

    The signs of a word come in the order 0, 2, 1, 3, because three instructions then make four values.
    """
    bits = values.to(tl.uint16, bitcast=True).to(tl.uint32)
    bits = (bits | (bits << 16))[:, None]
    words = words.to(tl.uint32, bitcast=True)
    pairs = tl.join(((words << 8) & 0x80008000) ^ bits, (words & 0x80008000) ^ bits)
    products = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return products.to(values.dtype, bitcast=True).reshape(words.shape[0], 4 * words.shape[1])


@triton.jit
def load_weighted(
    rows, stride, start, start_n, mask_k, width, values, DESCRIPTORS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Load rows from ``start`` on, BLOCK_N of their ``width`` columns, and multiply them by ``values`` [k].

    With DESCRIPTORS ``rows`` is a descriptor, one of int32 for :func:`multiply_signs`, and not masked.
    """
    if DESCRIPTORS and rows.dtype == tl.int32:
        return multiply_signs(rows.load([start, start_n // 4]), values)
    else:  # noqa: RET505  the compiler takes no early return here
        if DESCRIPTORS:
            tile = rows.load([start, start_n])
        else:
            offs_n = start_n.to(tl.int64) + tl.arange(0, BLOCK_N)
            row = rows + (start + tl.arange(0, values.shape[0])).to(tl.int64) * stride
            mask = mask_k[:, None] & (offs_n < width)[None, :]
            tile = tl.load(row[:, None] + offs_n[None, :], mask=mask, other=0)
        # Rounded once to the dtype of the product, as a weighted copy in memory would be.
        return tile.to(values.dtype) * values[:, None]


@triton.jit
def weighted_outer_kernel(
    out, left, right, utilities, core, factor,
    rows, outputs, inputs, ranks, part_rows, stride_l, stride_r, tiles_m, tiles_n,
    HADAMARD: tl.constexpr, DESCRIPTORS: tl.constexpr, EARLY: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum ``part_rows`` rows for a tile of ``out`` [parts, o, i]; the grid is tiles times parts.

    Arguments are those of :func:`load_weighted`.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid_m, pid_n = tile_index(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    start_m, start_n = pid_m * BLOCK_M, pid_n * BLOCK_N
    offs_m = start_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = start_n.to(tl.int64) + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < outputs, offs_n < inputs
    begin = tl.program_id(1) * part_rows
    end = min(begin + part_rows, rows)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    ones = tl.full((BLOCK_K,), 1, utilities.dtype.element_ty)
    for start in range(begin, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < end
        utility = tl.load(utilities + offs_k // ranks, mask=mask_k, other=0)
        a = load_weighted(left, stride_l, start, start_m, mask_k, outputs, utility, DESCRIPTORS, BLOCK_M)
        b = load_weighted(right, stride_r, start, start_n, mask_k, inputs, ones, DESCRIPTORS, BLOCK_N)
        acc = tl.dot(tl.trans(a), b, acc=acc, out_dtype=ACC, input_precision=PRECISION)
    # The order of packed signs, 0, 2, 1, 3, becomes that of the sum.
    if DESCRIPTORS and left.dtype == tl.int32:
        acc = acc.reshape(BLOCK_M // 4, 2, 2, BLOCK_N).permute(0, 2, 1, 3).reshape(BLOCK_M, BLOCK_N)
    if DESCRIPTORS and right.dtype == tl.int32:
        acc = acc.reshape(BLOCK_M, BLOCK_N // 4, 2, 2).permute(0, 1, 3, 2).reshape(BLOCK_M, BLOCK_N)
    mask = mask_m[:, None] & mask_n[None, :]
    offsets = offs_m[:, None] * inputs + offs_n[None, :]
    if core is not None:
        acc *= tl.load(core + offsets, mask=mask, other=0).to(ACC)
    if HADAMARD:
        sign = hadamard_sign(offs_m.to(tl.int32)[:, None], offs_n.to(tl.int32)[None, :])
        acc = tl.where(sign < 0, -acc, acc)
    out += tl.program_id(1).to(tl.int64) * outputs * inputs
    tl.store(out + offsets, (acc * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_parts_kernel(out, parts, count, size, EARLY: tl.constexpr, ACC: tl.constexpr, ELEMENTS: tl.constexpr):
    """Add parts [count, size] in their order; the grid is tiles of elements."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = element < size
    acc = tl.zeros((ELEMENTS,), dtype=ACC)
    for part in range(count):
        acc += tl.load(parts + tl.cast(part, tl.int64) * size + element, mask=mask, other=0)
    tl.store(out + element, acc.to(out.dtype.element_ty), mask=mask)


def split_rows(rows: int, outputs: int, inputs: int, default: Tiling) -> tuple[int, int]:
    """Return (parts, rows of a part) of a sum.

    They follow from the sizes and the default tiles, so that a sum with other tiles adds the same parts.
    """
    tile = default.clip(outputs, inputs, rows)
    tiles = -(-outputs // tile.block_m) * -(-inputs // tile.block_n)
    parts = max(1, min(ENOUGH_PROGRAMS * default.programs // tiles, rows // FEWEST_ROWS))
    part_rows = math.ceil(rows / parts / STEP) * STEP
    return -(-rows // part_rows), part_rows


def is_packed(rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether :func:`multiply_signs` unpacks these rows [n, c] for a product of a dtype."""
    return rows.dtype is torch.int8 and dtype.itemsize == 2 and rows.shape[1] % 4 == 0  # noqa: PLR2004  bytes


def describe_rows(rows: Tensor, dtype: torch.dtype, block_k: int, columns: int) -> TensorDescriptor | None:
    """Return a descriptor of rows [n, c], of words of four packed signs; None where they have none."""
    described = describe(rows, block_k, columns)
    if described is None or not is_packed(rows, dtype):
        return described
    return describe(rows.view(torch.int32), block_k, columns // 4)


def weighted_outer(
    left: Tensor,
    right: Tensor,
    utilities: Tensor,
    core: Tensor | None = None,
    *,
    hadamard: bool = False,
    factor: float = 1.0,
    is_part: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Sum outer products of rows by their members' utilities, c_m L[n, o] R[n, i]: [o, i].

    With a core C the sum is multiplied by C[o, i], with ``hadamard`` by (-1)^popcount(o & i), in registers.
    Sums are float32, or float64 for float64. Where there are fewer tiles than multiprocessors, rows are split
    into parts, whose number follows from the sizes alone. So the same tiles give the same bits every time.

    For N rows with e bytes per number:

    * bytes: N e (o + i), read again from a cache for each tile of the other axis; the result; the core. With
      P > 1 parts another 8 P o i.
    * flops: 2 N o i on tensor cores, and a multiplication for each number of a tile of L.

    Args:
        left: [n, o], signs +1 and -1 of int8, or numbers of the dtype of the utilities.
        right: [n, i], likewise.
        utilities: [m], each of n / m adjacent rows; the sum has their dtype.
        core: [o, i] of the dtype of the utilities.
        hadamard: whether to multiply by entries of a Hadamard matrix.
        factor: multiplies the sum.
        is_part: whether to return float32, or float64 for float64, because the caller adds further sums.
        tiling: tile sizes, by default tuned ones, :data:`TILING` or :data:`SIGNS_TILING`; ``block_k`` is of
            rows.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    (count, outputs), (members,), dtype = left.shape, utilities.shape, utilities.dtype
    inputs = right.shape[1]
    if len(right) != count or (count % members if members else count):
        raise ValueError(
            f"left and right must have the same number of rows, a multiple of the {members} members, got "
            f"{count} and {len(right)}"
        )
    if dtype not in DOT_DTYPES or not {left.dtype, right.dtype} <= {torch.int8, dtype}:
        raise ValueError(
            "left and right must be int8 or have the floating dtype of the utilities, got "
            f"{left.dtype}, {right.dtype} and {dtype}"
        )
    if core is not None:
        core = operand("core", core, (outputs, inputs), dtype)
    left, right = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (left, right))
    wider = torch.promote_types(torch.float32, dtype)
    out = torch.empty(outputs, inputs, device=left.device, dtype=wider if is_part else dtype)
    if not out.numel():
        return out
    if not count:
        return out.zero_()
    if dtype is torch.float64:
        # A number that is passed to a kernel is float32, and Triton cannot make float64 operands from bytes.
        utilities, factor = utilities * factor, 1.0
        left, right = left.to(dtype), right.to(dtype)
    default = (SIGNS_TILING if is_packed(left, dtype) else TILING).for_dtype(dtype)
    parts, part_rows = split_rows(count, outputs, inputs, default)
    name = "outer products of signs" if left.dtype is torch.int8 else "outer products"
    tiling = tiling or find_tuned_tiling(name, utilities, outputs, inputs, count) or default
    tiling = tiling.clip(outputs, inputs, count)
    row_tiles, column_tiles = -(-outputs // tiling.block_m), -(-inputs // tiling.block_n)
    sums = torch.empty(parts, outputs, inputs, device=left.device, dtype=wider) if parts > 1 else out
    described = [
        describe_rows(rows, dtype, tiling.block_k, columns)
        for rows, columns in ((left, tiling.block_m), (right, tiling.block_n))
    ]
    has_descriptors = None not in described
    early = parts > 1 and can_begin_early(left.device)
    with torch.cuda.device_of(left):
        weighted_outer_kernel[(*grid_of(row_tiles, column_tiles), parts)](
            sums, *(described if has_descriptors else (left, right)), utilities.contiguous(), core, factor,
            count, outputs, inputs, count // members, part_rows,
            left.stride(0), right.stride(0), row_tiles, column_tiles,
            HADAMARD=hadamard, DESCRIPTORS=has_descriptors, EARLY=early,
            ACC=accumulator_dtype(dtype), PRECISION=input_precision(dtype), **tiling.options,
        )  # fmt: skip
        if parts > 1:
            elements = block_size(out.numel(), MAX_ELEMENTS)
            add_parts_kernel[grid_of(-(-out.numel() // elements))](
                out, sums, parts, out.numel(),
                EARLY=early, ACC=accumulator_dtype(dtype), ELEMENTS=elements, launch_pdl=early,
            )  # fmt: skip
    return out


def sum_outer_products(
    weight: torch.Size,
    outputs: Tensor,
    inputs: Tensor,
    utilities: Tensor,
    core: Tensor | None = None,
    *,
    hadamard: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """Sum utilities[m] * outputs[m] inputs[m]^T over members in the shape of a weight.

    See :func:`weighted_outer`.

    Args:
        weight: [1, o, i, *taps], the shape of the sum.
        outputs: [m, 1, o] or, with several ranks, [m, 1, k, o], whose products are added.
        inputs: [m, 1, i, *taps] or [m, 1, k, i, *taps].
        utilities: [m].
        core: multiplies the sum entry by entry, [1, ..., o, i, *taps].
        hadamard: whether to multiply by entries of a Hadamard matrix, for a weight without taps.
        factor: multiplies the sum.
    """
    shape = (weight[1], weight[2:].numel())
    left, right = (values.reshape(-1, width) for values, width in zip((outputs, inputs), shape, strict=True))
    core = None if core is None else core.reshape(shape)
    return weighted_outer(left, right, utilities, core, hadamard=hadamard, factor=factor).view(weight)
