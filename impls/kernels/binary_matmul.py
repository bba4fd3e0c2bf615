"""Products of packed bits: by popcount for few rows of each member, and on int8 tensor cores for many.

Bit 1 is +1 and bit 0 is -1, lowest bits first, in words of int64. Kernels read the halves of a word, low and
high, as adjacent int32 words, so that a row of a weight [m, K, o] has 2 o of them. Bits after the last one,
of all words or of each tap, must be 0 in all arguments, and are 0 in results.
"""

from typing import Any

import torch
from torch import Tensor

from impls.kernels.gemm import grid_of
from impls.kernels.optional_triton import tl, triton
from impls.kernels.tiling import block_size

HALVES = tl.constexpr(2)
"""Halves of 32 bits in a word."""


@triton.jit
def popcount(x):
    """Count set bits of uint32, in steps that LLVM compiles to one POPC."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_words(pointers, mask):
    """Load int32 words as uint32, 0 where the mask is false."""
    return tl.load(pointers, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def member_tile(tiles_n, tiles_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (member, offs_m, offs_n) of this program in int64; tiles of columns are adjacent programs."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = (pid // tiles_n % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    return pid // tiles_n // tiles_m, offs_m, offs_n


@triton.jit
def scale_sums(sums, length, DTYPE: tl.constexpr):
    """Convert int32 sums to DTYPE; for a floating DTYPE divide them by sqrt(length)."""
    if tl.int32 == DTYPE:
        return sums
    elif tl.float64 == DTYPE:  # noqa: RET505  Triton needs both branches
        return sums.to(tl.float64) / tl.sqrt(tl.cast(length, tl.float64))
    else:
        # Rounded like torch's division on a CPU: outputs near a threshold then give the same bits.
        return tl.div_rn(sums.to(tl.float32), tl.sqrt_rn(tl.cast(length, tl.float32))).to(DTYPE)


def halves(words: Tensor) -> Tensor:
    """View packed words of int64 as int32, contiguous for each member; a member axis of stride 0 is kept."""
    if words.stride(0) == 0 and len(words) > 1:
        return halves(words[:1]).expand(len(words), *[-1] * (words.dim() - 1))
    # Flattened, because an axis of one word may have a stride with which view(dtype) fails.
    flat = words.contiguous().view(-1).view(torch.int32)
    return flat.view(*words.shape[:-1], 2 * words.shape[-1])


POPCOUNT_BLOCK_M = 4
"""Rows in a tile of a product by popcount."""

POPCOUNT_BLOCK_N = 512
"""Words of 32 bits in a row of the tile: four for each of 128 threads."""

POPCOUNT_BLOCK_K = 8
"""Rows of a weight's words that are loaded at a time."""


