"""Product with Hadamard noise in two kernels.

y_row = W x + s (H (x * in_m)) * out_m with H[o, i] = (-1)^popcount(o & i), for widths of at most
:func:`most_channels`.
With both indices split into blocks of B, o = a B + b and i = a' B + b', H is the Kronecker product of two
smaller Hadamard matrices:

    noise[row, a, b] = sum_a' H_A[a, a'] sum_b' H_B[b', b] (x * in)[row, a', b']

A first kernel computes the noise of whole rows by two products of tensor cores, with matrices made from
indices, and writes it. The product's kernel adds it to a tile. On capability 9.0 it runs beside the first one
and waits for it only there: the first kernel is bound by memory, the second one by tensor cores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    accumulator_dtype,
    can_begin_early,
    describe,
    flip_signs,
    gemm_of,
    grid_of,
    load_sigma,
    load_x,
    noise_scale,
    operand,
    programs_before_product,
    row_to_member,
    select_tiling,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import hadamard_sign, sum_outer_products
from impls.kernels.scheme import NARROW, AbstractFused
from impls.kernels.tiling import MIN_BLOCK, Tiling, block_size, input_precision
from impls.schemes.hadamard import Hadamard, HadamardNoise

TILING = Tiling(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes of the product for a 16-bit dtype."""

ROW_BYTES = 2**15
"""Most bytes of the rows that a program of :func:`hadamard_rows_kernel` transforms at once, in registers."""

TILE_BYTES = 2**13
"""Bytes of rows of at most this width that it transforms at once. They take few registers, so that it runs
beside the product."""

COLUMNS = 64
"""Most columns of a tile that are finished at once: few, which leaves registers for the first kernel."""


def most_channels(dtype: torch.dtype) -> int:
    """Return the numbers that a program transforms at once, which is the largest width of a row.

    Float32 without TF32 is multiplied in registers, of which it takes four times as many.
    """
    is_wide = dtype.itemsize > 2 and input_precision(dtype) == "ieee"  # noqa: PLR2004  bytes
    return ROW_BYTES // dtype.itemsize // (4 if is_wide else 1)


def too_wide(weight: Tensor) -> str:
    """Return why the rows of a weight [o, i] cannot be transformed, or an empty string."""
    width = most_channels(weight.dtype)
    return f"its kernel transforms at most {width} channels" if max(weight.shape) > width else ""


