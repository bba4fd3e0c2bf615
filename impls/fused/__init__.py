"""Schemes whose forward or update is one kernel: variants of their own, held to the schemes they wrap."""

from impls.fused.dropout import FusedDropoutBlocks, FusedDropoutMask
from impls.fused.lowrank import FusedLowRank, FusedLowRankSign
from impls.fused.sparse import FusedSparsePerturbed

__all__ = [
    "FusedDropoutBlocks",
    "FusedDropoutMask",
    "FusedLowRank",
    "FusedLowRankSign",
    "FusedSparsePerturbed",
]
