"""The minimum work that variants declare is a lower bound of the work that they execute."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

import impls
from esbench.measure.validation import tensors
from esbench.registry import REGISTRY, Entry
from esbench.schema import PHASES, Case, Work
from esbench.workload import build
from impls.benchmark.inputs import is_packed
from tests.workload_cases import CASES, LINEAR, declared, every_variant, suits, workload


def gets_tensors(flops: Any) -> Any:
    """Register a formula that gets tensors instead of shapes."""
    flops._get_raw = True  # noqa: SLF001  how torch's counter tells them apart
    return flops


@gets_tensors
def elementwise(*arguments: Any, out_val: Any, **options: Any) -> int:
    """Count a pass over values: one operation each, or two if one operand is scaled as well."""
    del arguments
    scaled = "alpha" in options or "value" in options
    return int(out_val.numel()) * (2 if scaled else 1)


@gets_tensors
def multiply_adds(*arguments: Any, out_val: Any, **options: Any) -> int:
    """Count a multiplication and an addition for each value of the result."""
    del arguments, options
    return 2 * int(out_val.numel())


@gets_tensors
def additions(total: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any) -> int:
    """Count an addition for each value that is added to a sum."""
    del total, dim, index, options
    return source.numel()


@gets_tensors
def sums(values: Tensor, *arguments: Any, **options: Any) -> int:
    """Count an addition for each value that is summed."""
    del arguments, options
    return values.numel()


@gets_tensors
def matrix_vector_product(matrix: Tensor, vector: Tensor, **options: Any) -> int:
    """Count a matrix-vector product, which torch's counter leaves out."""
    del vector, options
    return 2 * matrix.numel()


@gets_tensors
def sums_of_rows(table: Tensor, rows: Tensor, *arguments: Any, **options: Any) -> int:
    """Count a multiplication and an addition for each value of a table that embedding_bag adds to a sum."""
    del arguments, options
    return 2 * rows.numel() * table.shape[1]


ATEN = torch.ops.aten


ELEMENTWISE = {
    **dict.fromkeys((ATEN.add, ATEN.add_, ATEN.sub, ATEN.mul, ATEN.mul_), elementwise),
    **dict.fromkeys((ATEN.addcmul, ATEN.addcmul_, ATEN.lerp), multiply_adds),
    **dict.fromkeys((ATEN.scatter_add_, ATEN.index_add_), additions),
    ATEN.sum: sums,
    ATEN.mv: matrix_vector_product,
    ATEN._embedding_bag_forward_only: sums_of_rows,  # noqa: SLF001  torch's name
}


class Traffic(TorchDispatchMode):
    """A mode that adds up the bytes read and written by each operation; views move none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without hints
        self.moved_bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.moved_bytes += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in moved)
        return result


@every_variant
def test_the_minimum_work_is_a_lower_bound_of_what_is_executed(entry: Entry) -> None:
    """Flops and bytes are at most the executed ones; output bytes are those returned."""
    for case in (case for case in CASES if suits(entry, case)):
        work = workload(entry, case)
        for phase, call in work.phases.items():
            name, least = f"{case.label}: {phase}", declared(work, phase)
            work.enter(phase)
            with FlopCounterMode(display=False, custom_mapping=ELEMENTWISE) as counter:
                call()
            assert least.flops <= counter.get_total_flops(), name
            with Traffic() as traffic:
                result = call()
            assert least.moved_bytes <= traffic.moved_bytes, name
            assert least.output_bytes == sum(tensor.nbytes for tensor in tensors(result)), name
        assert_a_product(entry, case, declared(work, "forward"))


def assert_a_product(entry: Entry, case: Case, forward: Work) -> None:
    """Check that a forward has at least the product of the rows with the kept part of a weight."""
    plain = declared(build(REGISTRY.entries["Base"].scheme, case, "cpu", 0), "forward")
    products = 2 * case.rows * case.out_channels * case.in_channels // case.groups
    assert plain.flops >= (0 if is_packed(case) else products), case.label
    channels = (case.out_channels // case.groups, case.in_channels // case.groups)
    weight = torch.Size((case.groups, *channels, *case.kernel_size))
    kept = entry.scheme.density(weight) if isinstance(entry.scheme, impls.DropoutBlocks) else 1.0
    assert forward.flops >= kept * plain.flops, case.label


def test_the_minimum_work_of_dense_noise_by_hand() -> None:
    """Flops and bytes of 40 members of Linear(16 -> 24) in float32, by phase."""
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


def test_a_structured_scheme_needs_the_shared_product_and_its_correction() -> None:
    """Flips cost a second product, permuting half the columns half of it, one column a sixteenth."""
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


def test_stored_weights_replace_the_weight() -> None:
    """A forward with stored weights reads neither W nor the copy used by the update."""
    dense, stored = (build(impls.Perturbed(form), LINEAR, "cpu", 0) for form in ("noise", "weights"))
    gap = declared(dense, "forward").moved_bytes - declared(stored, "forward").moved_bytes
    assert gap == 4 * 16 * 24
    assert stored.noise_bytes - dense.noise_bytes == gap


class Silent(impls.Flipped):
    """A scheme that does not declare ``flops``."""

    flops = impls.AbstractScheme.flops  # type: ignore[assignment]  # as if it had not been written


def test_undeclared_work_is_none() -> None:
    """A scheme that does not declare ``flops`` has no minimum work in any phase."""
    work = build(Silent(), LINEAR, "cpu", 0)
    assert [work.work(phase) for phase in PHASES] == [None] * 4
