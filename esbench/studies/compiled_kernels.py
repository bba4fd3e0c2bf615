"""Records of what kernels compile to, for GPUs that need not be there, and their file.

They are one JSON file, ``<results>/compiled/kernels.json``, written at once and whole; reading is strict.
Nothing here imports torch or triton.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from esbench import store

SCHEMA = 1
FILE = Path("compiled", "kernels.json")
"""Where they are, below the folder of results."""

Amount = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding refuses fields that it does not know."""


class Compilation(_Strict, frozen=True, kw_only=True):
    """What one launch of a kernel compiles to.

    ``capability`` is 90 for 9.0. ``registers`` are of a thread, ``shared_bytes`` of a program and
    ``spilled_bytes`` what registers had no room for. ``instructions`` counts kinds of them in the assembly,
    each where it stands: loops are not run.
    """

    title: str
    kernel: str
    capability: Positive
    warps: Positive
    stages: Positive
    registers: Positive
    shared_bytes: Amount
    spilled_bytes: Amount
    instructions: dict[str, Amount]


class Refused(_Strict, frozen=True, kw_only=True):
    """A launch that does not compile, and why."""

    title: str
    kernel: str
    capability: Positive
    reason: str


class Compilations(_Strict, frozen=True, kw_only=True):
    """Everything that was compiled, by which compiler and of which revision."""

    schema: int
    triton: str
    commit: str | None
    dirty: bool | None
    found: tuple[Compilation, ...]
    refused: tuple[Refused, ...] = ()


def write_compilations(compilations: Compilations, path: Path) -> Path:
    """Write them in place of what was there; an interrupt leaves one of the two."""
    return store.write_document(compilations, path)


def read_compilations(results: Path) -> Compilations | None:
    """Read what kernels compile to, None where nobody has looked.

    Raises:
        UserError: the file holds something else; the message names it and the field.

    """
    path = results / FILE
    if not path.exists():
        return None
    again = "compile again with `nox -s kernels`"
    return store.read_document(
        path, Compilations, what="study of compiled kernels", schema=SCHEMA, again=again
    )
