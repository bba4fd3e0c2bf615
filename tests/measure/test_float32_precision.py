"""Whether TF32 may stand in for float32: set for a while, and as it was before."""

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
    before_cases: list[str] = [
        "highest",
        "high",
        "medium",
    ]
    convolutions_cases: list[bool] = [
        False,
        True,
    ]
    dtype_cases: list[str] = [
        "tfloat32",
        "float32",
        "bfloat16",
    ]
    for before in before_cases:
        for convolutions in convolutions_cases:
            for dtype in dtype_cases:
                torch.set_float32_matmul_precision(before)
                BACKENDS.cudnn.allow_tf32 = convolutions
                was, allowed = flags(), dtype == "tfloat32"
                with precision(dtype):
                    name, older = ("tf32", "high") if allowed else ("ieee", "highest")
                    assert flags() == (name, name, name, allowed, allowed, older)
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
    with precision("tfloat32"):
        assert flags()[0] == "tf32"
    with precision("float32"):
        assert flags()[0] == "ieee"
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"


def test_one_inside_another_returns_to_the_outer_one() -> None:
    """A float32 case that is measured between tfloat32 ones."""
    with precision("tfloat32"):
        with precision("float32"):
            assert not BACKENDS.cuda.matmul.allow_tf32
        assert BACKENDS.cuda.matmul.allow_tf32


def test_tensors_of_tfloat32_cases_are_float32() -> None:
    """Every other type is its own; a CPU has no TF32."""
    assert tensor_dtype("tfloat32") == tensor_dtype("float32") == torch.float32
    assert tensor_dtype("bfloat16") == torch.bfloat16
    assert not has_tf32("cpu")
