"""What kernels on packed bits share: pieces that are inlined in them, and how their arguments lie in memory.

+1 is bit 1 and -1 is bit 0, lowest bits first; bits behind the last one are 0. Words are int32 or int64; a
kernel reads the halves of an int64 word, low and high, as int32 words side by side. A row of a weight
[m, K, o] then has 2 o of them. GROUP is how many halves a word has.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS = {torch.int32: 1, torch.int64: 2}
"""Halves of 32 bits in a word."""

PRODUCTS = (torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of a product: sums as they are, or of unit size."""

MOST_PROGRAMS = 2**31 - 1
"""How many programs a launch may have on axis 0; the other axes end at 65,535, so they are not used."""


@triton.jit
def popcount(x):
    """Count set bits of uint32: the steps that LLVM knows as one POPC."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_words(pointers, mask):
    """Load int32 words as uint32, 0 outside of the mask."""
    return tl.load(pointers, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def place(tiles, row_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (member, rows, columns) of this program in int64: tiles of columns count fastest."""
    program = tl.program_id(0).to(tl.int64)
    rows = (program // tiles % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return program // tiles // row_tiles, rows, columns


@triton.jit
def scaled(sums, length, TYPE: tl.constexpr):
    """Return sums of ``length`` +1 and -1 as they are in int32, else by the square root of their number."""
    if tl.int32 == TYPE:
        return sums
    elif tl.float64 == TYPE:  # noqa: RET505  the compiler takes no early return here
        return sums.to(tl.float64) / tl.sqrt(tl.cast(length, tl.float64))
    else:
        # Rounded as torch rounds a division on a CPU, so that bits that follow from it are the same.
        return tl.div_rn(sums.to(tl.float32), tl.sqrt_rn(tl.cast(length, tl.float32))).to(TYPE)


def halves(words: Tensor, name: str) -> Tensor:
    """View packed words as int32, a member's own words contiguous; a member axis of stride 0 may stay.

    Raises:
        ValueError: they are of another type.

    """
    if words.dtype not in GROUPS:
        message = f"{name} must be words of int32 or int64, got {words.dtype}"
        raise ValueError(message)
    if words.stride(0) == 0 and len(words) > 1:
        return halves(words[:1], name).expand(len(words), *[-1] * (words.dim() - 1))
    # Flat in between: an axis of one word may have any stride, and views of another type mind it.
    flat = words.contiguous().view(-1).view(torch.int32)
    return flat.view(*words.shape[:-1], words.shape[-1] * GROUPS[words.dtype])


class Operands(NamedTuple):
    """What a product reads, as a kernel takes it.

    Attributes:
        x: [m, p, K * group] of int32.
        weights: [m, K, o * group] of int32.
        group: halves of 32 bits in a word.

    """

    x: Tensor
    weights: Tensor
    group: int

    @property
    def members(self) -> int:
        """How many there are."""
        return len(self.x)

    @property
    def rows(self) -> int:
        """Rows of each."""
        return self.x.shape[1]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """p, K, halves of a row of a weight, and both strides of members."""
        _, depth, width = self.weights.shape
        return self.rows, depth, width, self.x.stride(0), self.weights.stride(0)

    def output(self, dtype: torch.dtype) -> Tensor:
        """Return room for a product, [m, p, o]."""
        shape = (self.members, self.rows, self.weights.shape[2] // self.group)
        return torch.empty(shape, device=self.x.device, dtype=dtype)


def operands(x: Tensor, weights: Tensor, dtype: torch.dtype = torch.int32) -> Operands:
    """Look at x [m, p, K] and weights [m, K, o], a member axis of which may be expanded from 1.

    Raises:
        ValueError: they are no words of one type, or do not fit each other; or a product has no such dtype.

    """
    if dtype not in PRODUCTS:
        message = f"a product of bits is of int32 or a floating type, got {dtype}"
        raise ValueError(message)
    fits = x.dim() == weights.dim() == 3 and (len(x), x.shape[2]) == (len(weights), weights.shape[1])  # noqa: PLR2004  as their axes are
    if not fits or x.dtype != weights.dtype:
        message = (
            "a product takes x [m, p, K] and weights [m, K, o] of one type, got "
            f"{x.dtype} {list(x.shape)} and {weights.dtype} {list(weights.shape)}"
        )
        raise ValueError(message)
    return Operands(halves(x, "x"), halves(weights, "weights"), GROUPS[x.dtype])


def tile(size: int, most: int, least: int = 1) -> int:
    """Return a power of two for a tile: the smallest that holds ``size``, within the two ends."""
    return min(most, max(least, triton.next_power_of_2(size)))


def programs(*counts: int) -> tuple[int]:
    """Multiply the counts of programs to a grid.

    Raises:
        ValueError: they are more than a launch may have.

    """
    grid = 1
    for count in counts:
        grid *= count
    if grid > MOST_PROGRAMS:
        message = f"{grid} programs do not fit in one launch: split the population"
        raise ValueError(message)
    return (grid,)
