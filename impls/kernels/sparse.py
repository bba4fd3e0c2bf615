"""Product with noise in a few input columns of each member, in one kernel, and the sum of that noise.

y_row = W x + sigma sum_j x[column_j] v_j. The row's values at its member's columns are gathered before the
product and multiplied by the noise before y is written.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    accumulator_dtype,
    gemm_of,
    grid_of,
    load_of_members,
    load_sigma,
    noise_scale,
    operand,
    row_to_member,
    select_tiling,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.scheme import AbstractFused
from impls.kernels.tiling import Tiling, block_size
from impls.schemes.sparse import SparseNoise, SparsePerturbed

TILING = Tiling(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes."""

MAX_UNROLLED = tl.constexpr(2)
"""Largest number of columns of a member for which the loop over them is unrolled."""

MAX_COLUMNS = 8
"""Largest number of columns of a member: kernels are compiled and tested up to it."""

AT_ONCE = 16
"""Rows of values that a sum loads at a time."""

MAX_OUTPUTS = 256
"""Maximum number of outputs in a tile of a sum: 32 values for each of 128 threads."""


@triton.jit
def add_column(
    acc, out, pointer, stride_i, member, mask_m, columns, values, scale, j, start_m, start_n,
    K: tl.constexpr, IS_DESCRIBED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add to acc [m, n] the product of x at each row's column j with the row's values of that column.

    ``pointer`` [m] points to each row of x.
    """
    column = tl.load(columns + member * K + j, mask=mask_m, other=0).to(tl.int64)
    x_column = tl.load(pointer + column * stride_i, mask=mask_m, other=0).to(ACC) * scale
    start, end = j * out.outputs + start_n, (j + 1) * out.outputs
    value = load_of_members(values, out, start_m, start, end, K * out.outputs, acc, IS_DESCRIBED)
    return acc + x_column[:, None] * value.to(ACC)


@triton.jit
def add_columns(acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr):
    """Add sigma sum_j x[column_j] v_j to the rows of acc [m, n].

    ``columns`` [members, k] has each member's column_j, and ``stored`` [members, k * o] its v_j.
    """
    pointer, stride_r, stride_m, stride_p, stride_i, columns, sigmas, sigma = operands
    k: tl.constexpr = OPTIONS[0]
    is_described: tl.constexpr = OPTIONS[1]
    offs_m = start_m + tl.arange(0, acc.shape[0])
    mask_m = offs_m < out.rows
    repeat, member, position = row_to_member(offs_m, out.members, out.positions)
    pointer += repeat * stride_r + member * stride_m + position * stride_p
    scale = load_sigma(sigmas, sigma, repeat, mask_m, ACC)
    if k <= MAX_UNROLLED:
        for j in tl.static_range(k):
            acc = add_column(
                acc, out, pointer, stride_i, member, mask_m, columns, stored[0], scale, j, start_m, start_n,
                k, is_described, ACC,
            )  # fmt: skip
    else:
        # If this loop were unrolled, the loads of all columns would be in registers at the same time.
        for j in tl.range(0, k, num_stages=1):
            acc = add_column(
                acc, out, pointer, stride_i, member, mask_m, columns, stored[0], scale, j, start_m, start_n,
                k, is_described, ACC,
            )  # fmt: skip
    return acc


def sparse_product(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    values: Tensor,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Apply W + sigma E_m to each row, where E_m has k nonzero columns; write to ``y`` and return it.

    ``columns`` is int64 [m, k] with k <= 8, and ``values`` is [m, k, o]. The other arguments are common to
    all launchers, see :mod:`impls.kernels.gemm`.

    * bytes: e R (i + o) + e i o for the matmul, e m k o for values, 8 m k for columns; columns, and x at
      them, are reread from cache for each tile of outputs. e is the element size.
    * flops: 2 R i o on tensor cores, and 2 R k o on CUDA cores.
    """
    gemm, count = gemm_of(x, weight, y), columns.shape[-1]
    columns = operand("columns", columns, (gemm.members, count), torch.int64)
    values = operand("values", values, (gemm.members, count, len(weight)), x.dtype)
    if count > MAX_COLUMNS:
        raise ValueError(
            f"the kernel supports at most {MAX_COLUMNS} perturbed columns per member, got {count}"
        )
    tiling = select_tiling("sparse", gemm, tiling, TILING.keep_warps(x.dtype), count)
    described = gemm.describe_members(values, tiling)
    operands = (x, *x.stride(), columns, *noise_scale(sigma, x))
    return gemm.launch(
        tiling, operands, stored=[described], LAST=add_columns,
        OPTIONS=(count, not isinstance(described, Tensor)),
        FLATTEN=count <= MAX_UNROLLED.value,
    )  # fmt: skip


@triton.jit
def column_sums_kernel(
    out, values, utilities, order, starts, k, outputs, tiles,
    ACC: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum members' values at one input column for a tile of outputs; the grid is tiles times columns.

    ``order`` are rows of values by column, and ``starts`` the index in it at which each column begins.
    """
    pid = tl.program_id(0).to(tl.int64)
    column, offs_n = pid // tiles, pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    begin, end = tl.load(starts + column), tl.load(starts + column + 1)
    acc = tl.zeros((BLOCK_N,), dtype=ACC)
    for start in range(begin, end, AT_ONCE):
        offs_m = start + tl.arange(0, AT_ONCE)
        mask_m = offs_m < end
        row = tl.load(order + offs_m, mask=mask_m, other=0)
        utility = tl.load(utilities + row // k, mask=mask_m, other=0).to(ACC)
        mask = mask_m[:, None] & mask_n[None, :]
        value = tl.load(values + row[:, None] * outputs + offs_n[None, :], mask=mask, other=0)
        acc += tl.sum(value.to(ACC) * utility[:, None], axis=0)
    tl.store(out + column * outputs + offs_n, acc.to(out.dtype.element_ty), mask=mask_n)


def sort_columns(columns: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Sort columns [m, k] stably: return the order, int64 [m k], and the start of each column in it."""
    # Sorting int32 takes half the passes of int64.
    values, order = columns.flatten().int().sort(stable=True)
    bounds = torch.arange(inputs + 1, device=columns.device, dtype=torch.int32)
    return order, torch.searchsorted(values, bounds, out_int32=True)


def column_sums(columns: Tensor, values: Tensor, utilities: Tensor, inputs: int) -> Tensor:
    """Sum members' columns by their utilities, c_m v[m, k, o] at column i = columns[m, k]: [i, o].

    Rows of values are sorted by their column. Each column adds its rows in the order of members, in float32,
    or float64 for float64: without atomics, so the bits are the same every time.

    A product with a matrix of zeros and ones would take 2 m k i o flops, 22 us times k for m = 8192 and 1024
    x 1024 at 790 TFLOP/s. Here the sum of 16 MB times k takes 4 us times k, after a sort of 8192 k numbers,
    about 20 us.

    * bytes: e m k o of values once, e i o of the result, and those of a sort of m k numbers.
    * flops: 2 m k o, without tensor cores.

    Args:
        columns: int64 [m, k], below ``inputs``.
        values: [m, k, o].
        utilities: [m], of the dtype of values, which the sum has too.
        inputs: number of columns of the result.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    members, count, outputs = values.shape
    columns = operand("columns", columns, (members, count), torch.int64)
    utilities = operand("utilities", utilities, (members,), values.dtype)
    out = torch.empty(inputs, outputs, device=values.device, dtype=values.dtype)
    if not out.numel():
        return out
    order, starts = sort_columns(columns, inputs)
    width = block_size(outputs, MAX_OUTPUTS, 32)
    tiles = -(-outputs // width)
    with torch.cuda.device_of(values):
        column_sums_kernel[grid_of(inputs, tiles)](
            out, values.contiguous(), utilities, order, starts, count, outputs, tiles,
            ACC=accumulator_dtype(values.dtype), AT_ONCE=AT_ONCE, BLOCK_N=width,
        )  # fmt: skip
    return out


@variant(k=(1, 2), values="sign", source="NESgpu's sparse noise, with signs; the kernels are ours")
@variant(k=(1, 2), source="NESgpu; the kernels are ours")
@dataclass(frozen=True)
class FusedSparsePerturbed(AbstractFused[SparseNoise]):
    """:class:`~impls.schemes.sparse.SparsePerturbed` in one kernel without further passes over rows.

    The update adds the members of each column in order. Unlike that of the wrapped scheme on a GPU, its bits
    are the same every time.

    Memory    same as the wrapped scheme.
    Work      same as the wrapped scheme; a row's columns are gathered once for each tile of outputs.
    Quality   same as the wrapped scheme.
    """

    PLAIN = SparsePerturbed

    k: int
    values: Literal["normal", "sign"] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > MAX_COLUMNS:
            raise ValueError(
                f"k must be at most {MAX_COLUMNS} for a kernel, got {self.k}: "
                "SparsePerturbed supports more columns"
            )

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: SparseNoise, sigma: float | Tensor, y: Tensor) -> None:
        sparse_product(x, weight, noise.columns[:, 0], noise.values[:, 0].flatten(2), sigma, y)

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        values = noise.values[:, 0].flatten(2)
        total = column_sums(noise.columns[:, 0], values, utilities, noise.inputs)
        return total.view(1, noise.inputs, *noise.values.shape[3:]).transpose(1, 2)
