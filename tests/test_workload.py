"""What is measured: calls that read inputs in turn, and the least work that they declare."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

import impls
from esbench.plugins import load
from esbench.records import PHASES, Case, Phase, Work
from esbench.registry import REGISTRY, Entry, Workload, WrongResultError, build, select_cases
from impls.axes import over_taps
from impls.inputs import TFLOAT32_EPS, dtype_of
from impls.operators import AbstractOperator, Linear
from impls.schemes.flipped import FlippedNoise

load("impls")

ENTRIES = REGISTRY.select()
PERTURBED = [entry for entry in ENTRIES if entry.variant.mode == "batched"]
CHECKS = REGISTRY.find_suite("check").cases
LINEAR = Case(operator="Linear", out_channels=24, in_channels=16, members=40)
CASES = (
    *CHECKS,
    LINEAR,
    msgspec.structs.replace(LINEAR, members=3, repeats=4, antithetic=True, bias=True),
    msgspec.structs.replace(CHECKS[1], repeats=2, antithetic=True, bias=False, dtype="float32"),
)

every_variant = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


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


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two results have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def called(work: Workload, phase: Phase, times: int) -> list[list[Tensor]]:
    """What calls in a row return after the phase is entered."""
    work.enter(phase)
    return [values(work.phases[phase]()) for _ in range(times)]


@pytest.mark.parametrize("case", [CHECKS[0], CHECKS[1]], ids=lambda case: case.label)
@every_variant
def test_calls_in_a_row_give_other_results(entry: Entry, case: Case) -> None:
    """In every phase the second call returns other numbers than the first."""
    work = workload(entry, case)
    for phase in work.phases:
        first, second = called(work, phase, 2)
        assert first
        assert not equal(first, second), phase


@pytest.mark.parametrize("case", [CHECKS[0], CHECKS[1]], ids=lambda case: case.label)
@every_variant
def test_entering_a_phase_begins_it_again(entry: Entry, case: Case) -> None:
    """However many calls were made, after entering again the same results come in the same order."""
    work = workload(entry, case)
    for phase in work.phases:
        if phase != "step":
            assert all(map(equal, called(work, phase, 3)[:2], called(work, phase, 2))), phase


@every_variant
def test_inputs_are_read_in_turn_and_from_where_they_are(entry: Entry) -> None:
    """Other numbers, written into the inputs in place, are what the calls of their turn read."""
    for phase in workload(entry, LINEAR).phases:
        work = workload(entry, LINEAR)
        work.enter(phase)
        if phase == "sample":
            assert not work.inputs
            continue
        places = [buffer.data_ptr() for buffer in work.inputs]
        assert len(set(places)) == 2
        for read in work.inputs:
            assert abs(read.std().item() - 1) < 0.3
        assert not torch.equal(*work.inputs)
        work.enter(phase)
        assert [buffer.data_ptr() for buffer in work.inputs] == places
        work.inputs[1].zero_()
        first, second, third = called(work, phase, 3)
        assert all(bool((result == 0).all()) for result in second), phase
        assert any(bool((result != 0).any()) for result in first)
        assert phase == "step" or equal(first, third)


@every_variant
def test_a_phase_that_is_entered_again_reads_the_same_noise(entry: Entry) -> None:
    """What forward and update read stays where it is, so that a captured graph stays good."""
    work = workload(entry, CHECKS[0])
    for phase in set(work.phases) - {"sample", "step"}:
        work.enter(phase)
        held = [vars(work).get(name) for name in ("_noise", "_y")]
        work.enter(phase)
        again = [vars(work).get(name) for name in ("_noise", "_y")]
        assert all(one is other for one, other in zip(held, again, strict=True))


def counts(flops: Any) -> Any:
    """Mark a formula as one of values, not of shapes."""
    flops._get_raw = True  # noqa: SLF001  how torch's counter tells them apart
    return flops


@counts
def passed(*arguments: Any, out_val: Any, **options: Any) -> int:
    """Count a pass over values: one operation each, two where one side is scaled as well."""
    del arguments
    scaled = "alpha" in options or "value" in options
    return int(out_val.numel()) * (2 if scaled else 1)


@counts
def twice(*arguments: Any, out_val: Any, **options: Any) -> int:
    """Count a multiplication and an addition for each value of the result."""
    del arguments, options
    return 2 * int(out_val.numel())


@counts
def gathered(total: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any) -> int:
    """Count an addition for each value that is added somewhere."""
    del total, dim, index, options
    return source.numel()


@counts
def contracted(matrix: Tensor, vector: Tensor, **options: Any) -> int:
    """Count the product of a matrix and a vector, which torch's counter leaves out."""
    del vector, options
    return 2 * matrix.numel()


