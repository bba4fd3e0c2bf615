"""Options and layers that fused schemes refuse, with the reason."""

import importlib.util
from collections.abc import Callable

import pytest
from torch import nn

from impls import (
    FusedDropoutBlocks,
    FusedDropoutMask,
    FusedFlipped,
    FusedFlippedSign,
    FusedHadamard,
    FusedLowRank,
    FusedLowRankSign,
    FusedPermuted,
    FusedSparsePerturbed,
)
from impls.perturbation.scheme import AnyScheme

ONE_CORE: list[Callable[..., AnyScheme]] = [FusedFlipped, FusedFlippedSign, FusedHadamard, FusedPermuted]
LOW_RANK: list[Callable[..., AnyScheme]] = [FusedLowRank, FusedLowRankSign]
REFUSED: list[tuple[str, Callable[[], object]]] = [
    *(
        (
            f"cores must be 1 for a kernel, got {cores}: members take",
            lambda one=one, cores=cores: one(cores=cores),
        )
        for one in ONE_CORE
        for cores in (0, 2)
    ),
    *(
        (
            f"at most 32 for a kernel.* got {rank}" if rank > 32 else "power of two",
            lambda one=one, r=rank, w=word: one(r, w),
        )
        for one in LOW_RANK
        for rank in (3, 64)
        for word in (False, True)
    ),
    *(
        (f"side must be 'in' for a kernel, got '{side}'", lambda side=side: FusedPermuted(side=side))
        for side in ("out", "both")
    ),
    *(
        ("side must be 'in', 'out' or 'both', got 'up'", lambda one=one: one(side="up"))
        for one in (FusedFlipped, FusedFlippedSign, FusedPermuted)
    ),
    ("in_sparsity must be in", lambda: FusedPermuted(in_sparsity=1.5)),
    ("k must be at most 8 for a kernel", lambda: FusedSparsePerturbed(9)),
    ("k must be an int of at least 1", lambda: FusedSparsePerturbed(0)),
    ("values must be", lambda: FusedSparsePerturbed(1, "few")),  # type: ignore[arg-type]  # what is refused
    ("blocks must be at most 16 for a kernel", lambda: FusedDropoutBlocks(blocks=17)),
    ("groups must be an int of at least 2", lambda: FusedDropoutBlocks(groups=1)),
    ("side must be", lambda: FusedDropoutBlocks(side="out")),  # type: ignore[arg-type]  # what is refused
    ("p must be a number between 0 and 1", lambda: FusedDropoutMask(p=1.0)),
    ("side must be", lambda: FusedDropoutMask(side="both")),  # type: ignore[arg-type]  # what is refused
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_options_that_no_kernel_serves_are_refused(message: str, make: Callable[[], object]) -> None:
    """When the scheme is made, not when it is launched."""
    with pytest.raises(ValueError, match=message):
        make()


def test_rows_are_learned_from_where_the_plain_scheme_does() -> None:
    """A fused scheme of which one side learns from rows does so on that side alone."""
    assert FusedDropoutMask(side="out").learns_from_rows
    assert FusedDropoutBlocks(side="both").learns_from_rows
    assert not FusedDropoutMask(side="in").learns_from_rows
    assert not FusedDropoutBlocks(side="in").learns_from_rows


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("scheme", ONE_CORE)
def test_a_convolution_that_is_no_product_of_matrices_is_refused(scheme: Callable[..., AnyScheme]) -> None:
    """With the property that prevents it."""
    for options, words in (
        ({"kernel_size": (3, 2)}, "6 taps needs 6 copies of its input"),
        ({"kernel_size": 1, "groups": 2}, "2 groups is as many matrix products"),
        ({"kernel_size": 1, "stride": (1, 2)}, "a stride leaves positions out"),
        ({"kernel_size": 1, "padding": 1}, "rows of padding"),
    ):
        reason = scheme().supports(nn.Conv2d(4, 4, **options, device="meta"))
        assert "its kernel multiplies rows by a matrix: " in reason
        assert words in reason
    assert not scheme().supports(nn.Conv2d(4, 4, 1, device="meta"))
