"""Every kernel that may be tuned."""

from impls.kernels.tuning.lowrank import TUNABLES as LOW_RANK
from impls.kernels.tuning.tunable import Tunable

TUNABLES: tuple[Tunable, ...] = (*LOW_RANK,)
"""In the order in which they are tuned."""
