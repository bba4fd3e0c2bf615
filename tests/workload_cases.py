"""Every variant on small cases, for tests of workloads."""

import contextlib
from collections.abc import Iterable, Iterator

import msgspec
import pytest
from torch import Tensor

from esbench.measure.validation import tensors
from esbench.registry import REGISTRY, Entry, load
from esbench.schema import Case, Phase, Work
from esbench.workload import Workload, build
from impls.benchmark.inputs import is_packed

load("impls")

CHECKS = tuple(case for case in REGISTRY.find_suite("check").cases if case.operator not in REGISTRY.reserved)
"""The cases of layers in the suite ``check``: other workloads have other tests."""

ENTRIES = [
    entry
    for entry in REGISTRY.select(("*", "!Fused*", "!Compiled*"))
    if any(entry.supports(case) for case in CHECKS)
]
"""All variants of layers that run on a CPU without a compiler.

Kernels are tested where they run, see tests/kernels, and compiled variants in tests/schemes/test_compiled.py.
"""

LINEAR = Case(operator="Linear", out_channels=24, in_channels=16, members=40)

BITS = Case(operator="BinarizedLinear", out_channels=24, in_channels=70, members=40)

CASES = (
    BITS,
    *CHECKS,
    LINEAR,
    msgspec.structs.replace(LINEAR, members=3, repeats=4, antithetic=True, bias=True),
    msgspec.structs.replace(CHECKS[1], repeats=2, antithetic=True, bias=False, dtype="float32"),
)


every_variant = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)


def suits(entry: Entry, case: Case) -> bool:
    """Return whether a variant supports the case: binary schemes need packed rows, others real ones."""
    if not entry.supports(case) or ("int8" in entry.variant.name and case.operator == "BinarizedConv2d"):
        return False
    return entry.operators is not None or entry.variant.mode != "batched" or not is_packed(case)


def pairs(cases: Iterable[Case], entries: Iterable[Entry] = ENTRIES) -> pytest.MarkDecorator:
    """Parametrize a test over every variant and the cases that it supports."""
    supported = [(entry, case) for entry in entries for case in cases if suits(entry, case)]
    names = [f"{entry.variant.name}-{case.label}" for entry, case in supported]
    return pytest.mark.parametrize(("entry", "case"), supported, ids=names)


NUMBERS = [entry for entry in ENTRIES if suits(entry, LINEAR)]
"""Variants for layers that are not binarized."""


def small(entry: Entry) -> Case:
    """Return a small case that the variant supports."""
    return next(case for case in (LINEAR, BITS) if suits(entry, case))


def workload(entry: Entry, case: Case) -> Workload:
    """Return the workload of a variant on the CPU."""
    return build(entry.scheme, case, "cpu", 0)


def values(result: object) -> list[Tensor]:
    """Return copies of every tensor in the result of a call."""
    return [tensor.detach().clone() for tensor in tensors(result)]


def called(work: Workload, phase: Phase, times: int) -> list[list[Tensor]]:
    """Return the results of consecutive calls after entering a phase."""
    work.enter(phase)
    return [values(work.phases[phase]()) for _ in range(times)]


def declared(work: Workload, phase: Phase) -> Work:
    """Return the minimum work of a phase, which must be declared."""
    least = work.work(phase)
    assert least is not None
    return least


@contextlib.contextmanager
def on(name: str) -> Iterator[None]:
    """Add the name of the tested variant to the traceback of an error."""
    try:
        yield
    except BaseException as error:  # pytest.fail raises one as well
        error.add_note(f"on {name}")
        raise
