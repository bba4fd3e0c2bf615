"""Low-rank noise that is drawn inside of its kernels, and never stored, in Triton.

y_row = W x + s (x . down_m) up_m, as :mod:`impls.kernels.lowrank` has it, with the factors of Philox. A first
kernel draws ``down``, once for a block of a member's rows, and takes its products with them; they are RANK
numbers a row. The product's own kernel draws ``up`` in its epilogue, for the tile that it is about to write.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.drawn import (
    COUNTERS,
    NORMALS,
    SIGNS,
    Draw,
    four_bits,
    seed_of,
    sign_of,
    unsigned,
    values_of,
)
from impls.kernels.ranks import check_rank
from impls.kernels.rows import (
    Tiling,
    place,
    precision,
    product,
    strength,
    strength_of,
    whose,
    wide,
)
from impls.kernels.tiles import channels, multiplied
from impls.kernels.words import programs, tile

NAMES = {False: "drawn low rank", True: "drawn low rank of signs"}
"""Of tiles of normals and of signs, in the tables of what was tuned."""

NARROW_ROWS = 16
"""Rows of a tile of the first kernel at most, of one member or of several."""

NARROW_CHANNELS = 512
"""Channels of it, over all ranks."""

NARROW_WARPS = 8
"""Of a program of it."""

MOST_IMAGES = 8
"""Members in a tile of rows for which ``up`` is drawn member by member; of more, row by row."""


def narrow_tile(rank: int, width: int) -> tuple[int, int]:
    """Return rows and calls of ``width`` values of a tile of the first kernel.

    A thread has 32 sums in its registers: where a call for each rank is more, there are fewer rows.
    """
    calls = max(1, NARROW_CHANNELS // rank // width)
    return min(NARROW_ROWS, NARROW_ROWS * NARROW_CHANNELS // (rank * width * calls)), calls


def tiling_of(*, signs: bool) -> Tiling:
    """Return the tiles of the product where nothing was tuned.

    Normals of a tile of 64 columns leave registers for a second program on each processor, which multiplies
    while the first one draws; signs come 128 columns at a time.
    """
    return Tiling(columns=128) if signs else Tiling(columns=64)


@triton.jit(do_not_specialize=COUNTERS)
def narrow_kernel(
    out, x, inputs, members, positions, rows, x_repeat, x_member, x_row, x_column,
    key0, key1, layer, draw, first_member, member_tiles,
    RANK: tl.constexpr, SIGN: tl.constexpr, WHOLE: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr,
    OWN: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of each of OWN members by ``down``; the grid is tiles of members and of rows."""
    program = tl.program_id(0).to(tl.int64)
    own = program % member_tiles * OWN
    each = tl.arange(0, ROWS * OWN)
    row = program // member_tiles * ROWS + each // OWN
    member, repeat, position = own + each % OWN, row // positions, row % positions
    inside = (row < rows) & (member < members)
    x += repeat * x_repeat + member * x_member + position * x_row
    width: tl.constexpr = 128 if SIGN else 4
    seed, layer, draw = seed_of(key0, key1), unsigned(layer), unsigned(draw)
    counter = unsigned(first_member) + (own + tl.arange(0, OWN)).to(tl.uint32)
    rank = tl.arange(0, RANK).to(tl.int64)
    sums = tl.zeros((ROWS, OWN, RANK, CALLS * width), dtype=TYPE)
    for start in range(0, inputs, CALLS * width):
        first = rank[:, None] * inputs + (start + tl.arange(0, CALLS) * width)[None, :]
        down = values_of(seed, first[None, :, :], counter[:, None, None], layer, draw, SIGN, WHOLE)
        k = start + tl.arange(0, CALLS * width)
        values = channels(x, x_column, inside, k, inputs).to(TYPE)
        # Rounded as the stream's values are, in the weight's type.
        down = down.to(x.dtype.element_ty).to(TYPE)
        sums += values.reshape(ROWS, OWN, 1, CALLS * width) * down[None, :, :, :]
    narrow = tl.sum(sums, axis=3).reshape(ROWS * OWN, RANK)
    out += ((repeat * members + member) * positions + position) * RANK
    tl.store(out[:, None] + tl.arange(0, RANK)[None, :], narrow, mask=inside[:, None])