@triton.jit
def hadamard_rows_kernel(
    noise, x, input_signs, output_signs, sigmas, sigma,
    rows, outputs, inputs, members, positions, stride_xr, stride_xm, stride_xp, stride_xi, tiles,
    EARLY: tl.constexpr, ONCE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the noise [rows, o] of tiles of ROWS rows of A * B channels.

    ``right`` and ``left`` are H_B and H_A of the module's docstring. With ONCE each program computes one
    tile, otherwise several one after another; with EARLY the product's kernel may start beside this one.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.arange(0, A * B)
    a, b = tl.arange(0, A), tl.arange(0, B)
    left = hadamard_sign(a[:, None], a[None, :]).to(x.dtype.element_ty)
    right = hadamard_sign(b[:, None], b[None, :]).to(x.dtype.element_ty)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for index in tl.range(0, 1 if ONCE else tl.cdiv(tiles - first, programs)):
        offs_m = (first + index * programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask_m = offs_m < rows
        repeat, member, position = row_to_member(offs_m, members, positions)
        x_rows = x + repeat * stride_xr + member * stride_xm + position * stride_xp
        values = load_x(x_rows, stride_xi, mask_m, channel, inputs)
        values = flip_signs(values, load_x(input_signs + member * inputs, 1, mask_m, channel, inputs))
        mixed = tl.dot(values.reshape(ROWS * A, B), right, out_dtype=ACC, input_precision=PRECISION)
        mixed = mixed.to(values.dtype).reshape(ROWS, A, B).permute(1, 0, 2).reshape(A, ROWS * B)
        mixed = tl.dot(left, mixed, out_dtype=ACC, input_precision=PRECISION)
        mixed = mixed.reshape(A, ROWS, B).permute(1, 0, 2).reshape(ROWS, A * B)
        mixed *= load_sigma(sigmas, sigma, repeat, mask_m, ACC)[:, None]
        mixed = flip_signs(mixed, load_x(output_signs + member * outputs, 1, mask_m, channel, outputs))
        mask = mask_m[:, None] & (channel < outputs)[None, :]
        noise_rows = noise + (offs_m * outputs)[:, None] + channel[None, :]
        tl.store(noise_rows, mixed.to(noise.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(
    acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr  # noqa: ARG001  as every LAST
):  # fmt: skip
    """Add a tile of [rows, o] to acc [m, n]."""
    if OPTIONS[1]:
        tl.extra.cuda.gdc_wait()
    if OPTIONS[0]:
        return acc + stored[0].load([start_m, start_n]).to(ACC)
    else:  # noqa: RET505  the compiler takes no early return here
        offs_m, offs_n = start_m + tl.arange(0, acc.shape[0]), start_n + tl.arange(0, acc.shape[1])
        rows = stored[0] + offs_m.to(tl.int64) * out.outputs
        return acc + load_x(rows, 1, offs_m < out.rows, offs_n, out.outputs).to(ACC)


def hadamard_rows(x: Tensor, inputs: Tensor, outputs: Tensor, sigma: float | Tensor) -> Tensor:
    """Multiply each row by sigma H between its member's signs: [r, m, p, o], of x's dtype, contiguous.

    For R rows with e bytes per number and m members, and the larger width rounded up to a power of two A B:

    * bytes: e R (i + o) of rows and m (i + o) of signs.
    * flops: 2 R A B (A + B) on tensor cores, 0.08 times the plain product at (1024, 1024).

    Args:
        x: [r, m, p, i], any strides.
        inputs: signs, int8 [m, i].
        outputs: signs, int8 [m, o].
        sigma: a number, or [r].
    """
    (members, width), count = inputs.shape, outputs.shape[1]
    most = most_channels(x.dtype)
    noise = torch.empty((*x.shape[:3], count), device=x.device, dtype=x.dtype)
    if not noise.numel():
        return noise
    channels = block_size(max(width, count), most, MIN_BLOCK**2)
    block = max(MIN_BLOCK, min(64, channels // MIN_BLOCK))
    rows = x.shape[:3].numel()
    at_once = most * TILE_BYTES // ROW_BYTES
    is_wide, tile_rows = channels > at_once, block_size(rows, max(1, at_once // channels))
    tiles = -(-rows // tile_rows)
    grid = grid_of(tiles) if is_wide else programs_before_product(tiles, 1, x.device)
    with torch.cuda.device_of(x):
        hadamard_rows_kernel[grid](
            noise, x, inputs, outputs, *noise_scale(sigma, x),
            rows, count, width, members, x.shape[2], *x.stride(), tiles,
            EARLY=can_begin_early(x.device), ONCE=is_wide, ACC=accumulator_dtype(x.dtype),
            PRECISION=input_precision(x.dtype),
            ROWS=tile_rows, A=channels // block, B=block,
            num_warps=8 if is_wide else 4, num_stages=1 if is_wide else 3,
        )  # fmt: skip
    return noise


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

    Signs are int8, ``inputs`` [m, i] and ``outputs`` [m, o], of widths up to :func:`most_channels`. Other
    arguments are those of all launchers, see :mod:`impls.kernels.gemm`.

    * bytes: e R (i + o) + e i o of the product, e R (i + 2 o) of noise and m (i + o) of signs; x and W are
      read again from a cache for each tile of the other axis.
    * flops: on tensor cores 2 R i o of the product, and those of :func:`hadamard_rows`.
    """
    gemm = gemm_of(x, weight, y)
    inputs = operand("signs of inputs", inputs, (gemm.members, weight.shape[1]), torch.int8)
    outputs = operand("signs of outputs", outputs, (gemm.members, weight.shape[0]), torch.int8)
    if reason := too_wide(weight):
        raise ValueError(f"{reason}, got a weight of {list(weight.shape)}")
    noise = hadamard_rows(x, inputs, outputs, sigma)
    if not y.numel():
        return y
    tiling = select_tiling("hadamard", gemm, tiling, TILING.keep_warps(x.dtype))
    columns = min(COLUMNS, gemm.columns, tiling.block_n)
    described = describe(noise, tiling.block_m, columns)
    waits = can_begin_early(x.device)
    return gemm.launch(
        tiling, stored=[described or noise], LAST=add_rows, OPTIONS=(described is not None, waits),
        columns=columns, launch_pdl=waits,
    )  # fmt: skip


@variant(source="ours")
@dataclass(frozen=True)
class FusedHadamard(AbstractFused[HadamardNoise]):
    """:class:`~impls.schemes.hadamard.Hadamard` in two kernels.

    Memory    same as the wrapped scheme, with one copy of outputs during a forward.
    Work      rows are transformed by two small products on tensor cores, and written and read once.
    Quality   same as the wrapped scheme.
    """

    PLAIN = Hadamard

    @property
    @override
    def dtypes(self) -> frozenset[torch.dtype]:
        return NARROW

    @override
    def why_unsupported(self, module: nn.Module) -> str:
        return super().why_unsupported(module) or too_wide(next(module.parameters()).flatten(1))

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
