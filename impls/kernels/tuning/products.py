"""Tiles of the products that noise is a part of."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from impls.kernels import blocks, dropout, flipped, hadamard, lowrank, permuted, redrawn, sparse
from impls.kernels.drawn import Draw
from impls.kernels.rows import Tiling
from impls.kernels.tuning.layers import Layer
from impls.kernels.tuning.tunable import Launch, Task, Tunable, grid

SIZES = ((1024, 1024, 1024), (8192, 1024, 1024), (1024, 8192, 8192))
"""Rows, outputs and inputs of the suite ``kernels``."""

SIGMA = 0.02

CANDIDATES = grid(
    rows=(64, 128),
    columns=(64, 128, 256),
    deep=(32, 64),
    warps=(4, 8),
    stages=(2, 3, 4),
    group=(4, 8),
)
"""Tiles that any product may have."""

Compute = Callable[[Layer, tuple[int, ...]], Launch]
"""Draw a layer's noise, of sizes beside the layer's own, and return the call with given tiles."""


def tunable(
    kernel: str,
    compute: Compute,
    default: Callable[[tuple[int, ...]], Tiling],
    *more: tuple[int, ...],
) -> Tunable:
    """Describe a product.

    Args:
        kernel: its name in tables.
        compute: what is timed.
        default: tiles of its sizes where nothing was tuned.
        more: sizes beside rows, outputs and inputs that it is tuned for.

    """

    def set_up(task: Task, device: torch.device) -> Launch:
        return compute(Layer.of(task, device), task.sizes[3:])

    tasks = [Task(torch.bfloat16, (*sizes, *rest)) for sizes in SIZES for rest in more or ((),)]
    return Tunable(kernel, tasks, default, CANDIDATES, set_up)


def _low_rank(layer: Layer, sizes: tuple[int, ...]) -> Launch:
    (rank,), (x, weight, y, _) = sizes, layer
    rows, (outputs, inputs) = x.shape[1], weight.shape
    down, up = layer.normal(rows, rank, inputs), layer.normal(rows, rank, outputs)
    return lambda tiling: lowrank.low_rank_product(x, weight, down, up, SIGMA, y, tiling)


def _redrawn(*, signs: bool) -> Compute:
    def compute(layer: Layer, sizes: tuple[int, ...]) -> Launch:
        (rank,), (x, weight, y, _) = sizes, layer
        members = range(x.shape[1])
        down, up = Draw((0, 0), 0, 0, members), Draw((0, 0), 0, 1, members)
        return lambda tiling: redrawn.redrawn_product(
            x, weight, down, up, rank, SIGMA, y, signs=signs, tiling=tiling
        )

    return compute


def _redrawn_default(_: tuple[int, ...], *, signs: bool) -> Tiling:
    return redrawn.tiling_of(signs=signs)


def _hadamard(layer: Layer, _: tuple[int, ...]) -> Launch:
    x, weight, y, _generator = layer
    rows, (outputs, inputs) = x.shape[1], weight.shape
    before, after = layer.signs(rows, inputs), layer.signs(rows, outputs)
    return lambda tiling: hadamard.hadamard_product(x, weight, before, after, SIGMA, y, tiling)


def _flipped(layer: Layer, _: tuple[int, ...]) -> Launch:
    x, weight, y, _generator = layer
    rows, (outputs, inputs) = x.shape[1], weight.shape
    core, before, after = layer.normal(outputs, inputs), layer.signs(rows, inputs), layer.signs(rows, outputs)
    return lambda tiling: flipped.flipped_product(x, weight, core, before, after, SIGMA, y, tiling)


def _two_products(layer: Layer, sizes: tuple[int, ...]) -> Launch:
    (count,), (x, weight, y, _) = sizes, layer
    second, core = layer.normal(*x.shape[:3], count), layer.normal(len(weight), count)
    return lambda tiling: permuted.added_product(x, weight, second, core, SIGMA, y, tiling)


def _sparse(layer: Layer, sizes: tuple[int, ...]) -> Launch:
    (kept,), (x, weight, y, _) = sizes, layer
    rows, (outputs, inputs) = x.shape[1], weight.shape
    columns, values = layer.below(inputs, rows, kept), layer.normal(rows, kept, outputs)
    return lambda tiling: sparse.sparse_product(x, weight, columns, values, SIGMA, y, tiling)


def _dropped(product: Callable[..., Tensor], axis: int) -> Compute:
    def compute(layer: Layer, _: tuple[int, ...]) -> Launch:
        x, weight, y, _generator = layer
        kept = layer.below(2, x.shape[1], weight.shape[axis]).bool()
        return lambda tiling: product(x, weight, kept, 2.0, 0.0, y, tiling)

    return compute


def _blocks(layer: Layer, sizes: tuple[int, ...]) -> Launch:
    (out, inner, groups), (x, weight, y, _) = sizes, layer
    cuts = (blocks.Cut(out, out, len(weight) // out), blocks.Cut(inner, inner, weight.shape[1] // inner))
    # Each group keeps the first half of each axis that is cut.
    changes = x.new_full((groups, out, inner), -1.0)
    changes[:, : -(-out // 2), : -(-inner // 2)] = 1.0
    return lambda tiling: blocks.kept_blocks(x, weight, changes, cuts, 2.0, 0.0, y, 0, tiling)


TUNABLES = (
    tunable(lowrank.NAME, _low_rank, lambda sizes: lowrank.tiling_of(sizes[3]), (1,), (4,)),
    *(
        tunable(
            redrawn.NAMES[signs],
            _redrawn(signs=signs),
            functools.partial(_redrawn_default, signs=signs),
            (1,),
        )
        for signs in (False, True)
    ),
    tunable(hadamard.NAME, _hadamard, lambda _: hadamard.TILING),
    tunable(flipped.NAME, _flipped, lambda _: flipped.TILING),
    tunable(permuted.NAME, _two_products, lambda _: permuted.TILING, (128,), (512,), (1024,)),
    tunable(sparse.NAME, _sparse, lambda _: sparse.TILING, (1,), (2,)),
    tunable(dropout.INPUTS, _dropped(dropout.dropped_inputs, 1), lambda _: dropout.INPUTS_TILING),
    tunable(dropout.OUTPUTS, _dropped(dropout.dropped_outputs, 0), lambda _: dropout.TILING),
    tunable(blocks.NAME, _blocks, lambda _: blocks.TILING, (1, 2, 4), (2, 2, 8)),
)
"""In the order in which they are tuned."""
