"""One parametrised test, naming no scheme, holds every variant on every operator to the slow truth."""

import msgspec
import pytest

from esbench.measure.precision import precision
from esbench.plugins import load
from esbench.registry import Entry, build
from esbench.schema import Case
from tests.workload_cases import BITS, CHECKS, NUMBERS, pairs

load("impls")

CASES = CHECKS


@pairs(CASES)
def test_every_variant_agrees_with_its_members_own_weights(entry: Entry, case: Case) -> None:
    """Forward, update, moments, purity, splits, antithetic halves and bias noise hold in float64."""
    build(entry.scheme, case, "cpu", 0).verify()


@pytest.mark.parametrize("dtype", ["float32", "tfloat32", "bfloat16", "float16"])
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("entry", NUMBERS, ids=lambda entry: entry.variant.name)
def test_narrow_types_err_at_most_twice_the_slow_computation(
    entry: Entry, dtype: str, antithetic: bool
) -> None:
    """In a narrow type the error stays within twice that of the written-out weights in that type."""
    case = Case(
        operator="Linear",
        out_channels=48,
        in_channels=64,
        bias=True,
        members=32,
        repeats=2,
        dtype=dtype,
        antithetic=antithetic,
    )
    with precision(dtype):
        build(entry.scheme, case, "cpu", 0).verify()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pairs([BITS])
def test_bits_err_at_most_twice_in_narrow_types(entry: Entry, case: Case, dtype: str) -> None:
    """Logits and outputs in a narrow type: the bits themselves are exact."""
    narrow = msgspec.structs.replace(case, dtype=dtype, repeats=2, bias=True)
    build(entry.scheme, narrow, "cpu", 0).verify()


def test_the_check_suite_holds_what_convolutions_get_wrong() -> None:
    """Stride, dilation, groups, an oblong kernel and a padding mode other than zeros are all there."""
    convolutions = [case for case in CASES if case.operator == "Conv2d"]
    assert any(case.stride != 1 for case in convolutions)
    assert any(case.dilation != 1 for case in convolutions)
    assert any(case.groups != 1 for case in convolutions)
    assert any(len(set(case.kernel_size)) > 1 for case in convolutions)
    assert any(case.padding_mode != "zeros" for case in convolutions)
    assert all(case.bias for case in CASES)
