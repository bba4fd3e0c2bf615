"""Product with permuted noise in two kernels: gather each member's channels, then multiply by the core.

y_row = W x + C s x[picks_m]. Gathering inside the matmul loop would be repeated for each tile of columns:
at (1024, 1024), four times an index and an uncoalesced load per element of x, which takes several times the
matmul. So one kernel writes the gathered channels times sigma, and a second computes both products in one
accumulator. On capability 9.0 it runs beside the first one, and waits for it after the first product.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    Gemm,
    accumulator_dtype,
    can_begin_early,
    empty_aligned,
    gemm_of,
    load_sigma,
    noise_scale,
    operand,
    programs_before_product,
    row_to_member,
    select_tiling,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.scheme import AbstractFused
from impls.kernels.tiling import Tiling, block_size
from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import TransposedLinear
from impls.schemes.permuted import Permuted, PermutedNoise

TILING = Tiling(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes for a 16-bit dtype."""

GATHER_BLOCK = (8, 512)
"""Rows and picks in a tile of :func:`gather_kernel`."""

GATHER_WARPS, GATHER_PROGRAMS = 8, 2
"""Its warps, and its programs on a multiprocessor beside the product."""


@triton.jit
def gather_kernel(
    picked, x, picks, sigmas, sigma,
    rows, count, stride, members, positions, stride_xr, stride_xm, stride_xp, stride_xi, tiles_n, tiles,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write each row's channels ``picks`` [members, count], times sigma, to ``picked`` [rows, count].

    Its rows have this stride. Programs compute tiles one after another, and load the picks of later ones
    early. With EARLY the next kernel, which waits for the result, may begin before this one ends.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    for pid in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        offs_m = (pid // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        repeat, member, position = row_to_member(offs_m, members, positions)
        mask_m = offs_m < rows
        mask = mask_m[:, None] & (offs_n < count)[None, :]
        index = tl.load(picks + (member * count)[:, None] + offs_n[None, :], mask=mask, other=0)
        x_rows = x + repeat * stride_xr + member * stride_xm + position * stride_xp
        values = tl.load(x_rows[:, None] + index.to(tl.int64) * stride_xi, mask=mask, other=0)
        values = values.to(ACC) * load_sigma(sigmas, sigma, repeat, mask_m, ACC)[:, None]
        picked_rows = picked + (offs_m * stride)[:, None] + offs_n[None, :]
        tl.store(picked_rows, values.to(x.dtype.element_ty), mask=mask)


def gather_channels(x: Tensor, picks: Tensor, sigma: float | Tensor = 1.0) -> Tensor:
    """Gather each member's channels: ``sigma * x[r, m, p, picks[m]]``, [r, m, p, k], aligned for descriptors.

    For R rows of e-byte elements, reads e R i bytes of x and m k indices of 2, 4 or 8 bytes, and writes e R k
    bytes. Loads of x are uncoalesced.

    Args:
        x: [r, m, p, i], any strides.
        picks: int16, int32 or int64, [m, k], each below i.
        sigma: a number, or [r].

    Raises:
        ValueError: shape or dtype of picks do not match.
    """
    members, count = x.shape[1], picks.shape[-1]
    dtype = picks.dtype if picks.dtype in {torch.int16, torch.int32} else torch.int64
    picks = operand("picks", picks, (members, count), dtype)
    picked = empty_aligned((*x.shape[:3], count), x)
    if not picked.numel():
        return picked
    rows = x.shape[:3].numel()
    block_m, block_n = block_size(rows, GATHER_BLOCK[0]), block_size(count, GATHER_BLOCK[1])
    tiles_n = -(-count // block_n)
    tiles = -(-rows // block_m) * tiles_n
    with torch.cuda.device_of(x):
        gather_kernel[programs_before_product(tiles, GATHER_PROGRAMS, x.device)](
            picked, x, picks, *noise_scale(sigma, x),
            rows, count, picked.stride(2), members, x.shape[2], *x.stride(), tiles_n, tiles,
            EARLY=can_begin_early(x.device), ACC=accumulator_dtype(x.dtype),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=GATHER_WARPS,
        )  # fmt: skip
    return picked


@triton.jit
def wait_for_picks(
    acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr  # noqa: ARG001  as every FIRST
):  # fmt: skip
    """Wait for the kernel before this one, where it may still run."""
    if OPTIONS[0]:
        tl.extra.cuda.gdc_wait()
    return acc


def permuted_product(
    x: Tensor, weight: Tensor, gathered: Tensor, core: Tensor, y: Tensor, tiling: Tiling | None = None
) -> Tensor:
    """Compute ``x @ weight.T + gathered @ core.T``, write it to ``y`` and return ``y``.

    ``gathered`` is [r, m, p, k] and ``core`` is [o, k], both with contiguous channels; descriptors need rows
    of :func:`~impls.kernels.gemm.empty_aligned`. Other arguments are those of all launchers, see
    :mod:`impls.kernels.gemm`.

    * bytes: e R (i + k + o) + e o (i + k); rows are reread from cache for each tile of columns, weights
      for each tile of rows.
    * flops: 2 R o (i + k) on tensor cores, 1 + k / i times the plain product.
    """
    gemm, count = gemm_of(x, weight, y), core.shape[-1]
    gathered = operand("gathered channels", gathered, (*x.shape[:3], count), x.dtype, may_be_apart=True)
    core = operand("core", core, (len(weight), count), x.dtype, may_be_apart=True)
    tiling = select_tiling("two products", gemm, tiling, TILING.keep_warps(x.dtype), count)
    waits = can_begin_early(x.device)
    # The first product is that of x, which needs no picks.
    return Gemm(gathered, core, y).launch(
        tiling, second=(x, gemm.weight), FIRST=wait_for_picks, OPTIONS=(waits,), launch_pdl=waits
    )


def with_picks(noise: PermutedNoise, dtype: torch.dtype) -> PermutedNoise:
    """Return the noise with picks of this integer dtype: torch needs int64, kernels read fewer bytes."""
    assert noise.inputs is not None  # noqa: S101  inputs are permuted
    return replace(noise, inputs=noise.inputs.to(dtype))


@variant(in_sparsity=(0.5, 0.1), source="NESgpu; the kernels are ours")
@variant(source="NESgpu; the kernels are ours")
@dataclass(frozen=True)
class FusedPermuted(AbstractFused[PermutedNoise]):
    """:class:`~impls.schemes.permuted.Permuted` of inputs: one kernel picks, another computes both products.

    Outputs cannot be permuted: a row's picks are spread over the whole row of the core's product, which would
    have to be written, R * o numbers, before any of them can be added. A kernel could save only one of the
    plain scheme's passes over outputs.

    Memory    indices take a quarter of the wrapped scheme's; R * k picked numbers.
    Work      1 + k / i products, and an index of 2 bytes for each pick, or 4 above 32,767 inputs. The update
              is the wrapped scheme's with wider indices: n k numbers scattered into k x i, and one product of
              the core with them, for any population.
    Quality   same as the wrapped scheme.
    """

    PLAIN = Permuted

    in_sparsity: float = 1.0

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> PermutedNoise:
        noise = super().sample(weight, stream)
        rows = noise.core.flatten(3)  # of a convolution, whose last axes have one tap
        core = empty_aligned(rows.shape, rows).copy_(rows).view(noise.core.shape)
        return with_picks(replace(noise, core=core), torch.int16 if noise.width < 2**15 else torch.int32)

    @override
    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: PermutedNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        return super().forward_transposed(op, weight, with_picks(noise, torch.int64), x, sigma)

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(with_picks(noise, torch.int64), utilities)

    @override
    def dense_noise(self, noise: PermutedNoise) -> Tensor:
        return super().dense_noise(with_picks(noise, torch.int64))

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: PermutedNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        assert noise.inputs is not None  # noqa: S101  inputs are permuted
        picked = gather_channels(x, noise.inputs[:, 0], sigma)
        permuted_product(x, weight, picked, noise.core[0, 0].flatten(1), y)
