"""Products with dense noise that is drawn as it is multiplied, and never stored, in Triton.

Every row has its member's own noise: y_row = W x + s E_m x, with the entries of E_m those of one draw of
Philox, in the order of the weight. The product with W is one of matrices; the noise meets the rows where it
was drawn. A tile holds the rows of a member, or ROWS of them, and draws for them once: rows are counted
member by member here, row = repeat * positions + position.

Few rows of a member are multiplied on plain units, in the registers that drew: :func:`few_rows_kernel`. With
more of them E_m becomes an operand of the matrix units: :func:`many_rows_kernel`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.drawn import (
    COUNTERS,
    NORMALS,
    SIGNS,
    Draw,
    four_bits,
    four_normals,
    seed_of,
    turned,
    unsigned,
    values_of,
)
from impls.kernels.rows import LEAST, DOT, deepen, precision, product, strength, strength_of, wide
from impls.kernels.words import programs, tile

UNROLLED = tl.constexpr(8)
"""Bits of a word in the body of a loop over them."""

MOST_FEW = 4
"""Rows of a member that plain units multiply: of more, matrix units do."""


class FewTiling(NamedTuple):
    """How few rows of each member are cut into tiles.

    Attributes:
        members: of a tile.
        columns: of a tile.
        calls: of Philox in a tile, for each member and column.
        deep: channels of the shared product that are multiplied at once.
        warps: of a program.
        stages: tiles that are loaded ahead.

    """

    members: int = 16
    columns: int = 32
    calls: int = 4
    deep: int = 64
    warps: int = 8
    stages: int = 2


class ManyTiling(NamedTuple):
    """How many rows of one member are cut into tiles.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        deep: channels that are multiplied at once.
        warps: of a program.
        stages: tiles that are loaded ahead.

    """

    rows: int = 64
    columns: int = 64
    deep: int = 64
    warps: int = 4
    stages: int = 2


@triton.jit(do_not_specialize=COUNTERS)
def few_rows_kernel(
    y, x, weight, scales, sigma,
    outputs, inputs, members, positions, rows,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    key0, key1, layer, draw, first_member, member_tiles, column_tiles,
    SIGN: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, CALLS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of each of OWN members; the grid is tiles of columns, of members and of rows.

    What a thread draws should meet few rows and many columns, so that it loads little: columns are PARTS, which
    fall to one thread, of LINE next to each other, which fall to a warp.
    """
    program = tl.program_id(0).to(tl.int64)
    left = (program % column_tiles) * COLUMNS
    own = (program // column_tiles % member_tiles) * OWN
    each = tl.arange(0, ROWS * OWN)
    row = program // column_tiles // member_tiles * ROWS + each // OWN
    member, repeat, position = own + each % OWN, row // positions, row % positions
    inside = (row < rows) & (member < members)
    x += repeat * x_repeat + member * x_member + position * x_row
    LINE: tl.constexpr = COLUMNS // PARTS
    width: tl.constexpr = 128 if SIGN else 4
    seed, layer, draw = seed_of(key0, key1), unsigned(layer), unsigned(draw)
    counter = unsigned(first_member) + (own + tl.arange(0, OWN)).to(tl.uint32)[None, :, None, None]
    column = left + tl.arange(0, PARTS)[:, None, None, None] * LINE + tl.arange(0, LINE)[None, None, :, None]
    noise = tl.zeros((ROWS, PARTS, OWN, LINE, CALLS), dtype=TYPE)
    for start in range(0, tl.cdiv(inputs, width), CALLS):
        call = start + tl.arange(0, CALLS)
        first = column * inputs + call[None, None, None, :] * width
        if SIGN:
            drawn = four_bits(seed, first, counter, layer, draw, WHOLE)
            for lane in tl.static_range(4):
                word = drawn[lane]
                # From the highest bit down: a word moves up by one, and no bit has a place of its own.
                for bit in tl.range(0, 32, loop_unroll_factor=UNROLLED):
                    k = call * width + (lane * 32 + 31 - bit)
                    here = inside[:, None] & (k < inputs)[None, :]
                    values = tl.load(x[:, None] + k[None, :] * x_column, mask=here, other=0).to(TYPE)
                    noise -= turned(values.reshape(ROWS, 1, OWN, 1, CALLS), word[None, :, :, :, :])
                    word += word
        else:
            drawn = four_normals(seed, first, counter, layer, draw, WHOLE)
            for lane in tl.static_range(4):
                k = call * width + lane
                here = inside[:, None] & (k < inputs)[None, :]
                values = tl.load(x[:, None] + k[None, :] * x_column, mask=here, other=0).to(TYPE)
                # Rounded as the stream's values are, in the weight's type.
                one = drawn[lane].to(x.dtype.element_ty).to(TYPE)
                noise += values.reshape(ROWS, 1, OWN, 1, CALLS) * one[None, :, :, :, :]
    sums = tl.sum(noise, axis=4).permute(0, 2, 1, 3).reshape(ROWS * OWN, COLUMNS)
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    base = tl.zeros((ROWS * OWN, COLUMNS), dtype=TYPE)
    column = left + tl.arange(0, COLUMNS)
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        base, _ = deepen(
            base, x, weight, k, inputs, inside, column, outputs, x_column, weight_row, TYPE, PRECISION
        )
    y += repeat * y_repeat + member * y_member + position * y_row
    edge = inside[:, None] & (column < outputs)[None, :]
    tl.store(
        y[:, None] + column[None, :] * y_column,
        (base + scale[:, None] * sums).to(y.dtype.element_ty),
        mask=edge,
    )
