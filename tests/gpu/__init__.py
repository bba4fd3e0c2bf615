"""Tests that need a CUDA GPU: ``nox -s tests_gpu``."""
