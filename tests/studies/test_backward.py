"""What an optimizer in backward costs beside the ordinary one: ratios of steps that take turns."""

import statistics
import time

import pytest

from esbench.registry import Workload, build
from esbench.schema import Case
from impls.benchmark.training.backward import square
from impls.benchmark.training.rules import Kernel
from impls.benchmark.training.stacks import FEW_LARGE, MANY_SMALL
from impls.benchmark.training.steps import StandardStep, StepInBackward

ROUNDS = {MANY_SMALL: 300, FEW_LARGE: 10}
"""A step of the large ones takes a second, and three gigabytes."""


def seconds(step: Workload) -> float:
    """Take a step."""
    call = step.phases["step"]
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


@pytest.mark.parametrize("case", [square(MANY_SMALL, 64, 32), square(FEW_LARGE, 4096, 32)])
@pytest.mark.parametrize("kernel", ["foreach", "fused"])
@pytest.mark.parametrize("guarded", [False, True])
def test_bucketed_hooks_take_as_long_as_an_ordinary_step(case: Case, kernel: Kernel, guarded: bool) -> None:
    """Within 1.1 of it in the median of their turns, also where the guard looks at the gradients.

    A fused step is so short that the hooks of many small layers and the guard take a tenth of it: 1.15 there.
    """
    schemes = (StandardStep(kernel=kernel), StepInBackward(kernel, "bucket", guarded))
    steps = [build(scheme, case, "cpu", 0) for scheme in schemes]
    for step in steps:
        step.enter("step")
        seconds(step)
    taken = [[seconds(step) for step in steps] for _ in range(ROUNDS[case.operator])]
    ratio = statistics.median(inside / ordinary for ordinary, inside in taken)
    print(case.operator, kernel, guarded, f"{ratio:.3f}")  # noqa: T201  # what a study says
    assert ratio <= (1.15 if guarded and kernel == "fused" else 1.1)
