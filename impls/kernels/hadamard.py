"""Hadamard noise in one kernel with the product that it belongs to, in Triton: the transform costs a tile.

y_row = W x + s (H (x * in_m)) * out_m with H[o, i] = -1 to the number of bits that o and i have in common,
whatever the widths. Split both numbers into blocks of B, o = a B + b and i = a' B + b', and H falls into
-1^(a . a') and a matrix of B rows: all columns of one block a need

    z[row, a, b] = sum_b' H_B[b, b'] u[row, b'],      u[row, b'] = sum_a' -1^(a . a') x[row, a', b'].

The blocks a' are just the tiles of x that the product's loop over channels reads: each is flipped and added
to u with one sign for the whole tile, and when the loop is done one small product with H_B, made from its
indices, turns u into z. No pass is added, nothing is written in between, and rows may have any width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    accumulator_dtype,
    check_signs,
    flip_signs,
    gemm_of,
    load_noise_scale,
    load_weight,
    load_x,
    noise_scale,
    row_to_member,
    select_tiling,
    tile_index,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import summed
from impls.kernels.scheme import AbstractFused, check_one_core
from impls.kernels.tiling import Tiling, input_precision
from impls.schemes.hadamard import Hadamard, HadamardNoise

NAME = "hadamard"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Of a product of a 16-bit type, where nothing was tuned."""

MOST_BLOCKS = 2
"""Blocks of ``deep`` columns in a tile: there is a sum of rows' channels for each."""


@triton.jit
def sign_of(first, second):
    """Return -1 to the number of bits that both int32 have in common."""
    bits = first & second
    bits ^= bits >> 16
    bits ^= bits >> 8
    bits ^= bits >> 4
    # The parity of four bits, looked up.
    return 1 - 2 * (0x6996 >> (bits & 15) & 1)


