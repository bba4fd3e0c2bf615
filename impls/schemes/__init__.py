"""Perturbation schemes, one file per family; importing the package registers them in the order of tables."""

# isort: off
from impls.schemes.dense import Perturbed
from impls.schemes.regenerated import Regenerated, RegeneratedSign
from impls.schemes.noise_table import NoiseTable
from impls.schemes.sparse import SparsePerturbed
from impls.schemes.lowrank import LowRank, LowRankSign
from impls.schemes.lowrank_addmm import AddmmLowRank
from impls.schemes.orthogonal import Orthogonal
from impls.schemes.permuted import Permuted
from impls.schemes.flipped import Flipped, FlippedSign
from impls.schemes.hadamard import Hadamard
from impls.schemes.dropout import DropConnect, DropoutMask
from impls.schemes.blocks import DropoutBlocks
from impls.schemes.binary import Binary, BinaryMixture
from impls.schemes.compiled import Compiled
from impls.schemes.torch_baselines import Loop, Vmap
# isort: on

__all__ = [
    "AddmmLowRank",
    "Binary",
    "BinaryMixture",
    "Compiled",
    "DropConnect",
    "DropoutBlocks",
    "DropoutMask",
    "Flipped",
    "FlippedSign",
    "Hadamard",
    "Loop",
    "LowRank",
    "LowRankSign",
    "NoiseTable",
    "Orthogonal",
    "Permuted",
    "Perturbed",
    "Regenerated",
    "RegeneratedSign",
    "SparsePerturbed",
    "Vmap",
]
