"""Schemes whose forward or update is one kernel: variants of their own, held to the schemes they wrap."""

from impls.fused.binary import FusedBinary
from impls.fused.dropout import FusedDropoutBlocks, FusedDropoutMask
from impls.fused.flipped import FusedFlipped, FusedFlippedSign
from impls.fused.hadamard import FusedHadamard
from impls.fused.lowrank import FusedLowRank, FusedLowRankSign
from impls.fused.permuted import FusedPermuted
from impls.fused.regenerated import FusedRegenerated, FusedRegeneratedSign
from impls.fused.sparse import FusedSparsePerturbed

__all__ = [
    "FusedBinary",
    "FusedDropoutBlocks",
    "FusedDropoutMask",
    "FusedFlipped",
    "FusedFlippedSign",
    "FusedHadamard",
    "FusedLowRank",
    "FusedLowRankSign",
    "FusedPermuted",
    "FusedRegenerated",
    "FusedRegeneratedSign",
    "FusedSparsePerturbed",
]
