"""Triton kernels, and the schemes that launch them: one file per family of schemes.

A fused scheme computes the forward, the update or both in kernels and takes everything else from the scheme
that it wraps. It is a separate variant: where its kernel cannot run it is refused with the reason.

Launchers take plain tensors on a CUDA device. Under ``TRITON_INTERPRET=1``, which triton reads when a kernel
is decorated, they run on a CPU.
"""
