"""What needs processes of its own, and so takes minutes: `nox -s studies`."""

import os
import sys

import pytest
import torch

from esbench.plugins import load
from esbench.registry import REGISTRY, Entry, UnavailableError, build
from impls.benchmark.training import search
from impls.benchmark.training.candidates import ARCHITECTURES, COMPILED, architectures, batches, population
from impls.benchmark.training.compile_trial import Plan, Trial, ask
from impls.benchmark.training.hygiene import HygieneWorkload
from impls.benchmark.training.hygiene_trial import ask as ask_for_search
from impls.training.compile import refusal
from impls.training.hygiene import isolated
from impls.training.isolation import IsolationError, answer

load("impls")

CHECKS = {case.operator: case for case in REGISTRY.find_suite("check").cases}
FAMILIES = [
    (entry, operator)
    for operator in (ARCHITECTURES, COMPILED)
    for entry in REGISTRY.select()
    if entry.supports(CHECKS[operator])
]

needs_compiler = pytest.mark.skipif(bool(refusal("cpu")), reason=refusal("cpu") or "there is a compiler")


@pytest.mark.parametrize(
    ("entry", "operator"), FAMILIES, ids=[f"{entry.variant.name}-{operator}" for entry, operator in FAMILIES]
)
def test_every_way_passes_its_oracle(entry: Entry, operator: str) -> None:
    """Each candidate learns what it does written out, or the reason is in words."""
    try:
        workload = build(entry.scheme, CHECKS[operator], "cpu", 0)
    except UnavailableError as error:
        assert "CUDA" in str(error) or "compiler" in str(error)  # noqa: PT017  the reason is what is looked at
    else:
        workload.verify()


@needs_compiler
@pytest.mark.parametrize("candidates", [4, 12])
def test_a_shared_dynamic_layer_compiles_two_graphs(candidates: int) -> None:
    """By torch's own compiler, for 4 architectures as for 12, in a fresh process with an empty cache."""
    case = population(candidates, 8, 4, operator=COMPILED)
    found = ask(Plan(case, "cpu", 0, "dynamic", architectures(case, 0), torch.get_num_threads()))
    assert (found.graphs, found.eager, found.wrong) == (2, "", "")
    assert len(found.candidate_ns) == candidates
    # Whatever comes behind the first architecture finds everything compiled.
    assert max(found.compile_ns[1:]) < found.compile_ns[0] / 4


def test_whole_models_behind_the_limit_are_not_reported() -> None:
    """The fresh process says how many ran eager."""
    case = population(10, 5, 4, operator=COMPILED)
    plan = Plan(case, "cpu", 0, "whole", architectures(case, 0), 1, backend="eager", timed=False)
    found: Trial = ask(plan)
    assert (found.graphs, found.eager[:15]) == (8, "2 of 10 models ")


def test_a_process_each_gives_bitwise_the_same() -> None:
    """Losses and trained weights, with the parent's number of threads."""
    case = population(2, 5, 4)
    widths, x = architectures(case, 0), batches(case, "cpu", 0)[0]
    right = search.run(search.Search(case, "cpu", 0), widths, x)
    found = search.run(search.Search(case, "cpu", 0, mode="subprocess"), widths, x)
    assert found.digests == right.digests
    assert torch.equal(found.losses, right.losses)


def test_an_isolated_call_is_another_process() -> None:
    """Its result comes back by value, and what it raises too."""
    assert isolated(os.getpid) != os.getpid()
    assert torch.equal(isolated(torch.arange, 4), torch.arange(4))


def test_a_fresh_process_that_fails_says_why() -> None:
    """By the last line of what it said."""
    case = population(2, 5, 4)
    plan = Plan(case, "cpu", 0, "whole", (), 1, backend="none such")
    with pytest.raises(IsolationError, match=r"a fresh process for .* failed: "):
        answer("impls.benchmark.training.hygiene_trial", plan, {}, Trial)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a part of a process is Linux's to tell")
def test_a_leaky_search_holds_all_candidates_and_a_clean_one_the_largest() -> None:
    """Parameters that are alive, and the peak of the process above what it held before."""
    case = population(6, 128, 16)
    widths = [architectures(case, 0)[1]] * 6
    clean = ask_for_search(search.Search(case, "cpu", 0), widths, {})
    leaky = ask_for_search(search.Search(case, "cpu", 0, leaky=True), widths, {})
    assert clean.digests == leaky.digests
    assert (clean.alive, clean.alive_collected) == (0, 0)
    assert leaky.alive == leaky.alive_collected == 6 * 8
    assert clean.resident_bytes is not None
    assert leaky.resident_bytes is not None
    weights = sum(4 * a * b for a, b in zip(widths[0], widths[0][1:], strict=False))
    assert leaky.resident_bytes > 6 * weights
    assert leaky.resident_bytes > 2 * clean.resident_bytes


def test_a_search_says_all_its_figures_or_why_not() -> None:
    """On a CPU those of torch's allocator carry their reason."""
    entry = REGISTRY.entries["CleanSearch"]
    workload = build(entry.scheme, population(3, 16, 4), "cpu", 0)
    assert isinstance(workload, HygieneWorkload)
    found = {(figure.metric, figure.method): figure for figure in workload.quality()}
    assert all(bool(figure.samples) != bool(figure.reason) for figure in found.values())
    assert {name for (name, _), figure in found.items() if "CUDA" in figure.reason} == {
        *("reserved_over_largest", "fragmentation_percent", "retries_count")
    }
    assert found["alive_count", "after del"].samples == (0.0, 0.0, 0.0)
