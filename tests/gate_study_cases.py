"""Studies of the gate that nobody took: replicates of a known spread, inside processes and between them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from esbench.gate.protocol import ARMS
from esbench.gate.records import SCHEMA, Line, Opening, Replicate, Timed
from esbench.gate.study import FOLDER, SURPLUS, Study, compressed
from esbench.gate.worktree import Revision
from tests.accuracy_cases import HERE

ROUNDS, LAUNCHES = 20, 8
CELLS = tuple(f"Variant{number} | Linear(4, 4) | forward | host" for number in range(6))


def timed(
    rng: np.random.Generator, cell: str, *, slower: float = 0.0, between: float = 0.0, within: float = 0.01
) -> Timed:
    """Make a cell of a replicate: ``between`` is the spread of an arm's process, ``within`` of its visits."""
    arms = []
    for ratio in (1.0, 1 + slower):
        visits = 1e5 * ratio * math.exp(rng.normal(0, between)) * np.exp(rng.normal(0, within, 2 * ROUNDS))
        # launches of a visit lie close together, and evenly around their median; the first is an outlier
        launches = visits[:, None] * (1 + 1e-4 * np.array([9, -3, -2, -1, 0, 1, 2, 3]))
        arms.append(tuple(map(tuple, launches.tolist())))
    return Timed(cell=cell, first=ARMS[:1] * ROUNDS, base=arms[0], head=arms[1])


def replicates(
    count: int,
    cells: Mapping[str, Mapping[str, float]] | None = None,
    seed: int = 0,
    /,
    **fields: float,
) -> list[Replicate]:
    """Make replicates of cells, each with fields of its own, and of the controls of a study."""
    rng = np.random.default_rng(seed)
    own = dict.fromkeys(CELLS, fields) if cells is None else cells
    controls = {f"{name} | host": {**fields, "slower": more} for name, more in SURPLUS.items()}
    return [
        Replicate(
            stage="study",
            number=number,
            cells=tuple(timed(rng, cell, **each) for cell, each in {**own, **controls}.items()),
            wall_s=60.0,
        )
        for number in range(1, count + 1)
    ]


def opening(number: int = 0, **fields: Any) -> Opening:
    """Make the first line of a study."""
    return Opening(
        schema=SCHEMA,
        gate_id=f"2026112{number}T000000Z-gate-0000",
        started=f"2026-11-2{number}T00:00:00+00:00",
        seed=7,
        suite="gate",
        revisions={
            "base": Revision(asked="HEAD", commit="a" * 40),
            "head": Revision(asked="HEAD", commit="a" * 40),
        },
        environment=msgspec.structs.replace(HERE, **fields),
        code={"base": {}, "head": {}},
        harness="h",
    )


def study_of(*found: Replicate, **fields: Any) -> Study:
    """Make a study of replicates."""
    return Study(path=Path("study"), opening=opening(**fields), surveys=(), replicates=found)


def stored(results: Path, *lines: Line, number: int = 0, **fields: Any) -> Path:
    """Write a study as a device's results hold it."""
    first = opening(number, **fields)
    path = results / first.environment.slug / FOLDER / f"{first.gate_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (first, *lines)))
    return compressed(path)
