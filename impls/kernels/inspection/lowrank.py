"""Launches of low-rank products that are worth a look."""

import triton.language as tl

from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.lowrank import low_rank_kernel, tiling_of

POINTERS = dict.fromkeys(("y", "x", "weight", "down", "up", "scales"), "*bf16")

SPECIMENS = tuple(
    Specimen(
        kernel=low_rank_kernel,
        title=f"low rank, rank {rank}, bfloat16",
        types={**POINTERS, "sigma": "fp32"},
        constants={
            "RANK": rank,
            "SCALED": False,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            "GROUP": tiling_of(rank).group,
            "ROWS": tiling_of(rank).rows,
            "COLUMNS": tiling_of(rank).columns,
            "DEEP": tiling_of(rank).deep,
            "positions": 1,
            "x_row": 1,
            "x_column": 1,
            "y_row": 1,
            "y_column": 1,
        },
        instructions=MATRIX,
        warps=tiling_of(rank).warps,
        stages=tiling_of(rank).stages,
    )
    for rank in (1, 4)
)
