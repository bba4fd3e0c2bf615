"""Recommendations from stored runs: the run used, and the order. ``golden/examples.md`` has the texts."""

import ast

import msgspec

from esbench.report.analysis.ranking import Recommendation, nearest, rankings, recommend
from esbench.report.tables.console import warnings
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import best_schemes, ranking_sections
from esbench.report.tables.recommendation import answer, details, figures, training_code
from esbench.report.web import answers
from esbench.report.web.views import views
from esbench.schema import OUT_OF_TIME, Measurement, Phase, Run, RunEnd, Variant
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import (
    CORES,
    FLIPPED,
    HADAMARD,
    KAPPAS,
    SQUARE,
    one_ranking,
    orthogonal,
    rows,
)
from tests.report.table_examples import winner, without
from tests.synthetic import BASE, DENSE, linear, time_row, variant


def recommendation_of(
    run: Run, variants: set[Variant] | None = None, limit_bytes: float | None = None
) -> Recommendation:
    """Return the recommendation of a run for the usual case."""
    result = recommend([run], SQUARE, variants=variants, limit_bytes=limit_bytes)
    assert result is not None
    return result


def test_variants_without_time_are_counted_beside_the_answer() -> None:
    """The best of few measured variants may not be the best of all."""
    left_out = synthetic.skipped(variant("Other"), SQUARE, OUT_OF_TIME)
    measured = ranking_cases.run([*rows(), left_out])
    text = answer(recommendation_of(measured)).replace("\n", " ")
    count = len(recommendation_of(measured).ranked)
    assert f". Best of {count} measured variants; the time budget left out 1." in text
    assert "Best of" not in answer(recommendation_of(ranking_cases.run()))


def test_a_recommendation_has_the_ranking_of_the_tables() -> None:
    """Rows and values are those of the ranking, if requested; variants over a limit move to the end."""
    run = ranking_cases.run()
    (table,) = ranking_sections(run, "Linear")
    assert list(recommendation_of(run).variants) == one_ranking(run).of(SQUARE)
    assert details(recommendation_of(run)).startswith(table.text())
    assert [entry.variant for entry in recommendation_of(run, {FLIPPED, CORES}).variants] == [CORES, FLIPPED]
    assert [entry.variant for entry in recommendation_of(run, limit_bytes=1.5e6).ranked] == [
        HADAMARD,
        CORES,
        FLIPPED,
    ]
    for metric in ("peak_bytes", "noise_bytes"):
        unknown = ranking_cases.run(without(rows(), CORES, metric))
        assert CORES in [entry.variant for entry in recommendation_of(unknown).ranked]
        assert [entry.variant for entry in recommendation_of(unknown, limit_bytes=1.5e6).ranked] == [
            HADAMARD,
            FLIPPED,
        ]
    assert recommendation_of(run, limit_bytes=1.0).recommended == []
    uneven = time_row(FLIPPED, SQUARE, 3.0, 3.5, 4.0, 4.0, 4.5, 5.0, phase="step")
    (flipped,) = recommendation_of(
        ranking_cases.run([*without(rows(), FLIPPED, "latency_ns"), uneven]), {FLIPPED}
    ).variants
    assert flipped.effective is not None
    assert flipped.step_interval is not None
    low, high = flipped.effective.low, flipped.effective.high
    assert flipped.rate_interval == (
        low / (flipped.step_interval.high / 1e6),
        high / (flipped.step_interval.low / 1e6),
    )


def test_a_ranking_has_the_steps_of_one_method_and_dtype() -> None:
    """Methods are never ranked together, and neither are dtypes."""
    graphs = [time_row(FLIPPED, SQUARE, 1.0, phase="step", method="graph")]
    half = rows(msgspec.structs.replace(SQUARE, dtype="bfloat16"))
    run = ranking_cases.run([*rows(), *graphs, *half])
    timed = {
        (ranking.grid.method, case.dtype): [entry.variant for entry in ranking.of(case) if entry.step_ns]
        for ranking in rankings(run, "Linear")
        for case in ranking.cases
    }
    ranked = [HADAMARD, ranking_cases.LOW_RANK, CORES, FLIPPED, DENSE]
    assert timed == {
        ("host", "float32"): ranked,
        ("graph", "float32"): [FLIPPED],
        ("host", "bfloat16"): ranked,
    }
    methods = [section.heading_suffix for section in ranking_sections(run, "Linear")]
    assert methods == [", method host", ", method host", ", method graph"]


