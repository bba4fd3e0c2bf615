"""Which tiles are fastest on which GPU: a table for each that somebody tuned, committed beside this file.

A table is ``<device>.json``, named as the device's folder of results, and written by ``nox -s tune``. A
launcher that is given no tiles asks here before it takes its own default, which is for GPUs without a table,
and for what is not in it.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from esbench import documents
from esbench.errors import UserError
from esbench.records import slug
from impls.kernels.rows import LEAST, Tiling

SCHEMA = 1
FOLDER = Path(__file__).parent

Key = tuple[str, str, tuple[int, ...]]
"""A kernel, a type, and a shape as :func:`bucket` has it."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Nanoseconds = Annotated[float, msgspec.Meta(gt=0, le=1e24)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding refuses fields that it does not know."""


class Configuration(_Strict, frozen=True, kw_only=True):
    """The tiles of a kernel in a type, for all shapes of a bucket, and what they take beside the default.

    Raises:
        ValueError: no tile has such a size; the message says which.

    """

    kernel: str
    dtype: str
    sizes: tuple[Count, ...]
    rows: Count
    columns: Count
    deep: Count
    group: Count
    warps: Count
    stages: Count
    time_ns: Nanoseconds
    default_ns: Nanoseconds

    def __post_init__(self) -> None:
        """Hold sizes to what can be launched."""
        for name, least in (("rows", LEAST), ("columns", LEAST), ("deep", LEAST), ("warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                message = f"{name} of a tile must be a power of two of at least {least}, got {value}"
                raise ValueError(message)

    @property
    def key(self) -> Key:
        """What it is for."""
        return self.kernel, self.dtype, self.sizes

    @property
    def tiling(self) -> Tiling:
        """The tiles."""
        return Tiling(self.rows, self.columns, self.deep, self.group, self.warps, self.stages)


class Table(_Strict, frozen=True, kw_only=True):
    """Everything that was tuned on a GPU, and with what."""

    schema: int
    device_name: str
    torch: str
    triton: str
    commit: str | None
    dirty: bool | None
    found: tuple[Configuration, ...]


def tuned(kernel: str, x: Tensor, *sizes: int) -> Tiling | None:
    """Return the tiles that were fastest for a kernel on the GPU of x, in its type and at such sizes.

    None where nobody tuned it there.

    Raises:
        UserError: the table of this GPU is broken; the message names the file.

    """
    if x.device.type != "cuda":
        return None
    return tilings(_device_name(x.device.index)).get((kernel, type_name(x.dtype), bucket(sizes)))


@functools.cache
def tilings(device_name: str) -> Mapping[Key, Tiling]:
    """Read the table of a GPU; nothing where there is none.

    Raises:
        UserError: it is broken; the message names the file.

    """
    path = path_of(device_name)
    return {one.key: one.tiling for one in read_table(path).found} if path.exists() else {}


def path_of(device_name: str) -> Path:
    """Return where the table of a GPU is."""
    return FOLDER / f"{slug(device_name)}.json"


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        UserError: the file holds none, or two answers to one question; the message names it.

    """
    again = "tune again with `nox -s tune`"
    table = documents.read(path, Table, what="table of tuned kernels", schema=SCHEMA, again=again)
    keys = [one.key for one in table.found]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        message = f"{path}: two configurations are for {twice}: {again}"
        raise UserError(message)
    if odd := next((key for key in keys if key[2] != bucket(key[2])), None):
        message = f"{path}: the sizes of {odd} are no powers of two: {again}"
        raise UserError(message)
    return table


def bucket(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return sizes as a table has them: each the next power of two, so that near shapes share their tiles."""
    return tuple(1 << max(0, size - 1).bit_length() for size in sizes)


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type in a table."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)
