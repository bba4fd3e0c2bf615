"""What kernels compile to, for GPUs that need not be there."""

from impls.kernels.inspection.dropout import SPECIMENS as DROPOUT
from impls.kernels.inspection.lowrank import SPECIMENS as LOW_RANK
from impls.kernels.inspection.outer import SPECIMENS as OUTER
from impls.kernels.inspection.sparse import SPECIMENS as SPARSE
from impls.kernels.inspection.specimen import Specimen

SPECIMENS: tuple[Specimen, ...] = (*DROPOUT, *LOW_RANK, *OUTER, *SPARSE)
"""Every kernel, as launches of it would compile it."""
