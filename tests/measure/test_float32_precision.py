"""Whether TF32 may stand in for float32: set for a while, and as it was before."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from esbench.measure.float32_precision import has_tf32, precision, tensor_dtype

BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Leave to other tests what torch starts with."""
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for place in (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul):
        place.fp32_precision = "none"


def flags() -> tuple[object, ...]:
    """Read both sets of torch's flags; where they disagree, torch raises."""
    return (
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.cudnn.conv.fp32_precision,
        BACKENDS.cudnn.rnn.fp32_precision,
        BACKENDS.cuda.matmul.allow_tf32,
        BACKENDS.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


def test_only_tfloat32_allows_tf32_and_only_meanwhile() -> None:
    """Both sets of flags say so, and say afterwards what they said before, also after an error."""
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
    """With only the newer flags set, torch raises where the older ones are read, before and after."""
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        torch.get_float32_matmul_precision()
    for dtype, name in (("tfloat32", "tf32"), ("float32", "ieee")):
        with precision(dtype):
            assert flags()[0] == name
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"


def test_tensors_of_tfloat32_cases_are_float32() -> None:
    """Every other type is its own; a CPU has no TF32."""
    assert tensor_dtype("tfloat32") == tensor_dtype("float32") == torch.float32
    assert tensor_dtype("bfloat16") == torch.bfloat16
    assert not has_tf32("cpu")
