"""A search as something to measure: held to its training written out, and met by its own variants only."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from esbench.plugins import load
from esbench.registry import REGISTRY, Entry, UnavailableError, WrongResultError, build
from impls.benchmark.training import candidates, compile_trial, hygiene, hygiene_trial, search
from impls.benchmark.training.candidates import ARCHITECTURES, COMPILED, architectures, population
from impls.benchmark.training.hygiene import HygieneWorkload
from impls.benchmark.training.hygiene_trial import Trial

load("impls")

CASE = hygiene.CHECKS[0]
SMALL = population(3, 5, 4)
HERE = [
    entry
    for entry in REGISTRY.select()
    if entry.supports(CASE)
    and not any(word in entry.variant.name for word in ("cache", "expand", "pool", "sub"))
]
"""What a CPU can run in this process."""
each = pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.variant.name)


@pytest.fixture(autouse=True)
def _spared() -> Iterator[None]:
    """Spare the collector what was there before the test."""
    gc.freeze()
    yield
    gc.unfreeze()


def workload(name: str, case: Any = SMALL) -> HygieneWorkload:
    """Set a variant up."""
    made = build(REGISTRY.entries[name].scheme, case, "cpu", 0)
    assert isinstance(made, HygieneWorkload)
    return made


@each
def test_a_search_passes_its_oracle(entry: Entry) -> None:
    """Each candidate's weights are those of the same training written out, in float64 and in float32."""
    for case in (CASE, SMALL):
        made = workload(entry.variant.name, case)
        made.verify()
        made.confirm("step")


def test_a_missing_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch that nobody learns from, of one candidate, is another result."""
    honest = candidates.train

    def lazy(candidate: candidates.Candidate, x: Any, case: Any) -> list[torch.Tensor]:
        rows = list(x)
        return [*honest(candidate, rows[:-1], case), torch.zeros((), dtype=torch.float64)]

    monkeypatch.setattr(search, "train", lazy)
    with pytest.raises(WrongResultError, match="weights of candidate 0 is off"):
        workload("CleanSearch", CASE).verify()


def test_other_rows_give_other_losses_and_the_same_rows_the_same() -> None:
    """Calls read two sets of rows in turn; a candidate always begins with the same weights."""
    made = workload("CleanSearch")
    made.enter("step")
    first, second, third = (made.phases["step"]() for _ in range(3))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert isinstance(third, torch.Tensor)
    assert first.shape == (3, candidates.STEPS)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["LeakySearch", "CleanSearch(linked=True)"])
def test_a_call_leaves_nothing_behind(name: str) -> None:
    """What leaks within a search goes when it is over: it is not the next variant's memory."""
    made, outcomes = workload(name), []
    honest = search.run

    def watched(*args: Any) -> search.Outcome:
        outcomes.append(honest(*args))
        assert outcomes[-1].alive > 0
        return outcomes[-1]

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "run", watched)
            made.phases["step"]()
        assert [outcome.alive for outcome in outcomes] == [0]
    finally:
        if was_enabled:
            gc.enable()


@pytest.mark.parametrize(
    ("reclaim", "said"), [("pool", "CUDA"), ("empty_cache", "CUDA"), ("expandable", "CUDA")]
)
def test_what_a_cpu_lacks_is_unavailable(reclaim: str, said: str) -> None:
    """With the reason in words."""
    with pytest.raises(UnavailableError, match=said):
        workload(f"CleanSearch(reclaim={reclaim})")


def test_a_process_each_is_not_timed_here() -> None:
    """Its phases are unavailable, and say where its figures are."""
    made = workload("CleanSearch(reclaim=subprocess)")
    assert made.phases == {}
    assert "wall_ns" in made.unavailable["step"]


def test_figures_are_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks over that of the largest candidate alone; what the device does not tell has its reason."""
    whole = Trial(
        5.0, 2.0, 7, 6, ("a",), resident_bytes=300, reserved_bytes=90, allocated_bytes=60, retries=4
    )
    alone = Trial(1.0, 0.0, 0, 0, ("a",), resident_bytes=100, reserved_bytes=40, allocated_bytes=30)
    asked = []

    def answer(plan: search.Search, widths: Any, environment: Any) -> Trial:
        asked.append((plan.mode, len(widths), dict(environment)))
        return whole if len(widths) > 1 else alone

    hygiene.largest_alone.cache_clear()
    monkeypatch.setattr(hygiene, "ask", answer)
    found = {(one.metric, one.method): one for one in workload("CleanSearch(reclaim=collect)").quality()}
    hygiene.largest_alone.cache_clear()
    assert asked == [("collect", 3, {})] * 3 + [("nothing", 1, {})]
    assert found["wall_ns", "fresh process"].samples == (5.0,) * 3
    assert found["pause_ns", "fresh process"].samples == (2.0,) * 3
    assert found["alive_count", "after del"].samples == (7.0,) * 3
    assert found["alive_count", "after collection"].samples == (6.0,) * 3
    assert found["process_over_largest", "resident set"].samples == (3.0,) * 3
    assert "CUDA" in found["retries_count", "allocator"].reason
    made = workload("CleanSearch")
    object.__setattr__(made, "_plan", search.Search(SMALL, "cuda", 0))
    found = {(one.metric, one.method): one for one in made.quality()}
    hygiene.largest_alone.cache_clear()
    assert found["reserved_over_largest", "allocator"].samples == (3.0,) * 3
    assert found["fragmentation_percent", "allocator"].samples == pytest.approx((100 / 3,) * 3)
    assert found["retries_count", "allocator"].samples == (4.0,) * 3


def test_a_trial_counts_pauses_and_what_stays() -> None:
    """In this process: collections that a mode asks for, and the parameters that a leaky search leaves."""
    widths = architectures(SMALL, 0)
    collected = hygiene_trial.trial(search.Search(SMALL, "cpu", 0, mode="collect_batch"), widths)
    assert 0 < collected.pause_ns < collected.wall_ns
    assert (collected.alive, collected.alive_collected) == (0, 0)
    leaky = hygiene_trial.trial(search.Search(SMALL, "cpu", 0, leaky=True), widths)
    assert leaky.digests == collected.digests
    assert leaky.alive == leaky.alive_collected == sum(2 * (len(one) - 1) for one in widths)


def test_families_meet_nobody_else() -> None:
    """Layers' variants, base and naive included, are not for populations, nor these for layers' suites."""
    for suite in REGISTRY.suites.values():
        for case in suite.cases:
            for entry in REGISTRY.select():
                named = entry.operators or ()
                if case.operator in {ARCHITECTURES, COMPILED} or {ARCHITECTURES, COMPILED} & {*named}:
                    assert entry.supports(case) == (case.operator in named)
    for operator in (ARCHITECTURES, COMPILED):
        modes = [
            entry.variant.mode
            for entry in REGISTRY.select()
            if entry.supports(population(2, 5, 4, operator=operator))
        ]
        assert (modes.count("base"), modes.count("naive")) == (1, 1)
        assert modes.count("batched") > 1


def test_a_compiled_model_that_learns_otherwise_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial says so and reports nothing."""
    monkeypatch.setattr(compile_trial, "LEARNING_RATE", 0.051)
    case = population(2, 5, 4, operator=COMPILED)
    plan = compile_trial.Plan(case, "cpu", 0, "eager", architectures(case, 0), 1, timed=False)
    found = compile_trial.trial(plan)
    assert found.wrong.startswith("weights of candidate 0 is off")
    assert found.candidate_ns == ()
