"""One file for each family of schemes; importing this package registers them, in table order."""

from impls.schemes.dense import Perturbed
from impls.schemes.sparse import SparsePerturbed
from impls.schemes.permuted import Permuted  # isort: skip
from impls.schemes.flipped import Flipped  # isort: skip
from impls.schemes.baselines import Loop, Vmap

__all__ = ["Flipped", "Loop", "Permuted", "Perturbed", "SparsePerturbed", "Vmap"]
