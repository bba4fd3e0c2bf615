"""Launches of kernels that draw their noise, which are worth a look.

Unless it is said otherwise inputs are a multiple of what a call draws.
"""

from collections.abc import Mapping
from typing import Any

import triton.language as tl

from impls.kernels import noise_sums, redrawn, regenerated
from impls.kernels.drawn import NORMALS, SIGNS
from impls.kernels.inspection.specimen import MATRIX, Specimen

POINTERS = dict.fromkeys(("y", "x", "weight", "scales", "utilities"), "*bf16")
TYPES = {**POINTERS, "out": "*fp32", "narrow": "*fp32", "sigma": "fp32"}

FLAT = dict.fromkeys(("positions", "x_row", "x_column", "y_row", "y_column"), 1)
"""What a launch for a Linear layer finds to be 1."""

IMAGES = {"x_row": 1, "y_row": 1}
"""What a launch for a convolution of one tap does."""

SUMMED = {"TYPE": tl.float32, "PRECISION": "ieee", "SCALED": False}

DRAWN = dict.fromkeys(MATRIX, ("mul.hi.u32",))
"""What Philox is made of."""

BOTH = {capability: (*DRAWN[capability], *MATRIX[capability]) for capability in MATRIX}

# Tiles of 16 rows are below what the larger matrix instruction takes.
FEW = {capability: (*DRAWN[capability], "mma.sync") for capability in MATRIX}


def _few(rows: int, *, signs: bool, whole: bool = True) -> Specimen:
    """Return a product of few rows of each member."""
    tiling = regenerated.tiling_of(rows, signs=signs, whole=whole)
    assert isinstance(tiling, regenerated.FewTiling)  # noqa: S101  so few are they
    constants = {
        "ROWS": rows,
        "OWN": tiling.tall // rows,
        "COLUMNS": tiling.columns,
        "PARTS": tiling.columns // tiling.line,
        "CALLS": tiling.calls,
        "DEEP": tiling.deep,
        "SIGN": signs,
        "WHOLE": whole,
    }
    title = f"regenerated, {rows} of a member's rows, {_kind(signs)}{'' if whole else ', odd inputs'}"
    return _specimen(regenerated.few_rows_kernel, title, constants | FLAT | SUMMED, FEW, tiling)


def _many(*, signs: bool) -> Specimen:
    """Return a product of many rows of each member."""
    tiling = regenerated.tiling_of(regenerated.MOST_FEW + 1, signs=signs, whole=True)
    assert isinstance(tiling, regenerated.ManyTiling)  # noqa: S101  so many are they
    constants = {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "DEEP": tiling.deep,
        "SIGN": signs,
        "WHOLE": True,
    }
    title = f"regenerated, many rows of a member, {_kind(signs)}"
    return _specimen(regenerated.many_rows_kernel, title, constants | IMAGES | SUMMED, BOTH, tiling)


def _narrow(rank: int, *, signs: bool) -> Specimen:
    """Return what takes rows to a few numbers each."""
    constants = {
        "RANK": rank,
        "ROWS": 1,
        "OWN": redrawn.NARROW_ROWS,
        "CALLS": redrawn.NARROW_CHANNELS // rank // (SIGNS if signs else NORMALS),
        "SIGN": signs,
        "WHOLE": True,
        "TYPE": tl.float32,
    }
    flat = {name: FLAT[name] for name in ("positions", "x_row", "x_column")}
    title = f"low rank, drawn, down, rank {rank}, {_kind(signs)}"
    return Specimen(
        redrawn.narrow_kernel, f"{title}, bfloat16", TYPES, constants | flat, DRAWN, redrawn.NARROW_WARPS
    )


def _redrawn(rank: int, *, signs: bool, images: int = 0) -> Specimen:
    """Return the product of which ``up`` is drawn."""
    tiling = redrawn.tiling_of(signs=signs)
    constants = {
        "RANK": rank,
        "IMAGES": images,
        "GROUP": tiling.group,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "DEEP": tiling.deep,
        "SIGN": signs,
        "WHOLE": True,
    }
    title = f"low rank, drawn, up, rank {rank}, {_kind(signs)}{', images' if images else ''}"
    ones = IMAGES if images else FLAT
    return _specimen(redrawn.redrawn_kernel, title, constants | ones | SUMMED, BOTH, tiling)


def _sum(*, signs: bool) -> Specimen:
    """Return the sum of members' noise."""
    constants = {"SIGN": signs, "TYPE": tl.float32, "CALLS": noise_sums.CALLS[signs]}
    title = f"sum of drawn {_kind(signs)}, bfloat16"
    return Specimen(noise_sums.noise_sum_kernel, title, TYPES, constants, DRAWN)


def _kind(signs: bool) -> str:  # noqa: FBT001  passed on by name everywhere above
    return "signs" if signs else "normals"


def _specimen(
    kernel: Any,  # noqa: ANN401  triton's decorated functions have no type
    title: str,
    constants: Mapping[str, object],
    instructions: Mapping[int, tuple[str, ...]],
    tiling: Any,  # noqa: ANN401  whatever has warps and stages
) -> Specimen:
    return Specimen(kernel, f"{title}, bfloat16", TYPES, constants, instructions, tiling.warps, tiling.stages)


SPECIMENS = (
    *(_few(rows, signs=signs) for rows in (1, 2, 4) for signs in (False, True)),
    *(_few(1, signs=signs, whole=False) for signs in (False, True)),
    *(_many(signs=signs) for signs in (False, True)),
    *(_narrow(rank, signs=signs) for rank in (1, 4) for signs in (False, True)),
    *(_redrawn(rank, signs=signs) for rank in (1, 4) for signs in (False, True)),
    *(_redrawn(1, signs=signs, images=2) for signs in (False, True)),
    *(_sum(signs=signs) for signs in (False, True)),
)
