"""Which of several stored runs answers: never an empty table while one of them has the answer."""

from collections.abc import Collection

import msgspec

from esbench.report.analysis.ranking import choose, ranked_runs
from esbench.schema import Request, Run, RunEnd, Variant
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, rows
from tests.synthetic import linear, skipped, variant


def stored(number: int, *variants: Variant, reasons: Collection[Variant] = ()) -> Run:
    """A run that was asked for these variants alone; without any it is of the whole suite."""
    kappas = {one: KAPPAS[one] for one in (variants or KAPPAS)}
    found = [row for row in rows(kappas=kappas) if not variants or row.variant in {*variants, *kappas}]
    found += [skipped(one, SQUARE, "too narrow") for one in reasons]
    run = ranking_cases.run(found, run_id=f"2026010{number}T000000Z-quality-000{number}")
    request = Request(variants=tuple(one.scheme for one in variants), shapes=(SQUARE,))
    return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, request=request))


def cut_off(run: Run) -> Run:
    """The run, interrupted."""
    return msgspec.structs.replace(run, end=RunEnd(status="interrupted", wall_s=1.0))


def chosen(*runs: Run, variants: Collection[Variant] | None = None) -> tuple[Run, str]:
    """The run that answers, and what is said of the others."""
    holding, words = choose(ranked_runs(runs, SQUARE, variants), variants)
    return holding.run, words


def test_newest_run_that_says_all_that_is_wanted_answers() -> None:
    """A newer run of another variant is passed over, and one line says what it holds."""
    older, both, newer = stored(1, LOW_RANK, FLIPPED), stored(2, LOW_RANK, FLIPPED), stored(3, HADAMARD)
    assert chosen(older, both, newer, variants={LOW_RANK, FLIPPED}) == (both, "")
    run, words = chosen(older, both, stored(3, LOW_RANK), variants={LOW_RANK, FLIPPED})
    assert run == both
    assert words == (
        "shows run 20260102T000000Z-quality-0002, which ranks 2 (LowRank(rank=1), Flipped); passed over: "
        "newer 20260103T000000Z-quality-0003 ranks 1 (LowRank(rank=1)), "
        "it holds part of its suite (variants LowRank)"
    )


def test_reason_is_an_answer_too() -> None:
    """A variant that cannot serve the shape has its reason in the newest run: no older one is looked at."""
    narrow = variant("Narrow")
    newer = stored(2, LOW_RANK, reasons=[narrow])
    assert chosen(stored(1, LOW_RANK), newer, variants={LOW_RANK, narrow}) == (newer, "")


def test_numbers_go_before_reasons_alone() -> None:
    """Where the newest run has only a reason for what is wanted, an older one with a number answers."""
    older, newer = stored(1, LOW_RANK), stored(2, HADAMARD, reasons=[LOW_RANK])
    assert chosen(older, newer, variants={LOW_RANK})[0] == older


def test_without_a_choice_the_newest_whole_run_answers() -> None:
    """Whatever runs of one variant or cut-off ones came after it; each is named in the line."""
    whole = stored(2)
    run, words = chosen(stored(1), whole, stored(3, HADAMARD), cut_off(stored(4)))
    assert run == whole
    assert "newer 20260104T000000Z-quality-0004 ranks 5 (" in words
    assert "was interrupted; newer 20260103T000000Z-quality-0003 ranks 1 (Hadamard), it holds part" in words
    assert "older" not in words
    assert "\n" not in words


def test_without_a_whole_run_the_one_with_most_variants_answers() -> None:
    """Of two with as many the newer; an older run with another variant is named."""
    runs = stored(1, CORES), stored(2, LOW_RANK, FLIPPED), stored(3, LOW_RANK, FLIPPED), stored(4, HADAMARD)
    run, words = chosen(*runs)
    assert run == runs[2]
    assert "newer 20260104T000000Z-quality-0004 ranks 1 (Hadamard)" in words
    assert "older 20260101T000000Z-quality-0001 ranks 1 (Flipped(cores=8))" in words
    assert "older 20260102T000000Z-quality-0002" not in words


def test_invalid_run_answers_only_where_there_is_no_other() -> None:
    """However much more it ranks."""
    invalid = msgspec.structs.replace(stored(2), end=RunEnd(status="complete", wall_s=1.0, invalid=("hot",)))
    assert chosen(stored(1, HADAMARD), invalid)[0] == stored(1, HADAMARD)
    assert chosen(invalid) == (invalid, "")


def test_run_that_says_nothing_of_the_question_holds_nothing() -> None:
    """Neither of another shape nor of other variants."""
    assert ranked_runs([stored(1)], linear(32), None) == []
    assert ranked_runs([stored(1, LOW_RANK)], SQUARE, {HADAMARD}) == []
