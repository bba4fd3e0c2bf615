"""What kernels compile to, for GPUs that need not be there."""

from impls.kernels.inspection.drawn import SPECIMENS as DRAWN
from impls.kernels.inspection.lowrank import SPECIMENS as LOW_RANK
from impls.kernels.inspection.specimen import Specimen

SPECIMENS: tuple[Specimen, ...] = (*DRAWN, *LOW_RANK)
"""Every kernel, as launches of it would compile it."""