def test_page_command_and_table_recommend_the_same() -> None:
    """The exact scheme comes first, with the best of the others; without an exact one only the best."""
    for stored, expected in (
        ([*rows(), *orthogonal(SQUARE)], ["Orthogonal", "Hadamard"]),
        (rows(), ["Hadamard"]),
    ):
        run = ranking_cases.run(stored)
        assert [entry.variant.name for entry in recommendation_of(run).recommended] == expected
        assert all(f"\n{name} " in figures([recommendation_of(run)], str) for name in expected)
        assert all(name in answer(recommendation_of(run)) for name in expected)
        picks = answers.answer(list(views(run, "Linear")), str).picks
        assert [pick.variant.name for pick in picks] == expected
        table = best_schemes([run], ["Linear"], largest_only=True)
        assert table is not None
        assert [cells[1].text() for cells in table.blocks[0].table.cells] == expected


def test_rankings_name_the_variants_that_keep_less_than_a_tenth_of_their_members() -> None:
    """The table of all variants and that of the best schemes say it, with n_eff; others are not named."""
    kappas, steps = {DENSE: 0.0, FLIPPED: 40.0, HADAMARD: 34.0}, {DENSE: 9e4, FLIPPED: 1.0, HADAMARD: 5e4}
    run = ranking_cases.run(rows(kappas=kappas, steps=steps))
    (all_variants,) = ranking_sections(run, "Linear")
    best = best_schemes([run], ["Linear"], largest_only=True)
    assert best is not None
    for section in (all_variants, best):
        (note,) = [note for note in section.footnotes if "tenth" in note]
        assert note.endswith("n_eff below a tenth of the 1,024 members: FlippedLinear 93.1")


def test_a_recommendation_says_that_single_weights_move_far() -> None:
    """It names the largest change where it is above three times dense noise's; older runs lack the metric."""
    for change, has_note in ((16.0, True), (14.0, False), (None, False)):
        changes = {HADAMARD: change, DENSE: 5.0} if change else {}
        key = (SQUARE, "largest_change", "one weight")
        measured = [ranking_cases.quality_row(v, *key, value) for v, value in changes.items()]
        recommendation = recommendation_of(ranking_cases.run([*rows(), *measured]))
        words = "Hadamard moves single weights by up to 16.0 sigma, dense noise by 5.00"
        text = " ".join(figures([recommendation], lambda variant: f"99 ({variant.name})").split())
        assert (words in text) == has_note
        assert ("single weights" in text) == has_note
        (law,) = [s for s in quality_sections(recommendation.run, "Linear") if "Quality law" in s.markdown()]
        assert ("largest change (sigma)" in law.markdown()) == bool(change)


def test_a_case_that_no_run_ranks_has_no_recommendation() -> None:
    """A different shape or sigma is a different case; the nearest ranked case can be named."""
    run = ranking_cases.run([*rows(), *rows(linear(128))])
    assert recommend([run], linear(32)) is None
    assert recommend([run], msgspec.structs.replace(SQUARE, sigma=0.5)) is None
    assert recommend([run], SQUARE, variants={variant("Unheard")}) is None
    assert nearest([run], linear(100)) == linear(128)
    assert nearest([run], linear(60)) == SQUARE
    assert nearest([], SQUARE) is None


