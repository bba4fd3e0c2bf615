"""Tile sizes of a matrix product, and the tables of tuned ones that launches look up.

``python -m impls.kernels.autotune`` writes a table for each GPU model into ``tuned/``.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from esbench import store
from esbench.compiled import REGISTERS, THREADS_OF_WARP
from esbench.schema import slug

MIN_BLOCK = 16
"""Rows, columns and depth of the smallest tile that a matrix unit takes."""


class Tiling(NamedTuple):
    """Tile sizes and launch options of a product.

    Sums over channels are accumulated ``block_k`` at a time, so results for different ``block_k`` agree up to
    rounding. For the same tiling they have the same bits every time. Drawn or stored noise never depends on
    the tiling.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: channels multiplied at once.
        group_m: tiles of rows that are computed one after another with the same tile of columns, for the
            cache.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline of loads.
        programs: programs on each multiprocessor of a kernel that loops over tiles. While one of them ends a
            tile, another one multiplies, if both fit into shared memory. Registers are limited so that they
            fit.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    programs: int = 1

    def for_dtype(self, dtype: torch.dtype) -> "Tiling":
        """Return smaller tiles for operands wider than 16 bits.

        Products of float64, and of float32 without TF32, hold both operands in registers.
        """
        if dtype.itemsize <= 2:  # noqa: PLR2004  bytes
            return self
        if input_precision(dtype) == "tf32":
            return self._replace(block_k=max(MIN_BLOCK, self.block_k // 2), programs=1)
        block_m, block_n = (max(MIN_BLOCK, size // 2) for size in (self.block_m, self.block_n))
        # So a thread has the same number of bytes of accumulators in float64 and in float32.
        num_warps = self.num_warps if dtype is torch.float64 else max(1, self.num_warps // 2)
        return self._replace(
            block_m=block_m, block_n=block_n, block_k=MIN_BLOCK, num_warps=num_warps, programs=1
        )

    def keep_warps(self, dtype: torch.dtype) -> "Tiling":
        """Return twice the warps for float32, since :meth:`for_dtype` halves them.

        For kernels whose float32 accumulators do not fit in the registers of half the warps.
        """
        is_halved = dtype is torch.float32 and input_precision(dtype) == "ieee"
        return self._replace(num_warps=2 * self.num_warps) if is_halved else self

    def clip(self, rows: int, columns: int, channels: int) -> "Tiling":
        """Return tiles no larger than the product: each size is a power of two of at least 16."""
        return self._replace(
            block_m=block_size(rows, self.block_m, MIN_BLOCK),
            block_n=block_size(columns, self.block_n, MIN_BLOCK),
            block_k=block_size(channels, self.block_k, MIN_BLOCK),
        )

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            **self.register_limit(),
        }

    def register_limit(self, reserved: int = 0) -> dict[str, int]:
        """Return the keyword argument of a launch by which several programs fit on a multiprocessor.

        They leave ``reserved`` registers of a multiprocessor to another kernel.
        """
        if self.programs == 1:
            return {}
        return {"maxnreg": (REGISTERS - reserved) // (self.programs * self.num_warps * THREADS_OF_WARP)}


def block_size(size: int, most: int, least: int = 1) -> int:
    """Return the smallest power of two that holds ``size``, clamped to [least, most]."""
    return min(most, max(least, 1 << max(0, size - 1).bit_length()))


MAX_PROGRAMS_OF_SUM = 512
"""A sum is split over members up to this many programs: a few for each multiprocessor of a GPU."""

MIN_MEMBERS_OF_PART = 64
"""Fewest members of a part of a split sum."""


def member_parts(members: int, tiles: int) -> tuple[int, int]:
    """Return (parts, members of a part) of a sum over members that has this many tiles."""
    parts = max(1, min(MAX_PROGRAMS_OF_SUM // max(1, tiles), members // MIN_MEMBERS_OF_PART))
    part_members = max(1, -(-members // parts))
    return -(-members // part_members), part_members


def input_precision(dtype: torch.dtype) -> str:
    """Return ``tl.dot``'s ``input_precision``: "tf32" where torch's own float32 products use TF32."""
    # Not allow_tf32, which raises an error after TF32 was allowed by fp32_precision.
    is_tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if is_tf32 else "ieee"


DTYPE = torch.bfloat16
"""The dtype that kernels are tuned for."""

SCHEMA = 6
FOLDER = Path(__file__).parent / "tuned"
"""Tables of tuned tile sizes, one file for each GPU model."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fastest tile sizes of a kernel, for sizes rounded up by :func:`round_up_sizes`.

    ``tiling`` is None if the default is fastest. ``default_ns`` is the time of a launch with the default tile
    sizes, ``triton`` the version that compiled both.
    """

    kernel: str
    sizes: tuple[int, ...]
    tiling: Tiling | None
    time_ns: float
    default_ns: float
    triton: str

    def describe(self) -> str:
        """Return the tile sizes and both times."""
        return (
            f"{self.tiling or 'the default'} takes {self.time_ns / 1e3:.1f} us, the default "
            f"{self.default_ns / 1e3:.1f} us"
        )


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tuned tile sizes of a GPU model."""

    schema: int = SCHEMA
    configurations: tuple[Configuration, ...] = ()


def find_tuned_tiling(kernel: str, x: Tensor, *sizes: int) -> Tiling | None:
    """Return the tuned tile sizes of a kernel on the GPU of ``x``, for its dtype and these sizes.

    Returns:
        None on a CPU, where these sizes or this dtype were not tuned, and where the default is fastest.

    Raises:
        UserError: the table of this GPU cannot be read; the message names the file.
    """
    if x.device.type != "cuda" or x.dtype is not DTYPE:
        return None
    return tuned_tilings(x.device.index).get((kernel, round_up_sizes(sizes)))


@functools.cache
def tuned_tilings(device_index: int) -> Mapping[tuple[str, tuple[int, ...]], Tiling | None]:
    """Read the table of a GPU: tile sizes by kernel and sizes."""
    table = read_table(table_path(torch.cuda.get_device_name(device_index)))
    return {(entry.kernel, entry.sizes): entry.tiling for entry in table.configurations}


def table_path(device_name: str) -> Path:
    """Return the path of a GPU model's table."""
    return FOLDER / f"{slug(device_name)}.json"


def read_table(path: Path) -> Table:
    """Read a table; without a file it is empty.

    Raises:
        UserError: the file is not a table.
    """
    if not path.exists():
        return Table()
    again = "delete it and tune again with `nox -s tune`"
    return store.read_document(path, Table, what="table of tuned kernels", schema=SCHEMA, again=again)


def round_up_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Round each size up to a power of two: similar shapes share an entry of a table."""
    return tuple(1 << max(0, size - 1).bit_length() for size in sizes)
