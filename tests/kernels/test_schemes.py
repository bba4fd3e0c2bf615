"""Options and layers that fused schemes refuse, with the reason, and their precision."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

from esbench.registry import REGISTRY, changed_options, load
from impls import (
    FusedDropoutBlocks,
    FusedFlipped,
    FusedFlippedSign,
    FusedHadamard,
    FusedLowRank,
    FusedLowRankSign,
    FusedPermuted,
    FusedSparsePerturbed,
)
from impls.kernels.scheme import AbstractFused
from impls.kernels.tiling import input_precision
from impls.perturbation.scheme import AnyScheme

load("impls")

MATRIX_ONLY: list[Callable[[], AnyScheme]] = [FusedFlipped, FusedFlippedSign, FusedHadamard, FusedPermuted]
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("rank must be a power of two .*: LowRank", lambda: FusedLowRank(3)),
    ("at most 32 for a kernel.* got 64", lambda: FusedLowRankSign(64, regenerated=True)),
    ("at most 8 for a kernel, got 9: SparsePerturbed supports more", lambda: FusedSparsePerturbed(9)),
    ("blocks must be at most 16 for a kernel", lambda: FusedDropoutBlocks(blocks=17)),
    ("k must be an int of at least 1", lambda: FusedSparsePerturbed(0)),  # refused by the wrapped scheme
]


def test_options_that_no_kernel_serves_are_refused() -> None:
    """Options that no kernel supports are refused when the scheme is created, not when it is launched."""
    for message, make in REFUSED:
        with pytest.raises(ValueError, match=message):
            make()


def test_a_fused_scheme_computes_the_scheme_of_its_name_with_the_same_options() -> None:
    """It wraps the scheme of the same name without ``Fused``, with the same options."""
    for entry in REGISTRY.select(["Fused*"]):
        if isinstance(entry.scheme, AbstractFused):
            plain = entry.scheme.plain
            assert type(entry.scheme).__name__ == f"Fused{type(plain).__name__}"
            for name, value in changed_options(entry.scheme):
                assert getattr(plain, name) == value


@pytest.mark.parametrize(
    "allow",
    [
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: torch.set_float32_matmul_precision("high"),
    ],
)
def test_tf32_is_used_however_it_was_allowed(allow: Callable[[], None]) -> None:
    """Kernels use TF32 for float32 if either of torch's two settings allows it, and only then."""
    try:
        assert input_precision(torch.float32) == "ieee"
        allow()
        assert input_precision(torch.float32) == "tf32"
        assert input_precision(torch.bfloat16) == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")  # resets both


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_convolution_that_is_no_product_of_matrices_is_refused() -> None:
    """A convolution that is not one matrix product is refused, and the reason names the property."""
    refused = (
        ({"kernel_size": (3, 2)}, "6 taps needs 6 copies of its input"),
        ({"kernel_size": 1, "groups": 2}, "2 groups is 2 matrix products"),
        ({"kernel_size": 1, "stride": (1, 2)}, "with a stride needs a copy"),
        ({"kernel_size": 1, "padding": 1}, "a padded convolution needs a copy"),
    )
    for scheme in MATRIX_ONLY:
        for options, words in refused:
            reason = scheme().why_unsupported(nn.Conv2d(4, 4, **options, device="meta"))
            assert "its kernel multiplies rows by a matrix: " in reason
            assert words in reason
        assert not scheme().why_unsupported(nn.Conv2d(4, 4, 1, device="meta"))
