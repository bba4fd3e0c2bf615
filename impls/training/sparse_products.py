"""Linear layers whose products skip what is not connected: the time and memory that masks do not save.

Each holds the values of its connections alone, which do not move: growth needs a dense gradient, which nobody
computes here. Rows are [rows, in], outputs [rows, out]; a bias is added.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from impls.training import topology


class AbstractSparseLinear(nn.Module, ABC):
    """A linear layer that knows its weight [out, in] written out."""

    bias: nn.Parameter

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the weight with its zeros."""

    @abstractmethod
    def mask(self) -> Tensor:
        """Return what is connected."""


class Pattern(NamedTuple):
    """Where the connections of a matrix are, by rows and by columns.

    ``order`` says which value by rows comes next by columns.
    """

    shape: tuple[int, int]
    row_ends: Tensor
    columns: Tensor
    column_ends: Tensor
    rows: Tensor
    order: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Pattern":
        """Read it from a mask [out, in]."""
        rows, columns = mask.nonzero(as_tuple=True)
        order = torch.argsort(columns, stable=True)
        ends = (
            torch.cat([one.new_zeros(1, dtype=torch.long), one.cumsum(0)])
            for one in (mask.sum(1), mask.sum(0))
        )
        shape = (mask.shape[0], mask.shape[1])
        row_ends, column_ends = ends
        return cls(shape, row_ends, columns, column_ends, rows[order], order)

    def matrix(self, values: Tensor) -> Tensor:
        """Return the matrix in the layout CSR."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
            return torch.sparse_csr_tensor(
                self.row_ends, self.columns, values, self.shape, check_invariants=False
            )

    def transposed(self, values: Tensor) -> Tensor:
        """Return the transposed matrix in the layout CSR."""
        return torch.sparse_csr_tensor(
            self.column_ends, self.rows, values[self.order], self.shape[::-1], check_invariants=False
        )

    def sampled(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the values: rows of outputs and inputs, multiplied where connections are."""
        like = self.matrix(gradient.new_zeros(len(self.columns)))
        return torch.sparse.sampled_addmm(like, gradient.t(), x, beta=0.0).values()


class CsrLinear(AbstractSparseLinear):
    """A product with a matrix in the layout CSR, and ``sampled_addmm`` for the gradient of its values."""

    def __init__(self, layer: nn.Linear, mask: Tensor) -> None:
        """Take over what is connected of a dense layer."""
        super().__init__()
        self.pattern = Pattern.of(mask)
        self.values = nn.Parameter(layer.weight.detach()[mask])
        self.bias = nn.Parameter(layer.bias.detach().clone())

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.values, self.pattern, _by_csr)  # type: ignore[no-untyped-call]  # torch's
        return y + self.bias

    @override
    def dense(self) -> Tensor:
        return self.pattern.matrix(self.values.detach()).to_dense()

    @override
    def mask(self) -> Tensor:
        return self.pattern.matrix(torch.ones_like(self.values)).to_dense().bool()


class CondensedLinear(AbstractSparseLinear):
    """As many connections for every output, in a dense table of their inputs: sums of weighted columns.

    Lasby et al., Dynamic Sparse Training with Structured Sparsity, 2023, call it the condensed form.
    """

    def __init__(self, layer: nn.Linear, mask: Tensor) -> None:
        """Take over what is connected of a dense layer; every row of the mask has as many entries."""
        super().__init__()
        self.pattern = Pattern.of(mask)
        self.values = nn.Parameter(layer.weight.detach()[mask].view(mask.shape[0], -1))
        self.bias = nn.Parameter(layer.bias.detach().clone())

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.values, self.pattern, _by_table)  # type: ignore[no-untyped-call]  # torch's
        return y + self.bias

    @override
    def dense(self) -> Tensor:
        return self.pattern.matrix(self.values.detach().flatten()).to_dense()

    @override
    def mask(self) -> Tensor:
        return self.pattern.matrix(torch.ones_like(self.values).flatten()).to_dense().bool()


