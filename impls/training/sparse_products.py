"""Linear layers that store and multiply active weights only: unlike masks, they save time and memory.

The positions of the active weights are fixed, as growing others would need the dense gradient, which is never
computed. Inputs are [rows, in], outputs [rows, out].
"""

import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from impls.training.sparse_masks import random_mask


class AbstractSparseLinear(nn.Module, ABC):
    """A linear layer with a sparse weight [out, in]."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(layer.bias.detach().clone())

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the weight [out, in] with its zeros, without a gradient."""

    def mask(self) -> Tensor:
        """Return the mask of the nonzero entries: bool, [out, in]."""
        return self.dense() != 0


class Pattern(NamedTuple):
    """Positions of the active entries of a matrix, in CSR form for the matrix and for its transpose."""

    shape: tuple[int, int]
    row_ends: Tensor  # [rows + 1]: 0, and the number of entries up to the end of each row
    columns: Tensor  # of each entry, row by row
    column_ends: Tensor  # [columns + 1], as for rows
    rows: Tensor  # of each entry, column by column
    order: Tensor  # sorts entries that are stored row by row into column by column

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Pattern":
        """Return the pattern of a mask [out, in]."""
        rows, columns = mask.nonzero(as_tuple=True)
        order = torch.argsort(columns, stable=True)
        row_ends, column_ends = (
            nn.functional.pad(counts.cumsum(0), (1, 0)) for counts in (mask.sum(1), mask.sum(0))
        )
        return cls((mask.shape[0], mask.shape[1]), row_ends, columns, column_ends, rows[order], order)

    def matrix(self, values: Tensor) -> Tensor:
        """Return the matrix with these values, in CSR layout."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
            return torch.sparse_csr_tensor(
                self.row_ends, self.columns, values, self.shape, check_invariants=False
            )

    def transpose(self, values: Tensor) -> Tensor:
        """Return the transpose of the matrix with these values, in CSR layout."""
        return torch.sparse_csr_tensor(
            self.column_ends, self.rows, values[self.order], self.shape[::-1], check_invariants=False
        )

    def value_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return gradient.T @ x at the active entries only: the gradient of the values."""
        zeros = self.matrix(gradient.new_zeros(len(self.columns)))
        return torch.sparse.sampled_addmm(zeros, gradient.t(), x, beta=0.0).values()


