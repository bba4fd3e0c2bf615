"""Tiles that products read, and what is done to them before they meet: pieces that kernels inline."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def check_signs(name: str, signs: Tensor | None, members: int, width: int) -> None:
    """Refuse signs that are no int8 [members, width], one row behind the other.

    Raises:
        ValueError: with what they are.

    """
    if signs is None:
        return
    if signs.dtype is not torch.int8 or signs.shape != (members, width) or not signs.is_contiguous():
        got = f"{signs.dtype} {list(signs.shape)}"
        message = f"signs of {name} must be contiguous int8 [{members}, {width}], got {got}"
        raise ValueError(message)


@triton.jit
def channels(x, step, inside, k, inputs):
    """Load channels k of rows, [rows, k]: ``x`` points to each row, ``step`` lies between its channels."""
    here = inside[:, None] & (k < inputs)[None, :]
    return tl.load(x[:, None] + k[None, :] * step, mask=here, other=0)


@triton.jit
def weights(weight, step, column, across, k, inputs):
    """Load channels k of a weight's rows ``column``, transposed, [k, column]; ``step`` lies between rows."""
    here = (k < inputs)[:, None] & across[None, :]
    return tl.load(weight + column[None, :] * step + k[:, None], mask=here, other=0)


@triton.jit
def flip(values, signs):
    """Give values the signs of signed integers: one exclusive or each, exact in any type."""
    bits: tl.constexpr = values.dtype.primitive_bitwidth
    kind: tl.constexpr = tl.core.get_int_dtype(bits, True)  # noqa: FBT003  the compiler's own function
    turned = signs.to(kind) & -(1 << (bits - 1))
    return (values.to(kind, bitcast=True) ^ turned).to(values.dtype, bitcast=True)


@triton.jit
def onto(
    sums, x, x_step, inside, weight, weight_step, column, across, inputs,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Add the product of rows and a weight's rows ``column`` to sums, [rows, column], over all channels."""
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        values = channels(x, x_step, inside, k, inputs)
        shared = weights(weight, weight_step, column, across, k, inputs)
        sums = tl.dot(values, shared, acc=sums, out_dtype=TYPE, input_precision=PRECISION)
    return sums
