"""Products of rows with members' perturbed weights: each fused kernel against its formula in plain torch."""

import math
import mmap
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from impls.kernels import (
    blocks,
    dense_rng,
    dropout,
    flipped,
    gemm,
    hadamard,
    lowrank,
    lowrank_rng,
    permuted,
    sparse,
)
from impls.kernels.blocks import Cut
from impls.kernels.dense_rng import FewRowsTiling
from impls.kernels.optional_triton import tl, triton
from impls.kernels.philox import Draw, Law, fill
from impls.kernels.tiling import Tiling
from impls.schemes import hadamard as plain_hadamard
from impls.verify.reference import check_close
from tests.kernels.launched.canaries import DEVICE, Canaries, canaries, generator, normal

Sigma = float | Tensor


class Sizes(NamedTuple):
    """Sizes of a product."""

    repeats: int
    members: int
    positions: int
    inputs: int
    outputs: int


SMALL, OTHER = Tiling(16, 32, 16, 2, 4, 2), Tiling(32, 16, 32, 1)
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
Cases = list[tuple[Sizes, torch.dtype, Tiling | None, Sigma]]
CASES: Cases = [
    (Sizes(1, 1, 1, 1, 1), SINGLE, None, 0.3),
    (Sizes(2, 21, 1, 50, 40), HALF, SMALL, torch.tensor([0.5, -2.0])),
    (Sizes(2, 3, 7, 33, 40), SINGLE, OTHER, torch.tensor([0.5, -0.5])),
    (Sizes(3, 2, 19, 70, 100), HALF, None, 0.3),
    (Sizes(2, 5, 3, 37, 33), DOUBLE, SMALL, 0.1),
    (Sizes(2, 32, 1, 72, 272), HALF, SMALL, torch.tensor([0.5, -0.5])),
]
"""Sizes that are not multiples of a tile, some with several tiles along an axis or one sigma per repeat.

Rows of the last case begin at multiples of 16 bytes, so that its kernels load and store by descriptors.

A number passed to a kernel on a GPU is float32; the case in float64 shows that factors keep 53 bits.
"""

DRAWN_CASES: Cases = [
    (Sizes(1, 5, 3, 40, 35), SINGLE, SMALL, 0.3),
    (Sizes(2, 3, 1, 131, 18), HALF, OTHER, torch.tensor([0.5, -2.0])),
    (Sizes(3, 2, 3, 33, 17), HALF, None, 0.3),
    (Sizes(2, 2, 3, 128, 18), SINGLE, SMALL, torch.tensor([0.5, -0.5])),
    (Sizes(1, 2, 1, 128, 18), DOUBLE, SMALL, 0.1),
]
"""Smaller cases for kernels that draw signs; one Philox call gives 128 signs."""

NORMAL_CASES: Cases = [
    (sizes._replace(inputs=min(sizes.inputs, 38)), dtype, tiling, sigma)
    for sizes, dtype, tiling, sigma in DRAWN_CASES
    if dtype is not DOUBLE
]
"""Cases for kernels that draw normals, four per Philox call; no kernel draws them in float64."""


class Product(NamedTuple):
    """A kernel's product with given noise, and the same product in plain torch.

    Attributes:
        launch: takes (x, weight, sigma, y, tiling) and writes the product into y.
        formula: takes (x, weight, sigma) and computes in the dtype of x.
    """

    launch: Callable[..., Tensor]
    formula: Callable[..., Tensor]


Guard = Callable[[Tensor], Tensor]
Make = Callable[[Sizes, torch.dtype, Guard], Product]
"""Makes noise for given sizes and dtype; the launch reads guarded copies of it."""


class Family(NamedTuple):
    """A kernel and the cases that it is tested with.

    Attributes:
        make: makes its noise.
        tilings: used instead of SMALL and OTHER.
        cases: sizes, dtypes, tilings and sigmas.
    """

    make: Make
    tilings: tuple[Any, Any] = (SMALL, OTHER)
    cases: Cases = CASES


