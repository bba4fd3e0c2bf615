"""Every variant on small cases, for tests of what is measured."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import pytest
from torch import Tensor

from esbench.registry import REGISTRY, Entry, Workload, build, load
from esbench.schema import Case, Phase, Work
from impls.benchmark.inputs import is_packed

load("impls")


CHECKS = tuple(case for case in REGISTRY.find_suite("check").cases if case.operator not in REGISTRY.reserved)
"""Those of layers: other workloads have other tests."""


ENTRIES = [
    entry
    for entry in REGISTRY.select(("*", "!Fused*", "!Compiled*"))
    if any(entry.supports(case) for case in CHECKS)
]
"""All variants of layers that run on a CPU without a compiler.

Kernels are tested where they run, see tests/kernels, and what is compiled in test_compiled_schemes.py.
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
    """Whether the variant is for the case's operator: schemes of bits for bits, and others for numbers."""
    if not entry.supports(case) or ("int8" in entry.variant.name and case.operator == "BinarizedConv2d"):
        return False
    return entry.operators is not None or entry.variant.mode != "batched" or not is_packed(case)


def pairs(cases: Iterable[Case], entries: Iterable[Entry] = ENTRIES) -> pytest.MarkDecorator:
    """Every variant on each of the cases that it is for."""
    found = [(entry, case) for entry in entries for case in cases if suits(entry, case)]
    names = [f"{entry.variant.name}-{case.label}" for entry, case in found]
    return pytest.mark.parametrize(("entry", "case"), found, ids=names)


every_pair = pairs(CASES)


NUMBERS = [entry for entry in ENTRIES if suits(entry, LINEAR)]
"""The variants for layers of numbers."""


def small(entry: Entry) -> Case:
    """A small case that the variant is for."""
    return next(case for case in (LINEAR, BITS) if suits(entry, case))


def workload(entry: Entry, case: Case) -> Workload:
    """Set a variant up on the CPU."""
    return build(entry.scheme, case, "cpu", 0)


def tensors(result: object) -> Iterator[Tensor]:
    """Every tensor of what a call returns, those inside of noise included."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        yield from tensors(list(result.values()))
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors(part)
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        yield from tensors([getattr(result, field.name) for field in dataclasses.fields(result)])


def values(result: object) -> list[Tensor]:
    """Copies of every tensor of what a call returns."""
    return [tensor.detach().clone() for tensor in tensors(result)]


def called(work: Workload, phase: Phase, times: int) -> list[list[Tensor]]:
    """What calls in a row return after the phase is entered."""
    work.enter(phase)
    return [values(work.phases[phase]()) for _ in range(times)]


def declared(work: Workload, phase: Phase) -> Work:
    """Return the least work of a phase, which must have been declared."""
    least = work.work(phase)
    assert least is not None
    return least
