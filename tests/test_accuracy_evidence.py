"""The figures and goals that a study of the harness is evidence for."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from esbench.report import evidence
from esbench.report.accuracy import accuracy_page, render_accuracy
from esbench.report.goals import Goal, goals
from esbench.schema import SCHEMA_VERSION, Run, RunEnd, RunHeader
from esbench.studies.timer_accuracy import Study, write_study
from tests.accuracy_cases import BY_CALL, HERE, ROUNDS, TORCH, WHOLE, reading, study_of


def run_that_spent(
    run_id: str, spent_s: dict[str, float], suite: str = "quick", device: str = "Some CPU"
) -> Run:
    """Make a run that says where its time went."""
    header = RunHeader(
        schema=SCHEMA_VERSION,
        run_id=run_id,
        suite=suite,
        started="",
        seed=0,
        environment=msgspec.structs.replace(HERE, device_name=device),
    )
    return Run(header=header, rows=(), end=RunEnd(status="complete", wall_s=1.0, spent_s=spent_s))


def goal(found: Sequence[Goal], words: str) -> Goal:
    """Find the one goal that says this."""
    (one,) = [one for one in found if words in one.goal]
    return one


def test_an_empty_study_meets_nothing(tmp_path: Path) -> None:
    """Every goal is shown as not shown, none as met."""
    assert {found.met for found in goals(study_of(), None)} == {None}
    write_study(study_of(), tmp_path)
    assert "not shown" in render_accuracy(tmp_path, tmp_path)[0].read_text()


@pytest.mark.parametrize(("bias", "met"), [(1.0, True), (1.009, True), (1.02, False), (0.98, False)])
@pytest.mark.parametrize("timer", [TORCH, BY_CALL])
def test_a_timer_that_is_further_off_than_one_percent_is_shown_to_be(
    timer: str, bias: float, met: bool
) -> None:
    """Ours reads so many times what the other reads, in every round, however fast the machine was then."""
    speeds = [1 + 0.3 * (k % 3) for k in range(ROUNDS)]
    ours = reading("agreement", "k", "esbench", [[200 * bias * speed] * 4 for speed in speeds])
    samples = 1 if timer == TORCH else 4
    theirs = reading("agreement", "k", timer, [[200 * speed] * samples for speed in speeds])
    found = study_of(ours, theirs)
    assert goal(goals(found, None), f"of {timer} above").met is met
    assert evidence.agreements(found)[0].ratio.median == pytest.approx(bias)
    assert ("**no**" in accuracy_page([found], [])) is not met


def test_one_kernel_that_is_off_is_enough_to_miss_a_goal() -> None:
    """The other is near."""
    rows = [
        reading("agreement", kernel, arm, [[us] * 4] * ROUNDS)
        for kernel, arm, us in (
            ("a", "esbench", 200.0),
            ("a", TORCH, 200.0),
            ("b", "esbench", 204.0),
            ("b", TORCH, 200.0),
        )
    ]
    one = goal(goals(study_of(*rows), None), f"{TORCH} above")
    assert (one.met, one.found) == (False, "1 of 2 kernels, 0 unclear; the furthest is 2.00 % off")


def test_what_is_off_is_unclear_where_its_interval_reaches_below_the_limit() -> None:
    """The median ratio is 2 % off, and the rounds lie 4 % around it."""
    shares = [1.02 + 0.04 * (-1) ** k * (k > 1) for k in range(ROUNDS)]
    ours = reading("agreement", "k", "esbench", [[200 * share] * 4 for share in shares])
    theirs = reading("agreement", "k", TORCH, [[200.0]] * ROUNDS)
    one = goal(goals(study_of(ours, theirs), None), f"{TORCH} above")
    assert (one.met, one.found) == (False, "0 of 1 kernels, 1 unclear; the furthest is 2.00 % off")


def test_only_arms_of_the_same_sitting_share_rounds() -> None:
    """The machine was faster in the second, and one of the two left the first a round earlier."""
    rows = [
        reading("agreement", "k", arm, [[us] * samples] * rounds, sitting=sitting)
        for sitting, us in ((0, 300.0), (1, 200.0))
        for arm, samples, rounds in (("esbench", 4, 6), (TORCH, 1, 5 + sitting))
    ]
    (found,) = evidence.agreements(study_of(*rows))
    assert (found.ratio.low, found.ratio.high, found.rounds) == (1, 1, 11)
    twice = [
        reading("twins", "k", arm, [[us]] * 6, sitting=sitting, places=(place,) * 6)
        for sitting, us in ((0, 300.0), (1, 200.0))
        for place, arm in enumerate(("first name", "second name"))
    ]
    (one,) = evidence.twins(study_of(*twice[:-1]), "twins")
    assert (one.half_range, one.rounds) == (0, 6)
    assert evidence.twins(study_of(*twice), "twins")[0].rounds == 12


def test_a_short_kernel_is_shown_and_not_judged() -> None:
    """The goal begins at 100 us."""
    ours = reading("agreement", "k", "esbench", [[5.0] * 4] * ROUNDS)
    theirs = reading("agreement", "k", TORCH, [[4.0]] * ROUNDS)
    assert goal(goals(study_of(ours, theirs), None), f"{TORCH} above").met is None
    assert "+25.0" in accuracy_page([study_of(ours, theirs)], [])


def test_a_mean_of_a_block_is_compared_with_a_mean() -> None:
    """One slow call of four moves the mean of a visit, in ours as in the block, and not the median."""
    ours = reading("agreement", "k", "esbench", [[200.0, 200.0, 200.0, 400.0]] * ROUNDS)
    block = reading("agreement", "k", TORCH, [[250.0, 250.0]] * ROUNDS)
    (found,) = evidence.agreements(study_of(ours, block))
    assert found.ratio.median == pytest.approx(1)
    assert found.difference == pytest.approx(-0.2)


def test_a_timer_with_a_cold_cache_stands_beside_our_cold_time() -> None:
    """And one that keeps the cache warm beside our warm one."""
    cold = reading("agreement", "k", "esbench", [[300.0] * 4] * ROUNDS)
    warm = reading("agreement", "k", "esbench", [[200.0] * 4] * ROUNDS, metric="warm_latency_ns")
    host = reading("agreement", "k", "esbench", [[9.0] * 4] * ROUNDS, metric="host_latency_ns")
    theirs = [
        reading("agreement", "k", timer, [[value] * 4] * ROUNDS)
        for timer, value in ((TORCH, 200.0), ("triton.testing.do_bench", 300.0))
    ]
    found = evidence.agreements(study_of(cold, warm, host, *theirs, device="cuda"))
    assert [one.ratio.median for one in found] == [pytest.approx(1)] * 2


def two(first: Sequence[float], second: Sequence[float], places: Sequence[int]) -> Study:
    """Make a study of one call under two names."""
    return study_of(
        reading("twins", "k", "first name", [[value] for value in first], places=tuple(places)),
        reading("twins", "k", "second name", [[v] for v in second], places=tuple(1 - p for p in places)),
    )


def test_twins_that_drift_together_are_equal() -> None:
    """A ratio taken inside a round is free of what happens between rounds."""
    drift = [10.0 + k for k in range(ROUNDS)]
    (found,) = evidence.twins(two(drift, drift, (0, 1) * 5), "twins")
    assert (found.half_range, found.bias, found.ratio.relative) == (0, 0, 0)


def test_a_slower_first_visit_is_shown_whichever_name_had_it() -> None:
    """Each name is first in half of the rounds, so that the ratio of the names shows nothing."""
    places = (0, 1) * 5
    first = [10.1 if place == 0 else 10.0 for place in places]
    second = [10.0 if place == 0 else 10.1 for place in places]
    found = two(first, second, places)
    (one,) = evidence.twins(found, "twins")
    assert one.bias == pytest.approx(0.01)
    assert one.half_range == pytest.approx(0.01, rel=0.02)
    assert goal(goals(found, None), "visited first").met is False
    assert goal(goals(found, None), "under two names").met is False


def test_one_after_the_other_the_first_name_is_always_first() -> None:
    """The ratio is the order's."""
    (found,) = evidence.twins(WHOLE, "sequence")
    assert found.bias == pytest.approx(10.5 / 12.5 - 1)


