"""Launches of products with sparse noise, and of its sum, that are worth a look."""

import triton.language as tl

from impls.kernels.inspection.formats import FORMATS, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.sparse import (
    AT_ONCE,
    MOST,
    MOST_OUTPUTS,
    TILING,
    column_sums_kernel,
    sparse_kernel,
    tiling_of,
)

BFLOAT16 = tuple(
    Specimen(
        kernel=sparse_kernel,
        title=f"sparse noise, k = {kept}, bfloat16",
        types={
            **dict.fromkeys(("y", "x", "weight", "values", "scales"), "*bf16"),
            "columns": "*i64",
            "sigma": "fp32",
        },
        constants={
            "KEPT": kept,
            "SLOTS": kept,
            "SCALED": is_scaled,
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
    for kept, is_scaled in ((1, False), (2, True), (MOST, False))
)

SPECIMENS = (
    *BFLOAT16,
    *(
        in_format(BFLOAT16[-1], one, tiling_of(MOST, one.dtype).suited(one.dtype, one.reads))
        for one in FORMATS
    ),
    Specimen(
        kernel=column_sums_kernel,
        title="sums of sparse noise, bfloat16",
        types={
            **dict.fromkeys(("out", "values", "utilities"), "*bf16"),
            "order": "*i64",
            "borders": "*i32",
        },
        constants={"TYPE": tl.float32, "AT_ONCE": AT_ONCE, "OUTPUTS": MOST_OUTPUTS},
        instructions={80: ("ld.global.v4",), 90: ("ld.global.v4",)},
    ),
)
