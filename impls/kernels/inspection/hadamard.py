"""Launches of Hadamard products that are worth a look."""

import triton.language as tl

from impls.kernels.hadamard import TILING, blocks_of, bounded, hadamard_kernel
from impls.kernels.inspection.formats import FORMATS, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen

POINTERS = dict.fromkeys(("y", "x", "weight", "scales"), "*bf16")
SIGNS = dict.fromkeys(("own_inputs", "own_outputs"), "*i8")

BFLOAT16 = tuple(
    Specimen(
        kernel=hadamard_kernel,
        title=f"hadamard, tiles of {tiling.columns} columns, bfloat16",
        types={**POINTERS, **SIGNS, "sigma": "fp32"},
        constants={
            "BLOCKS": blocks_of(tiling),
            "SCALED": False,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            **tiling.constants,
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

WIDER = [(one, bounded(TILING.suited(one.dtype, one.reads))) for one in FORMATS]

SPECIMENS = (
    *BFLOAT16,
    *(
        in_format(BFLOAT16[0], one, tiling, {**tiling.constants, "BLOCKS": blocks_of(tiling)})._replace(
            title=f"hadamard, tiles of {tiling.columns} columns, {one.name}"
        )
        for one, tiling in WIDER
    ),
)
