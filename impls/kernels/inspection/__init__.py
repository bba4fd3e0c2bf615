"""What kernels compile to, for GPUs that need not be there."""

from impls.kernels.inspection.bits import SPECIMENS as BITS
from impls.kernels.inspection.drawn import SPECIMENS as DRAWN
from impls.kernels.inspection.dropout import SPECIMENS as DROPOUT
from impls.kernels.inspection.flipped import SPECIMENS as FLIPPED
from impls.kernels.inspection.hadamard import SPECIMENS as HADAMARD
from impls.kernels.inspection.lowrank import SPECIMENS as LOW_RANK
from impls.kernels.inspection.outer import SPECIMENS as OUTER
from impls.kernels.inspection.permuted import SPECIMENS as PERMUTED
from impls.kernels.inspection.sparse import SPECIMENS as SPARSE
from impls.kernels.inspection.specimen import Specimen

SPECIMENS: tuple[Specimen, ...] = (
    *DRAWN,
    *DROPOUT,
    *FLIPPED,
    *HADAMARD,
    *LOW_RANK,
    *OUTER,
    *PERMUTED,
    *SPARSE,
    *BITS,
)
"""Every kernel, as launches of it would compile it."""
