"""Schemes whose forward or update is one kernel: variants of their own, held to the schemes they wrap."""

from impls.fused.lowrank import FusedLowRank, FusedLowRankSign
from impls.fused.regenerated import FusedRegenerated, FusedRegeneratedSign

__all__ = ["FusedLowRank", "FusedLowRankSign", "FusedRegenerated", "FusedRegeneratedSign"]