@triton.jit
def bit_product_kernel(
    out, x, weights, length, rows, depth, outputs, x_stride, weight_stride, tiles_n, tiles_m,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply bits by popcount; the grid is tiles of columns times tiles of rows times members.

    A member's x is [rows, depth * HALVES], its weights are [depth, outputs * HALVES] in words of 32 bits.
    """
    member, offs_m, offs_half = member_tile(tiles_n, tiles_m, BLOCK_M, BLOCK_N)
    x += member * x_stride
    weights += member * weight_stride
    width = outputs * HALVES
    counts = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    row_offsets = offs_m[:, None] * depth * HALVES
    # 0 for low and 1 for high halves: constant in each register, because a thread has whole words.
    half = (tl.arange(0, BLOCK_N) % HALVES)[None, None, :]
    for start in range(0, depth, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_x = (offs_m[:, None] < rows) & (offs_k < depth)[None, :]
        low = load_words(x + row_offsets + offs_k[None, :] * HALVES, mask_x)[:, :, None]
        high = load_words(x + row_offsets + offs_k[None, :] * HALVES + 1, mask_x)[:, :, None]
        x_half = tl.where(half == 1, high, low)
        mask_weight = (offs_k < depth)[None, :, None] & (offs_half < width)[None, None, :]
        offsets = offs_k.to(tl.int64)[None, :, None] * width + offs_half[None, None, :]
        counts += tl.sum(popcount(x_half ^ load_words(weights + offsets, mask_weight)), axis=1)
    # Both halves of a word belong to the same output.
    counts = tl.sum(counts.reshape(BLOCK_M, BLOCK_N // HALVES, HALVES), axis=2)
    start_n = (tl.program_id(0) % tiles_n).to(tl.int64) * (BLOCK_N // HALVES)
    offs_n = start_n + tl.arange(0, BLOCK_N // HALVES)
    offsets = (member * rows + offs_m[:, None]) * outputs + offs_n[None, :]
    y = scale_sums(length - 2 * counts, length, out.dtype.element_ty)
    tl.store(out + offsets, y, mask=(offs_m[:, None] < rows) & (offs_n[None, :] < outputs))


def bit_product(x: Tensor, weights: Tensor, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Multiply each member's rows of +1 and -1 by its weights: [m, p, o].

    y = length - 2 sum_K popcount(x ^ w), divided by the square root of the length for a floating dtype. For K
    words of 32 bits in a column and outputs of e bytes:

    * bytes: for each member 4 K o, read again from a cache for every four rows, 4 K p, and e p o written. For
      1024 members with one row and a weight of 1024 x 1024 this is 139 MB in float32, 32 us of an H200's
      memory.
    * operations: exclusive or, popcount and addition, K o p of each for a member. POPC has at most a quarter
      of the others' rate: 9 us for the same population and each row.

    Args:
        x: [m, p, K] words of int64.
        weights: [m, K, o] likewise, o contiguous. The member axis of either may be expanded.
        length: number of bits that are summed.
        dtype: of the product: int32 for the sums, or floating for sums divided by the square root of the
            length.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    width = 2 * weights.shape[-1]
    block_m, block_n = block_size(x.shape[1], POPCOUNT_BLOCK_M), block_size(width, POPCOUNT_BLOCK_N, 32)
    tiling = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": POPCOUNT_BLOCK_K}
    return _launch(bit_product_kernel, x, weights, length, dtype, width, tiling)


INT8_MIN_BLOCK_M = 16
"""Minimum number of rows in a tile of a product on tensor cores."""

INT8_BLOCK_M = 128
"""Most rows in the tile."""

INT8_BLOCK_N = 128
"""Most columns of words in the tile."""


def int8_shape(rows: int) -> tuple[int, int]:
    """Return BLOCK_K (a number of words) and the number of warps for a tile of ``rows`` rows.

    Each thread then unpacks whole words of both operands, and has registers for its part of the product.
    """
    return max(4, 128 // rows), 8 if rows == INT8_BLOCK_M else 4


@triton.jit
def _unpack_signs(words, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Unpack words [SIZE, BLOCK_K] to +1 and -1, int8 [SIZE, BLOCK_K * 32], in the same order in all words.

    A register holds bits b, b + 8, b + 16 and b + 24 of a word. Splitting it into bytes and joining them
    keeps that order, so the compiler removes both.
    """
    bits = tl.join(words, words >> 1)
    bits = tl.join(bits, bits >> 2)
    bits = tl.join(bits, bits >> 4)
    # In each byte 255 for bit 0 and 1 for bit 1; no byte borrows from the next.
    signs = 0xFFFFFFFF - (bits & 0x01010101) * 0xFE
    signs = tl.join(tl.join(signs, signs >> 16), tl.join(signs >> 8, signs >> 24))
    return signs.to(tl.int8).reshape(SIZE, BLOCK_K * 32)


@triton.jit
def int8_product_kernel(
    out, x, weights, length, rows, depth, outputs, x_stride, weight_stride, tiles_n, tiles_m,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply bits on tensor cores; the grid is tiles of columns times tiles of rows times members.

    Operands are those of :func:`bit_product_kernel`. Tiles of y are transposed, [BLOCK_N, BLOCK_M].
    """
    member, offs_m, offs_n = member_tile(tiles_n, tiles_m, BLOCK_M, BLOCK_N)
    x += member * x_stride
    weights += member * weight_stride
    mask_m, mask_n = offs_m < rows, offs_n < outputs
    row_offsets = offs_m[:, None] * depth * HALVES
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    for start in range(0, depth * HALVES, BLOCK_K):
        # Halves of words: half k is in word k // HALVES.
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < depth * HALVES)[None, :]
        word_offsets = (offs_k // HALVES).to(tl.int64)[None, :] * outputs + offs_n[:, None]
        offsets = word_offsets * HALVES + (offs_k % HALVES)[None, :]
        weight_words = load_words(weights + offsets, mask_k & mask_n[:, None])
        weight_signs = _unpack_signs(weight_words, BLOCK_N, BLOCK_K)
        x_words = load_words(x + row_offsets + offs_k[None, :], mask_k & mask_m[:, None])
        x_signs = _unpack_signs(x_words, BLOCK_M, BLOCK_K)
        y = tl.dot(weight_signs, tl.trans(x_signs), acc=y, out_dtype=tl.int32)
    # Padding bits are 0 in both operands: each was counted as (-1) * (-1) = 1.
    padding = tl.cdiv(depth * HALVES, BLOCK_K) * BLOCK_K * 32 - length
    offsets = (member * rows + offs_m[None, :]) * outputs + offs_n[:, None]
    y = scale_sums(y - padding, length, out.dtype.element_ty)
    tl.store(out + offsets, y, mask=mask_m[None, :] & mask_n[:, None])


def int8_product(x: Tensor, weights: Tensor, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Multiply as :func:`bit_product`, for many rows of a member: [m, p, o].

    The kernel unpacks bits to +1 and -1 of int8 in registers. For K words of 32 bits in a column and outputs
    of e bytes:

    * bytes: 4 K o for each member and tile of 128 rows, 4 K p for each tile of 128 outputs, and e p o
      written.
    * operations: 64 K o p of int8 on tensor cores for a member, with p rounded up to 16, and about 32 K o to
      unpack the weights of a tile of rows: 72 us for 1024 members with a weight of 1024 x 1024, at an H200's
      1.5e13 integer operations a second.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    outputs = weights.shape[-1]
    block_m = block_size(x.shape[1], INT8_BLOCK_M, INT8_MIN_BLOCK_M)
    block_k, warps = int8_shape(block_m)
    tiling = {"BLOCK_M": block_m, "BLOCK_N": block_size(outputs, INT8_BLOCK_N, 64), "BLOCK_K": block_k}
    return _launch(int8_product_kernel, x, weights, length, dtype, outputs, {**tiling, "num_warps": warps})


def _launch(
    kernel: Any,  # noqa: ANN401  Triton's functions have no type
    x: Tensor,
    weights: Tensor,
    length: int,
    dtype: torch.dtype,
    columns: int,
    tiling: dict[str, int],
) -> Tensor:
    """Check x [m, p, K] and weights [m, K, o], and launch a product.

    ``length`` is the number of bits that are summed. Tiles of BLOCK_N cover ``columns`` columns: the
    outputs, or twice as many where the kernel reads a word's halves side by side.
    """
    members, rows, depth = x.shape
    outputs = weights.shape[2]
    if weights.shape[:2] != (members, depth) or not x.dtype == weights.dtype == torch.int64:
        raise ValueError(
            "a product of packed bits takes int64 words, x [members, rows, words] and weights "
            "[members, words, outputs], got "
            f"{x.dtype} {list(x.shape)} and {weights.dtype} {list(weights.shape)}"
        )
    out = torch.empty(members, rows, outputs, device=x.device, dtype=dtype)
    if not out.numel():
        return out
    tiles = -(-columns // tiling["BLOCK_N"]), -(-rows // tiling["BLOCK_M"])
    x, weights = halves(x), halves(weights)
    with torch.cuda.device_of(x):
        kernel[grid_of(members, *tiles)](
            out, x, weights, length, rows, depth, outputs, x.stride(0), weights.stride(0), *tiles,
            **tiling,
        )  # fmt: skip
    return out
