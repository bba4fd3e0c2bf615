"""Recommendations from stored runs: the run used, and the order. ``golden/examples.md`` has the texts."""

import ast
from collections.abc import Collection

import msgspec

from esbench.report.tables.ranking import ranking_sections
from esbench.report.tables.recommendation import Advice, advise, applied, nearest
from esbench.schema import Request, Run, RunEnd, Variant
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, KAPPAS, LOW_RANK, SQUARE, one_ranking, rows
from tests.report.table_examples import winner, without
from tests.synthetic import DENSE, linear, skipped, variant


def advice(run: Run, variants: set[Variant] | None = None, limit_bytes: float | None = None) -> Advice:
    """Return the recommendation of a run for the usual case."""
    found, _ = advise([run], SQUARE, variants=variants, limit_bytes=limit_bytes)
    assert found is not None
    return found


def test_its_ranking_is_the_tables() -> None:
    """Rows and figures are those of the ranking, if requested; variants over a limit move to the end."""
    run = ranking_cases.run()
    (table,) = ranking_sections(run, "Linear")
    found = advice(run)
    assert list(found.variants) == one_ranking(run).of(SQUARE)
    assert found.text(tables=True).startswith(table.text())
    assert [one.variant for one in advice(run, {FLIPPED, CORES}).variants] == [CORES, FLIPPED]
    assert [one.variant for one in advice(run, limit_bytes=1.5e6).ranked] == [HADAMARD, CORES, FLIPPED]
    unknown = ranking_cases.run(without(rows(), CORES, "peak_bytes"))
    assert CORES in [one.variant for one in advice(unknown).ranked]
    assert [one.variant for one in advice(unknown, limit_bytes=1.5e6).ranked] == [HADAMARD, FLIPPED]
    assert advice(run, limit_bytes=1.0).best is None


def test_a_case_that_no_run_ranks_has_no_advice() -> None:
    """A different shape or sigma is a different case; the ranked cases can be listed."""
    run = ranking_cases.run([*rows(), *rows(linear(128))])
    assert advise([run], linear(32)) == (None, "")
    assert advise([run], msgspec.structs.replace(SQUARE, sigma=0.5)) == (None, "")
    assert nearest([run], linear(100)) == ["Linear(128, 128)", "Linear(64, 64)"]
    assert nearest([run], linear(60), 1) == ["Linear(64, 64)"]
    assert advise([run], SQUARE, variants={variant("Unheard")}) == (None, "")


def test_code_for_many_layers_is_python_with_short_lines() -> None:
    """The code parses and keeps its line length, however many layers there are."""
    names = {f"block.{place}": winner(HADAMARD if place % 3 else DENSE) for place in range(20)}
    text = applied(names, {HADAMARD: "impls", DENSE: "impls"})
    ast.parse(text)
    assert all(len(line) <= 110 for line in text.splitlines())


def stored(
    number: int, *variants: Variant, reasons: Collection[Variant] = (), end: RunEnd | None = None
) -> Run:
    """Return a run that requested only these variants, or the whole suite if there are none."""
    kappas = {one: KAPPAS[one] for one in (variants or KAPPAS)}
    found = [row for row in rows(kappas=kappas) if not variants or row.variant in {*variants, *kappas}]
    found += [skipped(one, SQUARE, "too narrow") for one in reasons]
    run = ranking_cases.run(found, run_id=f"2026010{number}T000000Z-quality-000{number}")
    request = Request(variants=tuple(one.scheme for one in variants), shapes=(SQUARE,))
    header = msgspec.structs.replace(run.header, request=request)
    return msgspec.structs.replace(run, header=header, end=end or run.end)


def chosen(*runs: Run, variants: Collection[Variant] | None = None) -> tuple[Run, str]:
    """Return the chosen run, and the line about other runs."""
    found, line = advise(runs, SQUARE, variants=variants)
    assert found
    return found.run, line


def test_the_newest_run_that_answers_for_all_variants_is_chosen() -> None:
    """A reason is an answer, but runs with numbers come first; one line names other runs."""
    older, both, newer = stored(1, LOW_RANK, FLIPPED), stored(2, LOW_RANK, FLIPPED), stored(3, HADAMARD)
    assert chosen(older, both, newer, variants={LOW_RANK, FLIPPED}) == (both, "")
    assert chosen(older, both, stored(3, LOW_RANK), variants={LOW_RANK, FLIPPED}) == (
        both,
        (
            "shows run 20260102T000000Z-quality-0002, which ranks LowRank(rank=1), Flipped; passed over: "
            "newer 20260103T000000Z-quality-0003 ranks LowRank(rank=1), "
            "it holds part of its suite (variants LowRank)"
        ),
    )
    narrow = variant("Narrow")
    newer = stored(2, LOW_RANK, reasons=[narrow])
    assert chosen(stored(1, LOW_RANK), newer, variants={LOW_RANK, narrow}) == (newer, "")
    older = stored(1, LOW_RANK)
    assert chosen(older, stored(2, HADAMARD, reasons=[LOW_RANK]), variants={LOW_RANK})[0] == older


def test_without_a_choice_the_newest_whole_run_is_chosen() -> None:
    """Partial and unfinished runs come after whole ones, the largest first; invalid runs are last."""
    whole, cut_off = stored(2), stored(4, end=RunEnd(status="interrupted", wall_s=1.0))
    run, line = chosen(stored(1), whole, stored(3, HADAMARD), cut_off)
    assert run == whole
    assert "newer 20260104T000000Z-quality-0004 ranks Hadamard, LowRank(rank=1), " in line
    assert "was interrupted; newer 20260103T000000Z-quality-0003 ranks Hadamard, it holds part" in line
    assert "0001" not in line
    assert "\n" not in line
    runs = stored(1, CORES), stored(2, LOW_RANK, FLIPPED), stored(3, LOW_RANK, FLIPPED), stored(4, HADAMARD)
    run, line = chosen(*runs)
    assert run == runs[2]
    assert "newer 20260104T000000Z-quality-0004 ranks Hadamard, it" in line
    invalid = stored(2, end=RunEnd(status="complete", wall_s=1.0, invalid=("hot",)))
    assert chosen(stored(1, HADAMARD), invalid)[0] == stored(1, HADAMARD)
    assert chosen(invalid) == (invalid, "")
