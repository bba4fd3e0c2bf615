"""Ways to reclaim memory between candidates: the same results in each, and nothing left behind."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from impls.benchmark.training import search
from impls.benchmark.training.candidates import architectures, batches, largest, population
from impls.training.hygiene import MODES, Mode, environment, kept_settings, reclaim, refusal

CASE = population(3, 5, 4)
WIDTHS = architectures(CASE, 0)
X = batches(CASE, "cpu", 0)[0]

HERE: list[Mode] = [mode for mode in MODES if not refusal(mode, "cpu")]
"""The modes that a CPU has."""


def searched(**options: Any) -> search.Outcome:
    """Train the small population."""
    return search.run(search.Search(CASE, "cpu", 0, **options), WIDTHS, X)


@pytest.fixture(autouse=True)
def _spared() -> Iterator[None]:
    """Spare the collector what was there before the test: full collections are many here."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Let nothing be collected by itself."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()
    gc.collect()


def settings() -> tuple[object, ...]:
    """Return the collector's settings."""
    return gc.isenabled(), gc.get_threshold(), gc.get_debug()


@pytest.mark.parametrize("mode", [mode for mode in HERE if mode not in {"nothing", "subprocess"}])
def test_results_are_bitwise_the_same_in_every_mode(mode: Mode) -> None:
    """Losses and trained weights of every candidate; a process of its own is in tests/studies."""
    right, found = searched(), searched(mode=mode)
    assert torch.equal(found.losses, right.losses)
    assert found.digests == right.digests
    assert len(set(right.digests)) == len(WIDTHS)


@pytest.mark.parametrize("options", [{"leaky": True}, {"linked": True}], ids=str)
def test_what_leaks_learns_the_same(options: dict[str, bool]) -> None:
    """Bitwise: hooks that leak, and candidates that know each other, compute nothing else."""
    found = searched(**options)
    assert found.digests == searched().digests
    found.release()


@pytest.mark.usefixtures("_no_collection")
def test_a_clean_candidate_is_gone_when_it_was_trained() -> None:
    """Without any collection."""
    assert searched().alive == 0


@pytest.mark.usefixtures("_no_collection")
def test_the_leaky_recipe_keeps_every_candidate() -> None:
    """All parameters stay behind del, and behind a collection too; without the handles they go."""
    outcome = searched(leaky=True)
    everything = len(outcome.parameters)
    assert everything == 2 * sum(len(widths) - 1 for widths in WIDTHS)
    assert outcome.alive == everything
    gc.collect()
    assert outcome.alive == everything
    outcome.release()
    assert outcome.alive == 0


@pytest.mark.usefixtures("_no_collection")
def test_linked_candidates_go_when_somebody_collects() -> None:
    """Left alone they stay; a collection behind each candidate leaves none."""
    left = searched(linked=True)
    assert left.alive == len(left.parameters)
    gc.collect()
    assert left.alive == 0
    assert searched(linked=True, mode="collect").alive == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_collectors_settings_survive_an_exception(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a candidate that raises, having changed them itself; modes of CUDA are driven without a device."""
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: contextlib.nullcontext())
    plan = reclaim(mode)

    def candidate() -> None:
        with plan.candidate():
            for batch in plan.batches(range(8)):
                gc.disable() if was_enabled else gc.enable()
                gc.set_threshold(1)
                gc.set_debug(gc.DEBUG_UNCOLLECTABLE)
                assert batch < 6

    with kept_settings():
        gc.set_threshold(701, 11, 12)
        for was_enabled in (False, True):
            (gc.enable if was_enabled else gc.disable)()
            before = settings()
            with pytest.raises(AssertionError):
                candidate()
            assert settings() == before


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_what_they_were(mode: Mode) -> None:
    """In every mode, in order and in number."""
    assert list(reclaim(mode).batches([3, 1, 2] * 5)) == [3, 1, 2] * 5


@pytest.mark.parametrize(("mode", "collections"), [("nothing", 0), ("collect", 1), ("collect_batch", 4)])
@pytest.mark.usefixtures("_no_collection")
def test_a_mode_collects_when_it_says(mode: Mode, collections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a candidate once, or behind every batch."""
    asked: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: asked.append(1))
    plan = reclaim(mode)
    with plan.candidate():
        assert list(plan.batches(range(4))) == list(range(4))
    assert len(asked) == collections


@pytest.mark.parametrize(("mode", "releases"), [("empty_cache", 1), ("empty_cache_batch", 4), ("pool", 1)])
def test_a_mode_releases_when_it_says(mode: Mode, releases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a candidate once, or behind every batch; a pool is let go of first."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(1))
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: contextlib.nullcontext())
    plan = reclaim(mode)
    with plan.candidate():
        assert list(plan.batches(range(4))) == list(range(4))
    assert len(asked) == releases


def test_what_needs_cuda_says_so_on_a_cpu() -> None:
    """In words, and nothing of it where CUDA is."""
    assert {mode for mode in MODES if refusal(mode, "cpu")} == {
        *("empty_cache", "empty_cache_batch", "expandable", "pool")
    }
    assert all("CUDA" in refusal(mode, "cpu") for mode in set(MODES) - set(HERE))
    assert not any(refusal(mode, "cuda:0") for mode in MODES)


def test_only_an_allocator_mode_needs_an_environment() -> None:
    """Expandable segments are read once by a process."""
    assert {mode for mode in MODES if environment(mode)} == {"expandable"}


def test_an_unknown_mode_lists_the_known_ones() -> None:
    """By name."""
    unknown: Any = "everything"
    with pytest.raises(ValueError, match="no mode 'everything'; there are: nothing, collect"):
        reclaim(unknown)


def test_the_largest_candidate_is_the_same_whatever_the_seed() -> None:
    """It has three layers of the most channels, so that its memory is what a population must hold."""
    case = msgspec.structs.replace(CASE, members=9)
    drawn = {architectures(case, seed) for seed in range(5)}
    assert len(drawn) == 5
    assert {largest(widths) for widths in drawn} == {(5, 20, 20, 20, 3)}
    assert all(len(widths) == 9 and 3 <= len(one) <= 5 for widths in drawn for one in widths)
