"""Product of all members' rows with their shared weight: arguments of a launch, and the loop of a kernel.

Activations are [r, m, p, c] with any strides: repeats, members, positions and channels. They are the rows
(repeat * members + member) * positions + position of one matrix product with a weight [o, c]. A Linear layer
has one position, a 1x1 convolution one for each pixel.

Launchers of fused products take x [r, m, p, i], weight [o, i] and y [r, m, p, o], which they write and
return; sigma, a number or a tensor [r] with a number for each repeat; and tile sizes, by default the tuned
ones or else the default of the kernel. They raise ValueError where shapes or dtypes do not match. Costs in
their docstrings are for R rows with one position each, and e bytes per number.

The ``triton.jit`` functions are inlined in the kernels of the fused schemes. In them ``offs_m``, ``offs_n``
and ``offs_k`` are rows, outputs and channels, and ``mask_m`` and ``mask_n`` are true for rows and outputs
that exist.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impls.kernels.optional_triton import tl, triton
from impls.kernels.tiling import Tiling, find_tuned_tiling, input_precision

DOT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes of a matrix product."""

MAX_PROGRAMS = 2**31 - 1
"""Programs of a launch on axis 0. The other axes have at most 65,535, so kernels use only this one."""


class Gemm(NamedTuple):
    """Arguments of a product of members' rows with a shared weight.

    Attributes:
        x: activations [r, m, p, i], any strides.
        weight: [o, i], i contiguous.
        y: the output [r, m, p, o], any strides.
    """

    x: Tensor
    weight: Tensor
    y: Tensor

    @property
    def members(self) -> int:
        """Number of members."""
        return self.x.shape[1]

    @property
    def rows(self) -> int:
        """Rows of all members."""
        return self.x.shape[:3].numel()

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Rows, outputs, inputs, members, positions."""
        return self.rows, *self.weight.shape, self.x.shape[1], self.x.shape[2]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of x, of y, and of the weight's outputs."""
        return *self.x.stride(), *self.y.stride(), self.weight.stride(0)

    def launch(
        self,
        kernel: Any,  # noqa: ANN401  Triton's functions have no type
        tiling: Tiling,
        operands: Sequence[Tensor | float | None],
        *more: int | Tensor,
        **constants: float,
    ) -> Tensor:
        """Launch a kernel with one program for each tile, and return y.

        The kernel's arguments are y, x, weight, ``operands``, sizes, strides, ``more`` and the numbers of
        tiles.
        """
        if not self.y.numel():
            return self.y
        tiles = -(-self.rows // tiling.block_m), -(-self.weight.shape[0] // tiling.block_n)
        dtype = self.x.dtype
        with torch.cuda.device_of(self.x):
            kernel[grid_of(*tiles)](
                self.y, self.x, self.weight, *operands, *self.sizes, *self.strides, *more, *tiles,
                ACC=accumulator_dtype(dtype), PRECISION=input_precision(dtype), **constants, **tiling.options,
            )  # fmt: skip
        return self.y


def gemm_of(x: Tensor, weight: Tensor, y: Tensor) -> Gemm:
    """Check x [r, m, p, i], weight [o, i] and y [r, m, p, o], all of one dtype on one device.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    matches = x.shape[:3] == y.shape[:3] and (*weight.shape,) == (y.shape[-1], x.shape[-1])
    if not matches or not x.dtype == weight.dtype == y.dtype or x.dtype not in DOT_DTYPES:
        got = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x, weight, y))
        raise ValueError(
            "a product takes x [r, m, p, i], weight [o, i] and y [r, m, p, o] of the same floating dtype, "
            f"got {', '.join(got)}"
        )
    return Gemm(x, weight if weight.stride(1) == 1 else weight.contiguous(), y)


def select_tiling(kernel: str, gemm: Gemm, requested: Tiling | None, default: Tiling, *more: int) -> Tiling:
    """Return the tile sizes of a launch: the requested, else the tuned, else the default ones.

    Args:
        kernel: its name in tables of tuned tile sizes.
        gemm: the product.
        requested: tile sizes that the caller asks for; None for the tuned ones.
        default: for a 16-bit dtype, see :meth:`Tiling.for_dtype`.
        more: sizes besides rows, outputs and inputs that tile sizes depend on.

    Raises:
        UserError: the table of this GPU cannot be read; the message names the file.
    """
    sizes = gemm.rows, *gemm.weight.shape
    tiling = requested or find_tuned_tiling(kernel, gemm.x, *sizes, *more) or default.for_dtype(gemm.x.dtype)
    return tiling.clip(*sizes)


def noise_scale(sigma: float | Tensor, x: Tensor, factor: float = 1.0) -> tuple[Tensor | None, float]:
    """Multiply sigma, a number or a tensor of one value for each repeat of x [r, ...], by a factor.

    Returns:
        The arguments ``sigmas`` [r] and ``sigma`` of a kernel, which reads the number if ``sigmas`` is None.
    """
    if isinstance(sigma, Tensor):
        return sigma.flatten() * factor, 0.0
    if x.dtype is torch.float64:  # a number that is passed to a kernel is float32
        return x.new_full((len(x),), sigma * factor), 0.0
    return None, sigma * factor


def accumulator_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype in which products of this dtype are summed."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def grid_of(*counts: int) -> tuple[int]:
    """Return a one-dimensional grid of the product of these numbers of programs.

    Raises:
        ValueError: a launch cannot have this many programs.
    """
    grid = 1
    for count in counts:
        grid *= count
    if grid > MAX_PROGRAMS:
        raise ValueError(
            f"a launch of {grid} programs exceeds the limit of {MAX_PROGRAMS}: evaluate fewer members at once"
        )
    return (grid,)


def operand(name: str, values: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Check the shape and dtype of an operand, and return it contiguous.

    Raises:
        ValueError: the shape or the dtype differs.
    """
    if values.shape != tuple(shape) or values.dtype is not dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {values.dtype} {list(values.shape)}")
    return values.contiguous()


@triton.jit
def tile_index(tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column of this program's tile, int64: down GROUP_M tiles, then the next column."""
    pid = tl.program_id(0).to(tl.int64)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    pid_in_group = pid % (GROUP_M * tiles_n)
    return first_m + pid_in_group % group_m, pid_in_group // group_m


@triton.jit
def tile_offsets(tiles_m, tiles_n, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (offs_m, offs_n) of this program's tile, in int64, see :func:`tile_index`."""
    pid_m, pid_n = tile_index(tiles_m, tiles_n, GROUP_M)
    return pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def row_to_member(offs_m, members, positions):
    """Return (repeat, member, position) of rows, which are counted in this order, positions fastest."""
    image = offs_m // positions
    return image // members, image % members, offs_m % positions


@triton.jit
def load_sigma(sigmas, sigma, repeat, mask_m, ACC: tl.constexpr):
    """Return each row's noise scale in dtype ACC: ``sigmas[repeat]``, or ``sigma`` without ``sigmas``."""
    if sigmas is None:
        return tl.full(repeat.shape, sigma, ACC)
    else:  # noqa: RET505  the compiler takes no early return here
        return tl.load(sigmas + repeat, mask=mask_m, other=0).to(ACC)


@triton.jit
def load_x(x, stride_xi, mask_m, offs_k, inputs):
    """Load channels of rows, [m, k]; ``x`` points to each row's first channel."""
    mask = mask_m[:, None] & (offs_k < inputs)[None, :]
    # Channels may lie so far apart that their offsets need 64 bits.
    return tl.load(x[:, None] + offs_k[None, :].to(tl.int64) * stride_xi, mask=mask, other=0)


@triton.jit
def load_weight(weight, stride_wo, offs_n, mask_n, offs_k, inputs):
    """Load channels of a weight's outputs, transposed: [k, n]."""
    mask = (offs_k < inputs)[:, None] & mask_n[None, :]
    return tl.load(weight + offs_n[None, :] * stride_wo + offs_k[:, None], mask=mask, other=0)


@triton.jit
def flip_signs(values, signs):
    """Multiply values by the signs of integers, by an exclusive or of the sign bits: exact in any dtype."""
    bits: tl.constexpr = values.dtype.primitive_bitwidth
    int_dtype: tl.constexpr = tl.core.get_int_dtype(bits, True)  # noqa: FBT003  the compiler's own function
    sign_bit = signs.to(int_dtype) & -(1 << (bits - 1))
    return (values.to(int_dtype, bitcast=True) ^ sign_bit).to(values.dtype, bitcast=True)


@triton.jit
def dot_accumulate(
    acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, offs_k, inputs,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product over channels ``offs_k`` to ``acc`` [m, n]; return it and the values of x [m, k].

    Args:
        acc: [m, n], of dtype ACC.
        x: pointers to each row's first channel, [m].
        stride_xi: stride of x's channels.
        mask_m: whether a row exists, [m].
        weight: pointer to [o, i], i contiguous.
        stride_wo: stride of the weight's outputs.
        offs_n: outputs, [n].
        mask_n: whether an output exists, [n].
        offs_k: channels, [k]; those of ``inputs`` and above count as zeros.
        inputs: number of channels.
        ACC: dtype of sums.
        PRECISION: of float32 products.
    """
    a = load_x(x, stride_xi, mask_m, offs_k, inputs)
    b = load_weight(weight, stride_wo, offs_n, mask_n, offs_k, inputs)
    return tl.dot(a, b, acc=acc, out_dtype=ACC, input_precision=PRECISION), a


@triton.jit
def gemm_loop(
    acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, begin, end,
    ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product over channels ``begin`` to ``end`` to ``acc``, see :func:`dot_accumulate`."""
    for start in range(begin, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        acc, _ = dot_accumulate(
            acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, offs_k, end, ACC, PRECISION
        )
    return acc
