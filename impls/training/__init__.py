"""Training: evolution strategies, RigL, updates in backward, memory reclaim and shared compilation."""

from impls.training.evolution import evolve
from impls.training.implicit_optimizer import AutoOptimizer, ImplicitOptimizer
from impls.training.memory_reclaim import Reclaim, ReclaimingIterator
from impls.training.optimizer_in_backward import OptimizerInBackward
from impls.training.rigl import RigLInBackward, RigLScheduler
from impls.training.shared_compile import SharedLayers

__all__ = [
    "AutoOptimizer",
    "ImplicitOptimizer",
    "OptimizerInBackward",
    "Reclaim",
    "ReclaimingIterator",
    "RigLInBackward",
    "RigLScheduler",
    "SharedLayers",
    "evolve",
]
