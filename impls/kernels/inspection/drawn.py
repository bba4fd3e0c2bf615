"""Launches of kernels that draw their noise, which are worth a look.

Unless it is said otherwise inputs are a multiple of what a call draws.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import triton.language as tl

from impls.kernels import member_tiles, noise_sums, redrawn, regenerated
from impls.kernels.drawn import NORMALS, SIGNS
from impls.kernels.inspection.formats import FLOAT32, FLOAT64, FORMATS, NARROW, Format, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.ranks import MOST_RANK

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
    tiling = member_tiles.tiling_of(rows, signs=signs, whole=whole)
    assert isinstance(tiling, member_tiles.FewTiling)  # noqa: S101  so few are they
    constants = {**_few_tiles(rows, tiling), "SIGN": signs, "WHOLE": whole}
    title = f"regenerated, {rows} of a member's rows, {_kind(signs)}{'' if whole else ', odd inputs'}"
    return _specimen(regenerated.few_rows_kernel, title, constants | FLAT | SUMMED, FEW, tiling)


def _few_tiles(rows: int, tiling: member_tiles.FewTiling) -> dict[str, object]:
    """Return what tiles of few rows are compiled in."""
    return {
        "ROWS": rows,
        "OWN": tiling.tall // rows,
        "COLUMNS": tiling.columns,
        "PARTS": max(1, tiling.columns // tiling.line),
        "CALLS": tiling.calls,
        "DEEP": tiling.deep,
    }


def _few_wider(rows: int, *, signs: bool, whole: bool = True) -> Iterator[Specimen]:
    """Return it in other formats."""
    specimen = _few(rows, signs=signs, whole=whole)
    tiling = member_tiles.tiling_of(rows, signs=signs, whole=whole)
    assert isinstance(tiling, member_tiles.FewTiling)  # noqa: S101  so few are they
    # Odd inputs take most in the widest type.
    for one in _formats(signs) if whole else (FLOAT64,):
        suited = tiling.suited(one.dtype, one.reads)
        yield in_format(specimen, one, suited, _few_tiles(rows, suited))


def _many(*, signs: bool) -> Specimen:
    """Return a product of many rows of each member."""
    tiling = member_tiles.tiling_of(member_tiles.MOST_FEW + 1, signs=signs, whole=True)
    assert isinstance(tiling, member_tiles.ManyTiling)  # noqa: S101  so many are they
    constants = {**tiling.constants, "SIGN": signs, "WHOLE": True}
    title = f"regenerated, many rows of a member, {_kind(signs)}"
    return _specimen(regenerated.many_rows_kernel, title, constants | IMAGES | SUMMED, BOTH, tiling)


def _many_wider(*, signs: bool) -> Iterator[Specimen]:
    """Return it in other formats."""
    tiling = member_tiles.tiling_of(member_tiles.MOST_FEW + 1, signs=signs, whole=True)
    for one in _formats(signs):
        yield in_format(_many(signs=signs), one, tiling.suited(one.dtype, one.reads))


def _narrow(rank: int, *, signs: bool) -> Specimen:
    """Return what takes rows to a few numbers each."""
    rows, calls = redrawn.narrow_tile(rank, SIGNS if signs else NORMALS)
    constants = {
        "RANK": rank,
        "ROWS": 1,
        "OWN": rows,
        "CALLS": calls,
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
        **tiling.constants,
        "SIGN": signs,
        "WHOLE": True,
    }
    title = f"low rank, drawn, up, rank {rank}, {_kind(signs)}{', images' if images else ''}"
    ones = IMAGES if images else FLAT
    return _specimen(redrawn.redrawn_kernel, title, constants | ones | SUMMED, BOTH, tiling)


def _redrawn_wider(rank: int, *, signs: bool, images: int = 0) -> Iterator[Specimen]:
    """Return it in other formats."""
    for one in _formats(signs):
        tiling = redrawn.tiling_of(signs=signs).suited(one.dtype, one.reads)
        yield in_format(_redrawn(rank, signs=signs, images=images), one, tiling)


def _sum(*, signs: bool) -> Specimen:
    """Return the sum of members' noise."""
    constants = {"SIGN": signs, "TYPE": tl.float32, "CALLS": noise_sums.CALLS[signs]}
    title = f"sum of drawn {_kind(signs)}, bfloat16"
    return Specimen(noise_sums.noise_sum_kernel, title, TYPES, constants, DRAWN)


def _formats(signs: bool) -> tuple[Format, ...]:  # noqa: FBT001  passed on by name everywhere above
    """Return what a kernel serves beside 16 bits: normals are drawn in float32."""
    return FORMATS if signs else NARROW


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


BOTH_KINDS = (False, True)
"""Normals and signs."""

SPECIMENS = (
    *(_few(rows, signs=signs) for rows in (1, 2, 4) for signs in BOTH_KINDS),
    *(_few(1, signs=signs, whole=False) for signs in BOTH_KINDS),
    *(one for signs in BOTH_KINDS for one in _few_wider(1, signs=signs)),
    *_few_wider(1, signs=True, whole=False),
    *(_many(signs=signs) for signs in BOTH_KINDS),
    *(one for signs in BOTH_KINDS for one in _many_wider(signs=signs)),
    *(_narrow(rank, signs=signs) for rank in (1, 4, MOST_RANK) for signs in BOTH_KINDS),
    *(in_format(_narrow(rank, signs=signs), FLOAT32) for rank in (1, MOST_RANK) for signs in BOTH_KINDS),
    *(in_format(_narrow(rank, signs=True), FLOAT64) for rank in (1, MOST_RANK)),
    *(_redrawn(rank, signs=signs) for rank in (1, 4, MOST_RANK) for signs in BOTH_KINDS),
    *(one for signs in BOTH_KINDS for one in _redrawn_wider(1, signs=signs)),
    *(_redrawn(1, signs=signs, images=redrawn.MOST_IMAGES) for signs in BOTH_KINDS),
    *(
        one
        for signs in BOTH_KINDS
        for one in _redrawn_wider(MOST_RANK, signs=signs, images=redrawn.MOST_IMAGES)
    ),
    *(_sum(signs=signs) for signs in BOTH_KINDS),
)
