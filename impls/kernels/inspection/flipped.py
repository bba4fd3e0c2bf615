"""Launches of flipped products that are worth a look."""

import triton.language as tl

from impls.kernels.flipped import TILING, flipped_kernel
from impls.kernels.inspection.formats import FORMATS, in_format
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
            **TILING.constants,
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

# Signs that meet rows of float64 are widened first.
SPECIMENS = (
    *BFLOAT16,
    *(
        in_format(BFLOAT16[-1], one, TILING.suited(one.dtype, one.reads), own_inputs="*i64")
        for one in FORMATS
    ),
)
