"""Product with Hadamard noise in one kernel.

y_row = W x + s (H (x * in_m)) * out_m with H[o, i] = (-1)^popcount(o & i), for any widths. With both indices
split into blocks of B, o = a B + b and i = a' B + b', H is (-1)^popcount(a & a') times a matrix H_B, and the
outputs of block a are

    z[row, a, b]    = sum_b' H_B[b, b'] mixed[row, b']
    mixed[row, b'] = sum_a' (-1)^popcount(a & a') x[row, a', b']

with x after its flips. The blocks a' are the tiles of x that the loop of the product reads: each is flipped
and added to ``mixed`` with one sign. After the loop a product with H_B, which is made from its indices, turns
``mixed`` into z. There is no further pass over x or y, and rows may have any width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    flip_signs,
    gemm_of,
    load_sigma,
    load_weight,
    load_x,
    noise_scale,
    operand,
    row_to_member,
    select_tiling,
    tile_index,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import hadamard_sign, sum_outer_products
from impls.kernels.scheme import AbstractFused
from impls.kernels.tiling import Tiling
from impls.schemes.hadamard import Hadamard, HadamardNoise

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes for a 16-bit dtype."""

MAX_BLOCKS = 2
"""Largest number of blocks of BLOCK_K columns in a tile; each needs a sum ``mixed`` in registers."""


@triton.jit
def hadamard_transform(
    mixed, scale, output_signs, mask_m, first, outputs,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply ``mixed`` [m, BLOCK_K] by H_B of WIDTH columns from ``first``, sigma and signs of outputs."""
    offs_n = first + tl.arange(0, WIDTH)
    matrix = hadamard_sign(tl.arange(0, BLOCK_K)[:, None], (offs_n % BLOCK_K)[None, :]).to(DTYPE)
    acc = tl.dot(mixed.to(DTYPE), matrix, out_dtype=mixed.dtype, input_precision=PRECISION)
    return flip_signs(acc * scale[:, None], load_x(output_signs, 1, mask_m, offs_n, outputs))


@triton.jit
def hadamard_kernel(
    y, x, weight, input_signs, output_signs, sigmas, sigma,
    rows, outputs, inputs, members, positions,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    tiles_m, tiles_n,
    BLOCKS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y: BLOCKS blocks of BLOCK_K columns, or a part of one block.

    ``mixed`` is that of the module's docstring for the first block, ``mixed_next`` for the second.
    """
    pid_m, pid_n = tile_index(tiles_m, tiles_n, GROUP_M)
    offs_m, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first = pid_n.to(tl.int32) * BLOCK_N
    repeat, member, position = row_to_member(offs_m, members, positions)
    mask_m, mask_n = offs_m < rows, offs_n < outputs
    x += repeat * stride_xr + member * stride_xm + position * stride_xp
    input_signs += member * inputs
    block = first // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    mixed = tl.zeros((BLOCK_M, BLOCK_K), dtype=ACC)
    if BLOCKS > 1:
        mixed_next = tl.zeros((BLOCK_M, BLOCK_K), dtype=ACC)
    # Signs are loaded one tile ahead by hand: Triton pipelines only the loads of operands of a product.
    signs = load_x(input_signs, 1, mask_m, tl.arange(0, BLOCK_K), inputs)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ahead = load_x(input_signs, 1, mask_m, offs_k + BLOCK_K, inputs)
        values = load_x(x, stride_xi, mask_m, offs_k, inputs)
        shared = load_weight(weight, stride_wo, offs_n, mask_n, offs_k, inputs)
        acc = tl.dot(values, shared, acc=acc, out_dtype=ACC, input_precision=PRECISION)
        flipped = flip_signs(values.to(ACC), signs)
        mixed += flipped * hadamard_sign(block, start // BLOCK_K).to(ACC)
        if BLOCKS > 1:
            mixed_next += flipped * hadamard_sign(block + 1, start // BLOCK_K).to(ACC)
        signs = ahead
    scale = load_sigma(sigmas, sigma, repeat, mask_m, ACC)
    output_signs += member * outputs
    noise = hadamard_transform(
        mixed, scale, output_signs, mask_m, first, outputs,
        x.dtype.element_ty, BLOCK_N // BLOCKS, BLOCK_K, PRECISION,
    )  # fmt: skip
    if BLOCKS > 1:
        noise_next = hadamard_transform(
            mixed_next, scale, output_signs, mask_m, first + BLOCK_K, outputs,
            x.dtype.element_ty, BLOCK_K, BLOCK_K, PRECISION,
        )  # fmt: skip
        noise = tl.join(noise, noise_next).permute(0, 2, 1).reshape(BLOCK_M, BLOCK_N)
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y[:, None] + offs_n[None, :] * stride_yo, (acc + noise).to(y.dtype.element_ty), mask=mask)


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

    Signs are int8, ``inputs`` [m, i] and ``outputs`` [m, o]. Columns of a tile are limited to two
    blocks of the transform. Other arguments are those of all launchers, see :mod:`impls.kernels.gemm`. In
    tiles of D channels:

    * bytes: e R (i + o) + e i o of the product and m (i + o) of signs; x and signs are read again from a
      cache for each tile of columns, W for each tile of rows.
    * flops: on tensor cores 2 R i o of the product and 2 R o D of the transform, 1 + D / i times the plain
      product or 1.06 at (1024, 1024). On other units 2 R i operations for each block of D columns, and an
      exclusive or on each number of x for each tile of columns.

    Transforming rows in a kernel before the product would move R (3 i + 2 o) bytes in 16 bits, 42 MB or 10 us
    of an H200's memory at (1024, 1024) and R = 8192, next to a product of 22 us, and needs memory for R o
    numbers. It becomes the better choice for many outputs, as here each tile of columns sums its rows'
    channels again.
    """
    gemm = gemm_of(x, weight, y)
    inputs = operand("signs of inputs", inputs, (gemm.members, weight.shape[1]), torch.int8)
    outputs = operand("signs of outputs", outputs, (gemm.members, weight.shape[0]), torch.int8)
    tiling = select_tiling("hadamard", gemm, tiling, TILING)
    tiling = tiling._replace(block_n=min(tiling.block_n, MAX_BLOCKS * tiling.block_k))
    operands = (inputs, outputs, *noise_scale(sigma, x))
    return gemm.launch(hadamard_kernel, tiling, operands, BLOCKS=max(1, tiling.block_n // tiling.block_k))


@variant(source="ours")
@dataclass(frozen=True)
class FusedHadamard(AbstractFused[HadamardNoise]):
    """:class:`~impls.schemes.hadamard.Hadamard` in one kernel.

    Memory    same as the wrapped scheme, without transformed rows.
    Work      a tile of 128 columns sums its rows' channels with signs in the loop of the shared product and
              ends with a product of 64 channels: 64 / i more on tensor cores, and two additions for each
              number of a row and tile.
    Quality   same as the wrapped scheme.
    """

    PLAIN = Hadamard

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: HadamardNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        hadamard_product(x, weight, _input_signs(noise)[:, 0], noise.outputs[:, 0], sigma, y)

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        inputs = _input_signs(noise)
        taps = () if noise.taps is None else noise.taps.shape[1:]
        weight = torch.Size((1, noise.outputs.shape[2], inputs.shape[2], *taps))
        return sum_outer_products(weight, noise.outputs, inputs, utilities, hadamard=True)


def _input_signs(noise: HadamardNoise) -> Tensor:
    """Return the members' signs of inputs, times the sign of the tap for a convolution."""
    return noise.inputs if noise.taps is None else noise.inputs * noise.taps.view(-1, 1, 1)
