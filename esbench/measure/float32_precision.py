"""The precision of float32 products: the dtype of a case determines whether TF32 is allowed."""

import contextlib
from collections.abc import Iterator

import torch

TF32 = "tfloat32"
"""The dtype of cases whose tensors are float32 and whose products may be TF32."""

AMPERE = (8, 0)
"""The first compute capability that multiplies in TF32 and in bfloat16."""


def tensor_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a case's tensors: ``tfloat32`` tensors are float32."""
    dtype: torch.dtype = torch.float32 if name == TF32 else getattr(torch, name)
    return dtype


def has_tf32(device: str) -> bool:
    """Return whether a device multiplies in TF32."""
    return device == "cuda" and torch.cuda.get_device_capability() >= AMPERE


def unsupported_reason(dtype: str, device: str) -> str:
    """Return why a device cannot compute in the dtype of a case, or an empty string if it can.

    A GPU that emulates bfloat16 is refused, because converting the numbers takes most of the time.
    """
    if dtype == TF32 and not has_tf32(device):
        return "this device does not multiply in TF32"
    if (
        dtype == "bfloat16"
        and device == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return f"bfloat16 {capability_message()}"
    return ""


def capability_message() -> str:
    """Return the reason for a feature that this GPU is too old for."""
    have, need = (f"{major}.{minor}" for major, minor in (torch.cuda.get_device_capability(), AMPERE))
    return f"needs a GPU of capability {need} or more, this one has {have}"


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Allow TF32 in matrix products and convolutions for dtype ``tfloat32``, forbid it for any other dtype.

    The earlier setting is restored at the end of the context.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allowed = dtype == TF32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
