"""Training: by evolution strategies, and workloads that are no perturbed layers, in the same harness."""

from impls.training.backward import AutoOptimizer, ImplicitOptimizer, OptimizerInBackward
from impls.training.evolution import centred_ranks, evolve
from impls.training.rigl import RigLScheduler

__all__ = [
    "AutoOptimizer",
    "ImplicitOptimizer",
    "OptimizerInBackward",
    "RigLScheduler",
    "centred_ranks",
    "evolve",
]
