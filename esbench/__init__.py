"""esbench: how to evaluate a whole population of perturbed networks on a GPU."""

__version__ = "0.1.0"
