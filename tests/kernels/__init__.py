"""Tests of kernels: their compiled code, and their results in processes with Triton's interpreter."""
