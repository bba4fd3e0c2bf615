"""Compares kernels on a CUDA GPU, at the sizes that are timed, with the reference for some members."""

import pytest

from esbench.registry import REGISTRY, Entry, load
from esbench.schema import Case
from esbench.studies.kernels import SUITES
from esbench.workload import UnavailableError, build

pytestmark = [pytest.mark.alone, pytest.mark.slow]

load("impls")

ROWS = [
    pytest.param(entry, case, id=f"{entry.variant.name} {case.label}")
    for suite in map(REGISTRY.find_suite, SUITES)
    for case in suite.cases
    for entry in REGISTRY.select(suite.variants)
    if entry.variant.scheme.startswith("Fused")
]


@pytest.mark.parametrize(("entry", "case"), ROWS)
def test_a_kernel_is_right_at_the_size_that_is_timed(entry: Entry, case: Case) -> None:
    """Forward and update match the reference, even for 2^20 members whose noise is drawn and never stored."""
    try:
        built = build(entry.scheme, case, "cuda", 0)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    built.verify()
