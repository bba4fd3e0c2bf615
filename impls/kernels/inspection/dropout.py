"""Launches of products with dropout that are worth a look."""

import triton.language as tl

from impls.kernels import blocks, dropout
from impls.kernels.inspection.specimen import MATRIX, Specimen

POINTERS = dict.fromkeys(("y", "x", "weight"), "*bf16")
ONE = dict.fromkeys(("positions", "x_row", "x_column", "y_row", "y_column"), 1)
MASKS = {"kept": "*i8"}
BLOCKS = {"changes": "*bf16"}

SPECIMENS = tuple(
    Specimen(
        kernel=kernel,
        title=f"dropout of {title}, {'antithetic' if is_mirrored else 'plain'}, bfloat16",
        types={**POINTERS, **types, "factors": "*fp32" if is_mirrored else "*bf16", "on": "fp32"},
        constants={
            **ONE,
            **more,
            "MIRRORED": is_mirrored,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            "GROUP": tiling.group,
            "ROWS": tiling.rows,
            "COLUMNS": tiling.columns,
            "DEEP": tiling.deep,
        },
        instructions=MATRIX,
        warps=tiling.warps,
        stages=tiling.stages,
    )
    for kernel, title, types, more, tiling in (
        (dropout.dropped_inputs_kernel, "inputs", MASKS, {}, dropout.INPUTS_TILING),
        (dropout.dropped_outputs_kernel, "outputs", MASKS, {}, dropout.TILING),
        (blocks.kept_blocks_kernel, "blocks of inputs", BLOCKS, {"IN": 2, "OUT": 1}, blocks.TILING),
        (blocks.kept_blocks_kernel, "blocks of both sides", BLOCKS, {"IN": 2, "OUT": 2}, blocks.TILING),
    )
    for is_mirrored in (False, True)
)
