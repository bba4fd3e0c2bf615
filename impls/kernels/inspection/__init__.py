"""What kernels compile to, for GPUs that need not be there."""

from impls.kernels.inspection.bits import SPECIMENS as BITS
from impls.kernels.inspection.lowrank import SPECIMENS as LOW_RANK
from impls.kernels.inspection.specimen import Specimen

SPECIMENS: tuple[Specimen, ...] = (
    *LOW_RANK,
    *BITS,
)
"""Every kernel, as launches of it would compile it."""
