"""Triton kernels, imported only where they are asked for: this package loads no triton, its modules do.

They take plain tensors on a CUDA device. Under ``TRITON_INTERPRET=1``, read when a kernel is decorated, they
run on a CPU.
"""
