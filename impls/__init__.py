"""Reference implementations of perturbation schemes, and the population that trains with them.

Importing the package registers its variants and suites with :mod:`esbench.registry`.
"""

import impls.cases
import impls.plain
import impls.training
import impls.workload  # noqa: F401  imported for what it registers
from impls.noise import BLOCK
from impls.population import Population, perturb
from impls.scheme import AbstractAdditiveScheme, AbstractRowScheme, AbstractScheme
from impls.schemes import (
    DropConnect,
    DropoutMask,
    Flipped,
    FlippedSign,
    Hadamard,
    Loop,
    LowRank,
    LowRankSign,
    Orthogonal,
    Permuted,
    Perturbed,
    SparsePerturbed,
    Vmap,
)
from impls.values import PopulationNoise, Record

__all__ = [
    "BLOCK",
    "AbstractAdditiveScheme",
    "AbstractRowScheme",
    "AbstractScheme",
    "DropConnect",
    "DropoutMask",
    "Flipped",
    "FlippedSign",
    "Hadamard",
    "Loop",
    "LowRank",
    "LowRankSign",
    "Orthogonal",
    "Permuted",
    "Perturbed",
    "Population",
    "PopulationNoise",
    "Record",
    "SparsePerturbed",
    "Vmap",
    "perturb",
]
