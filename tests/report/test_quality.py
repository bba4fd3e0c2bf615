"""Estimates of kappa and n_eff from replicates, and the rankings computed from them."""

import math

import msgspec
import pytest
from scipy.stats import t as student

from esbench.report.analysis.comparison import compare
from esbench.report.analysis.quality import (
    LARGEST_GAIN,
    Estimate,
    Part,
    agrees,
    estimate,
    n_eff_by_law,
    n_eff_of_replicates,
    percent_of_members,
)
from esbench.report.analysis.ranking import rankings, tied
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import ranking_sections
from esbench.schema import Measurement, Row
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import (
    CORES,
    FLIPPED,
    HADAMARD,
    LOW_RANK,
    ORTHOGONAL,
    SPARSE,
    SQUARE,
    effective,
    one_ranking,
    qualities,
    quality_row,
    rows,
    with_effective,
)
from tests.report.table_examples import without
from tests.synthetic import BASE, DENSE, linear, skipped, time_row


def test_interval_of_a_mean() -> None:
    """The interval is Student's t times the standard error; one value has none, infinite ones no estimate."""
    result = estimate([1.0, 2.0, 3.0])
    assert result is not None
    assert (result.mean, result.replicates) == (2.0, 3)
    assert result.half == result.reach == pytest.approx(4.3027 / 3**0.5, rel=1e-4)  # Student's t from a table
    assert estimate([5.0]) == Estimate(5.0, None, 1)
    assert Estimate(5.0, None, 1).reach == 0.0
    assert estimate([0.925] * 3) == Estimate(0.925, 0.0, 3)
    for values in ([], [math.nan], [1.0, math.inf]):
        assert estimate(values) is None


def test_n_eff_of_noisy_replicates() -> None:
    """Negative replicates are used; if the cosine is 1 within its error, only the lower bound is known."""
    n_eff = n_eff_of_replicates([100 / share for share in (-0.1, 0.5, 0.3, 0.2, 0.1)], 100)
    assert n_eff.value == pytest.approx(500)
    assert 100 < n_eff.low < n_eff.value
    assert n_eff.high == math.inf
    n_eff = n_eff_of_replicates([50.0], 100)
    assert (n_eff.value, n_eff.low, n_eff.high, n_eff.replicates) == (50.0, 50.0, 50.0, 1)
    error = float(student.ppf(0.975, 3)) * (1 / 120) ** 0.5
    for values, least in (
        ([100 / share for share in (0.2, -0.2, 0.1, -0.1)], 100 / error),
        ([1.01 * LARGEST_GAIN * 100] * 3, LARGEST_GAIN * 100),
    ):
        n_eff = n_eff_of_replicates(values, 100)
        assert (n_eff.is_bound, n_eff.is_exact, n_eff.high) == (True, False, math.inf)
        assert n_eff.value == n_eff.low == pytest.approx(least)
        assert percent_of_members(n_eff, 100) == "more than dense"
        assert percent_of_members(n_eff, 10**6).startswith("at least ")
    for values, words in (
        ([-50.0, -60.0, -55.0], "below 0 by more than its error, which is impossible"),
        ([-50.0], "is impossible"),
        ([0.0, 1.0], "a replicate that is 0 or not finite"),
        ([math.nan, 1.0], "a replicate that is 0 or not finite"),
        ([], "no replicate"),
    ):
        with pytest.raises(ValueError, match=words):
            n_eff_of_replicates(values, 100)


def test_n_eff_by_the_closed_form() -> None:
    """The law's value has no interval; it is exact if 1 + kappa n / d is 0, and None below."""
    n_eff = n_eff_by_law(3.0, 100, 1000)
    assert n_eff is not None
    assert n_eff.value == n_eff.low == n_eff.high == pytest.approx(100 / 1.3)
    assert n_eff.replicates == 0
    for kappa, members in ((-1.0, 4096), (-4095 / 16383, 16384), (-4095 / 65535, 65536)):
        n_eff = n_eff_by_law(kappa, members, 4096)
        assert n_eff is not None
        assert n_eff.is_exact
        assert percent_of_members(n_eff, members) == "exact"
    assert n_eff_by_law(-1.0, 8192, 4096) is None
    n_eff = n_eff_by_law(-1.0, 4095, 4096)
    assert n_eff is not None
    assert n_eff.value == pytest.approx(4095 * 4096)


