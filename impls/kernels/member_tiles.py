"""How rows of members that draw dense noise are cut into tiles, see :mod:`impls.kernels.regenerated`."""

from typing import NamedTuple

import torch

from impls.kernels.drawn import SIGNS
from impls.kernels.rows import LEAST, precision

WORD_BITS = 32
"""Signs in a word of a call."""

MOST_FEW = 4
"""Rows of a member that plain units multiply: of more, matrix units do."""


class FewTiling(NamedTuple):
    """How few rows of each member are cut into tiles.

    Attributes:
        rows: of a member in a tile, at most.
        tall: rows of a tile, of all its members.
        columns: of a tile.
        line: columns next to each other that fall to a warp.
        calls: of Philox in a tile, for each member and column.
        deep: channels of the shared product that are multiplied at once.
        warps: of a program.
        stages: tiles that are loaded ahead.

    """

    rows: int = 4
    tall: int = 16
    columns: int = 32
    line: int = 8
    calls: int = 4
    deep: int = 64
    warps: int = 8
    stages: int = 2

    def suited(self, dtype: torch.dtype, reads: str | None = None) -> "FewTiling":
        """Return tiles that leave room for operands of this type, as :meth:`.rows.Tiling.suited` has it."""
        if dtype is torch.float64:
            return self._replace(columns=max(LEAST, self.columns // 4), deep=LEAST)
        if dtype.itemsize <= 2 or (reads or precision(dtype)) == "tf32":  # noqa: PLR2004  bytes
            return self
        return self._replace(deep=LEAST)


class ManyTiling(NamedTuple):
    """How many rows of one member are cut into tiles.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        deep: channels that are multiplied at once, of signs a multiple of 32, or of what a call draws.
        warps: of a program.
        stages: tiles that are loaded ahead.

    """

    rows: int = 128
    columns: int = 64
    deep: int = 32
    warps: int = 8
    stages: int = 2

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled with."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEEP": self.deep}

    def suited(self, dtype: torch.dtype, reads: str | None = None) -> "ManyTiling":
        """Return tiles that leave room for operands of this type, as :meth:`.rows.Tiling.suited` has it."""
        if dtype.itemsize <= 2:  # noqa: PLR2004  bytes
            return self
        if (reads or precision(dtype)) == "tf32":
            return self._replace(deep=min(self.deep, WORD_BITS))
        # Products keep all their operands in registers, of the noise and of the weight.
        rows, columns = (max(LEAST, size // 2) for size in (self.rows, self.columns))
        return self._replace(rows=rows, columns=columns, deep=max(LEAST, self.deep // 4))


def tiling_of(rows: int, *, signs: bool, whole: bool) -> FewTiling | ManyTiling:
    """Return the tiles for so many rows of a member, where nothing was tuned.

    A thread has about eight calls at a time in its registers, or what is left of sixteen where noise of a row
    of the weight does not begin with a call.
    """
    if rows > MOST_FEW:
        return ManyTiling(deep=SIGNS) if signs else ManyTiling()
    if signs:
        return FewTiling(columns=128, line=32, calls=1)
    return FewTiling() if whole else FewTiling(columns=16)
