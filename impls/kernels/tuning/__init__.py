"""The fastest tiles of kernels on a GPU: ``python -m impls.kernels.tuning``, which ``nox -s tune`` runs.

This package loads no triton, its modules do.
"""
