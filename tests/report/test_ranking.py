"""Effective members per millisecond: who comes first, and the tables that say so."""

import math

import msgspec
import pytest
from scipy.special import stdtrit

from esbench.report.analysis.quality import Part
from esbench.report.analysis.ranking import dense, rankings
from esbench.report.site import console_tables
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import ranking_section, ranking_sections, rate_text
from esbench.schema import Row, Skipped
from esbench.units import format_number
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import (
    CORES,
    FLIPPED,
    HADAMARD,
    LOW_RANK,
    ORTHOGONAL,
    QUALITY_OF_LAW,
    SPARSE,
    SQUARE,
    cell,
    figure,
    metric,
    named,
    one_ranking,
    rows,
    with_effective,
)
from tests.synthetic import BASE, DENSE, NAIVE, linear, time_row


def test_order_is_by_effective_members_per_millisecond() -> None:
    """The best comes first, neither the fastest nor the one that keeps most; who has no number comes last."""
    found = one_ranking(ranking_cases.run()).of(SQUARE)
    assert [one.variant for one in found] == [
        HADAMARD,
        LOW_RANK,
        CORES,
        FLIPPED,
        DENSE,
        SPARSE,
        BASE,
        NAIVE,
    ]
    assert found[0].rate == pytest.approx(1024 / 5, rel=1e-3)
    assert found[0].times(dense(found)) == pytest.approx(40, rel=1e-3)
    assert found[3].share == pytest.approx(1 / (1 + 65 / 4), rel=1e-3)


def test_headline_says_what_stands_behind_the_rate() -> None:
    """A row has its rate, its multiple of dense noise, n_eff with its interval, kappa, time and memory."""
    section = named(ranking_cases.run(), "per ms")
    assert section.title == "Linear (64, 64): n_eff per ms"
    assert list(section.blocks[0].frame.loc["FlippedLinear"]) == [
        "14.8",
        "2.90x",
        "59.4",
        "closed form",
        "5.80",
        "65.0",
        "4.00",
        "4.00x",
        "0.100",
        "1.10",
    ]
    assert section.conditions == "float32, 1024 x 1 (members x repeats)."


def test_row_without_figures_carries_its_reason() -> None:
    """Out of memory, or of no quality by nature, a variant's row has its reason once and no number."""
    for what in ("per ms", "quality of the gradient"):
        section = named(ranking_cases.run(), what)
        assert list(section.blocks[0].frame.loc["SparsePerturbedLinear(k=1)"])[:2] == [
            "out of memory [1]",
            "",
        ]
        assert cell(section, "Base", section.blocks[0].frame.columns[0]) == "a plain layer draws no noise [2]"
        assert section.footnotes[0] == "[1] unavailable: out of memory: tried to allocate 9 GB"


def test_failed_quality_hides_its_numbers() -> None:
    """A variant whose quality failed has no rate, whatever was stored of it."""
    failed = Skipped(variant=HADAMARD, case=SQUARE, phase="quality", status="failed", reason="NaN")
    run = ranking_cases.run([*rows(), failed])
    assert one_ranking(run).of(SQUARE)[0].variant == LOW_RANK
    for what, column in (("per ms", "n_eff / ms"), ("quality of", "kappa")):
        section = named(run, what)
        assert cell(section, "HadamardLinear", column).startswith("failed [")
        assert any(note.endswith("failed: NaN") for note in section.footnotes)


def test_reason_of_one_figure_stands_in_its_cell() -> None:
    """A figure that cannot be had leaves the others of its row, and no other method's table shows it."""
    alone = Skipped(
        variant=HADAMARD,
        case=SQUARE,
        phase="quality",
        status="unavailable",
        reason="one layer",
        method="layers",
    )
    gone = {"correlation", "noise_bytes"}
    found = [row for row in rows() if not (row.variant == HADAMARD and metric(row) in gone)]
    run = ranking_cases.run([*found, alone])
    section = named(run, "quality of")
    assert cell(section, "HadamardLinear", "kappa") == "0"
    assert cell(section, "HadamardLinear", "correlation of layers").startswith("one layer [")
    assert cell(named(run, "per ms"), "HadamardLinear", "noise (MB)") == "-"


def test_interval_without_an_upper_end() -> None:
    """One replicate below 0 takes part: there is a number, and its interval says what it is at least.

    The shares have a mean of 0.2, a standard error of 0.1 and t = 2.776: 1024 / 0.478 is the lower end.
    """
    run = with_effective(*[1024 / share for share in (-0.1, 0.5, 0.3, 0.2, 0.1)])
    section = named(run, "per ms")
    assert cell(section, "HadamardLinear", "n_eff") == "5120"
    assert cell(section, "HadamardLinear", "95 % interval") == "at least 2144"


