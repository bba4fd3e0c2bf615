"""Tests that need a CUDA GPU: ``nox -s tests_gpu``, or without nox as CONTRIBUTING.md says."""
