"""Launches of kernels on random operands of given sizes, for autotuning and for compile checks."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from impls.kernels import (
    blocks,
    dropout,
    flipped,
    gemm,
    hadamard,
    lowrank,
    lowrank_rng,
    outer,
    permuted,
    sparse,
)
from impls.kernels.philox import Draw, Law
from impls.kernels.tiling import Tiling

SIGMA = 0.02

Launch = Callable[[Tiling | None], Tensor]
"""Launch a kernel with these tile sizes, on the same operands every time, and return the result."""


class Operands:
    """Random operands: x [repeats, rows, positions, inputs], y like it, and weight [outputs, inputs].

    On the device ``meta`` they have no data.

    Args:
        sizes: rows, which are members of a layer, outputs and inputs.
        dtype: dtype of floating operands.
        device: device of the operands.
        repeats: number of repeats of each member.
        positions: number of positions of each member.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        repeats: int = 1,
        positions: int = 1,
    ) -> None:
        self.rows, self.outputs, self.inputs = sizes
        self._options: dict[str, Any] = {"device": device}
        self._dtype = dtype
        if device.type != "meta":
            self._options["generator"] = Generator(device).manual_seed(0)
        self.x = self.normal(repeats, self.rows, self.inputs, positions).mT
        self.weight = self.normal(self.outputs, self.inputs)
        self.y = self.x.new_empty(repeats, self.rows, self.outputs, positions).mT

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normals."""
        return torch.randn(shape, dtype=self._dtype, **self._options)

    def below(self, end: int, *shape: int) -> Tensor:
        """Draw indices from 0 to end - 1, int64."""
        return torch.randint(end, shape, **self._options)

    def signs(self, *shape: int) -> Tensor:
        """Draw +1 and -1, int8."""
        return (2 * self.below(2, *shape) - 1).to(torch.int8)

    def draw(self, name: int = 0) -> Draw:
        """Return a draw of noise of the members, which kernels make themselves."""
        return Draw((1, 2), 3, name, range(self.rows))


def low_rank(operands: Operands, rank: int) -> Launch:
    """Stored low-rank noise."""
    down, up = (operands.normal(operands.rows, rank, width) for width in (operands.inputs, operands.outputs))
    return lambda tiling: lowrank.low_rank_product(
        operands.x, operands.weight, down, up, SIGMA, operands.y, tiling
    )


def drawn_low_rank(operands: Operands, rank: int, law: Law = "normal") -> Launch:
    """Low-rank noise drawn in the kernels."""
    return lambda tiling: lowrank_rng.low_rank_rng_product(
        operands.x,
        operands.weight,
        operands.draw(),
        operands.draw(1),
        rank,
        SIGMA,
        operands.y,
        law=law,
        tiling=tiling,
    )


def hadamard_noise(operands: Operands) -> Launch:
    """A Hadamard matrix between signs."""
    before, after = (operands.signs(operands.rows, width) for width in (operands.inputs, operands.outputs))
    return lambda tiling: hadamard.hadamard_product(
        operands.x, operands.weight, before, after, SIGMA, operands.y, tiling
    )


def flips(operands: Operands, side: str = "both") -> Launch:
    """A shared core with flipped inputs, outputs or both."""
    core = operands.normal(operands.outputs, operands.inputs)
    before = None if side == "out" else operands.signs(operands.rows, operands.inputs)
    after = None if side == "in" else operands.signs(operands.rows, operands.outputs)
    return lambda tiling: flipped.flipped_product(
        operands.x, operands.weight, core, before, after, SIGMA, operands.y, tiling
    )


def two_products(operands: Operands, count: int) -> Launch:
    """Permuted inputs: ``count`` picked channels times a core."""
    second, core = (
        gemm.empty_aligned(values.shape, values).copy_(values)
        for values in (operands.normal(1, operands.rows, 1, count), operands.normal(operands.outputs, count))
    )
    return lambda tiling: permuted.permuted_product(
        operands.x, operands.weight, second, core, operands.y, tiling
    )


def sparse_noise(operands: Operands, count: int, sigma: float | Tensor = SIGMA) -> Launch:
    """Noise in ``count`` columns."""
    columns, values = (
        operands.below(operands.inputs, operands.rows, count),
        operands.normal(operands.rows, count, operands.outputs),
    )
    return lambda tiling: sparse.sparse_product(
        operands.x, operands.weight, columns, values, sigma, operands.y, tiling
    )


def dropout_product(operands: Operands, off: float = 0.0, *, side: Literal["in", "out"] = "in") -> Launch:
    """Masks on inputs or outputs; with a factor ``off`` of dropped ones, as in antithetic halves."""
    mask = operands.below(2, operands.rows, operands.inputs if side == "in" else operands.outputs).bool()
    return lambda tiling: dropout.dropout_product(
        operands.x, operands.weight, mask, 2.0, off, operands.y, side, tiling
    )


def block_dropout_product(operands: Operands, out: int, inner: int, groups: int, off: float = 0.0) -> Launch:
    """Blocks of outputs and inputs, of which each group keeps the first half if there are several."""
    cuts = blocks.Cut(out, out, operands.outputs // out), blocks.Cut(inner, inner, operands.inputs // inner)
    changes = operands.x.new_full((groups, out, inner), -1.0)
    changes[:, : -(-out // 2), : -(-inner // 2)] = 1.0
    return lambda tiling: blocks.block_dropout_product(
        operands.x, operands.weight, changes, cuts, 2.0, off, operands.y, tiling=tiling
    )


def outer_products(
    operands: Operands, *, signs: bool = False, is_cored: bool = False, is_hadamard: bool = False
) -> Launch:
    """Weighted sums of outer products; the sizes are outputs, inputs and rows, in this order."""
    outputs, inputs, rows = operands.rows, operands.outputs, operands.inputs
    left, right = (
        operands.signs(rows, width) if signs else operands.normal(rows, width) for width in (outputs, inputs)
    )
    utilities, core = operands.normal(rows), operands.normal(outputs, inputs) if is_cored else None
    return lambda tiling: outer.weighted_outer(
        left, right, utilities, core, hadamard=is_hadamard, tiling=tiling
    )
