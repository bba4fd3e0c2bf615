"""The rules of other tools on the launches of a replicate, and the parts of the variance of replicates."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esbench.errors import UserError
from esbench.gate.records import Replicate, Settings, Timed
from esbench.report.gate_arrays import Floats, Logs, Pair, arrays, pairs, variance
from esbench.report.rules import LEVELS, RULES, Record, records
from esbench.report.variances import Split, pooled, splits
from tests.gate_study_cases import CELLS, LAUNCHES, ROUNDS, replicates, study_of, timed

TRIM = Settings().trim


def of(rule: str, *found: Pair) -> Record:
    """Return what the one rule whose name begins so makes of pairs."""
    (record,) = (one for one in records(found) if one.rule.startswith(rule))
    return record


def pair(base: Floats, head: Floats, replicate: int = 0) -> Pair:
    """Make the launches of a cell."""
    return Pair(replicate, np.asarray(base, float), np.asarray(head, float))


@pytest.mark.parametrize(
    ("rule", "finds"),
    [
        ("ratio of medians > 1.02", (0.03, 0.05, 0.1)),
        ("ratio of medians > 1.05", (0.1,)),
        ("ratio of medians > 1.10", ()),
        ("Mann-Whitney", (0.005, 0.01, 0.02, 0.03, 0.05, 0.1)),
        ("asv", ()),
        ("pytest-benchmark", (0.1,)),
        ("criterion", (0.02, 0.03, 0.05, 0.1)),
        ("github-action-benchmark", ()),
    ],
)
def test_a_rule_finds_what_lies_beyond_its_threshold(rule: str, finds: tuple[float, ...]) -> None:
    """In launches that hardly vary, all of that and nothing else."""
    steady = 1e5 * (1 + 1e-6 * np.arange(40.0))
    found = of(rule, pair(steady, steady * (1 - 1e-7)))
    below = {slower: share for slower, share in found.flagged.items() if slower not in finds}
    # Swapped, the base is slower by 1e-7: a threshold of just the level is crossed on that side alone.
    assert {found.flagged[slower] for slower in finds} <= {1.0}
    assert set(below.values()) <= {0.0, 0.5}
    assert found.flagged[0.0] == 0.0
    assert found.alarmed == 0


@pytest.mark.parametrize(
    ("slower", "asv", "action"),
    [(1.0, True, False), (0.12, True, False), (0.08, False, False), (1.2, True, True)],
)
def test_the_coarse_rules_find_what_is_large(slower: float, *, asv: bool, action: bool) -> None:
    """As measured; swapped, head is faster and nothing is found."""
    rng = np.random.default_rng(0)
    base, head = rng.normal(100, 1, (2, 50))
    found = pair(base, head * (1 + slower))
    assert of("asv", found).flagged[0.0] == 0.5 * asv
    assert of("github-action-benchmark", found).flagged[0.0] == 0.5 * action


def test_asv_needs_both_the_factor_and_the_test() -> None:
    """Medians that are far apart by chance are no finding."""
    found = pair(np.array([1.0, 1.0, 1.0, 9.0, 9.0]), np.array([0.5, 0.5, 1.2, 9.0, 9.5]))
    assert of("ratio of medians > 1.10", found).flagged[0.0] == 0.5
    assert of("asv", found).flagged[0.0] == 0.0


def test_the_rank_test_is_that_of_each_pair_by_itself() -> None:
    """One-sided, at every level, however many launches there were."""
    rng = np.random.default_rng(2)
    found = [
        pair(base, head, n)
        for n in range(30)
        for base, head in [rng.normal(100, 1, (2, 10 + 3 * (n % 2))).round(1)]
    ]
    record = of("Mann-Whitney", *found)
    for slower in LEVELS:
        flags = [
            stats.mannwhitneyu(head * (1 + slower), base, alternative="greater", method="asymptotic").pvalue
            < 0.05
            for one in found
            for base, head in ((one.base, one.head), (one.head, one.base))
        ]
        assert record.flagged[slower] == pytest.approx(np.mean(flags))
        assert record.comparisons == len(flags)


def test_launches_of_one_process_are_not_independent() -> None:
    """Processes that differ are differences to a rank test, far more often than its level says."""
    study = study_of(*replicates(16, between=0.003))
    record = of("Mann-Whitney", *pairs(study, CELLS))
    assert record.flagged[0.0] > 0.2
    assert record.alarmed / record.suites > 0.7
    alike = np.random.default_rng(4).normal(100, 1, (300, 2, 40))
    record = of("Mann-Whitney", *(pair(*arms) for arms in alike))
    assert record.flagged[0.0] == pytest.approx(0.05, abs=0.02)


def test_a_bootstrap_knows_how_uncertain_a_mean_is() -> None:
    """Its lower bound is that of a normal approximation, within what resamples and approximation are off."""
    rng = np.random.default_rng(3)
    base, head = rng.normal(100, 10, (2, 400))
    head *= 1.012
    error = math.hypot(*(np.std(one) / np.mean(one) / math.sqrt(400) for one in (base, head)))
    ratio = np.mean(head) / np.mean(base)
    for share, expected in ((1.96 + 0.3, 0.5), (1.96 - 0.3, 0.0)):
        moved = head * 1.01 / ratio * (1 + share * error)
        assert of("criterion", pair(base, moved)).flagged[0.0] == expected


def test_a_suite_is_all_cells_of_a_replicate_one_way_round() -> None:
    """One cell of three that is slower in one replicate of two makes one suite of four an alarm."""
    same = 100 + 0.001 * np.arange(20.0)
    found = [pair(same, same * (1.1 if (n, cell) == (1, 2) else 1), n) for n in (0, 1) for cell in range(3)]
    record = of("ratio of medians > 1.02", *found)
    assert (record.comparisons, record.suites, record.alarmed) == (12, 4, 1)
    assert record.flagged[0.0] == pytest.approx(1 / 12)


def test_every_launch_of_a_study_is_judged() -> None:
    """What takes the caches back is not kept to begin with. Replicates of a gate are left out."""
    found = list(pairs(study_of(*replicates(2)), CELLS[:1]))
    assert [one.replicate for one in found] == [0, 1]
    assert {len(one.base) for one in found} == {2 * ROUNDS * LAUNCHES}


@pytest.mark.parametrize("launches", [1, 2])
def test_hardly_any_launches_are_judged_without_a_word(launches: int) -> None:
    """No rank tells anything where there is one, or all are alike."""
    found = pair(np.full(launches, 5.0), np.full(launches, 5.0))
    assert {of(name, found).flagged[0.0] for name in RULES} == {0.0}
    assert records([]) == []


@pytest.mark.parametrize(("between", "share"), [(0.0, 0.0), (0.002, 0.60), (0.02, 0.99)])
def test_the_share_of_the_processes_is_found(between: float, share: float) -> None:
    """Of replicates whose spread is known: within, 1e-4 over twenty rounds; between, that of two arms."""
    cells = {f"cell {number}": {"between": between, "within": 0.01} for number in range(12)}
    split = splits(arrays(study_of(*replicates(30, cells, 5)), TRIM).cells)
    assert len(split) == 12
    assert pooled(split) == pytest.approx(share, abs=0.08)
    assert np.mean([one.within for one in split]) == pytest.approx(
        1e-4 / 20 * 1.19, rel=0.1
    )  # 1.19: of a quarter trimmed


@given(
    rows=st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=5),
    within=st.floats(0, 1),
)
def test_a_share_is_one(rows: list[list[float]], within: float) -> None:
    """Between nothing and all of the variance, and parts that sum to it where the rounds explain no more."""
    logs = np.array(rows)
    for one in splits(Logs(tuple(map(str, range(len(rows)))), logs, np.full_like(logs, within), logs)):
        assert 0 <= one.share <= 1
        assert one.total == pytest.approx(np.var(logs[int(one.cell)], ddof=1))
        assert one.between == pytest.approx(max(0.0, one.total - within))


def test_shares_are_pooled_without_a_floor() -> None:
    """What is negative by chance counts, or noise alone would look like processes."""
    assert pooled([Split("a", 1.0, 1.5), Split("b", 1.0, 0.5)]) == 0.0
    assert pooled([]) == pooled([Split("a", 0.0, 0.0)]) == 0.0


@pytest.mark.parametrize("trim", [0.0, 0.1, 0.25])
def test_the_variance_of_a_trimmed_mean_is_known_from_its_values(trim: float) -> None:
    """On average over samples it is what trimmed means really vary by, outliers or none."""
    rng = np.random.default_rng(6)
    for draw in (rng.normal(0, 1, (2000, 20)), rng.standard_t(5, (2000, 20))):
        really = np.var([stats.trim_mean(one, trim) for one in draw])
        assert np.mean([variance(one, trim) for one in draw]) == pytest.approx(really, rel=0.15)
    assert variance([0.0, 1.0], trim) == 0.25
    assert math.isnan(variance([1.0], trim))


def test_too_few_rounds_or_replicates_split_nothing() -> None:
    """A variance that cannot be known is none."""
    assert splits(arrays(study_of(*replicates(1)), TRIM).cells) == []
    rows = np.zeros((1, 3))
    assert splits(Logs(("a",), rows, np.full_like(rows, np.nan), rows)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: {"head": cell.head[:-1]},
        lambda cell: {"first": cell.first[:-1]},
        lambda cell: {"base": cell.base[2:], "head": cell.head[2:]},
        lambda _: {"base": (), "head": (), "first": ()},
        lambda cell: {"head": ((), *cell.head[1:])},
    ],
    ids=["a visit less", "a round unnamed", "a round less", "nothing", "an empty visit"],
)
def test_a_replicate_whose_visits_do_not_pair_is_refused(change: Callable[[Timed], dict[str, Any]]) -> None:
    """With the file, the replicate and the cell."""
    cell = timed(np.random.default_rng(0), CELLS[0])
    broken = msgspec.structs.replace(cell, **change(cell))
    study = study_of(Replicate(stage="study", number=9, cells=(broken,), wall_s=1.0))
    with pytest.raises(UserError, match=r"study: replicate 9 of Variant0 .*twice in each of its rounds"):
        arrays(study, TRIM)
