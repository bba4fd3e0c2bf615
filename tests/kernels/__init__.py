"""Tests of kernels: what they compile to, and in processes with Triton's interpreter what they compute."""
