"""What is measured: calls that read inputs in turn, and noise of a declared size."""

import msgspec
import pytest
import torch
from torch import Tensor

import impls
from esbench.registry import Entry, build
from esbench.schema import Case
from tests.workload_cases import (
    CASES,
    CHECKS,
    LINEAR,
    called,
    declared,
    every_variant,
    pairs,
    small,
    suits,
    workload,
)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two results have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pairs([CHECKS[0], CHECKS[1], CHECKS[3], CHECKS[4]])
def test_calls_in_a_row_give_other_results(entry: Entry, case: Case) -> None:
    """In every phase the second call returns other numbers than the first."""
    work = workload(entry, case)
    for phase in work.phases:
        first, second = called(work, phase, 2)
        assert first
        assert not equal(first, second), phase


@pairs([CHECKS[0], CHECKS[1], CHECKS[3], CHECKS[4]])
def test_entering_a_phase_begins_it_again(entry: Entry, case: Case) -> None:
    """However many calls were made, after entering again the same results come in the same order."""
    work = workload(entry, case)
    for phase in work.phases:
        if phase != "step":
            assert all(map(equal, called(work, phase, 3)[:2], called(work, phase, 2))), phase


@every_variant
def test_inputs_are_read_in_turn_and_from_where_they_are(entry: Entry) -> None:
    """Other numbers, written into the inputs in place, are what the calls of their turn read."""
    case = small(entry)
    for phase in workload(entry, case).phases:
        work = workload(entry, case)
        work.enter(phase)
        if phase == "sample":
            assert not work.inputs
            continue
        places = [buffer.data_ptr() for buffer in work.inputs]
        assert len(set(places)) == 2
        for read in work.inputs:
            assert not read.is_floating_point() or abs(read.std().item() - 1) < 0.3
        assert not torch.equal(*work.inputs)
        work.enter(phase)
        assert [buffer.data_ptr() for buffer in work.inputs] == places
        work.inputs[1].zero_()
        first, second, third = called(work, phase, 3)
        if work.inputs[0].is_floating_point() or phase == "update":
            assert all(bool((result == 0).all()) for result in second), phase
        else:
            assert not equal(first, second)
        assert any(bool((result != 0).any()) for result in first)
        assert phase == "step" or equal(first, third)


@every_variant
def test_a_phase_that_is_entered_again_reads_the_same_noise(entry: Entry) -> None:
    """What forward and update read stays where it is, so that a captured graph stays good."""
    work = workload(entry, small(entry))
    for phase in set(work.phases) - {"sample", "step"}:
        work.enter(phase)
        held = [vars(work).get(name) for name in ("_noise", "_y")]
        work.enter(phase)
        again = [vars(work).get(name) for name in ("_noise", "_y")]
        assert all(one is other for one, other in zip(held, again, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_noise_holds_a_weight_for_each_member_to_the_byte(dtype: str, bias: bool) -> None:
    """The noise state of PerturbedLinear is members x out x in x itemsize, and the biases'."""
    case = msgspec.structs.replace(LINEAR, dtype=dtype, bias=bias)
    work = build(impls.Perturbed(), case, "cpu", 0)
    item = {"float32": 4, "bfloat16": 2}[dtype]
    assert work.noise_bytes == 40 * 24 * 16 * item + (40 * 24 * item if bias else 0)
    (drawn,) = called(work, "sample", 1)
    assert sum(tensor.nbytes for tensor in drawn) == work.noise_bytes


@every_variant
def test_noise_bytes_are_those_of_what_is_drawn(entry: Entry) -> None:
    """What a workload says its noise holds is what its sample returns, to the byte."""
    for case in (case for case in CASES if suits(entry, case)):
        work = workload(entry, case)
        if "sample" in work.phases:
            (drawn,) = called(work, "sample", 1)
            assert sum(tensor.nbytes for tensor in drawn) == work.noise_bytes
            assert declared(work, "sample").moved_bytes == work.noise_bytes
