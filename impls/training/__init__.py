"""Training: by evolution strategies, and workloads that are no perturbed layers, in the same harness."""

from impls.training.evolution import centred_ranks, evolve

__all__ = ["centred_ranks", "evolve"]
