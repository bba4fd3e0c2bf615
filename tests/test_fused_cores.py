"""Kernels with shared cores refuse what they cannot serve, and say why."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from impls import FusedFlipped, FusedFlippedSign, FusedHadamard, FusedPermuted
from impls.perturbation.scheme import AnyScheme

SCHEMES = [FusedFlipped, FusedFlippedSign, FusedHadamard, FusedPermuted]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cores", [0, 2])
def test_there_is_one_core(scheme: Callable[..., AnyScheme], cores: int) -> None:
    """Several cores would meet in one tile of rows."""
    with pytest.raises(
        ValueError, match=f"cores must be 1 for a kernel, got {cores}: members take cores in turn"
    ):
        scheme(cores=cores)


@pytest.mark.parametrize("side", ["out", "both"])
def test_outputs_are_not_permuted(side: str) -> None:
    """The core's product would have to be written first: the plain scheme does so."""
    with pytest.raises(ValueError, match=f"side must be 'in' for a kernel, got '{side}'"):
        FusedPermuted(side=side)  # type: ignore[arg-type]  # a string is any


@pytest.mark.parametrize("scheme", [FusedFlipped, FusedFlippedSign, FusedPermuted])
def test_an_unknown_side_is_refused(scheme: Callable[..., AnyScheme]) -> None:
    """With the sides that there are."""
    with pytest.raises(ValueError, match="side must be 'in', 'out' or 'both', got 'up'"):
        scheme(side="up")


def test_a_sparsity_keeps_its_range() -> None:
    """As in the plain scheme."""
    with pytest.raises(ValueError, match="in_sparsity must be in"):
        FusedPermuted(in_sparsity=1.5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel_size": (3, 2)}, "6 taps needs 6 copies of its input"),
        ({"groups": 2}, "2 groups is as many matrix products"),
        ({"stride": (1, 2)}, "a stride leaves positions out"),
        ({"padding": 1}, "rows of padding"),
    ],
    ids=str,
)
def test_a_convolution_that_is_no_product_of_matrices_is_refused(
    scheme: Callable[..., AnyScheme], options: dict[str, Any], words: str
) -> None:
    """With what about it is none."""
    layer = nn.Conv2d(4, 4, **{"kernel_size": 1, **options}, device="meta")
    assert "its kernel multiplies rows by a matrix: " in scheme().supports(layer)
    assert words in scheme().supports(layer)
    assert not scheme().supports(nn.Conv2d(4, 4, 1, device="meta"))