ATEN = torch.ops.aten
ELEMENTWISE = {
    **dict.fromkeys((ATEN.add, ATEN.add_, ATEN.sub, ATEN.mul, ATEN.mul_), passed),
    **dict.fromkeys((ATEN.addcmul_, ATEN.lerp), twice),
    **dict.fromkeys((ATEN.scatter_add_, ATEN.index_add_), gathered),
    ATEN.mv: contracted,
}


class Traffic(TorchDispatchMode):
    """Adds up the bytes of what every operation reads and writes; views move nothing."""

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without hints
        self.moved_bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.moved_bytes += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in moved)
        return result


def declared(work: Workload, phase: Phase) -> Work:
    """Return the least work of a phase, which must have been declared."""
    least = work.work(phase)
    assert least is not None
    return least


@every_case
@every_variant
def test_no_floor_is_above_what_is_executed(entry: Entry, case: Case) -> None:
    """Declared flops and bytes are at most those of the operations that torch really runs."""
    work = workload(entry, case)
    for phase, call in work.phases.items():
        least = declared(work, phase)
        work.enter(phase)
        with FlopCounterMode(display=False, custom_mapping=ELEMENTWISE) as counter:
            call()
        assert least.flops <= counter.get_total_flops(), phase
        with Traffic() as traffic:
            call()
        assert least.moved_bytes <= traffic.moved_bytes, phase


@every_case
@every_variant
def test_output_bytes_are_those_of_what_a_call_returns(entry: Entry, case: Case) -> None:
    """To the byte, in every phase."""
    work = workload(entry, case)
    for phase in work.phases:
        (result,) = called(work, phase, 1)
        assert declared(work, phase).output_bytes == sum(tensor.nbytes for tensor in result), phase


@every_case
@every_variant
def test_a_forward_does_at_least_the_plain_product(entry: Entry, case: Case) -> None:
    """No variant declares less arithmetic than one product of the rows with one weight."""
    work, base = workload(entry, case), build(*_base(case))
    plain = declared(base, "forward")
    assert plain.flops >= 2 * case.rows * case.out_channels * case.in_channels // case.groups
    assert declared(work, "forward").flops >= plain.flops


def _base(case: Case) -> tuple[Any, Case, str, int]:
    return REGISTRY.entries["Base"].scheme, case, "cpu", 0


def test_the_least_work_of_dense_noise_is_what_can_be_worked_out_by_hand() -> None:
    """Of 40 members of Linear(16 -> 24) in float32, phase by phase."""
    weight, noise, x, y = 16 * 24, 40 * 16 * 24, 40 * 16, 40 * 24
    work = build(impls.Perturbed(), LINEAR, "cpu", 0)
    expected = {
        "sample": Work(flops=0, moved_bytes=4 * noise, output_bytes=4 * noise),
        "forward": Work(flops=2 * noise, moved_bytes=4 * (x + weight + noise + y), output_bytes=4 * y),
        "update": Work(flops=2 * noise, moved_bytes=4 * (noise + 40 + weight), output_bytes=4 * weight),
    }
    for phase, least in expected.items():
        assert declared(work, phase) == least  # type: ignore[arg-type]  # the keys are phases
    assert declared(work, "step") == Work(
        flops=4 * noise + 2 * weight,
        moved_bytes=sum(least.moved_bytes for least in expected.values()) + 4 * 3 * weight,
        output_bytes=4 * y,
    )


def test_a_structured_schemes_floor_is_the_shared_product_and_its_correction() -> None:
    """Flipping costs a second product, half of the columns half of one, one column of 16 a sixteenth."""
    flops = {
        str(scheme): declared(build(scheme, LINEAR, "cpu", 0), "forward").flops / (2 * 40 * 16 * 24)
        for scheme in (
            impls.Flipped("both"),
            impls.Permuted(),
            impls.Permuted(in_sparsity=0.5),
            impls.SparsePerturbed(1),
            impls.Loop(),
        )
    }
    assert list(flops.values()) == [2, 2, 1.5, 1 + 1 / 16, 1]


def test_stored_weights_stand_for_the_weight() -> None:
    """A forward with stored weights reads neither W nor the copy that the update needs."""
    dense, stored = (build(impls.Perturbed(form), LINEAR, "cpu", 0) for form in ("noise", "weights"))
    gap = declared(dense, "forward").moved_bytes - declared(stored, "forward").moved_bytes
    assert gap == 4 * 16 * 24
    assert stored.noise_bytes - dense.noise_bytes == gap


class Silent(impls.Flipped):
    """A scheme that says nothing about its work."""

    flops = impls.AbstractScheme.flops  # type: ignore[assignment]  # as if it had not been written


def test_a_scheme_that_declares_nothing_has_no_floor() -> None:
    """What nobody has said is None in every phase, not nothing to do."""
    work = build(Silent(), LINEAR, "cpu", 0)
    assert [work.work(phase) for phase in PHASES] == [None] * 4