def test_a_constant_that_the_harness_adds_matters_to_short_waits_alone() -> None:
    """0.3 us more are 3 % of 10 us and 0.03 % of 1 ms."""
    waits = [
        reading("length", f"{us}", "esbench", [[us + 0.3] * 3], expected_ns=us * 1e3) for us in (10.0, 1000.0)
    ]
    found = evidence.lengths(study_of(*waits))
    assert [one.excess_ns for one in found] == [pytest.approx(300)] * 2
    assert [one.error for one in found] == [pytest.approx(0.03), pytest.approx(0.0003)]
    one = goal(goals(study_of(*waits), None), "known length")
    assert one.met is False
    assert "1 of 2 lengths; the worst is 10" in one.found


def test_on_a_gpu_the_longest_spin_sets_the_scale() -> None:
    """All are 5 % longer than asked for: they are proportional, which is what can be known."""
    waits = [
        reading("length", f"{us}", "esbench", [[us * 1.05] * 3], expected_ns=us * 1e3)
        for us in (10.0, 1000.0)
    ]
    found = study_of(*waits, device="cuda")
    assert [one.error for one in evidence.lengths(found)] == [pytest.approx(0)] * 2
    assert goal(goals(found, None), "known length").met is True


def test_the_variation_of_fresh_processes_is_that_of_their_medians() -> None:
    """Standard deviation with n - 1, by the mean: of 9, 10 and 11 it is a tenth."""
    rows = [reading("replicates", "k", f"process {us}", [[us, us, 100.0]]) for us in (9.0, 10.0, 11.0)]
    (found,) = evidence.replicates(study_of(*rows))
    assert found.variation == pytest.approx(0.1)
    assert goal(goals(study_of(*rows), None), "fresh processes").met is False


def test_the_time_outside_measuring_is_of_the_newest_quick_run_on_this_device() -> None:
    """Not of another suite, another device, or one that does not say."""
    runs = [
        run_that_spent("2", {"rounds": 97.0, "other": 3.0}),
        run_that_spent("1", {"rounds": 1.0, "other": 1.0}),
        run_that_spent("3", {}),
        run_that_spent("4", {"other": 1.0}, suite="readme"),
        run_that_spent("5", {"other": 1.0}, device="Another"),
    ]
    newest = evidence.newest_quick_run(WHOLE, runs)
    assert newest is runs[0]
    one = goal(goals(WHOLE, newest), "quick run")
    assert (one.found, one.met) == ("3.00 %", True)
    assert goal(goals(WHOLE, runs[1]), "quick run").met is False
    assert "| other" in accuracy_page([WHOLE], runs)


def test_a_sampler_that_slows_a_kernel_down_is_shown() -> None:
    """By the ratio inside rounds; with one of the two alone there is nothing to compare."""
    without = reading("sampler", "k", "not sampled", [[100.0] * 3] * ROUNDS)
    with_it = reading("sampler", "k", "sampled", [[103.0] * 3] * ROUNDS)
    assert "+3.00" in accuracy_page([study_of(without, with_it)], [])
    assert evidence.sampled(study_of(without)) == []
