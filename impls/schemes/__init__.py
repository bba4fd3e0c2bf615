"""Perturbation schemes, one file per family; importing the package registers them in the order of tables."""

from impls.schemes.dense import Perturbed  # isort: skip
from impls.schemes.regenerated import Regenerated, RegeneratedSign  # isort: skip
from impls.schemes.noise_table import NoiseTable  # isort: skip
from impls.schemes.sparse import SparsePerturbed  # isort: skip
from impls.schemes.lowrank import LowRank, LowRankSign  # isort: skip
from impls.schemes.orthogonal import Orthogonal  # isort: skip
from impls.schemes.permuted import Permuted  # isort: skip
from impls.schemes.flipped import Flipped, FlippedSign  # isort: skip
from impls.schemes.hadamard import Hadamard  # isort: skip
from impls.schemes.dropout import DropConnect, DropoutMask  # isort: skip
from impls.schemes.blocks import DropoutBlocks  # isort: skip
from impls.schemes.binary import Binary  # isort: skip
from impls.schemes.binary import BinaryMixture  # isort: skip
from impls.schemes.compiled import Compiled  # isort: skip
from impls.schemes.torch_baselines import Loop, Vmap  # isort: skip

__all__ = [
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
