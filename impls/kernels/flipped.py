"""Product with flipped noise in one kernel.

y_row = W x + s (C (x * in_m)) * out_m. The product with the core C is computed first and scaled and flipped
in its accumulator, to which the product with W is then added: nothing is written in between, and a tile has
one accumulator. A single loop with two accumulators would read x once, 56 instead of 72 KiB from a cache for
64 channels of 128 x 128 outputs, but would fill the registers; one accumulator allows tiles of 128 x 256 on
capability 9.0, which read 52 KiB.

There is no fp8 variant. A core of signs is exact in fp8, but rows are not, with 4 significant bits instead of
bfloat16's 8. Splitting rows into two fp8 numbers takes two products at twice the speed, and loses numbers
that are much smaller than the largest of their row.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    flip_signs,
    gemm_loop,
    gemm_of,
    load_sigma,
    load_weight,
    load_x,
    noise_scale,
    operand,
    row_to_member,
    select_tiling,
    tile_offsets,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import sum_outer_products
from impls.kernels.scheme import AbstractFused
from impls.kernels.tiling import Tiling
from impls.schemes.flipped import Flipped, FlippedNoise, FlippedSign

TILING = Tiling(block_m=128, block_n=128, block_k=32, group_m=8, num_warps=8, num_stages=4)
"""Default tile sizes for a 16-bit dtype."""


@triton.jit
def flipped_kernel(
    y, x, weight, core, input_signs, output_signs, sigmas, sigma,
    rows, outputs, inputs, members, positions,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    tiles_m, tiles_n,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y; ``input_signs`` [members, i] or ``output_signs`` [members, o] may be None."""
    offs_m, offs_n = tile_offsets(tiles_m, tiles_n, GROUP_M, BLOCK_M, BLOCK_N)
    repeat, member, position = row_to_member(offs_m, members, positions)
    mask_m, mask_n = offs_m < rows, offs_n < outputs
    x += repeat * stride_xr + member * stride_xm + position * stride_xp
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a = load_x(x, stride_xi, mask_m, offs_k, inputs)
        if input_signs is not None:
            a = flip_signs(a, load_x(input_signs + member * inputs, 1, mask_m, offs_k, inputs))
        b = load_weight(core, inputs, offs_n, mask_n, offs_k, inputs)
        acc = tl.dot(a, b, acc=acc, out_dtype=ACC, input_precision=PRECISION)
    acc *= load_sigma(sigmas, sigma, repeat, mask_m, ACC)[:, None]
    if output_signs is not None:
        acc = flip_signs(acc, load_x(output_signs + member * outputs, 1, mask_m, offs_n, outputs))
    acc = gemm_loop(
        acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, 0, inputs, ACC, PRECISION, BLOCK_K
    )
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y[:, None] + offs_n[None, :] * stride_yo, acc.to(y.dtype.element_ty), mask=mask)


def flipped_product(
    x: Tensor,
    weight: Tensor,
    core: Tensor,
    inputs: Tensor | None,
    outputs: Tensor | None,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma C with its member's signs on inputs, outputs or both, into ``y``.

    The core C is [o, i]; signs are int8, ``inputs`` [m, i] and ``outputs`` [m, o], or None where
    nothing is flipped. Other arguments are those of all launchers, see :mod:`impls.kernels.gemm`.

    * bytes: e R (i + o) + 2 e i o of the products, and m i or m o of signs. From a cache x twice and the
      signs of inputs once for each tile of columns, W and C for each tile of rows.
    * flops: 4 R i o on tensor cores, 2.0 times the plain product. Flipping is one operation on each number of
      x for each tile of columns.
    """
    gemm = gemm_of(x, weight, y)
    core = operand("core", core, weight.shape, x.dtype)
    if inputs is not None:
        inputs = operand("signs of inputs", inputs, (gemm.members, weight.shape[1]), torch.int8)
        # Triton cannot make float64 operands from bytes.
        inputs = inputs.long() if x.dtype is torch.float64 else inputs
    if outputs is not None:
        outputs = operand("signs of outputs", outputs, (gemm.members, weight.shape[0]), torch.int8)
    tiling = select_tiling("flipped", gemm, tiling, TILING.keep_warps(x.dtype))
    return gemm.launch(flipped_kernel, tiling, (core, inputs, outputs, *noise_scale(sigma, x)))


class AbstractFusedFlipped(AbstractFused[FlippedNoise]):
    """Flipped noise with both products in one kernel; subclasses define how the core is drawn."""

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: FlippedNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        inputs, outputs = (None if signs is None else signs[:, 0] for signs in (noise.inputs, noise.outputs))
        flipped_product(x, weight, noise.core[0, 0].flatten(1), inputs, outputs, sigma, y)

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        if noise.inputs is None or noise.outputs is None:
            return self.plain.weighted_sum(noise, utilities)  # a sum of signs and a pass over the core
        return sum_outer_products(noise.core.shape[1:], noise.outputs, noise.inputs, utilities, noise.core)


@variant(side=("in", "out", "both"), source="NESgpu; both sides: Flipout, arXiv:1803.04386; kernel ours")
@dataclass(frozen=True)
class FusedFlipped(AbstractFusedFlipped):
    """:class:`~impls.schemes.flipped.Flipped` with both products in one kernel.

    Memory    same as the wrapped scheme, without intermediate results.
    Work      two products; signs are flipped in registers. The update of one side is the wrapped scheme's, a
              sum of signs and a pass over the core; of both sides it is one product in a kernel.
    Quality   same as the wrapped scheme.
    """

    PLAIN = Flipped

    side: Literal["in", "out", "both"] = "in"


@variant(source="ours; Wen et al. 2018 (Flipout), arXiv:1803.04386, have the signs")
@dataclass(frozen=True)
class FusedFlippedSign(AbstractFusedFlipped):
    """:class:`~impls.schemes.flipped.FlippedSign` in one kernel, as :class:`FusedFlipped`.

    Memory    same as the wrapped scheme.
    Work      that of :class:`FusedFlipped`.
    Quality   same as the wrapped scheme.
    """

    PLAIN = FlippedSign

    side: Literal["in", "out", "both"] = "both"
