"""Launches of low-rank products that are worth a look."""

import triton.language as tl

from impls.kernels.inspection.formats import FORMATS, in_format
from impls.kernels.inspection.specimen import MATRIX, Specimen
from impls.kernels.lowrank import low_rank_kernel, tiling_of
from impls.kernels.ranks import MOST_RANK

POINTERS = dict.fromkeys(("y", "x", "weight", "down", "up", "scales"), "*bf16")

RANKS = (1, 4, 8, MOST_RANK)
WIDER = {1, 4, MOST_RANK}
"""Ranks that are looked at in other formats too."""

# The larger matrix instruction takes 64 rows.
FEW = dict.fromkeys(MATRIX, ("mma.sync",))

BFLOAT16 = tuple(
    Specimen(
        kernel=low_rank_kernel,
        title=f"low rank, rank {rank}, bfloat16",
        types={**POINTERS, "sigma": "fp32"},
        constants={
            "RANK": rank,
            "SCALED": False,
            "TYPE": tl.float32,
            "PRECISION": "ieee",
            **tiling_of(rank).constants,
            "positions": 1,
            "x_row": 1,
            "x_column": 1,
            "y_row": 1,
            "y_column": 1,
        },
        instructions=MATRIX if tiling_of(rank).rows >= 64 else FEW,  # noqa: PLR2004  as above
        warps=tiling_of(rank).warps,
        stages=tiling_of(rank).stages,
    )
    for rank in RANKS
)

SPECIMENS = (
    *BFLOAT16,
    *(
        in_format(specimen, one, tiling_of(rank).suited(one.dtype, one.reads))
        for rank, specimen in zip(RANKS, BFLOAT16, strict=True)
        for one in FORMATS
        if rank in WIDER
    ),
)
