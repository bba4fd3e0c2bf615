"""The suites included in the package."""

import itertools
import math

import msgspec
import pytest

from esbench.registry import REGISTRY, load, select_cases
from esbench.studies import kernels
from esbench.studies.kernels import GOALS

load("impls")


@pytest.mark.parametrize("name", ["population", "width"])
def test_a_sweep_goes_up_by_the_field_that_it_names(name: str) -> None:
    """Its cases differ only in that field (a square layer's width in both), in powers of two."""
    suite = REGISTRY.find_suite(name)
    steps = [getattr(case, suite.sweep) for case in suite.cases]
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(steps))
    assert math.isfinite(suite.stop_s)
    assert suite.phases == ("forward",)


def test_every_glob_of_a_suite_names_something() -> None:
    """Globs for variants and active cases match in any dtype; suite readme has one active case."""
    for suite in REGISTRY.suites.values():
        REGISTRY.select(suite.variants)
        for dtype in ("float32", "bfloat16"):
            cases = [msgspec.structs.replace(case, dtype=dtype) for case in suite.cases]
            for glob in suite.active:
                assert select_cases(cases, glob)
    readme = REGISTRY.find_suite("readme")
    active = [case.label for glob in readme.active for case in select_cases(readme.cases, glob)]
    assert active == ["Linear(1024, 1024)"]
    measured = {entry.variant.name for entry in REGISTRY.select(readme.variants)}
    assert len({*readme.active_variants} & measured) == len(readme.active_variants) == 4


def test_the_suite_capacity_asks_for_more_dense_noise_than_a_device_has() -> None:
    """Stored dense noise takes more than a terabyte, the rows less than a gigabyte."""
    (case,) = REGISTRY.find_suite("capacity").cases
    assert case.members * case.out_channels * case.in_channels * 4 > 10**12
    assert case.rows * case.in_channels * 4 < 2**30


def test_every_goal_of_a_kernel_is_of_a_row_that_a_suite_measures() -> None:
    """Each goal is for a registered variant, on a case of a suite that the kernels page shows."""
    found = {
        (entry.variant.name, case.label, phase)
        for name in kernels.SUITES
        for suite in [REGISTRY.suites[name]]
        for entry in REGISTRY.select(suite.variants)
        for case in suite.cases
        for phase in suite.phases
    }
    assert {(goal.variant, goal.case, goal.phase) for goal in GOALS} <= found