def signs(seed: int, *shape: int) -> Tensor:
    """Draw +1 and -1 as int8."""
    return (torch.randint(0, 2, shape, generator=generator(seed)) * 2 - 1).to(DEVICE, torch.int8)


def per_repeat(sigma: Sigma, x: Tensor) -> Tensor:
    """Return sigma as [r, 1, 1, 1] in the dtype of x."""
    return torch.as_tensor(sigma, dtype=x.dtype, device=DEVICE).expand(len(x)).view(-1, 1, 1, 1)


def dense_formula(x: Tensor, weight: Tensor, sigma: Sigma, changes: Tensor) -> Tensor:
    """Multiply rows by W + sigma E_m, with E of [m, o, i], as two products."""
    correction = torch.einsum("rmpi,moi->rmpo", x, changes.to(x.dtype))
    return x @ weight.mT + per_repeat(sigma, x) * correction


# --- Low rank and dense noise, stored and drawn. ---


def low_rank_formula(x: Tensor, weight: Tensor, sigma: Sigma, down: Tensor, up: Tensor) -> Tensor:
    """Multiply rows by W, and add their product with both low-rank factors, one after the other."""
    scale = per_repeat(sigma, x) / math.sqrt(down.shape[1])
    narrow = torch.einsum("rmpi,mki->rmpk", x, down.to(x.dtype)) * scale
    return x @ weight.mT + torch.einsum("rmpk,mko->rmpo", narrow, up.to(x.dtype))


def make_low_rank(rank: int, sizes: Sizes, dtype: torch.dtype, guard: Guard) -> Product:
    """Make stored low-rank noise."""
    stored = [
        normal(seed, sizes.members, rank, width, dtype=dtype)
        for seed, width in ((2, sizes.inputs), (3, sizes.outputs))
    ]
    down, up = map(guard, stored)
    return Product(
        lambda x, w, s, y, t: lowrank.low_rank_product(x, w, down, up, s, y, t),
        lambda x, w, s: low_rank_formula(x, w, s, *stored),
    )


def draw_of(name: int, members: int, first: int = 2**31 - 2) -> Draw:
    """Return a draw of members whose counters do not fit in an int32."""
    return Draw((0x80000001, 0xFFFFFFFF), 0x9ABCDEF0, name, range(first, first + members))


def written(draw: Draw, *shape: int, law: Law, dtype: torch.dtype) -> Tensor:
    """Return drawn noise as a tensor [m, *shape]."""
    values = torch.empty(len(draw.members), math.prod(shape), device=DEVICE, dtype=dtype)
    return fill(values, draw, law=law).unflatten(1, shape)


def make_drawn_low_rank(
    rank: int, law: Law, sizes: Sizes, dtype: torch.dtype, guard: Guard  # noqa: ARG001  nothing is stored
) -> Product:  # fmt: skip
    """Make low-rank noise that the kernel draws."""
    down, up = draw_of(7, sizes.members), draw_of(8, sizes.members)
    values = [
        written(draw, rank, width, law=law, dtype=dtype)
        for draw, width in ((down, sizes.inputs), (up, sizes.outputs))
    ]
    return Product(
        lambda x, w, s, y, t: lowrank_rng.low_rank_rng_product(x, w, down, up, rank, s, y, law=law, tiling=t),
        lambda x, w, s: low_rank_formula(x, w, s, *values),
    )


def make_drawn_dense(law: Law, sizes: Sizes, dtype: torch.dtype, guard: Guard) -> Product:  # noqa: ARG001  nothing is stored
    """Make dense noise that the kernel draws."""
    draw = draw_of(5, sizes.members)
    changes = written(draw, sizes.outputs, sizes.inputs, law=law, dtype=dtype)
    return Product(
        lambda x, w, s, y, t: dense_rng.dense_rng_product(x, w, draw, s, y, law=law, tiling=t),
        lambda x, w, s: dense_formula(x, w, s, changes),
    )