def test_a_variant_with_impossible_values_is_not_ranked() -> None:
    """A peak below the output, or a time below the bound, has a reason in place of a rate, and a warning."""
    big, cached = 2**31, 10**8
    contradictions: tuple[tuple[Phase, float, float, int, str], ...] = (
        ("step", 0, 1, 10**9, "a peak of 1100000 bytes"),
        ("step", 5e7, 1, 1, "125 % of the roofline"),
        ("step", 1e12, 1, 1, "reaches 2500000 %"),
        ("update", 5e7, 1, 1, "update reaches 125 %"),
        ("step", 0, big, 1, "bound (traffic)"),
        ("step", 0, cached, 1, ""),
        ("step", 3e7, 1, 1, ""),
    )
    for is_disturbed in (False, True):
        base = synthetic.working(time_row(BASE, SQUARE, 1.0), 2e7 if is_disturbed else 1e6, 1, 1)
        for phase, flops, moved_bytes, output_bytes, words in contradictions:
            timed = time_row(FLIPPED, SQUARE, 4.0, phase=phase)
            row = synthetic.working(timed, flops, moved_bytes, output_bytes)
            others = [
                other
                for other in rows()
                if not (isinstance(other, Measurement) and other.metric == row.metric)
                or (other.variant, other.phase) not in {(row.variant, row.phase), (BASE, "forward")}
            ]
            measured = synthetic.run([*others, row, base], suite="quality", device_peaks=synthetic.peaks())
            (ranked,) = [entry for entry in one_ranking(measured).of(SQUARE) if entry.variant == FLIPPED]
            is_explained = is_disturbed and "125 %" in words
            assert (ranked.rate is None) == bool(words and not is_explained), words
            if ranked.skipped:
                assert ranked.skipped.reason.startswith("impossible: ")
                assert words in ranked.skipped.reason
                assert f"Flipped is not ranked: {ranked.skipped.reason}" in warnings(measured)


def test_arithmetic_may_reach_the_fastest_sample_of_its_peak() -> None:
    """A peak measured while the processor warms up is too low, but its fastest sample was possible."""
    copy, product = synthetic.peaks()
    for flops, fastest, is_ranked in (
        (4.8e7, 8e5, True),
        (4.8e7, 9e5, False),
        (5.2e7, 1.0, False),  # no product is that fast
        (5.2e7, 0.0, False),
    ):
        row = synthetic.working(time_row(FLIPPED, SQUARE, 4.0, phase="update"), flops, 1, 1)
        peak = msgspec.structs.replace(product, samples=(fastest, *(1e6,) * 9))
        measured = synthetic.run([*rows(), row], suite="quality", device_peaks=(copy, peak))
        (ranked,) = [entry for entry in one_ranking(measured).of(SQUARE) if entry.variant == FLIPPED]
        assert (ranked.skipped is None) == is_ranked


def test_a_variant_with_a_wrong_phase_is_not_ranked() -> None:
    """A wrong forward has its reason in place of a rate, even if the step is right."""
    for reason, expected in (("wrong result: off by 1", "forward: wrong result: off by 1"), ("too big", "")):
        wrong = synthetic.skipped(FLIPPED, SQUARE, reason, "forward", status="failed")
        measured = synthetic.run([*rows(), wrong], suite="quality")
        (ranked,) = [entry for entry in one_ranking(measured).of(SQUARE) if entry.variant == FLIPPED]
        assert (ranked.rate is None) == bool(expected)
        assert (ranked.skipped.reason if ranked.skipped else "") == expected


def test_the_newest_complete_run_that_ranks_most_is_used() -> None:
    """A newer run that ranks fewer variants, was interrupted or is invalid does not replace it."""

    def run(number: int, *variants: Variant, end: RunEnd | None = None) -> Run:
        measured_rows = rows(kappas={variant: KAPPAS[variant] for variant in variants or KAPPAS})
        made_run = ranking_cases.run(measured_rows, run_id=f"2026010{number}T000000Z-quality-000{number}")
        return msgspec.structs.replace(made_run, end=end or made_run.end)

    complete, newer, few = run(1), run(2), run(3, HADAMARD)
    cut_off = run(4, end=RunEnd(status="interrupted", wall_s=1.0))
    invalid = run(5, end=RunEnd(status="complete", wall_s=1.0, invalid=("hot",)))
    for runs, variants, expected in (
        ([complete, newer, few, cut_off, invalid], None, newer),
        ([invalid, newer, complete], None, newer),
        ([complete, few], {HADAMARD}, few),
        ([complete, few], {HADAMARD, ranking_cases.LOW_RANK}, complete),
        ([invalid, few], None, few),
        ([cut_off], None, cut_off),
    ):
        result = recommend(runs, SQUARE, variants=variants)
        assert result
        assert result.run == expected


def test_code_for_many_layers_is_python_with_short_lines() -> None:
    """The code parses and keeps its line length, however many layers there are."""
    names = {f"block.{index}": winner(HADAMARD if index % 3 else DENSE) for index in range(20)}
    code = training_code(names, {HADAMARD: "impls", DENSE: "impls"})
    ast.parse(code)
    assert all(len(line) <= 110 for line in code.splitlines())