def test_n_eff_that_is_no_number_ranks_nobody() -> None:
    """Its row says why instead of a rate, which is never below 0, and keeps its time."""
    run = with_effective(-3.0, -3.0)
    assert all(one.rate is None or one.rate > 0 for one in one_ranking(run).of(SQUARE))
    section = named(run, "per ms")
    assert "[" in cell(section, "HadamardLinear", "n_eff / ms")
    assert cell(section, "HadamardLinear", "step (ms)") == "5.00"
    assert any("which is impossible" in note for note in section.footnotes)


def test_cosine_of_1_within_its_error_ranks_by_its_lower_end() -> None:
    """A fit that sets no upper end is worth at least so much, and no less for being so good."""
    shares = (-0.02, 0.02, -0.02, 0.02)
    run = with_effective(*[1024 / share for share in shares])
    assert one_ranking(run).of(SQUARE)[0].variant == HADAMARD
    section = named(run, "per ms")
    least = 1024 / (float(stdtrit(3, 0.975)) * 0.02 / 3**0.5)
    assert cell(section, "HadamardLinear", "n_eff") == f"at least {format_number(least)}"
    assert cell(section, "HadamardLinear", "n_eff / ms") == f"at least {format_number(least / 5)}"


@pytest.mark.parametrize("members", [4096, 16384, 65536])
def test_exact_estimate_stands_before_all_others(members: int) -> None:
    """Whatever its time and the noise of its fit, and at every population; its row has words and its time."""
    case = linear(64, members=members)
    run = ranking_cases.run([*rows(case), *ranking_cases.orthogonal(case)])
    first = one_ranking(run).of(case)[0]
    assert (first.variant, first.rate) == (ORTHOGONAL, math.inf)
    section = named(run, "per ms")
    shown = list(section.blocks[0].frame.loc["OrthogonalLinear"])[:5]
    assert shown == ["exact", "exact", "exact", "closed form", "exact"]
    assert cell(section, "OrthogonalLinear", "step (ms)") == "50.0"
    assert any(note.startswith("exact: 1 + kappa n / d is 0") for note in section.footnotes)
    assert cell(section, "HadamardLinear", "rate, x Perturbed") == "40.0x"


def test_exact_estimates_stand_in_the_order_of_their_time() -> None:
    """And are not told apart where their times are not."""
    case = linear(64, members=4096)
    faster = [
        msgspec.structs.replace(row, variant=SPARSE)
        for row in ranking_cases.orthogonal(case)
        if metric(row) != "latency_ns"
    ]
    slow = ranking_cases.orthogonal(case)
    for ms, alike in ((40.0, ""), (50.0, "tied with OrthogonalLinear")):
        run = ranking_cases.run([*slow, *faster, time_row(SPARSE, case, *[ms] * 6, phase="step")])
        found = one_ranking(run).of(case)
        assert {one.variant for one in found[:2]} == {ORTHOGONAL, SPARSE}
        assert found[0].step_ns == ms * 1e6
        assert found[0].tied_with(found).replace("SparsePerturbedLinear(k=1)", "OrthogonalLinear") == alike


def test_closed_form_counts_where_the_fit_does_not_contradict_it() -> None:
    """A noisy or a biased fit does not rank; one that says NO does, and so does one without a form."""
    other = [row for row in rows() if not (row.variant == HADAMARD and metric(row) in QUALITY_OF_LAW)]

    def hadamard(*kappas: float) -> list[Row]:
        worths = [ranking_cases.effective(SQUARE, one) for one in kappas]
        return [
            figure(HADAMARD, SQUARE, "kappa", "linear fitness", *kappas),
            figure(HADAMARD, SQUARE, "kappa", "closed form", 2.0),
            figure(HADAMARD, SQUARE, "effective_members", "linear fitness", *worths),
        ]

    for kappas, counts in (((1.0, 2.8, 1.4, 2.6), 2.0), ((3.0, 3.1, 2.9, 3.0), 3.0)):
        section = named(ranking_cases.run([*other, *hadamard(*kappas)]), "per ms")
        worth = ranking_cases.effective(SQUARE, counts)
        assert cell(section, "HadamardLinear", "kappa") == format_number(counts)
        assert cell(section, "HadamardLinear", "n_eff") == format_number(worth)
        is_form = cell(section, "HadamardLinear", "95 % interval") == "closed form"
        assert is_form == (counts == 2)
    found = ranking_cases.without_forms([*other, *hadamard(1.0, 2.8, 1.4, 2.6)])
    assert cell(named(ranking_cases.run(found), "per ms"), "HadamardLinear", "kappa") == "1.9"


