"""Tests that start fresh processes, which takes minutes: `nox -s studies`."""

import sys

import pytest
import torch

from esbench.registry import REGISTRY, Entry, load
from esbench.workload import UnavailableError, WrongResultError, build
from impls.benchmark.training import architecture_search, memory_reclaim, shared_compile
from impls.benchmark.training.architecture_search import (
    ARCHITECTURES,
    COMPILED,
    Search,
    architectures,
    batches,
    search_case,
)
from impls.benchmark.training.shared_compile import Plan, run_isolated
from impls.schemes.compiled import missing_compiler_reason
from impls.training.memory_reclaim import call_in_fresh_process

load("impls")

CASES = {ARCHITECTURES: memory_reclaim.CHECKS[0], COMPILED: shared_compile.CHECKS[0]}
FAMILIES = [
    (entry, operator)
    for operator in (ARCHITECTURES, COMPILED)
    for entry in REGISTRY.select()
    if entry.supports(CASES[operator])
]

compiler_reason = missing_compiler_reason(torch.device("cpu"))
needs_compiler = pytest.mark.skipif(bool(compiler_reason), reason=compiler_reason or "there is a compiler")


@pytest.mark.parametrize(
    ("entry", "operator"), FAMILIES, ids=[f"{entry.variant.name}-{operator}" for entry, operator in FAMILIES]
)
def test_every_variant_agrees_with_the_reference(entry: Entry, operator: str) -> None:
    """Each candidate is trained like the reference, or the variant is unavailable with a reason."""
    try:
        workload = build(entry.scheme, CASES[operator], "cpu", 0)
    except UnavailableError as error:
        assert "CUDA" in str(error) or "compiler" in str(error)  # noqa: PT017  the reason is what is tested
    else:
        workload.verify()


@needs_compiler
@pytest.mark.parametrize("candidates", [4, 12])
def test_a_shared_dynamic_layer_compiles_two_graphs(candidates: int) -> None:
    """Torch's compiler makes two graphs for a shared dynamic layer, for any number of architectures."""
    case = search_case(candidates, 8, 4, operator=COMPILED)
    plan = Plan(Search(case, "cpu", 0), "dynamic", architectures(case, 0))
    result = run_isolated(plan)
    assert (result.graphs, result.eager) == (2, "")
    assert len(result.candidate_ns) == candidates
    # After the first architecture everything is compiled.
    assert max(result.compile_ns[1:]) < result.compile_ns[0] / 4


def test_whole_models_beyond_the_limit_are_not_reported() -> None:
    """The fresh process reports the candidate at which the limit was reached."""
    case = search_case(10, 5, 4, operator=COMPILED)
    plan = Plan(Search(case, "cpu", 0), "whole", architectures(case, 0), backend="eager", timed=False)
    result = run_isolated(plan)
    assert result.graphs == 8
    assert result.eager.startswith("candidate 8 of 10: ")


def test_errors_in_a_fresh_process_are_raised() -> None:
    """An unknown backend, and training that differs from the reference, raise in the parent."""
    case = search_case(2, 5, 4, operator=COMPILED)
    plan = Plan(Search(case, "cpu", 0), "dynamic", architectures(case, 0), backend="none such")
    with pytest.raises(Exception, match="none such"):
        run_isolated(plan)
    with pytest.raises(WrongResultError, match="planted"):
        call_in_fresh_process(raise_wrong)


def raise_wrong() -> None:
    """Raise an error of the harness."""
    raise WrongResultError("planted")


def test_one_process_per_candidate_gives_bitwise_the_same() -> None:
    """A process for each candidate, with the parent's number of threads, trains the same bits."""
    case = search_case(2, 5, 4)
    widths, x = architectures(case, 0), batches(case, "cpu", 0)[0]
    expected = architecture_search.run(Search(case, "cpu", 0), widths, x)
    result = architecture_search.run(Search(case, "cpu", 0, mode="subprocess"), widths, x)
    assert torch.equal(result.losses, expected.losses)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak of a part of a process")
def test_a_leaky_search_holds_all_candidates_and_a_clean_one_the_largest() -> None:
    """This holds for the parameters that are alive and for the growth of the process's peak memory."""
    case = search_case(6, 128, 16)
    widths = [architectures(case, 0)[1]] * 6
    clean = call_in_fresh_process(memory_reclaim.run_trial, Search(case, "cpu", 0), widths)
    leaky = call_in_fresh_process(memory_reclaim.run_trial, Search(case, "cpu", 0, leaky=True), widths)
    assert clean.losses == leaky.losses
    assert (clean.alive, clean.alive_collected) == (0, 0)
    assert leaky.alive == leaky.alive_collected == 6 * 8
    assert clean.resident_bytes is not None
    assert leaky.resident_bytes is not None
    weights = sum(4 * a * b for a, b in zip(widths[0], widths[0][1:], strict=False))
    assert leaky.resident_bytes > 6 * weights
    assert leaky.resident_bytes > 2 * clean.resident_bytes


def test_a_search_has_all_its_metrics_or_reasons() -> None:
    """Every metric of a search has a value or a reason; on a CPU torch's allocator reports nothing."""
    workload = build(REGISTRY.entries["CleanSearch"].scheme, search_case(3, 16, 4), "cpu", 0)
    metrics = {(metric.metric, metric.method): metric for metric in workload.quality()}
    assert all(bool(metric.samples) != bool(metric.reason) for metric in metrics.values())
    assert {name for (name, _), metric in metrics.items() if "CUDA" in metric.reason} == {
        *("reserved_over_largest", "fragmentation_percent", "retries_count")
    }
    assert metrics["alive_count", "after del"].samples == (0.0, 0.0, 0.0)