def test_fitted_kappa_beside_its_closed_form() -> None:
    """A fit agrees within 5 % or 0.02; NO if its interval, with unseen pairs, excludes agreement."""
    for mean, half, closed, verdict in (
        (10.4, 0.1, 10.0, "yes"),
        (10.6, 0.05, 10.0, "NO"),
        (10.6, 0.2, 10.0, "unclear"),
        (0.019, 0.001, 0.0, "yes"),
        (0.021, None, 0.0, "NO"),
        (-0.03, 0.02, 0.0, "unclear"),
        (-0.9, 0.07, 0.0, "unclear"),
        (0.9, 0.07, 0.0, "NO"),
    ):
        assert agrees(Estimate(mean, half, 4), closed) == verdict, (mean, half, closed)
    below = Estimate(-0.9, 0.07, 5)
    assert [agrees(below, 0.0, unseen) for unseen in (1.0, 0.5)] == ["unclear", "NO"]


def test_qualities_of_two_runs_are_compared() -> None:
    """Qualities are compared by the values in tables: n_eff by reciprocals, others by their mean."""
    run = ranking_cases.run()
    for metric, value, before in (("stable_rank", (3.0,), 17.5), ("kappa", (0.0, 0.0, 3.0), 0.0)):
        method = "one perturbation" if metric == "stable_rank" else "linear fitness"
        key = (DENSE, metric, method)
        others = [row for row in rows() if (row.variant, getattr(row, "metric", ""), row.method) != key]
        changed = quality_row(DENSE, SQUARE, metric, method, *value)
        (pair,) = compare(run, ranking_cases.run([*others, changed])).counts
        assert pair.key.metric == metric
        assert [pair.a, pair.b] == pytest.approx([before, sum(value) / len(value)])
    counts = compare(run, with_effective(100.0, 100.0, 400.0)).counts
    (pair,) = (pair for pair in counts if pair.key.metric == "effective_members")
    assert pair.a == pytest.approx(1024)
    assert pair.b == pytest.approx(3 / (2 / 100 + 1 / 400))


def test_exact_estimates_are_before_all_others() -> None:
    """Exact estimates are first at every population, for any time or fit, ordered by time."""
    for members in (4096, 16384, 65536):
        case = linear(64, members=members)
        first = one_ranking(ranking_cases.run([*rows(case), *ranking_cases.orthogonal(case)])).of(case)[0]
        assert (first.variant, first.rate) == (ORTHOGONAL, math.inf)
    case = linear(64, members=4096)
    slow = ranking_cases.orthogonal(case)
    others = [msgspec.structs.replace(row, variant=SPARSE) for row in without(slow, ORTHOGONAL, "latency_ns")]
    for ms, is_tied in ((40.0, False), (50.0, True)):
        ranked = one_ranking(
            ranking_cases.run([*slow, *others, time_row(SPARSE, case, *[ms] * 6, phase="step")])
        ).of(case)
        assert {entry.variant for entry in ranked[:2]} == {ORTHOGONAL, SPARSE}
        assert ranked[0].step_ns == ms * 1e6
        assert bool(tied(ranked[0], ranked)) == is_tied


def test_the_closed_form_is_used_unless_the_fit_contradicts_it() -> None:
    """The ranking uses a fit only if it contradicts the closed form, or if there is none."""
    others = without(without(rows(), HADAMARD, "kappa"), HADAMARD, "effective_members")

    def hadamard(*kappas: float) -> list[Row]:
        return [
            quality_row(HADAMARD, SQUARE, "kappa", "linear fitness", *kappas),
            quality_row(HADAMARD, SQUARE, "kappa", "closed form", 2.0),
            quality_row(
                HADAMARD,
                SQUARE,
                "effective_members",
                "linear fitness",
                *[effective(SQUARE, kappa) for kappa in kappas],
            ),
        ]

    def law(measured_rows: list[Row]) -> tuple[float, float, int]:
        ranked = one_ranking(ranking_cases.run(measured_rows)).of(SQUARE)
        entry = next(entry for entry in ranked if entry.variant == HADAMARD)
        assert entry.kappa
        assert entry.effective
        return entry.kappa.mean, entry.effective.value, entry.effective.replicates

    noisy, apart = hadamard(1.0, 2.8, 1.4, 2.6), hadamard(3.0, 3.1, 2.9, 3.0)
    assert law([*others, *noisy]) == pytest.approx((2.0, effective(SQUARE, 2.0), 0))
    assert law([*others, *apart]) == pytest.approx((3.0, effective(SQUARE, 3.0), 4), rel=1e-3)
    assert law(ranking_cases.without_forms([*others, *noisy]))[0] == pytest.approx(1.95)