FEW = FewRowsTiling(rows=4, block_m=16, block_n=32, line=16, calls=2, block_k=32)
MANY = {
    "normal": Tiling(16, 16, 64, num_stages=2),
    "uniform": Tiling(16, 16, 64, num_stages=2),
    "sign": Tiling(16, 32, 128, num_stages=2),
}
LAWS: list[tuple[Law, Cases]] = [
    ("normal", NORMAL_CASES),
    ("uniform", [*NORMAL_CASES[1:3], DRAWN_CASES[-1]]),
    ("sign", DRAWN_CASES),
]


# --- Shared cores, and columns. ---


def flipped_formula(
    x: Tensor, weight: Tensor, sigma: Sigma, core: Tensor, *member_signs: Tensor | None
) -> Tensor:
    """Multiply rows by W, and add their product with the shared core between members' signs."""
    inputs, outputs = member_signs
    before = x if inputs is None else x * inputs[:, None].to(x.dtype)
    noise = before @ core.to(x.dtype).mT * per_repeat(sigma, x)
    return x @ weight.mT + (noise if outputs is None else noise * outputs[:, None].to(x.dtype))


def make_flipped(side: str, sizes: Sizes, dtype: torch.dtype, guard: Guard) -> Product:
    """Make a shared core with members' signs for inputs, outputs or both."""
    inputs = signs(2, sizes.members, sizes.inputs) if side != "out" else None
    outputs = signs(3, sizes.members, sizes.outputs) if side != "in" else None
    core = normal(4, sizes.outputs, sizes.inputs, dtype=dtype)
    shared, before, after = (
        guard(core),
        *(None if member_signs is None else guard(member_signs) for member_signs in (inputs, outputs)),
    )
    return Product(
        lambda x, w, s, y, t: flipped.flipped_product(x, w, shared, before, after, s, y, t),
        lambda x, w, s: flipped_formula(x, w, s, core, inputs, outputs),
    )


def hadamard_formula(x: Tensor, weight: Tensor, sigma: Sigma, inputs: Tensor, outputs: Tensor) -> Tensor:
    """Multiply rows by W, and add their product with the Hadamard matrix between members' signs."""
    widths = outputs.shape[1], inputs.shape[1]
    largest = max(plain_hadamard.hadamard_factors(plain_hadamard.hadamard_width(*widths)))
    seed = plain_hadamard.sylvester(largest, device=x.device, dtype=x.dtype)
    return flipped_formula(x, weight, sigma, plain_hadamard.hadamard_matrix(*widths, seed), inputs, outputs)


def make_hadamard(sizes: Sizes, _: torch.dtype, guard: Guard) -> Product:
    """Make members' signs around a Hadamard matrix."""
    member_signs = signs(2, sizes.members, sizes.inputs), signs(3, sizes.members, sizes.outputs)
    before, after = map(guard, member_signs)
    return Product(
        lambda x, w, s, y, t: hadamard.hadamard_product(x, w, before, after, s, y, t),
        lambda x, w, s: hadamard_formula(x, w, s, *member_signs),
    )


def make_permuted(sizes: Sizes, dtype: torch.dtype, guard: Guard) -> Product:
    """Make members' picks of input channels, with replacement, and a shared core of that width."""
    count = sizes.inputs // 2 + 3
    index = torch.randint(0, sizes.inputs, (sizes.members, count), generator=generator(2)).to(DEVICE)
    core = normal(3, sizes.outputs, count, dtype=dtype)
    picks, shared = (
        guard(index.to({HALF: torch.int16, SINGLE: torch.int32}.get(dtype, torch.int64))),
        # Rows apart, as those of the picks: with descriptors although the width is odd.
        gemm.empty_aligned(core.shape, core).copy_(core) if sizes.members % 2 else guard(core),
    )

    def formula(x: Tensor, weight: Tensor, sigma: Sigma) -> Tensor:
        picked = x.gather(3, index[:, None].expand(*x.shape[:3], count))
        return x @ weight.mT + per_repeat(sigma, x) * (picked @ core.to(x.dtype).mT)

    return Product(
        lambda x, w, s, y, t: permuted.permuted_product(
            x, w, permuted.gather_channels(x, picks, s), shared, y, t
        ),
        formula,
    )


