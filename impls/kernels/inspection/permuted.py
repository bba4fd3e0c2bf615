"""Launches of products with picked channels that are worth a look."""

import triton.language as tl

from impls.kernels.inspection.formats import FORMATS, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.permuted import PICKED, TILING, added_kernel, pick_kernel

LAID_OUT = {"positions": 1, "x_row": 1, "x_column": 1}

TWO_PRODUCTS = Specimen(
    kernel=added_kernel,
    title="two products, bfloat16",
    types={**dict.fromkeys(("y", "x", "weight", "second", "core", "scales"), "*bf16"), "sigma": "fp32"},
    constants={
        "SCALED": False,
        "TYPE": tl.float32,
        "PRECISION": "ieee",
        **TILING.constants,
        "y_row": 1,
        "y_column": 1,
        **LAID_OUT,
    },
    instructions=MATRIX,
    warps=TILING.warps,
    stages=TILING.stages,
)

SPECIMENS = (
    TWO_PRODUCTS,
    *(in_format(TWO_PRODUCTS, one, TILING.suited(one.dtype, one.reads)) for one in FORMATS),
    Specimen(
        kernel=pick_kernel,
        title="picks, bfloat16",
        types={"picked": "*bf16", "x": "*bf16", "picks": "*i64"},
        constants={"ROWS": PICKED[0], "COLUMNS": PICKED[1], **LAID_OUT},
        instructions=dict.fromkeys(MATRIX, ("ld.global", "st.global.v4")),
    ),
)