def test_a_layer_in_a_network_is_ranked_by_the_size_of_the_network() -> None:
    """n_eff of a layer uses kappa n / d with the d of the whole network, also without a closed form."""
    for stored in (rows(), ranking_cases.without_forms(rows())):
        ranked = one_ranking(ranking_cases.run(stored)).of(SQUARE, Part(4096, 40960))
        (flipped,) = [entry.effective for entry in ranked if entry.variant == FLIPPED]
        assert flipped
        assert flipped.value == pytest.approx(1024 / (1 + 65 * 1024 / 40960), rel=1e-3)


def test_the_interval_of_the_step_counts_for_ties() -> None:
    """Variants whose times overlap are tied, however narrow the interval of n_eff is."""
    others = without(without(rows(), HADAMARD, "latency_ns"), LOW_RANK, "latency_ns")
    steps = ((HADAMARD, [5.0] * 8), (LOW_RANK, [4, 5, 5, 6, 6, 6, 7, 8]))
    timed = [time_row(variant, SQUARE, *ms, phase="step") for variant, ms in steps]
    ranked = one_ranking(ranking_cases.run([*others, *timed])).of(SQUARE)
    assert [other.variant for other in tied(ranked[0], ranked)] == [LOW_RANK]


def test_each_method_and_case_has_its_own_ranking() -> None:
    """Eager calls and graphs are ranked apart, as are shapes; a case without a rate has no ranking."""
    wide = linear(128)
    measured = (row for row in rows() if isinstance(row, Measurement) and row.phase == "step")
    graphs = synthetic.replaced(measured, method="graph")
    run = ranking_cases.run([*rows(), *rows(wide), *graphs, time_row(DENSE, linear(32), 1.0, phase="step")])
    assert [(ranking.grid.method, ranking.cases) for ranking in rankings(run, "Linear")] == [
        ("host", [SQUARE, wide]),
        ("graph", [SQUARE]),
    ]
    run = synthetic.run(synthetic.three(SQUARE))
    assert rankings(run, "Linear") == []
    assert quality_sections(run, "Linear") == []


def test_the_terminal_shows_the_largest_population_at_which_most_variants_have_a_rate() -> None:
    """The terminal shows one ranking per shape of a sweep; the page shows all."""
    cases = [linear(64, members=members) for members in (64, 256, 1024)]
    alone = [row for row in rows(cases[-1]) if row.variant in {DENSE, BASE}]
    none = [skipped(variant, cases[-1], "no room") for variant in (FLIPPED, CORES, HADAMARD, LOW_RANK)]
    run = ranking_cases.run([*rows(cases[0]), *rows(cases[1]), *alone, *none])
    assert one_ranking(run).largest == [cases[1]]
    (shown,) = ranking_sections(run, "Linear")
    assert "members=256: n_eff per ms" in shown.title
    titles = [section.title for section in quality_sections(run, "Linear") if "per ms" in section.title]
    assert [title.partition(":")[0] for title in titles] == [
        f"Linear (64, 64) members={members}" for members in (64, 256, 1024)
    ]


def test_a_network_has_n_eff_of_a_linear_fitness_beside_that_at_sigma() -> None:
    """The last column is the quality law's n_eff, or a dash without kappa."""
    network = msgspec.structs.replace(SQUARE, operator="DigitsMLP")
    run = ranking_cases.run([*ranking_cases.digits(SQUARE), *qualities(FLIPPED, network, 12.0)])
    (table,) = [s.blocks[0].table for s in quality_sections(run, "DigitsMLP") if "trained" in s.title]
    cells = dict(zip(table.labels, table.texts(), strict=True))
    column = table.headings.index("n_eff, linear")
    assert cells["FlippedDigitsMLP"][column] == "256"
    assert cells["PerturbedDigitsMLP"][column] == "-"
