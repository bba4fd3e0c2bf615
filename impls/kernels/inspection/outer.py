"""Launches of weighted outer products that are worth a look."""

import triton.language as tl

from impls.kernels.inspection.formats import FORMATS, NARROW, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.outer import CORES_TILING, MOST_ELEMENTS, TILING, add_parts_kernel, weighted_outer_kernel

POINTERS = dict.fromkeys(("left", "right", "utilities", "core"), "*bf16")
BYTES = {"left": "*i8", "right": "*i8"}

BFLOAT16 = tuple(
    Specimen(
        kernel=weighted_outer_kernel,
        title=f"weighted outer products, {title}, bfloat16",
        types={**POINTERS, **types, "out": "*fp32", "factor": "fp32"},
        constants={
            "CORED": is_cored,
            "HADAMARD": is_hadamard,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            **tiling.constants,
            "ranks": 1,
            **({"cores": 1} if tiling is TILING else {}),
        },
        instructions=MATRIX,
        warps=tiling.warps,
        stages=tiling.stages,
    )
    for title, types, is_cored, is_hadamard, tiling in (
        ("factors", {}, False, False, TILING),
        ("signs", BYTES, False, False, TILING),
        ("signs around a core", BYTES, True, False, TILING),
        ("signs around many cores", BYTES, True, False, CORES_TILING),
        ("signs around a Hadamard matrix", BYTES, False, True, TILING),
    )
)

SPECIMENS = (
    *BFLOAT16,
    *(
        in_format(BFLOAT16[index], one, tiling.suited(one.dtype, one.reads), left="*fp64", right="*fp64")
        for index, tiling, formats in ((0, TILING, FORMATS), (1, TILING, NARROW), (3, CORES_TILING, FORMATS))
        for one in formats
    ),
    Specimen(
        kernel=add_parts_kernel,
        title="parts of a sum, bfloat16",
        types={"out": "*bf16", "parts": "*fp32"},
        constants={"TYPE": tl.float32, "ELEMENTS": MOST_ELEMENTS},
        instructions={80: ("ld.global.v4",), 90: ("ld.global.v4",)},
    ),
)