def make_sparse(kept: int, sizes: Sizes, dtype: torch.dtype, guard: Guard) -> Product:
    """Make sparse noise with different columns for each member."""
    kept = min(kept, sizes.inputs)
    index = torch.rand(sizes.members, sizes.inputs, generator=generator(9)).argsort(1)[:, :kept].to(DEVICE)
    values = normal(2, sizes.members, kept, sizes.outputs, dtype=dtype)
    guarded = guard(index), guard(values)

    def formula(x: Tensor, weight: Tensor, sigma: Sigma) -> Tensor:
        changes = torch.zeros(len(index), *weight.shape, dtype=x.dtype, device=DEVICE)
        changes.scatter_(2, index.unsqueeze(1).expand(-1, len(weight), -1), values.to(x.dtype).mT)
        return dense_formula(x, weight, sigma, changes)

    return Product(lambda x, w, s, y, t: sparse.sparse_product(x, w, *guarded, s, y, t), formula)


# --- Dropout: sigma stands for the factors 1 + sigma of kept and -sigma of dropped channels. ---


def gates(sigma: Sigma) -> tuple[Sigma, Sigma]:
    """Return the factors of kept and of dropped channels; for a sigma that is one number, the latter is 0."""
    return (1 + sigma, -sigma) if isinstance(sigma, Tensor) else (1 + sigma, 0.0)


def make_dropout(side: Literal["in", "out"], sizes: Sizes, _: torch.dtype, guard: Guard) -> Product:
    """Make dropout masks on inputs or outputs."""
    is_inputs = side == "in"
    width = sizes.inputs if is_inputs else sizes.outputs
    kept = (torch.rand(sizes.members, width, generator=generator(9)) < 0.6).to(DEVICE)
    mask = guard(kept.byte()).view(torch.bool)

    def formula(x: Tensor, weight: Tensor, sigma: Sigma) -> Tensor:
        on, off = (per_repeat(gate, x) for gate in gates(sigma))
        factor = torch.where(kept[:, None], on, off)
        return (x * factor) @ weight.mT if is_inputs else x @ weight.mT * factor

    return Product(lambda x, w, s, y, t: dropout.dropout_product(x, w, mask, *gates(s), y, side, t), formula)


WHOLE_TILES: Cases = [
    (Sizes(2, 36, 1, 160, 96), HALF, SMALL, torch.tensor([0.5, -0.5])),
    (Sizes(1, 40, 1, 320, 384), HALF, OTHER, 1.0),
]
"""Sizes of which all blocks are whole tiles, which are loaded and stored by descriptors."""

INPUT_BLOCKS: list[list[int]] = [[0, 1, 3], [], [0, 1, 2, 3, 4], [2, 4]]
OUTPUT_BLOCKS: list[list[int]] = [[1], [0, 1], [0, 2], []]
"""Blocks kept by each of four groups, out of five input blocks and out of three output blocks."""


