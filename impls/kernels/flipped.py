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
    gemm_of,
    load_of_members,
    noise_scale,
    operand,
    scale_rows,
    select_tiling,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import sum_outer_products
from impls.kernels.scheme import AbstractFused
from impls.kernels.tiling import Tiling
from impls.schemes.flipped import Flipped, FlippedNoise, FlippedSign

TILING = Tiling(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes for a 16-bit dtype."""


@triton.jit
def flip_inputs(
    a, out, stored, operands, start_m, start, channels, OPTIONS: tl.constexpr, ACC: tl.constexpr  # noqa: ARG001  as every INPUT
):  # fmt: skip
    """Multiply a tile of rows by its members' signs [members, i]."""
    return flip_signs(a, load_of_members(stored[0], out, start_m, start, channels, channels, a, OPTIONS[0]))


@triton.jit
def scale_and_flip(acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr):
    """Multiply the product with the core by the noise scale and by the members' signs [members, o]."""
    acc = scale_rows(acc, out, stored, operands, start_m, start_n, OPTIONS, ACC)
    return flip_signs(
        acc, load_of_members(stored[1], out, start_m, start_n, out.outputs, out.outputs, acc, OPTIONS[1])
    )


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
    described = [
        None if signs is None else gemm.describe_members(signs, tiling, columns)
        for signs, columns in ((inputs, tiling.block_k), (outputs, tiling.block_n))
    ]
    return gemm.launch(
        tiling, noise_scale(sigma, x), stored=described, second=(x, core),
        FIRST=scale_rows if outputs is None else scale_and_flip,
        INPUT=None if inputs is None else flip_inputs,
        OPTIONS=tuple(not isinstance(signs, Tensor) for signs in described),
    )  # fmt: skip


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
            # A kernel would save nothing: this is a sum of signs and a pass over the core.
            return self.plain.weighted_sum(noise, utilities)
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