class AbstractPatternLinear(AbstractSparseLinear):
    """A sparse linear layer that stores the active entries of its weight and their positions."""

    def __init__(self, layer: nn.Linear, mask: Tensor) -> None:
        super().__init__(layer)
        self.pattern = Pattern.from_mask(mask)
        self.values = nn.Parameter(layer.weight.detach()[mask])

    @abstractmethod
    def product(self, values: Tensor, x: Tensor) -> Tensor:
        """Return x [rows, in] @ W.T."""

    @abstractmethod
    def transposed_product(self, values: Tensor, gradient: Tensor) -> Tensor:
        """Return gradient [rows, out] @ W: the gradient of the inputs."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SparseProduct.apply(x, self.values, self)  # type: ignore[no-untyped-call]  # torch's
        return y + self.bias

    @override
    def dense(self) -> Tensor:
        return self.pattern.matrix(self.values.detach().flatten()).to_dense()


class CsrLinear(AbstractPatternLinear):
    """Multiplies by a CSR matrix, and computes the gradient of its values by ``sampled_addmm``."""

    @override
    def product(self, values: Tensor, x: Tensor) -> Tensor:
        return (self.pattern.matrix(values) @ x.t()).t()

    @override
    def transposed_product(self, values: Tensor, gradient: Tensor) -> Tensor:
        return (self.pattern.transpose(values) @ gradient.t()).t()


class CondensedLinear(AbstractPatternLinear):
    """A weight with the same number k of inputs for every output, as a table [out, k]: sums weighted columns.

    The condensed form of Lasby et al. 2023, Dynamic Sparse Training with Structured Sparsity.
    """

    def __init__(self, layer: nn.Linear, mask: Tensor) -> None:
        """Copy the active entries of a dense layer; each row of the mask has equally many."""
        super().__init__(layer, mask)
        self.values = nn.Parameter(self.values.detach().view(mask.shape[0], -1))

    @override
    def product(self, values: Tensor, x: Tensor) -> Tensor:
        columns = self.pattern.columns.view(values.shape)
        return nn.functional.embedding_bag(
            columns, x.t().contiguous(), per_sample_weights=values, mode="sum"
        ).t()

    @override
    def transposed_product(self, values: Tensor, gradient: Tensor) -> Tensor:
        pattern = self.pattern
        return nn.functional.embedding_bag(
            pattern.rows,
            gradient.t().contiguous(),
            pattern.column_ends[:-1],
            per_sample_weights=values.flatten()[pattern.order],
            mode="sum",
        ).t()


class BlockLinear(AbstractSparseLinear):
    """A weight of square blocks, some of which are active: multiplied as a batch of small dense matrices."""

    def __init__(self, layer: nn.Linear, mask: Tensor, side: int) -> None:
        super().__init__(layer)
        self.side = side
        blocks = _blocks(layer.weight.detach(), side)
        self._rows, self._columns = _blocks(mask, side)[:, :, 0, 0].nonzero(as_tuple=True)
        self._block_counts = (blocks.shape[0], blocks.shape[1])
        self.values = nn.Parameter(blocks[self._rows, self._columns].contiguous())

    @override
    def forward(self, x: Tensor) -> Tensor:
        block_inputs = x.unflatten(1, (-1, self.side)).transpose(0, 1)[self._columns]  # [blocks, rows, side]
        products = torch.bmm(block_inputs, self.values.transpose(1, 2))
        y = x.new_zeros(self._block_counts[0], len(x), self.side).index_add(0, self._rows, products)
        return y.transpose(0, 1).flatten(1) + self.bias

    @override
    def dense(self) -> Tensor:
        weight = self.values.new_zeros(*self._block_counts, self.side, self.side)
        weight[self._rows, self._columns] = self.values.detach()
        # [block rows, block columns, side, side] -> [outputs, inputs]
        return weight.transpose(1, 2).flatten(2).flatten(0, 1)


class SemiStructuredLinear(AbstractSparseLinear):
    """A weight with two of every four inputs, for sparse tensor cores of a GPU; the backward pass is dense.

    The weight is packed in every forward pass, as its values change.
    """

    def __init__(self, layer: nn.Linear, mask: Tensor) -> None:
        super().__init__(layer)
        self._mask = mask
        self.weight = nn.Parameter(layer.weight.detach() * mask)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SemiStructuredProduct.apply(x, self.weight, self._mask)  # type: ignore[no-untyped-call]  # torch's
        return y + self.bias

    @override
    def dense(self) -> Tensor:
        return self.weight.detach()


def constant_fan_in_mask(weight: Tensor, density: float, generator: Generator) -> Tensor:
    """Return a random mask of a weight [out, in] with equally many inputs, at least 1, for every output."""
    nonzero = max(1, round(density * weight.shape[1]))
    order = torch.rand(weight.shape, generator=generator).argsort(1)
    mask = torch.zeros(weight.shape, dtype=torch.bool).scatter(1, order[:, :nonzero], value=True)
    return mask.to(weight.device)


def block_mask(weight: Tensor, density: float, side: int, generator: Generator) -> Tensor:
    """Return a random mask of a weight [out, in] that consists of square blocks, at least one."""
    blocks = weight[::side, ::side]
    mask = random_mask(blocks, max(1, round(density * blocks.numel())), generator)
    return mask.repeat_interleave(side, 0).repeat_interleave(side, 1)


def two_of_four_mask(weight: Tensor, generator: Generator) -> Tensor:
    """Return a random mask of a weight [out, in] with two of every four inputs of an output."""
    permutations = torch.rand(weight.shape, generator=generator).unflatten(1, (-1, 4)).argsort(-1)
    return permutations.lt(2).flatten(1).to(weight.device)


class _SparseProduct(torch.autograd.Function):
    """Computes x @ W.T for a sparse W, and only the gradient of its active entries."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, values: Tensor, layer: AbstractPatternLinear) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.layer = layer
        return layer.product(values, x)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, values) = gradients, ctx.saved_tensors
        input_gradient = ctx.layer.transposed_product(values, gradient) if ctx.needs_input_grad[0] else None
        return input_gradient, ctx.layer.pattern.value_gradient(gradient, x).view(values.shape), None


class _SemiStructuredProduct(torch.autograd.Function):
    """Computes x @ W.T with a packed weight in the forward pass and the dense one in the backward pass."""

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
    """Return the blocks of a matrix: [rows of blocks, columns of blocks, side, side]."""
    return matrix.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
