"""Launches of the same kernels on wider numbers than those that a specimen is written for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.rows import wide


class Format(NamedTuple):
    """A format of numbers that a product takes.

    Attributes:
        name: in titles.
        dtype: of tensors.
        reads: how matrix units read it, see :func:`impls.kernels.rows.precision`.
        pointer: to numbers of it, as Triton has it.
        product: what a product of matrices is made of, if not of what it is in 16 bits.

    """

    name: str
    dtype: torch.dtype
    reads: str
    pointer: str
    product: str = ""


# Matrix units do not know float32, and of float64 capability 9.0 has the older kind of instruction alone.
FLOAT32 = Format("float32", torch.float32, "ieee", "*fp32", "fma.rn.f32")
TFLOAT32 = Format("tfloat32", torch.float32, "tf32", "*fp32")
FLOAT64 = Format("float64", torch.float64, "ieee", "*fp64", "mma.sync")
NARROW = (FLOAT32, TFLOAT32)
"""Of kernels that draw normals."""
FORMATS = (*NARROW, FLOAT64)

READ = {"SCALED": True, "MIRRORED": True}
"""What launches in float64 read from memory, as a kernel's own numbers are float32."""


def in_format(
    specimen: Specimen,
    one: Format,
    tiling: Any = None,  # noqa: ANN401  whatever has warps and stages
    constants: Mapping[str, object] | None = None,
    **widened: str,
) -> Specimen:
    """Return what is written for bfloat16 as a launch in another format would compile it.

    Args:
        specimen: in bfloat16.
        one: the format.
        tiling: what is suited to it, if a type has tiles of its own.
        constants: what these tiles are compiled in, if not as they say themselves.
        widened: types of what a launch in float64 copies to a wider type, by name.

    """
    is_wide = one.dtype is torch.float64
    pointers = {"*bf16": one.pointer, **({"*fp32": one.pointer} if is_wide else {})}
    known = {"TYPE": wide(one.dtype), "PRECISION": one.reads, **(READ if is_wide else {})}
    if tiling:
        known |= tiling.constants if constants is None else constants
        specimen = specimen._replace(warps=tiling.warps, stages=tiling.stages)
    return specimen._replace(
        title=specimen.title.replace("bfloat16", one.name),
        types={
            **{name: pointers.get(kind, kind) for name, kind in specimen.types.items()},
            **(widened if is_wide else {}),
        },
        constants={name: known.get(name, value) for name, value in specimen.constants.items()},
        instructions={
            capability: tuple(one.product or start if start in _PRODUCT else start for start in starts)
            for capability, starts in specimen.instructions.items()
        },
    )


_PRODUCT = {start for starts in MATRIX.values() for start in starts}
