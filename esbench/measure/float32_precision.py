"""The precision of float32 products: the dtype of a case determines whether TF32 is allowed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

TF32 = "tfloat32"
"""The dtype of cases whose tensors are float32 and whose products may be TF32."""

AMPERE = (8, 0)
"""The first compute capability that multiplies in TF32 and in bfloat16."""


def tensor_dtype(name: str) -> torch.dtype:
    """Return the type of the tensors of a case."""
    dtype: torch.dtype = torch.float32 if name == TF32 else getattr(torch, name)
    return dtype


def has_tf32(device: str) -> bool:
    """Say whether a device multiplies in TF32."""
    return device == "cuda" and torch.cuda.get_device_capability() >= AMPERE


def missing_type(dtype: str, device: str) -> str:
    """Return why a device cannot compute in the type of a case, or nothing if it can.

    A GPU that only emulates bfloat16 is refused: its times would be those of conversions.
    """
    if dtype == TF32 and not has_tf32(device):
        return "this device does not multiply in TF32"
    if (
        dtype == "bfloat16"
        and device == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        have, need = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(), AMPERE))
        return f"bfloat16 needs a GPU of capability {need} or more, this one has {have}"
    return ""


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Allow TF32 in matrix products and convolutions for ``tfloat32``, forbid it for any other type.

    What was set before is set again at the end. torch keeps two sets of flags: one by backend
    (``fp32_precision``) and an older one, which torch.compile reads in some releases and which raises where
    the two disagree. So both are written here, the older first because its setters write the newer.
    """
    backends: Any = torch.backends
    places: tuple[Any, ...] = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
    )
    before = [place.fp32_precision for place in places]
    older = _matmul_precision(), before[1] == "tf32"
    allowed = dtype == TF32
    _set("high" if allowed else "highest", conv=allowed)
    for place in places:
        place.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        _set(older[0], conv=older[1])
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _set(matmul: str, *, conv: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = conv


def _matmul_precision() -> str:
    """Return the older flag, or its value by the newer one if only that was set."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
