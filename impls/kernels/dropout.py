"""Product with dropout of inputs or outputs, with a mask for each member, in one kernel.

Kept channels have the factor ``on`` and dropped ones ``off``: 1 / q and 0 if a channel is kept with
probability q, and 2 - 1 / q and 2 for rows that see the negated noise.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    gemm_of,
    is_before_hopper,
    load_of_members,
    operand,
    row_to_member,
    select_tiling,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.scheme import AbstractFusedRows
from impls.kernels.tiling import Tiling
from impls.schemes.dropout import DropoutMask, DropoutNoise

TILING = Tiling(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes."""


def gate_arguments(on: float | Tensor, off: float | Tensor, x: Tensor) -> tuple[Tensor | None, float]:
    """Return the arguments ``factors`` and ``on`` that a kernel takes for these factors of channels.

    Args:
        on: the factor of kept channels, a number or [r], one for each repeat of x [r, ...].
        off: the factor of dropped channels, likewise.
        x: the rows.

    Returns:
        The factors [2, r] of kept and dropped channels, or None if ``on`` is the factor of all kept channels
        and dropped ones are 0.
    """
    # A number that is passed to a kernel is float32.
    if not (isinstance(on, Tensor) or isinstance(off, Tensor) or off) and x.dtype is not torch.float64:
        return None, float(on)
    wider = torch.promote_types(torch.float32, x.dtype)
    factors = [
        factor.to(wider).expand(len(x))
        if isinstance(factor, Tensor)
        else x.new_full((len(x),), factor, dtype=wider)
        for factor in (on, off)
    ]
    return torch.stack(factors), 0.0


@triton.jit
def load_factors(factors, repeats, repeat, mask_m, ACC: tl.constexpr):
    """Return the factors (on, off) of the kept and the dropped channels of each row, [m] of dtype ACC."""
    on = tl.load(factors + repeat, mask=mask_m, other=0)
    off = tl.load(factors + repeats + repeat, mask=mask_m, other=0)
    return on.to(ACC), off.to(ACC)


@triton.jit
def drop_inputs(a, out, stored, operands, start_m, start, channels, OPTIONS: tl.constexpr, ACC: tl.constexpr):
    """Multiply a tile of rows by the factors of channels; ``stored`` [members, i] is 0 for dropped ones."""
    factors, _, repeats = operands
    is_kept = load_of_members(stored[0], out, start_m, start, channels, channels, a, OPTIONS[0]) != 0
    if factors is not None:
        offs_m = start_m + tl.arange(0, a.shape[0])
        repeat, _, _ = row_to_member(offs_m, out.members, out.positions)
        row_on, row_off = load_factors(factors, repeats, repeat, offs_m < out.rows, ACC)
        return (a.to(ACC) * tl.where(is_kept, row_on[:, None], row_off[:, None])).to(a.dtype)
    else:  # noqa: RET505  the compiler takes no early return here
        return tl.where(is_kept, a, 0).to(a.dtype)


@triton.jit
def scale_kept(
    acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr  # noqa: ARG001  as every LAST
):  # fmt: skip
    """Multiply the product of the kept channels by their factor."""
    return acc * operands[1]


@triton.jit
def drop_outputs(acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr):
    """Multiply outputs by their factors; ``stored`` [members, o] is 0 for dropped ones."""
    factors, on, repeats = operands
    is_kept = (
        load_of_members(stored[0], out, start_m, start_n, out.outputs, out.outputs, acc, OPTIONS[0]) != 0
    )
    if factors is not None:
        offs_m = start_m + tl.arange(0, acc.shape[0])
        repeat, _, _ = row_to_member(offs_m, out.members, out.positions)
        row_on, row_off = load_factors(factors, repeats, repeat, offs_m < out.rows, ACC)
        return acc * tl.where(is_kept, row_on[:, None], row_off[:, None])
    else:  # noqa: RET505  the compiler takes no early return here
        return tl.where(is_kept, acc * on, 0)


