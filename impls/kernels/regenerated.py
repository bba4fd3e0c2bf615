"""Products with dense noise that is drawn as it is multiplied, and never stored, in Triton.

Every row has its member's own noise: y_row = W x + s E_m x, with the entries of E_m those of one draw of
Philox, in the order of the weight. The product with W is one of matrices; the noise meets the rows where it
was drawn. A tile holds the rows of a member, or ROWS of them, and draws for them once: rows are counted
member by member here, row = repeat * positions + position.

Few rows of a member are multiplied on plain units, in the registers that drew: :func:`few_rows_kernel`. With
more of them E_m becomes an operand of the matrix units: :func:`many_rows_kernel`.
"""

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
    signs_of,
    turned,
    unsigned,
    values_of,
)
from impls.kernels.member_tiles import FewTiling, ManyTiling, tiling_of
from impls.kernels.rows import LEAST, precision, product, strength, strength_of, wide
from impls.kernels.tiles import channels, multiplied
from impls.kernels.words import programs, tile

UNROLLED = tl.constexpr(8)
"""Bits of a word in the body of a loop over them."""


@triton.jit(do_not_specialize=COUNTERS)
def few_rows_kernel(
    y, x, weight, scales, sigma,
    outputs, inputs, positions, rows,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    key0, key1, layer, draw, first_member, members, member_tiles, column_tiles,
    SIGN: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, CALLS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of each of OWN members; the grid is tiles of columns, of members and of rows.

    What a thread draws should meet few rows and many columns, so that it loads little: columns are PARTS,
    which fall to one thread, of those next to each other, which fall to a warp.
    """
    program = tl.program_id(0).to(tl.int64)
    left = (program % column_tiles) * COLUMNS
    own = (program // column_tiles % member_tiles) * OWN
    each = tl.arange(0, ROWS * OWN)
    row = program // column_tiles // member_tiles * ROWS + each // OWN
    member, repeat, position = own + each % OWN, row // positions, row % positions
    inside = (row < rows) & (member < members)
    x += repeat * x_repeat + member * x_member + position * x_row
    line: tl.constexpr = COLUMNS // PARTS
    width: tl.constexpr = 128 if SIGN else 4
    seed, layer, draw = seed_of(key0, key1), unsigned(layer), unsigned(draw)
    counter = unsigned(first_member) + (own + tl.arange(0, OWN)).to(tl.uint32)[None, :, None, None]
    column = left + tl.arange(0, PARTS)[:, None, None, None] * line + tl.arange(0, line)[None, None, :, None]
    noise = tl.zeros((ROWS, PARTS, OWN, line, CALLS), dtype=TYPE)
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
                    values = channels(x, x_column, inside, k, inputs).to(TYPE)
                    noise -= turned(values.reshape(ROWS, 1, OWN, 1, CALLS), word[None, :, :, :, :])
                    word += word
        else:
            drawn = four_normals(seed, first, counter, layer, draw, WHOLE)
            for lane in tl.static_range(4):
                k = call * width + lane
                values = channels(x, x_column, inside, k, inputs).to(TYPE)
                # Rounded as the stream's values are, in the weight's type.
                one = drawn[lane].to(x.dtype.element_ty).to(TYPE)
                noise += values.reshape(ROWS, 1, OWN, 1, CALLS) * one[None, :, :, :, :]
    sums = tl.sum(noise, axis=4).permute(0, 2, 1, 3).reshape(ROWS * OWN, COLUMNS)
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    base = tl.zeros((ROWS * OWN, COLUMNS), dtype=TYPE)
    column = left + tl.arange(0, COLUMNS)
    across = column < outputs
    base = multiplied(
        base, x, x_column, inside, weight, weight_row, column, across, 0, inputs, TYPE, PRECISION, DEEP
    )
    y += repeat * y_repeat + member * y_member + position * y_row
    edge = inside[:, None] & across[None, :]
    tl.store(
        y[:, None] + column[None, :] * y_column,
        (base + scale[:, None] * sums).to(y.dtype.element_ty),
        mask=edge,
    )


@triton.jit
def parts_of_signs(seed, column, start, inputs, member, layer, draw, DEEP: tl.constexpr):
    """Return the signs of columns at ``start`` to start + DEEP, below a call: a multiple of 32, [n, DEEP]."""
    first = column[:, None] * inputs + (start + tl.arange(0, DEEP // 32) * 32)[None, :]
    word, _, _, _ = four_bits(seed, first, member, layer, draw, False)  # noqa: FBT003  the compiler's own function
    return signs_of(word).reshape(column.shape[0], DEEP)


@triton.jit(do_not_specialize=COUNTERS)
def many_rows_kernel(
    y, x, weight, scales, sigma,
    outputs, inputs, positions, rows,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    key0, key1, layer, draw, first_member, row_tiles, column_tiles,
    SIGN: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of one member; the grid is tiles of columns, of rows, and members.

    Tiles are transposed, so that what is drawn is the left operand, which may stay in registers.
    """
    program = tl.program_id(0).to(tl.int64)
    column = (program % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    row = program // column_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    member = program // column_tiles // row_tiles
    repeat, position = row // positions, row % positions
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    width: tl.constexpr = 128 if SIGN else 4
    seed, layer, draw = seed_of(key0, key1), unsigned(layer), unsigned(draw)
    counter = unsigned(first_member) + member.to(tl.uint32)
    base = tl.zeros((COLUMNS, ROWS), dtype=TYPE)
    noise = tl.zeros((COLUMNS, ROWS), dtype=TYPE)
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        here = k < inputs
        values = tl.load(
            x[None, :] + k[:, None].to(tl.int64) * x_column, mask=here[:, None] & inside[None, :], other=0
        )
        shared = tl.load(
            weight + column[:, None] * weight_row + k[None, :], mask=across[:, None] & here[None, :], other=0
        )
        base = tl.dot(shared, values, acc=base, out_dtype=TYPE, input_precision=PRECISION)
        if SIGN and width > DEEP:
            own = parts_of_signs(seed, column, start, inputs, counter, layer, draw, DEEP)
        else:
            first = column[:, None] * inputs + (start + tl.arange(0, DEEP // width) * width)[None, :]
            own = values_of(seed, first, counter, layer, draw, SIGN, WHOLE)
        own = own.to(values.dtype)
        noise = tl.dot(own, values, acc=noise, out_dtype=TYPE, input_precision=PRECISION)
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    y += repeat * y_repeat + member * y_member + position * y_row
    tl.store(
        y[None, :] + column[:, None] * y_column,
        (base + noise * scale[None, :]).to(y.dtype.element_ty),
        mask=across[:, None] & inside[None, :],
    )


def regenerated_product(
    x: Tensor,
    weight: Tensor,
    draw: Draw,
    sigma: float | Tensor,
    y: Tensor,
    *,
    signs: bool = False,
    tiling: FewTiling | ManyTiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma E_m, into ``y``, which is returned; E_m is drawn, and stored nowhere.

    Entry [o, i] of E_m is element o * inputs + i of the member's draw, in float32, rounded to x's type. It is
    drawn once for each block of its member's rows. For R rows of e bytes a number, and m members:

    * bytes: e R (i + o) and e i o of the product; x and W once more for each tile of the other axis, out of a
      cache.
    * flops: 2 R i o on matrix units, and as many for the noise, on plain units for few rows of a member.
    * calls of Philox: m i o / 4 for each block of rows, and of signs m i o / 128. The floor is 1e12 normals a
      second, far above all else; of signs three operations each are, where rows are few. Twice as many where
      i is no multiple of 4, or of 128.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        draw: which noise, of the members in x.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        signs: whether the noise is of signs, and not of normals.
        tiling: how rows are cut, and by which kernel, if not as
            :func:`~impls.kernels.member_tiles.tiling_of` has it.

    Raises:
        ValueError: shapes or types do not fit, or a member or an element has no counter.

    """
    read = product(x, weight, y)
    width = SIGNS if signs else NORMALS
    if len(draw.members) != read.members:
        message = f"noise of {len(draw.members)} members does not fit {read.members} of them"
        raise ValueError(message)
    counters = draw.arguments(weight.numel(), width)
    if not y.numel():
        return y
    repeats, members, positions, inputs = x.shape
    outputs, rows = len(weight), repeats * positions
    is_whole = inputs % width == 0
    tiling = tiling or tiling_of(rows, signs=signs, whole=is_whole).suited(x.dtype)
    columns = tile(outputs, tiling.columns, LEAST)
    column_tiles = -(-outputs // columns)
    scale = strength_of(sigma, x)
    arguments = (
        y, x, read.weight, scale.scales, scale.number, outputs, inputs, positions, rows,
        *read.strides, *counters,
    )  # fmt: skip
    options = {
        "SIGN": signs,
        "WHOLE": is_whole,
        "SCALED": scale.is_scaled,
        "TYPE": wide(x.dtype),
        "PRECISION": precision(x.dtype),
        "COLUMNS": columns,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    with torch.cuda.device_of(x):
        if isinstance(tiling, FewTiling):
            at_once = tile(rows, tiling.rows)
            own = tiling.tall // at_once
            member_tiles = -(-members // own)
            few_rows_kernel[programs(column_tiles, member_tiles, -(-rows // at_once))](
                *arguments, members, member_tiles, column_tiles, **options, ROWS=at_once, OWN=own,
                PARTS=max(1, columns // tiling.line), CALLS=tile(-(-inputs // width), tiling.calls),
                DEEP=tile(inputs, tiling.deep, LEAST),
            )  # fmt: skip
        else:
            at_once = tile(rows, tiling.rows, LEAST)
            row_tiles = -(-rows // at_once)
            many_rows_kernel[programs(column_tiles, row_tiles, members)](
                *arguments, row_tiles, column_tiles, **options, ROWS=at_once,
                DEEP=tile(inputs, tiling.deep, max(LEAST, width)),
            )  # fmt: skip
    return y
