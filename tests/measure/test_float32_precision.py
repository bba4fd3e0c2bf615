"""TF32 is allowed only inside its context, and the earlier setting is restored afterwards."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from esbench.measure.float32_precision import has_tf32, precision, tensor_dtype

BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Restore torch's precision settings for other tests."""
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for place in (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul):
        place.fp32_precision = "none"


def flags() -> tuple[object, ...]:
    """Read both the older and the newer precision flags; torch raises if they disagree."""
    return (
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.cudnn.conv.fp32_precision,
        BACKENDS.cudnn.rnn.fp32_precision,
        BACKENDS.cuda.matmul.allow_tf32,
        BACKENDS.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


def test_only_tfloat32_allows_tf32_and_only_meanwhile() -> None:
    """Both sets of flags allow TF32 inside the context and are restored afterwards, also after an error."""
    dtypes = ("tfloat32", "float32", "bfloat16")
    for before, convolutions, dtype in itertools.product(
        ("highest", "high", "medium"), (False, True), dtypes
    ):
        torch.set_float32_matmul_precision(before)
        BACKENDS.cudnn.allow_tf32 = convolutions
        was, allowed = flags(), dtype == "tfloat32"
        with precision(dtype):
            name, older = ("tf32", "high") if allowed else ("ieee", "highest")
            inside = (name, name, name, allowed, allowed, older)
            assert flags() == inside
            with precision("float32" if allowed else "tfloat32"):
                assert BACKENDS.cuda.matmul.allow_tf32 is not allowed
            assert flags() == inside
        assert flags() == was
        with pytest.raises(KeyError), precision(dtype):
            raise KeyError
        assert flags() == was


def test_flags_that_contradict_each_other_are_overruled_and_left_so() -> None:
    """If only the newer flags are set, torch raises when the older ones are read, before and after."""
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        torch.get_float32_matmul_precision()
    for dtype, name in (("tfloat32", "tf32"), ("float32", "ieee")):
        with precision(dtype):
            assert flags()[0] == name
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"


def test_tensors_of_tfloat32_cases_are_float32() -> None:
    """A tfloat32 case has float32 tensors, other dtypes are unchanged, and a CPU has no TF32."""
    assert tensor_dtype("tfloat32") == tensor_dtype("float32") == torch.float32
    assert tensor_dtype("bfloat16") == torch.bfloat16
    assert not has_tf32("cpu")
