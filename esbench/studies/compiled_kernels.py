"""Records of the kernels as compiled for several GPUs, in ``<results>/compiled/kernels.json``."""

from pathlib import Path
from typing import Annotated

import msgspec

from esbench import store

SCHEMA = 2
FILE = Path("compiled", "kernels.json")
"""The path of the file in the folder of results."""

Amount = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoding rejects unknown fields."""


class Compilation(_Strict, frozen=True, kw_only=True):
    """What one launch of a kernel compiles to.

    ``capability`` is 90 for 9.0. ``registers`` are per thread, ``shared_bytes`` per program.
    """

    title: str
    kernel: str
    capability: Positive
    warps: Positive
    stages: Positive
    registers: Positive
    shared_bytes: Amount
    spilled_bytes: Amount


class Refused(_Strict, frozen=True, kw_only=True):
    """A launch that does not compile, and why."""

    title: str
    kernel: str
    capability: Positive
    reason: str


class Compilations(_Strict, frozen=True, kw_only=True):
    """All compiled launches, with the compiler and the revision."""

    schema: int
    triton: str
    commit: str | None
    dirty: bool | None
    found: tuple[Compilation, ...]
    refused: tuple[Refused, ...] = ()


def write_compilations(compilations: Compilations, path: Path) -> Path:
    """Replace the file atomically."""
    return store.write_document(compilations, path)


def read_compilations(results: Path) -> Compilations | None:
    """Read what kernels compile to; None if there is no file.

    Raises:
        UserError: the file is invalid; the message names the file and the field.

    """
    path = results / FILE
    if not path.exists():
        return None
    again = "compile again with `nox -s kernels`"
    return store.read_document(
        path, Compilations, what="study of compiled kernels", schema=SCHEMA, again=again
    )
