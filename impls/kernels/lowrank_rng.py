"""Product with low-rank noise that is drawn inside the kernels and never stored.

y_row = W x + s (x . down_m) up_m, as in :mod:`impls.kernels.lowrank`. A first kernel draws ``down``, once for
each block of a member's rows, and computes x . down, RANK numbers for each row. The product's kernel draws
``up`` for each tile before it writes it.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from impls.kernels.gemm import (
    accumulator_dtype,
    can_begin_early,
    gemm_of,
    grid_of,
    load_sigma,
    load_x,
    noise_scale,
    product_kernel,
    programs_before_product,
    row_to_member,
    select_tiling,
)
from impls.kernels.optional_triton import tl, triton
from impls.kernels.philox import (
    COUNTERS,
    VALUES_PER_CALL,
    Draw,
    Law,
    as_uint32,
    draw_values,
    four_words,
    seed_of,
    sign_of,
)
from impls.kernels.tiling import Tiling, block_size

MAX_RANK = 32
"""Largest rank whose factors stay in registers in every dtype."""
_ANY_RANK = "LowRank and LowRankSign support any rank"


def check_rank(rank: int) -> None:
    """Check that a rank is a power of two, as dimensions of tiles are, of at most MAX_RANK.

    Raises:
        ValueError: it is not a power of two, or larger.
    """
    if rank & (rank - 1):
        raise ValueError(f"rank must be a power of two for a kernel, got {rank}: {_ANY_RANK}")
    if rank > MAX_RANK:
        raise ValueError(
            f"rank must be at most {MAX_RANK} for a kernel, which keeps one number per rank and row in "
            f"registers, got {rank}: {_ANY_RANK}"
        )


DOWN_ROWS = 16
"""Maximum number of rows in a tile of :func:`low_rank_down_kernel`, over all of its members."""

DOWN_CHANNELS = 512
"""Channels times ranks in a tile of :func:`low_rank_down_kernel`."""

AT_ONCE = 8
"""Neighboring channels that :func:`low_rank_down_kernel` sums at once: those that a thread loads."""

DOWN_WARPS = 8
"""Warps of a program of :func:`low_rank_down_kernel`."""

TASKS: Mapping[Law, str] = {
    "normal": "drawn low rank",
    "uniform": "drawn low rank of levels",
    "sign": "drawn low rank of signs",
}
"""Names of the product in tables of tuned tile sizes."""

MAX_IMAGES = 8
"""``up`` is drawn once for each image of a tile if there are at most this many, else once for each row."""


def down_tile(rank: int, width: int) -> tuple[int, int]:
    """Return (rows, Philox calls) of a tile of :func:`low_rank_down_kernel`; a call has ``width`` values.

    A tile has at most DOWN_ROWS * DOWN_CHANNELS sums, 32 for each thread. Where one call for each rank has
    more than DOWN_CHANNELS values, the tile has fewer rows.
    """
    calls = max(1, DOWN_CHANNELS // rank // width)
    return min(DOWN_ROWS, DOWN_ROWS * DOWN_CHANNELS // (rank * width * calls)), calls


TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=4, num_stages=3, programs=2)
"""Default tile sizes of the product for a 16-bit dtype: while a program draws, another one multiplies.

Four warps issue fewer instructions around a product than eight.
"""

COLUMNS = 16
"""Columns of a tile that are drawn and written at once: few, so that two programs fit on a multiprocessor."""

DOWN_REGISTERS: Mapping[Law, int] = {"normal": 0, "uniform": 2**14, "sign": 2**14}
"""Registers of a multiprocessor for :func:`low_rank_down_kernel` beside the product.

