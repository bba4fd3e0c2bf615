"""The result of a run in a few lines: the best variants, dense noise and the plain layer."""

from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, PEAK, TIMES, UNMEASURED, Grid, grids, operators
from esbench.report.analysis.quality import EXACT, percent_of_members
from esbench.report.analysis.ranking import RankedVariant, dense, rankings
from esbench.schema import DENSE, Case, Measurement, Run, Variant
from esbench.stats import median
from esbench.text import first_names, one_line
from esbench.units import format_cell, format_multiplier, format_number

BEST = 5
"""Variants of a table besides dense noise and base."""
TABLES = 3
"""Shapes that are shown; the rest is in all tables."""
FAILURES = 5
"""Failed variants that are named."""
_NAME = 42
"""Characters of a variant's name."""
_FEW = 0.1
"""A smaller share of the members, n_eff / n, is warned of."""


def run_summary(run: Run) -> str:
    """Return the tables of up to three shapes for a terminal, at most 100 columns wide.

    A shape with steps and qualities is ranked by n_eff per ms, another one by time.
    """
    every = [*_ranked(run), *_timed(run)]
    shown = dict(reversed(every))  # a ranking replaces times
    cases = list(dict.fromkeys(case for case, _ in every))
    first = list({case.operator: case for case in reversed(cases)}.values())[::-1]  # one of each operator
    cases = [*first, *(case for case in cases if case not in first)]
    parts = [shown[case] for case in cases[:TABLES]]
    if len(cases) > TABLES:
        parts.append(f"and {len(cases) - TABLES} more: --tables prints all")
    return "\n\n".join(parts) + "\n" if parts else ""


def warnings(run: Run) -> list[str]:
    """Return warnings on failed variants, and on those with a small effective population."""
    failures = {row.variant.name: one_line(row.reason) for row in run.skipped if row.status == "failed"}
    lines = [f"{name} failed: {reason}" for name, reason in list(failures.items())[:FAILURES]]
    if len(failures) > FAILURES:
        lines.append(f"and {len(failures) - FAILURES} more variants failed: --tables gives the reasons")
    for operator in operators(run):
        for ranking in rankings(run, operator)[:1]:
            for case in ranking.largest[:TABLES]:
                few = [
                    ranked
                    for ranked in ranking.of(case)
                    if ranked.rate is not None
                    and not ranked.variant.baseline
                    and (ranked.share or 1.0) < _FEW
                ]
                few.sort(key=lambda ranked: ranked.share or 0.0)
                sizes = [(ranked.variant.name, (ranked.share or 0.0) * case.members) for ranked in few]
                if names := [f"{name} {format_number(size)}" for name, size in sizes]:
                    lines.append(f"{_place(case)}, small n_eff: {first_names(names)}")
    return lines


def _ranked(run: Run) -> Iterator[tuple[Case, str]]:
    for operator in operators(run):
        for ranking in rankings(run, operator)[:1]:
            for case in dict.fromkeys([*filter(None, [ranking.main]), *ranking.largest]):
                yield case, ranking_table(case, ranking.of(case))


def ranking_table(case: Case, every: Sequence[RankedVariant]) -> str:
    """Return the five best variants of a ranking, dense noise and base, with a title."""
    reference = dense(every)
    best = [ranked for ranked in every if ranked.rate is not None and not ranked.variant.baseline]
    rows = best[:BEST] + [ranked for ranked in best[BEST:] if ranked.variant.name == DENSE]
    base = next((ranked for ranked in every if ranked.variant.mode == "base"), None)
    table = [_row(ranked, reference) for ranked in [*rows, *([base] if base else [])]]
    header = ("", "n_eff/ms", "x dense", "step (ms)", "x plain", "n_eff/n", "MB")
    count = f"best {min(BEST, len(best))} of {len(best)}"
    return f"{_place(case)}: n_eff per ms of a step, {count}\n{_table(header, table)}"


def _row(ranked: RankedVariant, reference: RankedVariant | None) -> tuple[str, ...]:
    times = ranked.times(reference)
    rate = "" if ranked.rate is None else EXACT if ranked.is_exact else format_number(ranked.rate)
    percent = percent_of_members(ranked.effective, ranked.case.members) if ranked.effective else ""
    return (
        _name(ranked.variant),
        rate,
        format_multiplier(times) if times else "",
        format_cell(LATENCY, ranked.step_ns) if ranked.step_ns else "",
        format_multiplier(ranked.multiplier.value) if ranked.multiplier else "",
        percent,
        format_cell(PEAK, ranked.peak_bytes) if ranked.peak_bytes else "",
    )


def _timed(run: Run) -> Iterator[tuple[Case, str]]:
    for operator in (name for name in operators(run) if not rankings(run, name)):
        timed = [
            grid
            for grid in grids(run, operator, TIMES)
            if grid.metric == LATENCY and grid.method != UNMEASURED
        ]
        for grid in timed[:1]:
            for case in reversed(grid.cases):
                if rows := _times(grid, case):
                    header = ("", f"{grid.phase} (ms)", "faster than dense", "x plain", "MB")
                    yield case, f"{_place(case)}: time of the {grid.phase}\n{_table(header, rows)}"


def _times(grid: Grid, case: Case) -> list[tuple[str, ...]]:
    """Return the rows of the fastest variants of a case, of dense noise and of the baselines."""
    rows = [
        (variant, row) for variant in grid.variants if isinstance(row := grid.at(variant, case), Measurement)
    ]
    timed = sorted(((variant, ns) for variant, row in rows if (ns := median(row))), key=lambda pair: pair[1])
    best = [variant for variant, _ in timed if not variant.baseline][:BEST]
    shown = [(v, ns) for v, ns in timed if v in best or v.name == DENSE or v.mode != "batched"]
    reference = next((ns for variant, ns in timed if variant.name == DENSE), None)

    def peak(variant: Variant) -> str:
        row = grid.peak(variant, case)
        value = median(row) if row else None
        return format_cell(PEAK, value) if value else ""

    def plain(variant: Variant) -> str:
        ratio = grid.multiplier(variant, case, "base")
        return format_multiplier(ratio.value) if ratio else ""

    return [
        (
            _name(variant),
            format_cell(LATENCY, ns),
            format_multiplier(reference / ns) if reference else "",
            plain(variant),
            peak(variant),
        )
        for variant, ns in shown
    ]


def _place(case: Case) -> str:
    return captions.layer(case) + (f", {case.members} members" if case.members > 1 else "")


def _name(variant: Variant) -> str:
    name = {DENSE: f"{DENSE} (dense noise)", "Base": "Base (plain layer)"}.get(variant.name, variant.name)
    line = one_line(name)
    return line if len(line) <= _NAME else f"{line[: _NAME - 1]}…"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in all rows."""
    columns = list(zip(header, *rows, strict=True))
    header, *rows = zip(*(column for column in columns if any(column[1:])), strict=True)
    align = ("left", *["right"] * (len(header) - 1))
    return tabulate(rows, header, tablefmt="plain", disable_numparse=True, colalign=align)
