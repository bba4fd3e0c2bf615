"""Training: by evolution strategies, and workloads that are no perturbed layers, in the same harness."""

from impls.training.backward import AutoOptimizer, ImplicitOptimizer, OptimizerInBackward
from impls.training.evolution import centred_ranks, evolve

__all__ = ["AutoOptimizer", "ImplicitOptimizer", "OptimizerInBackward", "centred_ranks", "evolve"]
