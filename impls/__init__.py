"""Reference implementations of perturbation schemes, and the population that trains with them.

Importing the package registers its variants and suites with :mod:`esbench.registry`.
"""

import impls.cases
import impls.plain
import impls.training.workloads.compile
import impls.training.workloads.hygiene
import impls.workload  # noqa: F401  imported for what it registers
from impls.binary import BinarizedConv2d, BinarizedLinear, BinarizedMaxPool2d
from impls.noise import BLOCK
from impls.population import Population, perturb
from impls.scheme import AbstractAdditiveScheme, AbstractRowScheme, AbstractScheme
from impls.schemes import (
    Binary,
    BinaryMixture,
    DropConnect,
    DropoutBlocks,
    DropoutMask,
    Flipped,
    FlippedSign,
    Hadamard,
    Loop,
    LowRank,
    LowRankSign,
    NoiseTable,
    Orthogonal,
    Permuted,
    Perturbed,
    Regenerated,
    RegeneratedSign,
    SparsePerturbed,
    Vmap,
)
from impls.values import PopulationNoise, Record

__all__ = [
    "BLOCK",
    "AbstractAdditiveScheme",
    "AbstractRowScheme",
    "AbstractScheme",
    "BinarizedConv2d",
    "BinarizedLinear",
    "BinarizedMaxPool2d",
    "Binary",
    "BinaryMixture",
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
    "Population",
    "PopulationNoise",
    "Record",
    "Regenerated",
    "RegeneratedSign",
    "SparsePerturbed",
    "Vmap",
    "perturb",
]