def test_layer_in_a_network_is_ranked_by_the_networks_size() -> None:
    """What its members repeat is less of a larger network's noise: n_eff has kappa n / d with its d."""
    ranking = one_ranking(ranking_cases.run())
    for found in (ranking, one_ranking(ranking_cases.run(ranking_cases.without_forms(rows())))):
        worths = {one.variant: one.effective for one in found.of(SQUARE, Part(4096, 40960))}
        flipped = worths[FLIPPED]
        assert flipped is not None
        assert flipped.value == pytest.approx(1024 / (1 + 65 * 1024 / 40960), rel=1e-3)
    assert [one.variant for one in ranking.of(SQUARE, Part(4096, 4096000))][:2] == [FLIPPED, CORES]


def test_step_that_failed_has_no_rate() -> None:
    """A variant with a quality and without a step keeps its quality, and its reason stands for the rate."""
    slow = Skipped(variant=HADAMARD, case=SQUARE, phase="step", status="unavailable", reason="no room")
    found = [row for row in rows() if not (row.variant == HADAMARD and row.phase == "step")]
    section = named(ranking_cases.run([*found, slow]), "per ms")
    assert cell(section, "HadamardLinear", "n_eff / ms") == "no room [2]"
    assert cell(section, "HadamardLinear", "n_eff") == "1024"


def test_dense_noise_without_a_rate_is_no_hole() -> None:
    """No multiple of dense noise that the run holds has a reason: its own, or the choice that was made."""
    gone = Skipped(variant=DENSE, case=SQUARE, phase="step", status="unavailable", reason="no room")
    found = [row for row in rows() if not (row.variant == DENSE and row.phase == "step")]
    section = named(ranking_cases.run([*found, gone]), "per ms")
    assert cell(section, "HadamardLinear", "rate, x Perturbed").startswith("- [")
    assert any(note.endswith("PerturbedLinear has no rate: no room") for note in section.footnotes)
    ranking = one_ranking(ranking_cases.run())
    chosen = [one for one in ranking.of(SQUARE) if one.variant == HADAMARD]
    section = ranking_section(ranking, SQUARE, chosen)
    assert cell(section, "HadamardLinear", "rate, x Perturbed").startswith("- [")
    assert section.footnotes == ("[1] PerturbedLinear is not among those that were asked for",)


def test_a_single_round_is_no_multiple() -> None:
    """A rate may rest on one round, a multiple of it not: neither of the row nor of its reference."""
    for single, shown in ((DENSE, ("- [", "- [")), (HADAMARD, ("- [", "33.3x"))):
        other = [row for row in rows() if not (row.variant == single and metric(row) == "latency_ns")]
        alone = time_row(single, SQUARE, ranking_cases.STEPS[single], phase="step")
        run = ranking_cases.run([*other, msgspec.structs.replace(alone, stop="budget of 1 s")])
        section = named(run, "per ms")
        for variant, text in zip(("HadamardLinear", "LowRankLinear(rank=1)"), shown, strict=True):
            assert cell(section, variant, "rate, x Perturbed").startswith(text)
        name = single.label("Linear")
        words = f"no multiple: {name} has a single round of its step (budget of 1 s)"
        assert any(note.endswith(words) for note in section.footnotes)
        assert cell(section, name, "step (ms)").endswith("]")
        assert any("1 round of the step: too few for an interval" in note for note in section.footnotes)


def test_gains_are_claimed_as_far_as_replicates_bear_them_out() -> None:
    """A form may say many times n; where the replicates know no upper end theirs is what it is at least."""
    case = linear(64, members=5000)
    kappa = -0.95 * 4096 / 5000
    unsure = [1 / off for off in (-1e-5, 3e-5, -1e-5, 3e-5)]
    sure = [ranking_cases.effective(case, kappa)] * 4
    for worths, is_bound in ((unsure, True), (sure, False)):
        found = [
            time_row(ORTHOGONAL, case, *[50.0] * 6, phase="step"),
            figure(ORTHOGONAL, case, "kappa", "linear fitness", kappa, kappa, kappa, kappa),
            figure(ORTHOGONAL, case, "kappa", "closed form", kappa),
            figure(ORTHOGONAL, case, "effective_members", "linear fitness", *worths),
        ]
        (first,) = one_ranking(ranking_cases.run(found)).of(case)
        assert first.effective is not None
        assert first.effective.is_bound == is_bound
        assert rate_text(first).startswith("at least ") == is_bound
        assert (first.effective.value < ranking_cases.effective(case, kappa)) == is_bound
        run = ranking_cases.run([*found, *rows(case)])
        shown = cell(named(run, "per ms"), "OrthogonalLinear", "rate, x Perturbed")
        assert shown.startswith("at least ") == is_bound


