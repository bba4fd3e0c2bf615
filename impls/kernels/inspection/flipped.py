"""Launches of flipped products that are worth a look."""

import torch
import triton.language as tl

from impls.kernels.flipped import TILING, flipped_kernel
from impls.kernels.inspection.specimen import MATRIX, Specimen

POINTERS = dict.fromkeys(("y", "x", "weight", "core", "scales"), "*bf16")
SIGNS = dict.fromkeys(("own_inputs", "own_outputs"), "*i8")
SIDES = {"in": (True, False), "out": (False, True), "both": (True, True)}

BFLOAT16 = tuple(
    Specimen(
        kernel=flipped_kernel,
        title=f"flipped, side {side}, bfloat16",
        types={**POINTERS, **SIGNS, "sigma": "fp32"},
        constants={
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            "SCALED": False,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            "GROUP": TILING.group,
            "ROWS": TILING.rows,
            "COLUMNS": TILING.columns,
            "DEEP": TILING.deep,
            "positions": 1,
            "x_row": 1,
            "x_column": 1,
            "y_row": 1,
            "y_column": 1,
        },
        instructions=MATRIX,
        warps=TILING.warps,
        stages=TILING.stages,
    )
    for side, (inputs, outputs) in SIDES.items()
)

WIDE = TILING.suited(torch.float64)
FLOAT64 = BFLOAT16[-1]._replace(
    title="flipped, side both, float64",
    types={
        **dict.fromkeys(POINTERS, "*fp64"),
        **SIGNS,
        "own_inputs": "*i64",
        "sigma": "fp32",
    },
    constants={
        **BFLOAT16[-1].constants,
        "SCALED": True,
        "TYPE": tl.float64,
        "ROWS": WIDE.rows,
        "COLUMNS": WIDE.columns,
        "DEEP": WIDE.deep,
    },
    # Capability 9.0 has products of float64 in the older kind of instruction alone.
    instructions=dict.fromkeys(MATRIX, ("mma.sync",)),
)

SPECIMENS = (*BFLOAT16, FLOAT64)