Normals take the time in which their instructions are issued anyway. The loop over images needs all registers.
"""


@triton.jit(do_not_specialize=COUNTERS)
def low_rank_down_kernel(
    out, x, stored, sigmas, sigma, inputs, members, positions, rows,
    stride_xr, stride_xm, stride_xp, stride_xi,
    key0, key1, layer, draw, first_member, member_tiles, tiles,
    RANK: tl.constexpr, LAW: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, MEMBERS: tl.constexpr, CALLS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of each of MEMBERS members by the member's ``down`` and by sigma: [rows, RANK].

    ``down`` is ``stored`` [members, RANK, inputs] or, if that is None, drawn. Programs compute one after
    another of ``tiles``, which are tiles of members times tiles of a member's ``rows``. With EARLY the next
    kernel, which waits for the result, may begin before this one ends.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    for pid in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        start_member = (pid % member_tiles).to(tl.int64) * MEMBERS
        row = tl.arange(0, ROWS * MEMBERS)
        offs_m = (pid // member_tiles).to(tl.int64) * ROWS + row // MEMBERS
        member, repeat, position = start_member + row % MEMBERS, offs_m // positions, offs_m % positions
        mask_m = (offs_m < rows) & (member < members)
        x_rows = x + repeat * stride_xr + member * stride_xm + position * stride_xp
        each_member, rank = start_member + tl.arange(0, MEMBERS), tl.arange(0, RANK).to(tl.int64)
        # Neighboring channels of a thread are summed at once, the others after the loop.
        acc = tl.zeros((ROWS, MEMBERS, RANK, CALLS * WIDTH // AT_ONCE), dtype=ACC)
        for start in range(0, inputs, CALLS * WIDTH):
            offs_k = start + tl.arange(0, CALLS * WIDTH)
            if stored is None:
                first = rank[:, None] * inputs + (start + tl.arange(0, CALLS) * WIDTH)[None, :]
                counter = as_uint32(first_member) + each_member.to(tl.uint32)
                down = draw_values(
                    seed_of(key0, key1), first[None, :, :], counter[:, None, None], as_uint32(layer),
                    as_uint32(draw), LAW, ALIGNED,
                )  # fmt: skip
            else:
                rows_of_down = (each_member[:, None] * RANK + rank[None, :])[:, :, None]
                mask = (each_member < members)[:, None, None] & (offs_k < inputs)[None, None, :]
                down = tl.load(stored + rows_of_down * inputs + offs_k[None, None, :], mask=mask, other=0)
            values = load_x(x_rows, stride_xi, mask_m, offs_k, inputs).to(ACC)
            # The stream rounds its values to the weight's dtype.
            down = down.to(x.dtype.element_ty).to(ACC)
            products = values.reshape(ROWS, MEMBERS, 1, CALLS * WIDTH) * down[None, :, :, :]
            acc += tl.sum(products.reshape(ROWS, MEMBERS, RANK, CALLS * WIDTH // AT_ONCE, AT_ONCE), axis=4)
        x_down = tl.sum(acc, axis=3).reshape(ROWS * MEMBERS, RANK)
        x_down *= load_sigma(sigmas, sigma, repeat, mask_m, ACC)[:, None]
        out_rows = out + ((repeat * members + member) * positions + position) * RANK
        tl.store(out_rows[:, None] + tl.arange(0, RANK)[None, :], x_down, mask=mask_m[:, None])


@triton.jit
def _draw_elements(
    seed, first, member, layer, draw, LAW: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr
):
    """Draw WIDTH elements of each member's noise, from element ``first`` on: [n, WIDTH] for members [n].

    WIDTH divides 32. With ALIGNED, ``first`` is a multiple of WIDTH or of the values of a Philox call.
    """
    if LAW == "sign":
        if ALIGNED:  # all signs are bits of one word
            words = four_words(seed, first & -128, member[:, None], layer, draw, ALIGNED=True)
            word = words[0]
            for lane in tl.static_range(1, 4):
                word = tl.where((first >> 5) & 3 == lane, words[lane], word)
            word = word >> (first & 31).to(tl.uint32)
        else:
            word, _, _, _ = four_words(seed, first, member[:, None], layer, draw, ALIGNED=False)
        return sign_of(word << (31 - tl.arange(0, WIDTH)[None, :]).to(tl.uint32))
    else:  # noqa: RET505  the compiler takes no early return here
        per_call: tl.constexpr = 16 if LAW == "uniform" else 4
        first_of_call = first + tl.arange(0, WIDTH // per_call)[None, :] * per_call
        return draw_values(seed, first_of_call, member[:, None], layer, draw, LAW, ALIGNED)


@triton.jit
def add_drawn_up(
    acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr  # noqa: ARG001  as every LAST
):  # fmt: skip
    """Add to acc [m, n] the product of x . down [rows, rank] with ``up``, which is drawn.

    An image is all positions of one member in one repeat. ``up`` is drawn once for each of the images that a
    tile may touch; if OPTIONS say 0, for small images, once for each row.
    """
    x_down, like, key0, key1, layer, draw, first_member = operands
    rank: tl.constexpr = OPTIONS[0]
    law: tl.constexpr = OPTIONS[2]
    aligned: tl.constexpr = OPTIONS[3]
    images: tl.constexpr = OPTIONS[4]
    if OPTIONS[1]:
        tl.extra.cuda.gdc_wait()
    offs_m = start_m + tl.arange(0, acc.shape[0])
    _, member, _ = row_to_member(offs_m, out.members, out.positions)
    seed, layer, draw = seed_of(key0, key1), as_uint32(layer), as_uint32(draw)
    row_image = offs_m // out.positions
    for r in range(rank):
        x_down_r = tl.load(x_down + offs_m.to(tl.int64) * rank + r, mask=offs_m < out.rows, other=0)
        first = start_n + tl.cast(out.outputs, tl.int64) * r
        if images:
            for index in tl.range(0, images, num_stages=1):
                tile_image = tl.min(row_image, axis=0) + index
                image_member = tile_image % out.members + tl.zeros((1,), tl.int64)
                counter = as_uint32(first_member) + image_member.to(tl.uint32)
                up = _draw_elements(seed, first, counter, layer, draw, law, aligned, acc.shape[1])
                up = up.to(like.dtype.element_ty).to(ACC)
                acc += tl.where(row_image == tile_image, x_down_r, 0)[:, None] * up
        else:
            counter = as_uint32(first_member) + member.to(tl.uint32)
            up = _draw_elements(seed, first, counter, layer, draw, law, aligned, acc.shape[1])
            acc += x_down_r[:, None] * up.to(like.dtype.element_ty).to(ACC)
    return acc


@triton.jit(do_not_specialize=COUNTERS)
def drawn_up_kernel(
    y, x, weight, second_x, second_weight, stored, more_stored, out, pair, second, operands,
    key0, key1, layer, draw, first_member,
    OPTIONS: tl.constexpr, DESCRIPTORS: tl.constexpr, COLUMNS: tl.constexpr, FLATTEN: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows and end with :func:`add_drawn_up`; operands are x . down and the weight."""
    x_down, like = operands
    product_kernel(
        y, x, weight, second_x, second_weight, stored, more_stored, out, pair, second,
        (x_down, like, key0, key1, layer, draw, first_member),
        None, None, add_drawn_up, OPTIONS, DESCRIPTORS, COLUMNS, FLATTEN,
        ACC, PRECISION, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


def down_product(
    x: Tensor, down: Tensor | Draw, rank: int, sigma: float | Tensor = 1.0, law: Law = "normal"
) -> Tensor:
    """Multiply each row by its member's ``down`` [k, i] and sigma: [rows, k] in float32, or float64 if x is.

    Element k * inputs + i of a draw, rounded to x's dtype, is entry [k, i]. For R rows with e bytes per
    number and m members:

    * bytes: e R i read, and e m k i if ``down`` is stored; 4 R k written.
    * flops: 2 R k i, without tensor cores.
    * Philox calls: m k i / 4 for every DOWN_ROWS rows of a member, m k i / 16 of levels and m k i / 128 of
      signs. A GPU draws about 1e12 normals a second.

    Args:
        x: [r, m, p, i], any strides.
        down: [m, k, i], contiguous, or the noise of the members in x, which is drawn.
        rank: k, see :func:`check_rank`.
        sigma: a number, or [r].
        law: the distribution of the noise that is drawn.

    Raises:
        ValueError: the rank is not supported, or the counter of a member or an element exceeds 32 bits.
    """
    repeats, members, positions, inputs = x.shape
    check_rank(rank)
    width, rows = VALUES_PER_CALL[law], repeats * positions
    stored = down if isinstance(down, Tensor) else None
    counters = (0,) * 5 if isinstance(down, Tensor) else down.arguments(members, rank * inputs, width)
    out = torch.empty(
        members * rows, rank, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    if not out.numel():
        return out
    max_rows, calls = down_tile(rank, width)
    tile_rows = block_size(rows, max_rows)
    tile_members = max_rows // tile_rows
    member_tiles = -(-members // tile_members)
    tiles, calls = member_tiles * -(-rows // tile_rows), block_size(-(-inputs // width), calls)
    runs_beside = stored is not None or DOWN_REGISTERS[law]
    grid = programs_before_product(tiles, 1, x.device) if runs_beside else grid_of(tiles)
    with torch.cuda.device_of(x):
        low_rank_down_kernel[grid](
            out, x, stored, *noise_scale(sigma, x), inputs, members, positions, rows, *x.stride(), *counters,
            member_tiles, tiles,
            RANK=rank, LAW=law, WIDTH=width, ALIGNED=inputs % width == 0, EARLY=can_begin_early(x.device),
            ACC=accumulator_dtype(x.dtype),
            ROWS=tile_rows, MEMBERS=tile_members, CALLS=calls, AT_ONCE=min(AT_ONCE, calls * width),
            num_warps=DOWN_WARPS,
        )  # fmt: skip
    return out


def low_rank_rng_product(
    x: Tensor,
    weight: Tensor,
    down: Draw,
    up: Draw,
    rank: int,
    sigma: float | Tensor,
    y: Tensor,
    *,
    law: Law = "normal",
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma up_m^T down_m / sqrt(k), into ``y``, which is returned.

    Factors are drawn by this law and never stored: ``down`` and ``up`` are the noise of the members in x, see
    :func:`down_product`. Entry [k, o] of ``up`` is element k * outputs + o of its draw. Other arguments are
    those of all launchers, see :mod:`impls.kernels.gemm`.

    * bytes: e R (2 i + o) + e i o of the product and 8 R k between the kernels; x and W are read again from a
      cache for each tile of the other axis.
    * flops: 2 R i o on tensor cores and 2 R k (i + o) on others.
    * Philox calls: R k (i + o) / 4, a fourth of that for levels, at most R k (i / 128 + o / 16) for
      signs. At 1e12 normals a second and one row for each member, drawing takes nearly as long as a product
      of width 1024. Where members have many positions, so that a tile has rows of few members, ``up`` is
      drawn once for each member and tile.

    Raises:
        ValueError: shapes or dtypes do not match, the rank is not supported, or the counter of a member or an
            element exceeds 32 bits.
    """
    gemm = gemm_of(x, weight, y)
    width, outputs = VALUES_PER_CALL[law], len(weight)
    counters = up.arguments(gemm.members, rank * outputs, width)
    x_down = down_product(x, down, rank, sigma / math.sqrt(rank), law)
    default = TILING if x.dtype.itemsize <= 2 else TILING._replace(num_warps=8)  # noqa: PLR2004  bytes
    tiling = select_tiling(TASKS[law], gemm, tiling, default.keep_warps(x.dtype), rank)
    # Columns that are drawn at once begin at a multiple of their number, those of the first rank always.
    is_aligned = rank == 1 or outputs % min(width, COLUMNS) == 0
    # A tile of m rows touches at most (m - 2) // positions + 2 images.
    images = (tiling.block_m - 2) // max(1, x.shape[2]) + 2
    images = images if images <= MAX_IMAGES else 0
    waits = can_begin_early(x.device)
    return gemm.launch(
        tiling, (x_down, weight), *counters, kernel=drawn_up_kernel,
        OPTIONS=(rank, waits, law, is_aligned, images), FLATTEN=not images and rank == 1,
        columns=COLUMNS, reserved=0 if images else DOWN_REGISTERS[law], launch_pdl=waits,
    )  # fmt: skip
