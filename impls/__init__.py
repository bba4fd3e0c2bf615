"""Reference implementations of perturbation schemes, and the population that trains with them.

Importing the package registers its variants and suites with :mod:`esbench.registry`.
"""

import impls.cases
import impls.plain
import impls.workload  # noqa: F401  imported for what it registers
from impls.noise import BLOCK
from impls.population import Population, PopulationNoise, perturb
from impls.scheme import AbstractAdditiveScheme, AbstractScheme
from impls.schemes import Flipped, Loop, Permuted, Perturbed, SparsePerturbed, Vmap

__all__ = [
    "BLOCK",
    "AbstractAdditiveScheme",
    "AbstractScheme",
    "Flipped",
    "Loop",
    "Permuted",
    "Perturbed",
    "Population",
    "PopulationNoise",
    "SparsePerturbed",
    "Vmap",
    "perturb",
]
