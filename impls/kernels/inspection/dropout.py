"""Launches of products with dropout that are worth a look."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton.language as tl

from impls.kernels import blocks, dropout
from impls.kernels.inspection.formats import FLOAT64, FORMATS, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.rows import Tiling

POINTERS = dict.fromkeys(("y", "x", "weight"), "*bf16")
ONE = dict.fromkeys(("positions", "x_row", "x_column", "y_row", "y_column"), 1)
MASKS = {"kept": "*i8"}
BLOCKS = {"changes": "*bf16"}

Tiles = Callable[[torch.dtype, str], Tiling]
"""Return the tiles of a type before they are suited to it."""


def specimen(
    kernel: Any,  # noqa: ANN401  triton's decorated functions have no type
    title: str,
    types: Mapping[str, str],
    more: Mapping[str, object],
    tiling: Tiling,
    *,
    is_mirrored: bool,
) -> Specimen:
    """Describe a launch in bfloat16."""
    constants = {
        "MIRRORED": is_mirrored,
        "TYPE": tl.float32,
        "PRECISION": "ieee",
    }
    return Specimen(
        kernel=kernel,
        title=f"dropout of {title}, {'antithetic' if is_mirrored else 'plain'}, bfloat16",
        types={**POINTERS, **types, "factors": "*fp32" if is_mirrored else "*bf16", "on": "fp32"},
        constants={**ONE, **more, **constants, **tiling.constants},
        instructions=MATRIX,
        warps=tiling.warps,
        stages=tiling.stages,
    )


def launches(
    kernel: Any,  # noqa: ANN401  as above
    title: str,
    types: Mapping[str, str],
    more: Mapping[str, object],
    tiles: Tiles,
) -> tuple[Specimen, ...]:
    """Describe launches in all formats; in float64 all are as antithetic ones, and masks are copied to it."""
    plain, mirrored = (
        specimen(kernel, title, types, more, tiles(torch.bfloat16, "ieee"), is_mirrored=each)
        for each in (False, True)
    )
    wider = (
        in_format(one, form, tiles(form.dtype, form.reads).suited(form.dtype, form.reads), kept="*fp64")
        for one in (plain, mirrored)
        for form in FORMATS
        if form is not FLOAT64 or one is mirrored
    )
    return plain, mirrored, *wider


SPECIMENS = (
    *launches(dropout.dropped_inputs_kernel, "inputs", MASKS, {}, lambda *_: dropout.INPUTS_TILING),
    *launches(dropout.dropped_outputs_kernel, "outputs", MASKS, {}, lambda *_: dropout.TILING),
    *launches(blocks.kept_blocks_kernel, "blocks of inputs", BLOCKS, {"IN": 2, "OUT": 1}, blocks.tiling_of),
    *launches(
        blocks.kept_blocks_kernel,
        f"{blocks.MOST} blocks of both sides",
        BLOCKS,
        {"IN": blocks.MOST, "OUT": blocks.MOST},
        blocks.tiling_of,
    ),
)
