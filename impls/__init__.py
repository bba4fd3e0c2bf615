"""Reference implementations of perturbation schemes, and populations that models are trained with.

Importing the package registers its variants and suites with :mod:`esbench.registry`.
"""

import impls.schemes  # isort: skip  # registered first: the order of tables
import impls.benchmark.baselines
import impls.benchmark.suites
import impls.benchmark.workload
import impls.training
from impls.binary.layers import BinarizedConv2d, BinarizedLinear, BinarizedMaxPool2d
from impls.kernels.binary import FusedBinary
from impls.kernels.blocks import FusedDropoutBlocks
from impls.kernels.dense_rng import FusedRegenerated, FusedRegeneratedSign
from impls.kernels.dropout import FusedDropoutMask
from impls.kernels.flipped import FusedFlipped, FusedFlippedSign
from impls.kernels.hadamard import FusedHadamard
from impls.kernels.lowrank import FusedLowRank, FusedLowRankSign
from impls.kernels.permuted import FusedPermuted
from impls.kernels.sparse import FusedSparsePerturbed
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.noise import BLOCK
from impls.perturbation.population import ActivationRecord, Population, PopulationNoise, perturb
from impls.perturbation.scheme import AbstractAdditiveScheme, AbstractRowScheme, AbstractScheme
from impls.perturbation.sharding import Shard, shard
from impls.schemes import *  # noqa: F403  every scheme is public
from impls.shaping import centered_ranks, log_ranks, top_k, z_scores

__all__ = [
    "BLOCK",
    "AbstractAdditiveScheme",
    "AbstractRowScheme",
    "AbstractScheme",
    "ActivationRecord",
    "BinarizedConv2d",
    "BinarizedLinear",
    "BinarizedMaxPool2d",
    "FusedBinary",
    "FusedDropoutBlocks",
    "FusedDropoutMask",
    "FusedFlipped",
    "FusedFlippedSign",
    "FusedHadamard",
    "FusedLowRank",
    "FusedLowRankSign",
    "FusedPermuted",
    "FusedRegenerated",
    "FusedRegeneratedSign",
    "FusedSparsePerturbed",
    "Population",
    "PopulationNoise",
    "Shard",
    "UnsupportedError",
    "centered_ranks",
    "log_ranks",
    "perturb",
    "shard",
    "top_k",
    "z_scores",
]
__all__ += impls.schemes.__all__