@triton.jit
def transformed(
    mixed, scale, own_outputs, mask_m, first, outputs,
    NARROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn u of one block, [rows, DEEP], into the noise of WIDTH columns from ``first`` on."""
    offs_n = first + tl.arange(0, WIDTH)
    small = sign_of(tl.arange(0, BLOCK_K)[:, None], (offs_n % BLOCK_K)[None, :]).to(NARROW)
    acc = tl.dot(mixed.to(NARROW), small, out_dtype=mixed.dtype, input_precision=PRECISION)
    return flip_signs(acc * scale[:, None], load_x(own_outputs, 1, mask_m, offs_n, outputs))


@triton.jit
def hadamard_kernel(
    y, x, weight, own_inputs, own_outputs, scales, sigma,
    rows, outputs, inputs, members, positions,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    tiles_m, tiles_n,
    BLOCKS: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows; BLOCKS blocks of DEEP columns or a part of one; the grid is all tiles."""
    down, along = tile_index(tiles_m, tiles_n, GROUP_M)
    offs_m, offs_n = down * BLOCK_M + tl.arange(0, BLOCK_M), along * BLOCK_N + tl.arange(0, BLOCK_N)
    first = along.to(tl.int32) * BLOCK_N
    repeat, member, position = row_to_member(offs_m, members, positions)
    mask_m, mask_n = offs_m < rows, offs_n < outputs
    x += repeat * stride_xr + member * stride_xm + position * stride_xp
    own_inputs += member * inputs
    block = first // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    mixed = tl.zeros((BLOCK_M, BLOCK_K), dtype=ACC)
    if BLOCKS > 1:
        others = tl.zeros((BLOCK_M, BLOCK_K), dtype=ACC)
    # Signs are loaded one tile ahead by hand: the compiler does so only for what a product reads.
    signs = load_x(own_inputs, 1, mask_m, tl.arange(0, BLOCK_K), inputs)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ahead = load_x(own_inputs, 1, mask_m, offs_k + BLOCK_K, inputs)
        values = load_x(x, stride_xi, mask_m, offs_k, inputs)
        shared = load_weight(weight, stride_wo, offs_n, mask_n, offs_k, inputs)
        acc = tl.dot(values, shared, acc=acc, out_dtype=ACC, input_precision=PRECISION)
        flipped = flip_signs(values.to(ACC), signs)
        mixed += flipped * sign_of(block, start // BLOCK_K).to(ACC)
        if BLOCKS > 1:
            others += flipped * sign_of(block + 1, start // BLOCK_K).to(ACC)
        signs = ahead
    scale = load_noise_scale(sigma, scales, repeat, mask_m, SCALED, ACC)
    own_outputs += member * outputs
    noise = transformed(
        mixed,
        scale,
        own_outputs,
        mask_m,
        first,
        outputs,
        x.dtype.element_ty,
        BLOCK_N // BLOCKS,
        BLOCK_K,
        PRECISION,
    )
    if BLOCKS > 1:
        more = transformed(
            others,
            scale,
            own_outputs,
            mask_m,
            first + BLOCK_K,
            outputs,
            x.dtype.element_ty,
            BLOCK_K,
            BLOCK_K,
            PRECISION,
        )
        noise = tl.join(noise, more).permute(0, 2, 1).reshape(BLOCK_M, BLOCK_N)
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    edge = mask_m[:, None] & mask_n[None, :]
    tl.store(y[:, None] + offs_n[None, :] * stride_yo, (acc + noise).to(y.dtype.element_ty), mask=edge)


def bounded(tiling: Tiling) -> Tiling:
    """Return tiles with fewer columns where they would be more than MOST_BLOCKS blocks."""
    return tiling._replace(block_n=min(tiling.block_n, MOST_BLOCKS * tiling.block_k))


def blocks_of(tiling: Tiling) -> int:
    """Return how many blocks of the transform a tile's columns are."""
    return max(1, tiling.block_n // tiling.block_k)


def hadamard_product(
    x: Tensor,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma H between its member's signs, into ``y``, which is returned.

    For R rows of e bytes a number, one position each, in tiles of C columns and D channels:

    * bytes: e R (i + o) and e i o of the product, and m (i + o) of signs; x and signs once more for each tile
      of columns, W for each tile of rows, out of a cache.
    * flops: 2 R i o of the product and 2 R o D of the transform on matrix units: 1 + D / i times the plain
      one, 1.06 at (1024, 1024). Beside them 2 R i operations for each block of D columns, at most two of
      them in a tile, and one exclusive or on each number of x for each tile of columns.

    The alternative, a kernel that transforms rows once and a product that adds them in its epilogue, moves
    R (3 i + 2 o) bytes in its first pass in 16-bit types and reads R o numbers again: at (1024, 1024) and
    R = 8192 the pass is 42 MB, 10 us of an H200's memory beside a product of 22 us. It needs room for R o
    numbers and a second launch, but it costs less and less as o grows, where here each tile of columns sums
    its rows' channels anew.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        inputs: signs [m, i] as int8, contiguous.
        outputs: signs [m, o] as int8, contiguous.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :data:`TILING` has it. Tiles
            get fewer columns where they would be more than two blocks of channels.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read = gemm_of(x, weight, y)
    check_signs("inputs", inputs, read.members, weight.shape[1])
    check_signs("outputs", outputs, read.members, weight.shape[0])
    if not y.numel():
        return y
    tiling = bounded(select_tiling(NAME, read, tiling, TILING))
    scale = noise_scale(sigma, x)
    with torch.cuda.device_of(x):
        hadamard_kernel[read.grid(tiling)](
            y, x, read.weight, inputs, outputs, scale.per_repeat, scale.number,
            *read.sizes, *read.strides, *read.tiles(tiling), BLOCKS=blocks_of(tiling),
            SCALED=scale.is_per_repeat, ACC=accumulator_dtype(x.dtype), PRECISION=input_precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y


@variant(source="ours")
@dataclass(frozen=True)
class FusedHadamard(AbstractFused[HadamardNoise]):
    """:class:`~impls.schemes.hadamard.Hadamard` in one kernel, from the product's own tiles.

    One core: of several each has an order of its own, which takes a tile's channels from all over the row.

    Memory    that of the plain scheme, and nothing for transformed rows.
    Work      a tile of 128 columns sums its rows' channels, with signs, in the loop of the shared product,
              and ends with a product of 64 channels: 64 / i more on matrix units, and two additions for each
              number of a row and tile.
    Quality   that of the plain scheme.
    """

    cores: int = 1

    def __post_init__(self) -> None:
        """Refuse several cores."""
        check_one_core(self.cores)

    @property
    @override
    def plain(self) -> Hadamard:
        return Hadamard()

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: HadamardNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        hadamard_product(x, weight, _inputs(noise)[:, 0], noise.outputs[:, 0], sigma, y)

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        inputs = _inputs(noise)
        taps = () if noise.taps is None else noise.taps.shape[1:]
        weight = torch.Size((1, noise.outputs.shape[2], inputs.shape[2], *taps))
        return summed(weight, noise.outputs, inputs, utilities, hadamard=True)


def _inputs(noise: HadamardNoise) -> Tensor:
    """Return the members' signs of inputs: a convolution of one tap has one more for each member."""
    return noise.inputs if noise.taps is None else noise.inputs * noise.taps.view(-1, 1, 1)
