"""Workloads: results differ between calls, inputs are read in place, and noise has its declared size."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import impls
from esbench.measure.memory import peak_bytes
from esbench.schema import Case, Phase
from esbench.workload import Workload, WrongResultError, build
from impls import Population
from impls.benchmark import baselines
from impls.verify import reference
from tests.workload_cases import CASES, CHECKS, ENTRIES, LINEAR, called, declared, on, small, suits, workload


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


def with_utilities(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Return a ``Population.update`` with changed utilities."""
    update = Population.update

    def wrong(self: Population, noise: Any, utilities: Tensor, *arguments: Any, **options: Any) -> None:
        update(self, noise, change(utilities), *arguments, **options)

    return wrong


def with_step(change: Callable[[Any], Any]) -> Callable[..., object]:
    """Return a ``Population.sample`` that draws the noise of another step."""
    sample = Population.sample

    def wrong(self: Population, step: Any, *arguments: Any) -> object:
        # The timed step is the first to ask for the noise of a step, and the reference the second.
        calls.append(step)
        return sample(self, change(step) if calls.count(step) == 1 else step, *arguments)

    calls: list[Any] = []
    return wrong


STEP_BUGS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "negated utilities": (Population, "update", with_utilities(operator.neg)),
    "squared utilities": (Population, "update", with_utilities(lambda c: c * c.abs())),
    "utilities of neighbors": (Population, "update", with_utilities(lambda c: c.roll(1))),
    "utilities of another scale": (Population, "update", with_utilities(lambda c: c * 0.5)),
    "half of the utilities are lost": (Population, "update", with_utilities(lambda c: c * (c < 0))),
    "noise of another step": (Population, "sample", with_step(lambda step: step + 1)),
    "no optimizer": (torch.optim.SGD, "step", lambda *_: None),
}


@pytest.mark.parametrize("max_dense", [reference.MAX_DENSE_NUMBERS["cpu"], 0], ids=["sum", "outputs"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("scheme", [impls.Perturbed(), impls.LowRank(1), impls.DropoutMask()], ids=str)
def test_a_planted_bug_in_a_step_is_found(
    monkeypatch: pytest.MonkeyPatch, scheme: object, dtype: str, max_dense: int
) -> None:
    """A step with a mistake in its noise, utilities, update or optimizer differs from the reference.

    It does so whether dense noise of all members is affordable, or the update is compared with outputs.
    """
    cases = (
        msgspec.structs.replace(LINEAR, in_channels=128, dtype=dtype),
        msgspec.structs.replace(LINEAR, in_channels=128, dtype=dtype, repeats=4, antithetic=True, bias=True),
    )
    monkeypatch.setitem(reference.MAX_DENSE_NUMBERS, "cpu", max_dense)
    for case in cases:
        build(scheme, case, "cpu", 0).confirm("step")
        for name, (owner, method, wrong) in STEP_BUGS.items():
            work = build(scheme, case, "cpu", 0)
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, wrong)
                with on(name), pytest.raises(WrongResultError, match="step"):
                    work.confirm("step")


def test_a_check_of_a_step_restores_the_weights() -> None:
    """The weights are restored, and the next step has the learning rate of timing."""
    case = msgspec.structs.replace(LINEAR, bias=True)
    checked, plain = (build(impls.LowRank(1), case, "cpu", 0) for _ in range(2))
    checked.confirm("step")
    for work in (checked, plain):
        work.enter("step")
        work.inputs[0].fill_(1.0)
        work.phases["step"]()
    assert all(
        map(torch.equal, *(list(vars(work)["_population"].model.parameters()) for work in (checked, plain)))
    )


def test_the_memory_of_an_update_counts_its_gradients() -> None:
    """The gradients of the last call are not freed during a call, which would hide those of this one."""
    for scheme in (impls.Perturbed(), impls.LowRank(1)):
        work = build(scheme, LINEAR, "cpu", 0)
        for phase in ("update", "step"):
            work.enter(phase)
            call = work.phases[phase]
            call()
            assert peak_bytes(call, "cpu") >= 4 * LINEAR.out_channels * LINEAR.in_channels, (scheme, phase)


class HalvedWorkload(baselines.BaseWorkload):
    """A base with half the gradient and half the step."""

    @override
    def _update(self) -> tuple[Tensor, ...]:
        return tuple(gradient / 2 for gradient in super()._update())

    @override
    def _step(self) -> Tensor:
        (group,) = self._optimizer.param_groups
        group["lr"] /= 2
        y = super()._step()
        group["lr"] *= 2
        return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("layer", ["Linear", "Conv2d"])
def test_the_update_and_the_step_of_base_are_checked(layer: str, dtype: str) -> None:
    """They pass after timed calls and leave the weights as they were; half of them is found."""
    kernel: dict[str, Any] = {"kernel_size": (3, 3), "input_size": (5, 5)} if layer == "Conv2d" else {}
    case = Case(operator=layer, out_channels=8, in_channels=6, members=16, dtype=dtype, **kernel)
    for phase in ("update", "step"):
        honest, halved = (kind(case, "cpu", 0) for kind in (baselines.BaseWorkload, HalvedWorkload))
        for base in (honest, halved):
            base.enter(phase)
            base.phases[phase]()
        before = [parameter.clone() for parameter in honest._module.parameters()]  # noqa: SLF001  # its weights
        honest.confirm(phase)
        assert all(map(torch.equal, before, honest._module.parameters()))  # noqa: SLF001  # its weights
        honest.phases[phase]()
        with pytest.raises(WrongResultError, match=f"{phase} of .* off by"):
            halved.confirm(phase)
