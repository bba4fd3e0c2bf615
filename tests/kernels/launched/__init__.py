"""Tests that launch kernels: under ``TRITON_INTERPRET=1`` on the CPU, otherwise on a CUDA GPU.

Triton reads the variable when a kernel is decorated, so they run in another process: see
``tests/kernels/test_interpreted.py``.
"""