def dropout_product(
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    on: float | Tensor,
    off: float | Tensor,
    y: Tensor,
    side: Literal["in", "out"],
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W and apply its member's mask to inputs or outputs, into ``y``, which is returned.

    Masks ``kept`` are bool, [m, i] or [m, o]; kept channels have the factor ``on`` and dropped ones ``off``,
    numbers or [r], one for each repeat. Other arguments are those of all launchers, see
    :mod:`impls.kernels.gemm`.

    If both factors are numbers and ``off`` is 0, dropped channels are left out and the sums scaled, without
    further rounding. Otherwise inputs are scaled in the tile of x and rounded to its dtype, as in a scaled
    copy.

    * bytes: e R (i + o) + e i o of the product and m i or m o of masks; x, W and masks of inputs are read
      again from a cache for each tile of the other axis.
    * flops: 2 R i o on tensor cores, and a selection for each number of a tile of x, or for each output.
    """
    gemm = gemm_of(x, weight, y)
    is_inputs = side == "in"
    name = "dropped inputs" if is_inputs else "dropped outputs"
    kept = operand("masks", kept, (gemm.members, weight.shape[1 if is_inputs else 0]), torch.bool)
    # Triton cannot make float64 operands from bytes.
    masks = kept.to(x.dtype) if x.dtype is torch.float64 else kept.view(torch.int8)
    default = TILING.keep_warps(x.dtype)
    if is_inputs and is_before_hopper(x.device):  # tiles of x pass through registers
        default = default._replace(block_k=32, num_stages=4)
    tiling = select_tiling(name, gemm, tiling, default)
    described = gemm.describe_members(masks, tiling, tiling.block_k if is_inputs else None)
    factors, factor = gate_arguments(on, off, x)
    operands = (factors, factor, len(x))
    functions = {"INPUT": drop_inputs, "LAST": scale_kept if factors is None else None}
    return gemm.launch(
        tiling, operands, stored=[described], OPTIONS=(not isinstance(described, Tensor),),
        **functions if is_inputs else {"LAST": drop_outputs},
    )  # fmt: skip


def gate_factors(
    scale: float, sigma: float | Tensor, noise_sigma: float
) -> tuple[float | Tensor, float | Tensor]:
    """Return the factors (on, off) of kept and dropped channels, for masks drawn for ``noise_sigma``.

    on = 1 + t (scale - 1) and off = 1 - t, with t = sigma / noise_sigma: ``scale`` and 0 where the two are
    equal, 2 - ``scale`` and 2 where ``sigma`` is ``-noise_sigma``, as in the antithetic half.
    """
    if not isinstance(sigma, Tensor):
        ratio = sigma / noise_sigma
        return 1 + ratio * (scale - 1), 1 - ratio
    # Both are rounded to one dtype, so that their ratio is exactly 1 where they are equal.
    ratios = sigma.flatten() / sigma.new_full((), noise_sigma)
    ratios = ratios.to(torch.promote_types(torch.float32, ratios.dtype))
    return 1 + ratios * (scale - 1), 1 - ratios


@variant(
    side=("in", "out"),
    source="Srivastava et al. 2014 (dropout); Werfel, Xie, Seung 2005 (the update of outputs); kernels ours",
)
@dataclass(frozen=True)
class FusedDropoutMask(AbstractFusedRows[DropoutNoise]):
    """:class:`~impls.schemes.dropout.DropoutMask` in one kernel without further passes over rows.

    Memory    same as the wrapped scheme, without a copy of the rows.
    Work      same as the wrapped scheme. The update is the wrapped scheme's: of inputs a sum of masks and a
              pass over the weight, of outputs a product of torch with the rows.
    Quality   same as the wrapped scheme.
    """

    PLAIN = DropoutMask

    p: float = 0.5
    side: Literal["in", "out"] = "in"

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: DropoutNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        factors = gate_factors(1 / (1 - self.p), sigma, noise.sigma)
        dropout_product(x, weight, noise.kept[:, 0], *factors, y, self.side)