def test_the_least_work_of_a_population_too_large_for_any_machine_is_known() -> None:
    """Nothing is drawn or computed to find it out."""
    case = msgspec.structs.replace(LINEAR, members=2**17, in_channels=4096, out_channels=4096)
    rows = torch.empty(1, device="meta", dtype=torch.float32).expand(case.rows, case.in_channels)
    module = torch.nn.Linear(4096, 4096, bias=False, device="meta")
    least = impls.work.perturbed(impls.Perturbed(), case, module, rows, "sample")
    assert least is not None
    assert least.moved_bytes == 2**17 * 4096 * 4096 * 4


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
    for case in CASES:
        work = workload(entry, case)
        if "sample" in work.phases:
            (drawn,) = called(work, "sample", 1)
            assert sum(tensor.nbytes for tensor in drawn) == work.noise_bytes
            assert declared(work, "sample").moved_bytes == work.noise_bytes


def tfloat32(x: Tensor) -> Tensor:
    """Round float32 to the ten bits of fraction that TF32 keeps, towards zero as the worst devices do."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@dataclasses.dataclass(frozen=True)
class RoundedLinear(Linear):
    """A layer whose products are TF32's, on any machine."""

    @override
    def shared(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().shared(tfloat32(x), tfloat32(weight))

    @override
    def batched(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().batched(tfloat32(x), tfloat32(weights))


WIDE = msgspec.structs.replace(LINEAR, in_channels=256, out_channels=64, dtype="tfloat32", bias=True)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("entry", PERTURBED, ids=lambda entry: entry.variant.name)
def test_tf32_products_are_within_the_budget_of_tfloat32_and_outside_of_float32s(
    entry: Entry, antithetic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that rounds products, but not the single rows of the slow computation, is no mistake."""
    monkeypatch.setattr("impls.interception.Linear", RoundedLinear)
    case = msgspec.structs.replace(WIDE, repeats=2, antithetic=antithetic)
    workload(entry, case).verify()
    with pytest.raises(WrongResultError, match="forward is off"):
        workload(entry, msgspec.structs.replace(case, dtype="float32")).verify()


class LostSigns(impls.Flipped):
    """A member in which one input's sign is not flipped."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        assert noise.inputs is not None
        signs = noise.inputs.clone()
        signs[:, :, 0] *= -1
        return op.shared(x * over_taps(signs, x[0]), noise.core)


def test_a_mistake_in_one_input_is_found_in_tfloat32() -> None:
    """The budget of TF32 is too small for a column of 256 that has the wrong sign."""
    with pytest.raises(WrongResultError, match="forward is off"):
        build(LostSigns(), WIDE, "cpu", 0).verify()


def test_tfloat32_is_float32_in_everything_but_its_products() -> None:
    """Tensors are float32, so that bytes are float32's, and the spacing is eight thousand times wider."""
    assert dtype_of(WIDE) is torch.float32
    narrow = build(impls.Perturbed(), WIDE, "cpu", 0)
    wide = build(impls.Perturbed(), msgspec.structs.replace(WIDE, dtype="float32"), "cpu", 0)
    assert [narrow.work(phase) for phase in PHASES] == [wide.work(phase) for phase in PHASES]
    assert TFLOAT32_EPS / torch.finfo(torch.float32).eps == 2**13


@pytest.mark.parametrize("name", ["population", "width"])
def test_a_sweep_goes_up_by_the_field_that_it_names(name: str) -> None:
    """Its cases differ in that field (a square layer's width in both), in powers of two."""
    suite = REGISTRY.find_suite(name)
    steps = [getattr(case, suite.sweep) for case in suite.cases]
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(steps))
    assert math.isfinite(suite.stop_s)
    assert suite.phases == ("forward",)


def test_every_glob_of_a_suite_names_something() -> None:
    """Variants and active cases are found in any dtype; the readme suite's active case is one."""
    for suite in REGISTRY.suites.values():
        REGISTRY.select(suite.variants)
        for dtype in ("float32", "bfloat16"):
            cases = [msgspec.structs.replace(case, dtype=dtype) for case in suite.cases]
            for glob in suite.active:
                assert select_cases(cases, glob)
    readme = REGISTRY.find_suite("readme")
    active = [case.label for glob in readme.active for case in select_cases(readme.cases, glob)]
    assert active == ["Linear(1024, 1024)"]


def test_the_suite_capacity_asks_for_more_dense_noise_than_a_device_has() -> None:
    """Stored dense noise takes more than a terabyte, the rows less than one of its gigabytes."""
    (case,) = REGISTRY.find_suite("capacity").cases
    assert case.members * case.out_channels * case.in_channels * 4 > 10**12
    assert case.rows * case.in_channels * 4 < 2**30