class BlockLinear(AbstractSparseLinear):
    """Square blocks of connections, multiplied as a batch of small dense matrices."""

    def __init__(self, layer: nn.Linear, mask: Tensor, side: int) -> None:
        """Take over what is connected of a dense layer; the mask is made of blocks of this side."""
        super().__init__()
        self.side = side
        blocks = _blocks(layer.weight.detach(), side)
        self._rows, self._columns = _blocks(mask, side)[:, :, 0, 0].nonzero(as_tuple=True)
        self._outer = (blocks.shape[0], blocks.shape[1])
        self.values = nn.Parameter(blocks[self._rows, self._columns].contiguous())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    @override
    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, self.side)).transpose(0, 1)[self._columns]  # [blocks, rows, side]
        products = torch.bmm(parts, self.values.transpose(1, 2))
        y = x.new_zeros(self._outer[0], len(x), self.side).index_add(0, self._rows, products)
        return y.transpose(0, 1).flatten(1) + self.bias

    @override
    def dense(self) -> Tensor:
        return self._spread(self.values.detach())

    @override
    def mask(self) -> Tensor:
        return self._spread(torch.ones_like(self.values)).bool()

    def _spread(self, values: Tensor) -> Tensor:
        found = values.new_zeros(*self._outer, self.side, self.side)
        found[self._rows, self._columns] = values
        return found.transpose(1, 2).flatten(2).flatten(0, 1)


class SemiStructuredLinear(AbstractSparseLinear):
    """Two of four neighbouring inputs, by the sparse tensor cores of a GPU; the backward pass is dense.

    The weight is packed anew in every step, as its values change.
    """

    def __init__(self, layer: nn.Linear, mask: Tensor) -> None:
        """Take over what is connected of a dense layer; of four inputs in a row the mask has two."""
        super().__init__()
        self._mask = mask
        self.weight = nn.Parameter(layer.weight.detach() * mask)
        self.bias = nn.Parameter(layer.bias.detach().clone())

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _TwoOfFour.apply(x, self.weight, self._mask)  # type: ignore[no-untyped-call]  # torch's
        return y + self.bias

    @override
    def dense(self) -> Tensor:
        return self.weight.detach()

    @override
    def mask(self) -> Tensor:
        return self._mask


def constant_fan_in(shape: tuple[int, int], density: float, generator: Generator) -> Tensor:
    """Return a mask [out, in] with as many inputs for every output, at random; at least one."""
    kept = max(1, round(density * shape[1]))
    order = torch.rand(shape, generator=generator).argsort(1)
    return torch.zeros(shape, dtype=torch.bool).scatter(1, order[:, :kept], value=True)


def blocks(shape: tuple[int, int], density: float, side: int, generator: Generator) -> Tensor:
    """Return a mask [out, in] of square blocks at random; at least one."""
    coarse = torch.empty(shape[0] // side, shape[1] // side)
    kept = max(1, round(density * coarse.numel()))
    return topology.scattered(coarse, kept, generator).repeat_interleave(side, 0).repeat_interleave(side, 1)


def two_of_four(shape: tuple[int, int], generator: Generator) -> Tensor:
    """Return a mask [out, in] with two of every four inputs, at random."""
    return torch.rand(shape[0], shape[1] // 4, 4, generator=generator).argsort(-1).lt(2).flatten(1)


Product = Callable[[Pattern, Tensor, Tensor, bool], Tensor]
"""Multiplies a pattern with values, or its transpose, with [rows, channels]: [rows, channels]."""


def _by_csr(pattern: Pattern, values: Tensor, x: Tensor, is_transposed: bool) -> Tensor:  # noqa: FBT001  # a side
    matrix = pattern.transposed(values) if is_transposed else pattern.matrix(values)
    return (matrix @ x.t()).t()


def _by_table(pattern: Pattern, values: Tensor, x: Tensor, is_transposed: bool) -> Tensor:  # noqa: FBT001  # a side
    table, bag = x.t().contiguous(), nn.functional.embedding_bag
    if is_transposed:
        weights = values.flatten()[pattern.order]
        ends = pattern.column_ends[:-1]
        return bag(pattern.rows, table, ends, per_sample_weights=weights, mode="sum").t()
    columns = pattern.columns.view(values.shape)
    return bag(columns, table, per_sample_weights=values, mode="sum").t()


class _Product(torch.autograd.Function):
    """Rows by the transposed sparse matrix; no dense gradient of it is ever made."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, values: Tensor, pattern: Pattern, product: Product) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.product = pattern, product
        return product(pattern, values, x, False)  # noqa: FBT003  # a side

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, values) = gradients, ctx.saved_tensors
        of_x = ctx.product(ctx.pattern, values, gradient, True) if ctx.needs_input_grad[0] else None  # noqa: FBT003  # a side
        return of_x, ctx.pattern.sampled(gradient, x).view(values.shape), None, None


class _TwoOfFour(torch.autograd.Function):
    """Rows by a packed weight forwards, by the dense one backwards."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        return nn.functional.linear(x, torch.sparse.to_sparse_semi_structured(weight.detach()))

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight, mask) = gradients, ctx.saved_tensors
        return gradient @ weight, (gradient.t() @ x) * mask, None


def _blocks(matrix: Tensor, side: int) -> Tensor:
    """Return a matrix as [outer rows, outer columns, side, side]."""
    return matrix.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
