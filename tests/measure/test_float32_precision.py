"""TF32: when it is allowed, and the error budget of the products that use it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import impls
from esbench.measure.float32_precision import has_tf32, precision, tensor_dtype
from esbench.schema import PHASES
from esbench.workload import WrongResultError, build
from impls.benchmark.inputs import TFLOAT32_EPS, dtype_of
from impls.perturbation.member_ops import append_axes
from impls.perturbation.operators import AbstractOperator, Linear
from impls.schemes.flipped import FlippedNoise
from tests.workload_cases import LINEAR, NUMBERS, workload


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


def test_only_tfloat32_allows_tf32() -> None:
    """TF32 is allowed inside the context, and the flags are restored afterwards, also after an error."""
    dtypes = ("tfloat32", "float32", "bfloat16")
    for cudnn, dtype in itertools.product((False, True), dtypes):
        torch.set_float32_matmul_precision("medium")
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


PERTURBED = [entry for entry in NUMBERS if entry.variant.mode == "batched"]


def tfloat32(x: Tensor) -> Tensor:
    """Round float32 to the ten fraction bits of TF32, towards zero like the least accurate devices.

    The gradient passes through unchanged, as the rounding error is a constant in autograd.
    """
    mantissa, exponent = torch.frexp(x.detach())  # a view as integers has no batching rule in torch 2.11
    kept = torch.ldexp(torch.trunc(mantissa * 2**11), exponent - 11)
    return x + (kept - x).detach()


@dataclasses.dataclass(frozen=True)
class RoundedLinear(Linear):
    """A linear layer with products rounded to TF32, on any machine."""

    @override
    def apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().apply_shared(tfloat32(x), tfloat32(weight))

    @override
    def add_shared_to(self, y: Tensor, scale: float | Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return super().add_shared_to(y, scale, tfloat32(x), tfloat32(weight))

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().apply_per_member(tfloat32(x), tfloat32(weights))


WIDE = msgspec.structs.replace(LINEAR, in_channels=256, out_channels=64, dtype="tfloat32", bias=True)


def test_tf32_products_pass_the_check_of_tfloat32_and_fail_that_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every scheme passes if all products are rounded except the single rows of the reference."""
    monkeypatch.setattr("impls.perturbation.layer_functions.Linear", RoundedLinear)
    case = msgspec.structs.replace(WIDE, repeats=2, antithetic=True)
    for entry in PERTURBED:
        workload(entry, case).verify()
        with pytest.raises(WrongResultError, match="forward is off"):
            workload(entry, msgspec.structs.replace(case, dtype="float32")).verify()


class LostSigns(impls.Flipped):
    """A scheme that does not flip the sign of one input of a member."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        assert noise.inputs is not None
        signs = noise.inputs.clone()
        signs[:, :, 0] *= -1
        return op.apply_shared(x * append_axes(signs, x[0]), noise.core[0])


def test_a_mistake_in_one_input_is_found_in_tfloat32() -> None:
    """A single wrong sign in 256 columns exceeds the budget of TF32."""
    with pytest.raises(WrongResultError, match="forward is off"):
        build(LostSigns(), WIDE, "cpu", 0).verify()


def test_tfloat32_tensors_are_float32() -> None:
    """Tensors and byte counts are those of float32; only the spacing is 8192 times wider."""
    assert dtype_of(WIDE) is torch.float32
    assert tensor_dtype("bfloat16") is torch.bfloat16
    assert not has_tf32("cpu")
    narrow = build(impls.Perturbed(), WIDE, "cpu", 0)
    wide = build(impls.Perturbed(), msgspec.structs.replace(WIDE, dtype="float32"), "cpu", 0)
    assert [narrow.work(phase) for phase in PHASES] == [wide.work(phase) for phase in PHASES]
    assert TFLOAT32_EPS / torch.finfo(torch.float32).eps == 2**13