@triton.jit
def _across(seed, first, member, layer, draw, SIGN: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH values from element ``first`` on, for members [n]: [n, WIDTH]."""
    if SIGN:
        column = tl.arange(0, WIDTH)[None, :]
        word = tl.zeros((member.shape[0], WIDTH), dtype=tl.uint32)
        for part in tl.static_range((WIDTH + 127) // 128):
            words = four_bits(seed, first + part * 128, member[:, None], layer, draw, WHOLE)
            for lane in tl.static_range(4):
                word = tl.where(column // 32 == part * 4 + lane, words[lane], word)
        return sign_of(word << (31 - column % 32).to(tl.uint32))
    else:  # noqa: RET505  the compiler takes no early return here
        calls = first + tl.arange(0, WIDTH // 4)[None, :] * 4
        return values_of(seed, calls, member[:, None], layer, draw, SIGN, WHOLE)


@triton.jit(do_not_specialize=COUNTERS)
def redrawn_kernel(
    y, x, weight, narrow, scales, sigma,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    key0, key1, layer, draw, first_member, row_tiles, column_tiles,
    RANK: tl.constexpr, SIGN: tl.constexpr, WHOLE: tl.constexpr, IMAGES: tl.constexpr, SCALED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows and add what ``up`` makes of ``narrow`` [rows, RANK]; the grid is all tiles.

    The rows of a tile are those of IMAGES members at most; 0 says that each may have its own.
    """
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    sums = multiplied(
        sums, x, x_column, inside, weight, weight_row, column, across, 0, inputs, TYPE, PRECISION, DEEP
    )
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    seed, layer, draw = seed_of(key0, key1), unsigned(layer), unsigned(draw)
    left, image = tl.min(column, axis=0), row // positions
    for k in range(RANK):
        one = tl.load(narrow + row * RANK + k, mask=inside, other=0) * scale
        first = left + tl.cast(outputs, tl.int64) * k
        if IMAGES:
            for each in tl.range(0, IMAGES, num_stages=1):
                mine = tl.min(image, axis=0) + each
                counter = unsigned(first_member) + (mine % members + tl.zeros((1,), tl.int64)).to(tl.uint32)
                up = _across(seed, first, counter, layer, draw, SIGN, WHOLE, COLUMNS)
                up = up.to(weight.dtype.element_ty).to(TYPE)
                sums += tl.where(image == mine, one, 0)[:, None] * up
        else:
            counter = unsigned(first_member) + member.to(tl.uint32)
            up = _across(seed, first, counter, layer, draw, SIGN, WHOLE, COLUMNS)
            sums += one[:, None] * up.to(weight.dtype.element_ty).to(TYPE)
    y += repeat * y_repeat + member * y_member + position * y_row
    edge = inside[:, None] & across[None, :]
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def narrow_product(x: Tensor, draw: Draw, rank: int, *, signs: bool = False) -> Tensor:
    """Multiply each row by its member's ``down`` [k, i], drawn and stored nowhere: [rows, k] in float32.

    In float64 if x is. Element k * inputs + i of the draw, rounded to x's type, is entry [k, i]. For R rows
    of e bytes a number, and m members:

    * bytes: e R i read, 4 R k written.
    * flops: 2 R k i, on plain units.
    * calls of Philox: m k i / 4 for every NARROW_ROWS rows of a member, and of signs m k i / 128. The floor
      is 1e12 normals a second.

    Args:
        x: [r, m, p, i], any strides.
        draw: which noise, of the members in x.
        rank: k, as :func:`~impls.kernels.ranks.check_rank` has it.
        signs: whether the noise is of signs, and not of normals.

    Raises:
        ValueError: a kernel takes no such rank, or a member or an element has no counter.

    """
    repeats, members, positions, inputs = x.shape
    _check(rank, draw, members)
    width = SIGNS if signs else NORMALS
    counters, rows = draw.arguments(rank * inputs, width), repeats * positions
    out = torch.empty(
        members * rows, rank, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    if not out.numel():
        return out
    most, calls = narrow_tile(rank, width)
    at_once = tile(rows, most)
    own = most // at_once
    member_tiles = -(-members // own)
    with torch.cuda.device_of(x):
        narrow_kernel[programs(member_tiles, -(-rows // at_once))](
            out, x, inputs, members, positions, rows, *x.stride(), *counters, member_tiles,
            RANK=rank, SIGN=signs, WHOLE=inputs % width == 0, TYPE=wide(x.dtype), ROWS=at_once, OWN=own,
            CALLS=tile(-(-inputs // width), calls), num_warps=NARROW_WARPS,
        )  # fmt: skip
    return out


def redrawn_product(
    x: Tensor,
    weight: Tensor,
    down: Draw,
    up: Draw,
    rank: int,
    sigma: float | Tensor,
    y: Tensor,
    *,
    signs: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma up_m^T down_m / sqrt(k), into ``y``, which is returned.

    Factors are drawn, see :func:`narrow_product`, and stored nowhere. Entry [k, o] of ``up`` is element
    k * outputs + o of its draw. For R rows of e bytes a number, one position each:

    * bytes: e R (2 i + o) and e i o of the product, 8 R k between the kernels; x and W once more for each
      tile of the other axis, out of a cache.
    * flops: 2 R i o on matrix units, and 2 R k (i + o) beside them.
    * calls of Philox: R k (i + o) / 4, of signs R k (i + o) / 128. The floor is 1e12 normals a second: for
      one row of each member and a width of 1024 nearly what the product takes. Of members of several
      positions ``up`` is drawn once for each tile that they are in, where tiles hold MOST_IMAGES images at
      most.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        down: which noise meets x, of the members in it.
        up: which noise makes outputs, of the same members.
        rank: k, as :func:`~impls.kernels.ranks.check_rank` has it.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        signs: whether factors are of signs, and not of normals.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :func:`tiling_of` has it.

    Raises:
        ValueError: shapes or types do not fit, a kernel takes no such rank, or a member or an element has no
            counter.

    """
    read = product(x, weight, y)
    width, outputs = SIGNS if signs else NORMALS, len(weight)
    _check(rank, up, read.members)
    counters = up.arguments(rank * outputs, width)
    narrow = narrow_product(x, down, rank, signs=signs)
    if not y.numel():
        return y
    tiling = chosen(NAMES[signs], read, tiling, tiling_of(signs=signs), rank)
    # The first column of every tile and rank is where a call begins.
    is_whole = outputs % width == 0 and tiling.columns % width == 0
    images = (tiling.rows - 2) // x.shape[2] + 2
    scale = strength_of(sigma, x, 1 / math.sqrt(rank))
    with torch.cuda.device_of(x):
        redrawn_kernel[read.grid(tiling)](
            y, x, read.weight, narrow, scale.scales, scale.number,
            *read.sizes, *read.strides, *counters, *read.tiles(tiling),
            RANK=rank, SIGN=signs, WHOLE=is_whole, IMAGES=images if images <= MOST_IMAGES else 0,
            SCALED=scale.is_scaled, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y


def _check(rank: int, draw: Draw, members: int) -> None:
    check_rank(rank)
    if len(draw.members) != members:
        message = f"noise of {len(draw.members)} members does not fit {members} of them"
        raise ValueError(message)
