"""TF32 is allowed only inside its context, and the earlier setting is restored afterwards."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from esbench.measure.float32_precision import has_tf32, precision, tensor_dtype


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore torch's precision settings for other tests."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def flags() -> tuple[object, ...]:
    """Return torch's settings, of which the last two are those that its kernels read."""
    backends: Any = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        backends.cuda.matmul.fp32_precision == "tf32",
        backends.cudnn.conv.fp32_precision == "tf32",
    )


def test_only_tfloat32_allows_tf32_and_only_meanwhile() -> None:
    """TF32 is allowed inside the context, and the flags are restored afterwards, also after an error."""
    dtypes = ("tfloat32", "float32", "bfloat16")
    for matmul, cudnn, dtype in itertools.product(("highest", "high", "medium"), (False, True), dtypes):
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        before, allowed = flags(), dtype == "tfloat32"
        inside = ("high" if allowed else "highest", allowed, allowed, allowed)
        with precision(dtype):
            assert flags() == inside
            with precision("float32" if allowed else "tfloat32"):
                assert flags()[1] is not allowed
            assert flags() == inside
        assert flags() == before
        with pytest.raises(KeyError), precision(dtype):
            raise KeyError
        assert flags() == before


def test_tensors_of_tfloat32_cases_are_float32() -> None:
    """A tfloat32 case has float32 tensors, other dtypes are unchanged, and a CPU has no TF32."""
    assert tensor_dtype("tfloat32") == tensor_dtype("float32") == torch.float32
    assert tensor_dtype("bfloat16") == torch.bfloat16
    assert not has_tf32("cpu")
