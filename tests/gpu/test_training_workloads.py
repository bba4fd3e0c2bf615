"""Training workloads on a CUDA GPU: checked against the same references as on the CPU."""

import msgspec
import pytest

from esbench.registry import REGISTRY, Entry, load
from esbench.schema import Case
from esbench.workload import UnavailableError, build
from impls.benchmark.training.rigl import mlp

load("impls")

SMALL = tuple(case for case in REGISTRY.find_suite("check").cases if case.operator in REGISTRY.reserved)
CASES = (*SMALL, *(mlp(128, 64, dtype) for dtype in ("float32", "bfloat16", "float16")))
PAIRS = [(entry, case) for case in CASES for entry in REGISTRY.select() if entry.supports(case)]


@pytest.mark.parametrize(
    ("entry", "case"),
    PAIRS,
    ids=[f"{entry.variant.name}-{case.operator}-{case.dtype}" for entry, case in PAIRS],
)
def test_every_variant_agrees_with_the_reference_on_cuda(entry: Entry, case: Case) -> None:
    """A workload matches its reference before and after its calls; an unavailable one is skipped."""
    try:
        work = build(entry.scheme, case, "cuda", 0)
    except UnavailableError as error:
        pytest.skip(str(error))  # a dtype or a shape that the products do not support
    work.verify()
    for phase in work.phases:
        work.enter(phase)
        work.phases[phase]()
        work.confirm(phase)


def test_two_of_four_runs_if_the_device_supports_it() -> None:
    """The variant with 2:4 sparsity runs in at least one dtype, given compute capability 8.0 or higher."""
    (entry,) = REGISTRY.select(["SemiStructured"])
    reasons = []
    for dtype in ("float32", "bfloat16", "float16"):
        case = msgspec.structs.replace(mlp(128, 64), dtype=dtype)
        try:
            build(entry.scheme, case, "cuda", 0).verify()
        except UnavailableError as error:
            reasons.append(str(error))
    assert len(reasons) < 3, reasons
