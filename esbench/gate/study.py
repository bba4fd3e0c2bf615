"""A study of the gate itself: one revision against itself, over and over, and work of a known surplus.

A study is kept as it was measured, one line a replicate, in ``<results>/<device>/gate/<id>.jsonl.gz``; while
it is being measured, and where it was interrupted, it is the same without ``.gz``.
"""

import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.gate.records import SAME, SCHEMA, Line, Opening, Replicate, Surveyed

FOLDER = "gate"
"""The folder of a device's results that holds its studies of the gate."""
SURPLUS: Mapping[str, float] = {
    SAME: 0.0,
    **{f"control: {100 * more:g} % more work": more for more in (0.005, 0.01, 0.02, 0.03)},
}
"""Name of a control -> by which share head has more work: what a gate finds of it is its power."""


@dataclass(frozen=True)
class Study:
    """What was measured: the first line, what was found of the cells, and the replicates."""

    path: Path
    opening: Opening
    surveys: Sequence[Surveyed]
    replicates: Sequence[Replicate]


def compressed(path: Path) -> Path:
    """Compress a study that is complete, the same content to the same bytes; return its new path."""
    packed = path.with_name(f"{path.name}.gz")
    part = packed.with_suffix(".part")
    part.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    part.replace(packed)
    path.unlink()
    return packed


def read(path: Path) -> Study:
    """Read a study; half a line at its end, where it was interrupted, is left out.

    Raises:
        UserError: it is none; the message names file, line and field.

    """
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        message = f"{path}: cannot be read: {error}"
        raise UserError(message) from error
    found = [_decoded(path, number, line) for number, line in enumerate(lines[:-1], start=1)]
    opening = found[0] if found else None
    if not isinstance(opening, Opening) or opening.schema != SCHEMA:
        message = (
            f"{path}: no study of the gate of schema {SCHEMA}: measure another with `esbench gate-study`"
        )
        raise UserError(message)
    return Study(
        path=path,
        opening=opening,
        surveys=tuple(one for one in found if isinstance(one, Surveyed)),
        replicates=tuple(one for one in found if isinstance(one, Replicate)),
    )


def newest_of_each(results: Path) -> list[Path]:
    """Return the newest complete study of each device, in the order of their folders."""
    found = {path.parent: path for path in sorted(results.glob(f"*/{FOLDER}/*.jsonl.gz"))}
    return list(found.values())


def _decoded(path: Path, number: int, line: bytes) -> Line:
    try:
        return msgspec.json.decode(line, type=Line)
    except (ValueError, RecursionError) as error:
        message = f"{path}:{number}: {error}"
        raise UserError(message) from error
