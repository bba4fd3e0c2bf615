"""Matrix products that a model writes by hand, such as ``x @ weight.T``, as calls of a linear layer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Product(NamedTuple):
    """A product of rows with a matrix.

    Attributes:
        x: rows [..., c].
        weight: the matrix, [c, d] or [d, c].
        summed: the axis of the matrix that is summed, that of c.
        bias: added to the product, or None.
        order: how the axes of the product [..., d] are permuted, or None.
    """

    x: Tensor
    weight: Tensor
    summed: int
    bias: Tensor | None = None
    order: Sequence[int] | None = None


TRANSPOSITIONS = frozenset(
    {
        torch.t, torch.transpose, torch.permute, torch.swapaxes, Tensor.t, Tensor.transpose, Tensor.permute,
        Tensor.swapaxes, *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    }
)  # fmt: skip
"""Functions that may transpose a matrix."""

_MATMUL = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
_ADDMM = frozenset({torch.addmm, Tensor.addmm})
PRODUCTS = _MATMUL | _ADDMM | {functional.linear, torch.einsum}
"""Functions that :func:`read_product` reads."""


def read_product(
    func: Callable[..., object], args: Sequence[object], is_weight: Callable[[object], bool]
) -> Product | None:
    """Return a call as a product of a tensor with a matrix, or None if it is another function.

    Args:
        func: one of :data:`PRODUCTS`.
        args: its arguments.
        is_weight: whether an argument is a perturbed matrix.
    """
    match args:
        case (str() as equation, *operands) if func is torch.einsum:
            return _read_einsum(equation, operands, is_weight)
        case (Tensor() as x, Tensor() as weight) if func in _MATMUL:
            product = Product(x, weight, 0)
        case (Tensor() as bias, Tensor() as x, Tensor() as weight) if func in _ADDMM:
            product = Product(x, weight, 0, bias)
        case (Tensor() as x, Tensor() as weight) if func is functional.linear:
            product = Product(x, weight, 1)
        case (Tensor() as x, Tensor() as weight, Tensor() | None as bias) if func is functional.linear:
            product = Product(x, weight, 1, bias)
        case _:
            return None
    return product if x.dim() > 1 and is_weight(weight) and not is_weight(x) else None


def _read_einsum(
    equation: str, operands: Sequence[object], is_weight: Callable[[object], bool]
) -> Product | None:
    """Read a sum over one axis of a matrix, such as ``"...c,dc->...d"``, with the operands in any order."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    pairs = list(zip(inputs.split(","), operands, strict=False))
    pairs.sort(key=lambda pair: is_weight(pair[1]))
    match pairs:
        case ((axes, Tensor() as x), (matrix, Tensor() as weight)) if is_weight(weight):
            pass
        case _:
            return None
    others = "ABCDEFGHIJKL"[: x.dim() - len(axes.replace("...", ""))]
    axes, output = axes.replace("...", others), output.replace("...", others)
    summed, kept = set(matrix) & set(axes) - set(output), set(matrix) & set(output) - set(axes)
    if not len(summed) == len(kept) == 1 or len(matrix) != 2 or is_weight(x):  # noqa: PLR2004  a matrix's axes
        return None
    (c,), (d,) = summed, kept
    product_axes = axes.replace(c, "") + d
    if len(set(axes)) != len(axes) or sorted(product_axes) != sorted(output):
        return None
    order = [product_axes.index(axis) for axis in output]
    return Product(x.movedim(axes.index(c), -1), weight, matrix.index(c), None, order)
