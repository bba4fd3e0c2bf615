"""Updates that are one kernel are those of the schemes they stand for, in their types and shapes."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from impls.kernels import (
    FusedDropoutBlocks,
    FusedDropoutMask,
    FusedLowRank,
    FusedLowRankSign,
    FusedSparsePerturbed,
    lowrank,
)
from impls.kernels.outer import summed
from impls.kernels.scheme import AbstractFused
from impls.perturbation.noise import PhiloxStream
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Flipped, FlippedSign, Hadamard
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE
from tests.kernels.launched.operands import NARROW, normal

MEMBERS = range(5, 75)
LINEAR, POINTWISE = (1, 20, 33), (1, 20, 33, 1, 1)


def drawn(scheme: AnyScheme, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Draw a scheme's noise for some members of a weight, and their utilities."""
    weight = torch.zeros(shape, dtype=dtype, device=DEVICE)
    stream = PhiloxStream(0, 1, "layer", MEMBERS, weight.device, dtype)
    return scheme.sample(weight, stream), normal(0, len(MEMBERS), dtype=dtype) / 8


def held(scheme: AnyScheme, noise: Any, utilities: Tensor, found: Tensor) -> None:
    """Hold an update to written-out noise, and its shape and layout to those of the scheme's own."""
    plain = scheme.weighted_sum(noise, utilities)
    assert (found.shape, found.dtype, found.stride()) == (plain.shape, plain.dtype, plain.stride())
    each = scheme.dense_noise(noise)
    truth = torch.tensordot(utilities.double(), each.double(), dims=1)
    compare("update", found, truth, torch.tensordot(utilities, each, dims=1))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("shape", [LINEAR, POINTWISE], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [
        FusedLowRank(1),
        FusedLowRank(4),
        FusedLowRankSign(2),
        FusedSparsePerturbed(2),
        FusedSparsePerturbed(3, "sign"),
    ],
    ids=str,
)
def test_an_update_is_that_of_the_plain_scheme(
    scheme: AbstractFused[Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Its type, shape and layout are those of the plain scheme's, for a few members of a population."""
    noise, utilities = drawn(scheme, shape, dtype)
    held(scheme.plain, noise, utilities, scheme.weighted_sum(noise, utilities))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "scheme",
    [
        FusedLowRank(1, regenerated=True),
        FusedLowRank(4, regenerated=True),
        FusedLowRankSign(2, regenerated=True),
    ],
    ids=str,
)
def test_factors_are_drawn_again_some_members_after_others(
    scheme: FusedLowRank | FusedLowRankSign, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than there is room for at once, and what parts give is rounded once all are added."""
    noise, utilities = drawn(scheme, LINEAR, dtype)
    whole = scheme.weighted_sum(noise, utilities)
    held(scheme.plain, noise, utilities, whole)
    fill = Mock(side_effect=lowrank.fill)
    monkeypatch.setattr(lowrank, "fill", fill)
    monkeypatch.setattr(lowrank, "PIECE_BYTES", 2000)
    held(scheme.plain, noise, utilities, scheme.weighted_sum(noise, utilities))
    sizes = [call.args[0].nbytes for call in fill.call_args_list]
    assert len(sizes) > 4
    assert all(sum(pair) <= 2000 for pair in zip(sizes[::2], sizes[1::2], strict=True))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("scheme", [Flipped("both"), Flipped("both", cores=3), FlippedSign()], ids=str)
def test_flips_sum_around_their_cores(scheme: Flipped | FlippedSign, dtype: torch.dtype) -> None:
    """Signs of both sides around one core or several are one sum, whichever member is the first."""
    noise, utilities = drawn(scheme, LINEAR, dtype)
    found = summed(
        torch.Size(LINEAR), noise.outputs, noise.inputs, utilities, noise.core, first=noise.members.start
    )
    held(scheme, noise, utilities, found)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_signs_sum_around_a_hadamard_matrix(dtype: torch.dtype) -> None:
    """Its entries are those of the scheme's matrix, and are made where they are needed."""
    noise, utilities = drawn(Hadamard(), LINEAR, dtype)
    found = summed(torch.Size(LINEAR), noise.outputs, noise.inputs, utilities, hadamard=True)
    held(Hadamard(), noise, utilities, found)


def test_rows_are_learned_from_where_the_plain_scheme_does() -> None:
    """A fused scheme of which one side learns from rows does so on that side alone."""
    assert FusedDropoutMask(side="out").learns_from_rows
    assert FusedDropoutBlocks(side="both").learns_from_rows
    assert not FusedDropoutMask(side="in").learns_from_rows
    assert not FusedDropoutBlocks(side="in").learns_from_rows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedSparsePerturbed(9), "k must be at most 8 for a kernel"),
        (lambda: FusedSparsePerturbed(0), "k must be an int of at least 1"),
        (lambda: FusedSparsePerturbed(1, "few"), "values must be"),  # type: ignore[arg-type]  # what is refused
        (lambda: FusedDropoutBlocks(blocks=17), "blocks must be at most 16 for a kernel"),
        (lambda: FusedDropoutBlocks(groups=1), "groups must be an int of at least 2"),
        (lambda: FusedDropoutBlocks(side="out"), "side must be"),  # type: ignore[arg-type]  # what is refused
        (lambda: FusedDropoutMask(p=1.0), "p must be a number between 0 and 1"),
        (lambda: FusedDropoutMask(side="both"), "side must be"),  # type: ignore[arg-type]  # what is refused
    ],
)
def test_options_that_no_kernel_serves_are_refused(make: Callable[[], object], message: str) -> None:
    """What a kernel cannot hold, and what no scheme knows, is refused with the reason."""
    with pytest.raises(ValueError, match=message):
        make()
