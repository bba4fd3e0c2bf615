"""esbench: a benchmark of ways to evaluate a population of perturbed networks on a GPU."""

__version__ = "0.1.0"