def test_first_that_is_not_told_apart_says_so() -> None:
    """Those whose interval reaches the first's are named below the table; without any nothing is said."""
    steps = {**ranking_cases.STEPS, LOW_RANK: 5.0005, CORES: 4.5}
    near = ranking_cases.without_forms(rows(steps=steps))
    section = named(ranking_cases.run(near), "per ms")
    assert section.footnotes[-1] == "first, HadamardLinear: tied with LowRankLinear(rank=1)"
    section = named(ranking_cases.run(), "per ms")
    assert not any("tied" in note for note in section.footnotes)


def test_interval_of_the_step_takes_part() -> None:
    """Times that lie across each other tell nobody apart, however sharp n_eff is."""
    steady, wide = (
        [time_row(one, SQUARE, *times, phase="step")]
        for one, times in ((HADAMARD, [5.0] * 8), (LOW_RANK, [4, 5, 5, 6, 6, 6, 7, 8]))
    )
    other = [
        row
        for row in rows()
        if not (metric(row) == "latency_ns" and row.phase == "step" and row.variant in {HADAMARD, LOW_RANK})
    ]
    found = one_ranking(ranking_cases.run([*other, *steady, *wide])).of(SQUARE)
    assert found[0].tied_with(found) == "tied with LowRankLinear(rank=1)"


def test_more_than_all_members_is_not_claimed_within_the_error() -> None:
    """Above 100 % it is about 100 % where the interval holds that, and the figure where it does not."""
    for spread, shown in ((0.3, "about 100"), (0.001, "142.9")):
        run = with_effective(*[1024 / (0.7 + off) for off in (-spread, spread, -spread, spread)])
        assert cell(named(run, "per ms"), "HadamardLinear", "n_eff / n (%)") == shown


def test_row_that_stands_twice_counts_once() -> None:
    """Of a quality that a run holds again with another figure the first counts, and the page says so."""
    again = figure(HADAMARD, SQUARE, "kappa", "linear fitness", 7.0)
    same = [row for row in rows() if row.variant == FLIPPED and metric(row) == "kappa"]
    section = named(ranking_cases.run([*rows(), again, *same]), "quality of")
    assert cell(section, "HadamardLinear", "kappa") == "0"
    assert section.footnotes[-1].endswith("the first are used: HadamardLinear kappa (linear fitness)")


def test_without_dense_noise_there_is_no_multiple_of_it() -> None:
    """Where the run holds no dense noise, its multiples are absent and the order is the same."""
    run = ranking_cases.run([row for row in rows() if row.variant != DENSE])
    section = named(run, "per ms")
    assert cell(section, "HadamardLinear", "rate, x Perturbed") == "-"
    assert "-: not in this run" in section.footnotes
    assert one_ranking(run).of(SQUARE)[0].variant == HADAMARD


def test_each_method_and_case_has_its_own_ranking() -> None:
    """Eager calls and graphs are ranked apart; so are shapes; one without any rate has no ranking."""
    wide = linear(128)
    graphs: list[Row] = [
        msgspec.structs.replace(row, method="graph")
        for row in rows()
        if row.phase == "step" and not isinstance(row, Skipped)
    ]
    run = ranking_cases.run([*rows(), *rows(wide), *graphs, time_row(DENSE, linear(32), 1.0, phase="step")])
    assert [(one.grid.method, one.cases) for one in rankings(run, "Linear")] == [
        ("host", [SQUARE, wide]),
        ("graph", [SQUARE]),
    ]


def test_terminal_shows_the_largest_population_that_most_could_do() -> None:
    """Of a sweep the terminal shows one ranking for each shape, the page all of them."""
    cases = [linear(64, members=members) for members in (64, 256, 1024)]
    alone = [row for row in rows(cases[-1]) if row.variant in {DENSE, BASE}]
    none = [synthetic.skipped(one, cases[-1], "no room") for one in (FLIPPED, CORES, HADAMARD, LOW_RANK)]
    run = ranking_cases.run([*rows(cases[0]), *rows(cases[1]), *alone, *none])
    assert one_ranking(run).largest == [cases[1]]
    (shown,) = ranking_sections(run, "Linear")
    assert "members=256: n_eff per ms" in shown.title
    assert shown.text().rstrip() in console_tables(run)
    rest = [section for section in quality_sections(run, "Linear") if "per ms" in section.title]
    assert len(rest) == 3


def test_run_without_quality_has_no_ranking() -> None:
    """Times alone are not ranked, and a run without a quality has no such section."""
    run = synthetic.run(synthetic.three(SQUARE))
    assert rankings(run, "Linear") == []
    assert quality_sections(run, "Linear") == []
