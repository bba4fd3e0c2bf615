"""Workloads: results differ between calls, inputs are read in place, and noise has its declared size."""

import operator
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

import impls
from esbench.schema import Case, Phase
from esbench.workload import Workload, build
from tests.workload_cases import (
    CASES,
    CHECKS,
    ENTRIES,
    LINEAR,
    called,
    declared,
    small,
    suits,
    workload,
)


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether two results are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def small_workloads() -> Iterator[tuple[Workload, Phase, str]]:
    """Yield a new workload of every variant for each of its phases, and their names."""
    for entry in ENTRIES:
        for phase in workload(entry, small(entry)).phases:
            yield workload(entry, small(entry)), phase, f"{entry.variant.name} {phase}"


def pairs(cases: tuple[Case, ...]) -> Iterator[tuple[Workload, str]]:
    """Yield a workload of every variant for each case that it supports, and their names."""
    for entry in ENTRIES:
        for case in cases:
            if suits(entry, case):
                yield workload(entry, case), f"{entry.variant.name} on {case.label}"


def test_consecutive_calls_differ_and_repeat_after_entering_again() -> None:
    """No call may reuse a result; ``enter`` restarts the same sequence of results."""
    for work, name in pairs((CHECKS[0], CHECKS[1], CHECKS[3], CHECKS[4])):
        for phase in work.phases:
            first, second = called(work, phase, 2)
            assert first, (name, phase)
            assert not equal(first, second), (name, phase)
            if phase != "step":
                again = called(work, phase, 2)
                assert all(map(equal, (first, second), again)), (name, phase)


def test_inputs_are_read_in_turn_and_in_place() -> None:
    """Each phase alternates between two N(0, 1) buffers, and reads new values that are written into them."""
    for work, phase, name in small_workloads():
        work.enter(phase)
        if phase == "sample":
            assert not work.inputs, name
            continue
        places = [buffer.data_ptr() for buffer in work.inputs]
        assert len(set(places)) == 2, name
        for read in work.inputs:
            assert not read.is_floating_point() or abs(read.std().item() - 1) < 0.3, name
        assert not torch.equal(*work.inputs), name
        work.enter(phase)
        assert [buffer.data_ptr() for buffer in work.inputs] == places, name
        work.inputs[1].zero_()
        first, second, third = called(work, phase, 3)
        if work.inputs[0].is_floating_point() or phase == "update":
            assert all(bool((result == 0).all()) for result in second), name
        else:
            assert not equal(first, second), name
        assert any(bool((result != 0).any()) for result in first), name
        assert phase == "step" or equal(first, third), name


def test_entering_a_phase_again_keeps_its_noise() -> None:
    """The noise that forward and update read keeps its memory, so that a captured graph stays valid."""
    for work, phase, name in small_workloads():
        if phase not in {"sample", "step"}:
            work.enter(phase)
            before = [vars(work).get(attribute) for attribute in ("_noise", "_y")]
            work.enter(phase)
            after = [vars(work).get(attribute) for attribute in ("_noise", "_y")]
            assert all(map(operator.is_, before, after)), name


def test_noise_bytes_are_exact() -> None:
    """The bytes are those of the result of ``sample``; for dense noise they are computed by hand."""
    for work, name in pairs(CASES):
        if "sample" in work.phases:
            (drawn,) = called(work, "sample", 1)
            assert sum(tensor.nbytes for tensor in drawn) == work.noise_bytes, name
            assert declared(work, "sample").moved_bytes == work.noise_bytes, name
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        for bias in (False, True):
            case = msgspec.structs.replace(LINEAR, dtype=dtype, bias=bias)
            expected = 40 * 24 * 16 * itemsize + (40 * 24 * itemsize if bias else 0)
            assert build(impls.Perturbed(), case, "cpu", 0).noise_bytes == expected
