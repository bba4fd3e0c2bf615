"""Launches of Hadamard products that are worth a look."""

import triton.language as tl

from impls.kernels.hadamard import TILING, blocks_of, hadamard_kernel
from impls.kernels.inspection.specimen import MATRIX, Specimen

POINTERS = dict.fromkeys(("y", "x", "weight", "scales"), "*bf16")
SIGNS = dict.fromkeys(("own_inputs", "own_outputs"), "*i8")

SPECIMENS = tuple(
    Specimen(
        kernel=hadamard_kernel,
        title=f"hadamard, tiles of {tiling.columns} columns, bfloat16",
        types={**POINTERS, **SIGNS, "sigma": "fp32"},
        constants={
            "BLOCKS": blocks_of(tiling),
            "SCALED": False,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            "GROUP": tiling.group,
            "ROWS": tiling.rows,
            "COLUMNS": tiling.columns,
            "DEEP": tiling.deep,
            "positions": 1,
            "x_row": 1,
            "x_column": 1,
            "y_row": 1,
            "y_column": 1,
        },
        instructions=MATRIX,
        warps=tiling.warps,
        stages=tiling.stages,
    )
    for tiling in (TILING, TILING._replace(rows=64, columns=64, warps=4))
)
