"""What kernels on rows share: how rows lie in memory, which member each is of, and where a program stands.

Activations are [r, m, p, c] with any strides: repeats, members, positions and channels. Row
(repeat * members + member) * positions + position is a row of one matrix product with a weight [o, c] that
all members share. A Linear layer has one position; a convolution of one tap has those of its image.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.words import programs, tile

DOT = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Types that a product of matrices takes."""

LEAST = 16
"""Rows, columns and depth of the smallest tile that a matrix unit takes."""


class Tiling(NamedTuple):
    """How a product is cut into tiles and a launch is made of them: a configuration that may be tuned.

    A sum over channels is in the order of tiles of ``deep`` of them, and a matrix unit adds those up in an
    order of its own: with another depth results agree to rounding, with the same one they are the same every
    time. Noise that is drawn or stored has the same bits whatever the tiles.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        deep: channels that are multiplied at once.
        group: tiles of rows that share a tile of columns one after another, while a cache holds it.
        warps: of a program.
        stages: tiles that are loaded ahead.

    """

    rows: int = 128
    columns: int = 128
    deep: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3

    def suited(self, dtype: torch.dtype, reads: str | None = None) -> "Tiling":
        """Return tiles that leave room for operands of this type, which may be wider than 16 bits.

        Products of float32 in float32, which matrix units do not know, and of float64 keep all their operands
        in registers.

        Args:
            dtype: of operands.
            reads: how matrix units read it, if not as :func:`precision` says.

        """
        if dtype.itemsize <= 2:  # noqa: PLR2004  bytes
            return self
        if (reads or precision(dtype)) == "tf32":
            return self._replace(deep=max(LEAST, self.deep // 2))
        rows, columns = (max(LEAST, size // 2) for size in (self.rows, self.columns))
        warps = self.warps if dtype is torch.float64 else max(1, self.warps // 2)
        return self._replace(rows=rows, columns=columns, deep=LEAST, warps=warps)

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled with."""
        return {"GROUP": self.group, "ROWS": self.rows, "COLUMNS": self.columns, "DEEP": self.deep}

    @property
    def options(self) -> dict[str, int]:
        """What a launch says: the kernel's constants, warps and stages."""
        return {**self.constants, "num_warps": self.warps, "num_stages": self.stages}

    def within(self, rows: int, columns: int, deep: int) -> "Tiling":
        """Return tiles no larger than what there is to compute: powers of two, and 16 at least."""
        return self._replace(
            rows=tile(rows, self.rows, LEAST),
            columns=tile(columns, self.columns, LEAST),
            deep=tile(deep, self.deep, LEAST),
        )


class Product(NamedTuple):
    """A product of members' rows with a shared weight, as a kernel takes it.

    Attributes:
        x: activations [r, m, p, i], any strides.
        weight: [o, i], i contiguous.
        y: the output [r, m, p, o], any strides.

    """

    x: Tensor
    weight: Tensor
    y: Tensor

    @property
    def members(self) -> int:
        """How many there are."""
        return self.x.shape[1]

    @property
    def rows(self) -> int:
        """Rows of all members."""
        return self.x.shape[:3].numel()

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Rows, outputs, inputs, members, positions."""
        return self.rows, *self.weight.shape, self.x.shape[1], self.x.shape[2]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of x, of y, and of the weight's rows."""
        return *self.x.stride(), *self.y.stride(), self.weight.stride(0)

    def tiles(self, tiling: Tiling) -> tuple[int, int]:
        """How many tiles of rows and of columns there are."""
        return -(-self.rows // tiling.rows), -(-self.weight.shape[0] // tiling.columns)

    def grid(self, tiling: Tiling) -> tuple[int]:
        """Return one program for each tile."""
        return programs(*self.tiles(tiling))


def product(x: Tensor, weight: Tensor, y: Tensor) -> Product:
    """Look at x [r, m, p, i], weight [o, i] and y [r, m, p, o], all of one type on one device.

    Raises:
        ValueError: shapes or types do not fit.

    """
    fits = x.dim() == y.dim() == 4 and weight.dim() == 2 and x.shape[:3] == y.shape[:3]  # noqa: PLR2004  as their axes are
    if not fits or (*weight.shape,) != (y.shape[3], x.shape[3]):
        message = (
            "a product takes x [r, m, p, i], weight [o, i] and y [r, m, p, o], got "
            f"{list(x.shape)}, {list(weight.shape)} and {list(y.shape)}"
        )
        raise ValueError(message)
    if x.dtype not in DOT or not x.dtype == weight.dtype == y.dtype:
        message = f"a product takes one floating type, got {x.dtype}, {weight.dtype} and {y.dtype}"
        raise ValueError(message)
    return Product(x, weight if weight.stride(1) == 1 else weight.contiguous(), y)


class Strength(NamedTuple):
    """The scale of rows' noise, as a kernel takes it.

    Attributes:
        number: of all rows.
        scales: [r], one for each repeat instead; where a number will do, any tensor.
        is_scaled: whether there is one for each repeat.

    """

    number: float
    scales: Tensor
    is_scaled: bool


def strength_of(sigma: float | Tensor, x: Tensor, factor: float = 1.0) -> Strength:
    """Look at a scale for activations [r, ...], a number or one for each repeat, times a factor."""
    if isinstance(sigma, Tensor):
        return Strength(0.0, sigma.flatten() * factor, is_scaled=True)
    if x.dtype is torch.float64:  # a kernel's numbers are float32
        return Strength(0.0, x.new_full((len(x),), sigma * factor), is_scaled=True)
    return Strength(sigma * factor, x, is_scaled=False)


def wide(dtype: torch.dtype) -> tl.dtype:
    """Return the type that products of this type are summed in."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def precision(dtype: torch.dtype) -> str:
    """Return how matrix units read float32: as torch's own products do, by its setting."""
    may_round = dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if may_round else "ieee"


@triton.jit
def corner(row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return which tile of rows and which of columns is this program's, in int64, see :func:`place`."""
    program = tl.program_id(0).to(tl.int64)
    first = program // (GROUP * column_tiles) * GROUP
    height = min(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % height, within // height


@triton.jit
def place(row_tiles, column_tiles, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (rows, columns) of this program's tile, in int64: GROUP tiles of rows for each of columns."""
    down, across = corner(row_tiles, column_tiles, GROUP)
    return down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def whose(rows, members, positions):
    """Return (repeat, member, position) of rows."""
    image = rows // positions
    return image // members, image % members, rows % positions


@triton.jit
def strength(sigma, scales, repeat, inside, SCALED: tl.constexpr, TYPE: tl.constexpr):
    """Return the scale of each row's noise, of TYPE: a number, or with SCALED one for each repeat."""
    if SCALED:
        return tl.load(scales + repeat, mask=inside, other=0).to(TYPE)
    else:  # noqa: RET505  the compiler takes no early return here
        return tl.full(repeat.shape, sigma, TYPE)