def is_kept(kept: list[list[int]], width: int, count: int) -> Tensor:
    """Return which channels each group keeps, bool [groups, width]."""
    _, cells, unit = Cut.of(width, count)
    borders = [*(block * cells // count * unit for block in range(count)), width]
    on = torch.zeros(len(kept), width, dtype=torch.bool)
    for group, kept_blocks in enumerate(kept):
        for block, (start, stop) in enumerate(pairwise(borders)):
            on[group, start:stop] = block in kept_blocks
    return on.to(DEVICE)


def changes_of(outputs: list[list[int]], inputs: list[list[int]], counts: tuple[int, int]) -> Tensor:
    """Return the scheme's stored changes: -1 where either block is dropped, larger where both are kept."""
    out, inner = (
        torch.tensor([[float(block in kept_blocks) for block in range(count)] for kept_blocks in kept])
        for kept, count in zip((outputs, inputs), counts, strict=True)
    )
    return (1.6 * out.unsqueeze(2) * inner.unsqueeze(1) - 1).to(DEVICE)


def make_block_dropout(is_both: bool, sizes: Sizes, dtype: torch.dtype, guard: Guard) -> Product:
    """Make kept blocks of four groups, where the first member is in group 3."""
    outputs, counts = (OUTPUT_BLOCKS, (3, 5)) if is_both else ([[0]] * 4, (1, 5))
    cuts = Cut.of(sizes.outputs, counts[0]), Cut.of(sizes.inputs, counts[1])
    out, inner = is_kept(outputs, sizes.outputs, counts[0]), is_kept(INPUT_BLOCKS, sizes.inputs, counts[1])
    changes = guard(changes_of(outputs, INPUT_BLOCKS, counts).to(dtype))

    def formula(x: Tensor, weight: Tensor, sigma: Sigma) -> Tensor:
        group = (3 + torch.arange(x.shape[1], device=DEVICE)) % len(out)
        is_on = (out.unsqueeze(2) & inner.unsqueeze(1))[group].to(x.dtype)
        kept, dropped = (torch.einsum("rmpi,moi->rmpo", x, weight * mask) for mask in (is_on, 1 - is_on))
        on, off = (per_repeat(factor, x) for factor in gates(sigma))
        return on * kept + off * dropped

    return Product(
        lambda x, w, s, y, t: blocks.block_dropout_product(x, w, changes, cuts, *gates(s), y, 3, t), formula
    )


FAMILIES = {
    **{f"low rank {rank}": Family(partial(make_low_rank, rank)) for rank in (4, 8)},
    # Tiles as wide as the signs of one Philox call, and wider.
    **{
        f"drawn low rank, {law}": Family(
            partial(make_drawn_low_rank, 2, law), (Tiling(16, 128, 64), Tiling(16, 256, 32)), cases
        )
        for law, cases in LAWS
    },
    **{
        f"drawn dense, few rows, {law}": Family(partial(make_drawn_dense, law), (FEW, FEW), cases)
        for law, cases in LAWS
    },
    # Some tiles have fewer channels than a Philox call has signs.
    **{
        f"drawn dense, many rows, {law}": Family(
            partial(make_drawn_dense, law), (MANY[law], Tiling(16, 16, 32 if law == "sign" else 16)), cases
        )
        for law, cases in LAWS
    },
    **{f"flipped {side}": Family(partial(make_flipped, side)) for side in ("in", "out", "both")},
    # A tile covers part of one block of the transform, or two blocks.
    "Hadamard": Family(make_hadamard, (Tiling(16, 16, 64), Tiling(16, 64, 32, 1))),
    "permuted": Family(make_permuted),
    **{f"sparse {kept}": Family(partial(make_sparse, kept)) for kept in (1, 3)},
    **{f"dropout of {side}": Family(partial(make_dropout, side)) for side in ("in", "out")},
    **{
        f"dropout of blocks, both sides {is_both}": Family(
            partial(make_block_dropout, is_both), cases=[*CASES, *WHOLE_TILES]
        )
        for is_both in (False, True)
    },
}


def guarded_image(buffers: Canaries, *shape: int, dtype: torch.dtype, values: Tensor | None = None) -> Tensor:
    """Return a tensor [r, m, p, c] between canaries, laid out as a layer's: channels have a stride of p."""
    repeats, members, positions, channels = shape
    y = buffers.empty(repeats, members, channels, positions, dtype=dtype).mT
    return y if values is None else y.copy_(values)


STACK = torch.stack


def guarded_scale(buffers: Canaries, *operands: Any) -> tuple[Tensor | None, float]:
    """Put the noise factors that a launcher computes between canaries."""
    sigmas, sigma = gemm.noise_scale(*operands)
    return None if sigmas is None else buffers.guard(sigmas), sigma


SIMILAR = (
    "low rank 8",
    "drawn low rank, normal",
    "drawn dense, few rows, sign",
    "drawn dense, many rows, normal",
    "flipped in",
    "flipped out",
    "sparse 1",
    "dropout of out",
    "dropout of blocks, both sides False",
)
"""Families whose kernel another family launches too."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if name in SIMILAR else (), id=name)
        for name, family in FAMILIES.items()
    ],
)
def test_a_product_is_that_of_its_formula(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel errs at most twice as much as its formula in the same dtype, and stays within its buffers."""
    for sizes, dtype, tiling, sigma in family.cases:
        tiles = tiling and family.tilings[0 if tiling == SMALL else 1]
        x = normal(0, sizes.repeats, sizes.members, sizes.positions, sizes.inputs, dtype=dtype)
        weight = normal(1, sizes.outputs, sizes.inputs, dtype=dtype) / sizes.inputs**0.5
        # Operands of float64 are copied before some launches.
        with canaries(is_watched=dtype is not DOUBLE) as buffers:
            product = family.make(sizes, dtype, buffers.guard)
            monkeypatch.setattr(torch, "stack", lambda each, buffers=buffers: buffers.guard(STACK(each)))
            for module in (lowrank_rng, dense_rng, flipped, hadamard, permuted, sparse):
                monkeypatch.setattr(module, "noise_scale", partial(guarded_scale, buffers))
            read = guarded_image(buffers, *x.shape, dtype=dtype, values=x)
            y = guarded_image(buffers, *sizes[:3], sizes.outputs, dtype=dtype)
            scale = sigma.to(DEVICE) if isinstance(sigma, Tensor) else sigma
            returned = product.launch(read, buffers.guard(weight), scale, y, tiles)
        monkeypatch.undo()
        assert returned is y
        exact = product.formula(x.double(), weight.double(), sigma)
        check_close(
            f"product of {sizes} in {dtype} with {tiles}", y, exact, product.formula(x, weight, sigma)
        )


def test_no_rows_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product without repeats or positions returns its empty output, and launches nothing."""
    monkeypatch.setattr(gemm, "grid_of", Mock(side_effect=AssertionError))
    for family in FAMILIES.values():
        product = family.make(Sizes(0, 2, 1, 3, 4), SINGLE, torch.clone)
        for shape in ((0, 2, 1), (1, 2, 0)):
            x, y = torch.zeros(*shape, 3, device=DEVICE), torch.empty(*shape, 4, device=DEVICE)
            assert product.launch(x, torch.zeros(4, 3, device=DEVICE), 1.0, y, None) is y


def test_more_rows_than_a_kernel_can_count_are_refused() -> None:
    """The error counts rows, not programs, and says to split the batch."""
    for name in ("flipped in", "dropout of blocks, both sides True"):
        product = FAMILIES[name].make(Sizes(1, 4, 1, 30, 40), SINGLE, torch.clone)
        x, y = (torch.zeros(1, device=DEVICE).expand(2**20, 4, 2**9, width) for width in (30, 40))
        words = r"at most 21474\d{5} rows \(repeats x members x positions\), got 2147483648: split the batch"
        with pytest.raises(ValueError, match=words):
            product.launch(x, torch.zeros(40, 30, device=DEVICE), 1.0, y, SMALL)


# --- Cases that the comparison with formulas does not cover. ---


def test_operands_may_have_any_strides() -> None:
    """Strided weights and a transposed core give the same results as contiguous operands."""
    x, weight, core = normal(0, 2, 3, 1, 33), normal(1, 40, 33), normal(2, 40, 33)
    member_signs = signs(2, 3, 33), signs(3, 3, 40)
    apart = torch.zeros(40, 66, device=DEVICE)[:, :33].copy_(weight)
    expected, strided = (torch.empty(2, 3, 1, 40, device=DEVICE) for _ in range(2))
    flipped.flipped_product(x, weight, core, *member_signs, 0.3, expected)
    flipped.flipped_product(x, apart, core.mT.contiguous().mT, *member_signs, 0.3, strided)
    assert torch.equal(strided, expected)
    index = torch.randint(0, 33, (3, 19), generator=generator(2)).to(DEVICE)
    with canaries() as buffers:
        picked = permuted.gather_channels(
            guarded_image(buffers, *x.shape, dtype=x.dtype, values=x), buffers.guard(index)
        )
    assert torch.equal(picked, x.gather(3, index[:, None].expand(2, 3, 1, 19)))


def test_rows_of_the_same_memory_have_no_descriptor() -> None:
    """Rows of an expanded tensor, whose stride is 0, are loaded by pointers: TMA needs rows apart."""
    row = normal(0, 1, 1, 1, 64, dtype=torch.float16)
    has_descriptor = gemm.describe(row, 16, 64) is not None
    assert has_descriptor is not gemm.is_before_hopper(row.device)
    assert gemm.describe(row.expand(1, 8, 1, 64), 16, 64) is None


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def end_of_tile_kernel(  # noqa: PLR0913, PLR0917  a Triton kernel
    y: Any, stored: Any, out: Any, operands: Any, start: Any,
    LAST: tl.constexpr, OPTIONS: tl.constexpr,  # noqa: N803  likewise
) -> None:  # fmt: skip
    """Write what a function for the end of a tile of 16 rows and outputs adds to zeros."""
    acc = LAST(tl.zeros((16, 16), tl.float32), out, (stored, None), operands, start, 0, OPTIONS, tl.float32)
    offsets = tl.arange(0, 16)
    tl.store(y + offsets[:, None] * 16 + offsets[None, :], acc)


@pytest.mark.skipif(DEVICE != "cpu", reason="untouched pages take no memory only on a CPU")
def test_rows_may_have_more_than_2_to_31_products_with_factors() -> None:
    """The last of many rows read products x . down from number 2^31 on, and give the result of few rows."""
    rank, rows, up = 32, 16, normal(0, 1, 32 * 16)
    drawn = (up, *draw_of(3, 1).arguments(1, rank * rows, 128))
    with mmap.mmap(-1, 2 * (2**31 + rank * rows)) as pages:
        x_down = torch.frombuffer(pages, dtype=torch.float16).view(-1, rank)
        last_rows = normal(1, rows, rank, dtype=torch.float16)
        x_down[-rows:] = last_rows
        for last, others, options in (
            (lowrank.add_up, (), (rank, False, False, False)),
            (lowrank_rng.add_drawn_up, drawn, (rank, False, "sign", True, 0)),
        ):
            results = []
            for products in (last_rows, x_down):
                y, count = torch.empty(rows, 16), len(products)
                out = gemm.Output(count, 16, 1, count, 0, 0, 0, 1, 1, 1)
                end_of_tile_kernel[(1,)](y, up, out, (products, *others), count - rows, last, options)
                results.append(y)
            assert torch.equal(*results), last
        del x_down, products


APART = 2**30
"""Stride of channels: the third is 2^31 numbers after the first."""


@pytest.mark.skipif(DEVICE != "cpu", reason="untouched pages take no memory only on a CPU")
def test_channels_may_lie_far_apart() -> None:
    """Channels whose offsets need 64 bits give the same result as adjacent channels."""
    noise, weight = draw_of(2, 2), normal(1, 4, 3, dtype=torch.float16)
    factor = [normal(seed, 2, 1, width, dtype=torch.float16) for seed, width in ((2, 3), (3, 4))]
    launches: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "low rank": lambda x, y: lowrank.low_rank_product(x, weight, factor[0], factor[1], 0.1, y),
        "down": lambda x, _: lowrank_rng.down_product(x, noise, 2),
        "few rows": lambda x, y: dense_rng.dense_rng_product(
            x, weight, noise, 0.1, y, tiling=FewRowsTiling()
        ),
        "few rows of signs": lambda x, y: dense_rng.dense_rng_product(x, weight, noise, 0.1, y, law="sign"),
        "many rows": lambda x, y: dense_rng.dense_rng_product(
            x, weight, noise, 0.1, y, tiling=Tiling(128, 64, 32, num_stages=2)
        ),
    }
    values = normal(0, 1, 2, 1, 3, dtype=torch.float16)
    for name, launch in launches.items():
        with mmap.mmap(-1, 2 * (2 * APART + 2)) as pages:
            x = torch.frombuffer(pages, dtype=torch.float16).as_strided(values.shape, (2, 1, 1, APART))
            x.copy_(values)
            y, expected = (torch.zeros(1, 2, 1, 4, dtype=torch.float16) for _ in range(2))
            assert torch.equal(launch(x, y), launch(values, expected)), name
            del x


def test_dropped_channels_are_never_multiplied() -> None:
    """NaN in dropped channels, or in the weights of dropped blocks, does not reach the result."""
    x, kept = torch.ones(1, 2, 1, 20, device=DEVICE), torch.ones(2, 20, dtype=torch.bool, device=DEVICE)
    x[0, 1, 0, 7], kept[1, 7] = torch.nan, False
    ones = torch.ones(20, 20, device=DEVICE)
    y = dropout.dropout_product(x, ones, kept, 1.0, 0.0, torch.empty_like(x), "in")
    assert torch.equal(y[0, :, 0, 0].cpu(), torch.tensor([20.0, 19.0]))
    y = dropout.dropout_product(x, ones, ~kept, 1.0, 0.0, torch.empty_like(x), "out")
    assert torch.equal(y[0, 0, 0].cpu(), torch.zeros(20))
    x, weight = torch.ones(1, 4, 1, 128, device=DEVICE), torch.ones(40, 128, device=DEVICE)
    x[0] = torch.where(is_kept([[0], [2]], 128, 4)[[0, 1, 0, 1]].unsqueeze(1), 1.0, torch.nan)
    weight[:, 32:64] = torch.nan
    changes, cuts = changes_of([[0]] * 2, [[0], [2]], (1, 4)), (Cut.of(40, 1), Cut.of(128, 4))
    y = blocks.block_dropout_product(
        x, weight, changes, cuts, 1.0, 0.0, torch.empty(1, 4, 1, 40, device=DEVICE)
    )
    assert torch.equal(y, torch.full_like(y, 32.0))


def test_a_tile_without_kept_outputs_reads_no_weights() -> None:
    """A tile in which a group drops all outputs is zero, and its weights are not read."""
    changes, cuts = changes_of([[1]] * 2, [[0]] * 2, (2, 1)), (Cut.of(64, 2), Cut.of(32, 1))
    with canaries() as buffers:
        below = buffers.empty(32, 32).fill_(1)
        # The 32 rows before ``below`` are a canary, so that reading them is found.
        weight = below.as_strided((64, 32), (32, 1), below.storage_offset() - below.numel())
        x, y = buffers.guard(torch.ones(1, 2, 1, 32)), buffers.empty(1, 2, 1, 64)
        blocks.block_dropout_product(x, weight, buffers.guard(changes), cuts, 1.0, 0.0, y, 0, SMALL)
    assert torch.equal(y[0, 1, 0].cpu(), torch.tensor([0.0, 32.0]).repeat_interleave(32))
