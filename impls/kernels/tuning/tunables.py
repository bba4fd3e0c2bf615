"""Every kernel that may be tuned.

What draws dense noise is not among them, as its time is that of its draws, whatever its tiles; nor are bits,
whose launches follow from their rows.
"""

from impls.kernels.tuning.products import TUNABLES as PRODUCTS
from impls.kernels.tuning.sums import TUNABLES as SUMS
from impls.kernels.tuning.tunable import Tunable

TUNABLES: tuple[Tunable, ...] = (*PRODUCTS, *SUMS)
"""In the order in which they are tuned."""
