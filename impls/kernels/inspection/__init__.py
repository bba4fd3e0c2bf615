"""What kernels compile to, for GPUs that need not be there."""

from impls.kernels.inspection.bits import SPECIMENS as BITS
from impls.kernels.inspection.flipped import SPECIMENS as FLIPPED
from impls.kernels.inspection.hadamard import SPECIMENS as HADAMARD
from impls.kernels.inspection.lowrank import SPECIMENS as LOW_RANK
from impls.kernels.inspection.permuted import SPECIMENS as PERMUTED
from impls.kernels.inspection.specimen import Specimen

SPECIMENS: tuple[Specimen, ...] = (*FLIPPED, *HADAMARD, *LOW_RANK, *PERMUTED, *BITS)
"""Every kernel, as launches of it would compile it."""
