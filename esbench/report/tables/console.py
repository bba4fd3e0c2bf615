"""The result of a run in a few lines: the best variants, dense noise and the plain layer."""

from collections.abc import Iterator, Sequence

from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, PEAK, TIMES, UNMEASURED, Grid, grids, operators
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense, rankings
from esbench.report.tables.ranking import COST, KEPT, PEAK_MEMORY, RATE, RELATIVE_RATE, STEP, ranking_texts
from esbench.report.tables.table import NOTHING
from esbench.schema import DENSE, Case, Measurement, Run, Variant
from esbench.stats import median
from esbench.text import first_names, one_line, pluralize
from esbench.units import format_cell, format_multiplier, format_number

BEST = 5
"""Variants of a table besides dense noise and base."""
TABLES = 3
"""Shapes that are shown; the rest is in all tables."""
FAILURES = 5
"""Failed variants that are named."""
_NAME = 42
"""Characters of the first column."""
_RANKED = {
    RATE: "rate",
    RELATIVE_RATE: "x dense",
    STEP: "step ms",
    COST: "x base",
    KEPT: "kept %",
    PEAK_MEMORY: "MB",
}
"""Columns of the ranking -> their headings here; with a name of 33 characters a line has 80."""
LEGEND = "rate: n_eff per ms of a step; kept: n_eff / n"
_SMALL = 0.1
"""A warning names variants whose n_eff is a smaller share of the members."""


def run_summary(run: Run) -> str:
    """Return a table for each of up to three shapes, 80 columns wide unless a name is long.

    Variants are ranked by n_eff per ms of a step; in a run without steps or quality metrics, by time.
    """
    ranked = dict(_ranking_tables(run))
    tables = ranked | dict(_time_tables(run))
    if not tables:
        return ""
    first = {case.operator: case for case in reversed(tables)}.values()  # one of each operator
    cases = [*reversed(first), *(case for case in tables if case not in first)]
    parts = [f"Best {BEST} variants of each shape, dense noise and base{f' ({LEGEND})' if ranked else ''}:"]
    parts += [tables[case] for case in cases[:TABLES]]
    if len(cases) > TABLES:
        parts.append(f"and {pluralize(len(cases) - TABLES, 'more shape')}: --tables prints all")
    return "\n\n".join(parts).replace(":\n\n", ":\n", 1) + "\n"


def warnings(run: Run) -> list[str]:
    """Return warnings on failed variants, and on variants with a small effective population."""
    failures = {row.variant.name: one_line(row.reason) for row in run.skipped if row.status == "failed"}
    lines = [f"{name} failed: {reason}" for name, reason in list(failures.items())[:FAILURES]]
    if len(failures) > FAILURES:
        lines.append(f"and {len(failures) - FAILURES} more variants failed: --tables gives the reasons")
    small = sorted(
        (
            ranked
            for operator in operators(run)
            for ranking in rankings(run, operator)[:1]
            for case in ranking.largest
            for ranked in ranking.of(case)
            if ranked.rate is not None and not ranked.variant.baseline and (ranked.share or 1.0) < _SMALL
        ),
        key=lambda ranked: ranked.share or 0.0,
    )
    sizes = {
        ranked.variant.name: f"{ranked.variant.name} {format_number(ranked.effective.value)} of"
        f" {ranked.case.members}"
        for ranked in reversed(small)
        if ranked.effective
    }
    if sizes:
        lines.append(f"n_eff below {_SMALL:.0%} of the members: {first_names([*reversed(sizes.values())])}")
    return lines


def _ranking_tables(run: Run) -> Iterator[tuple[Case, str]]:
    for operator in operators(run):
        for ranking in rankings(run, operator)[:1]:
            for case in dict.fromkeys([*filter(None, [ranking.main]), *ranking.largest]):
                yield case, ranking_table(ranking, case, ranking.of(case))


def ranking_table(ranking: Rankings, case: Case, every: Sequence[RankedVariant]) -> str:
    """Return the five best variants of a ranking, dense noise and base, with the cells of all tables."""
    reference = dense(every)
    best = [ranked for ranked in every if ranked.rate is not None and not ranked.variant.baseline]
    rows = best[:BEST] + [ranked for ranked in best[BEST:] if ranked.variant.name == DENSE]
    rows += [ranked for ranked in every if ranked.variant.mode == "base"]
    texts = [ranking_texts(ranking.grid, ranked, reference) for ranked in rows]
    cells = [
        (_name(ranked.variant), *(_shorten(row[heading]) for heading in _RANKED))
        for ranked, row in zip(rows, texts, strict=True)
    ]
    return _table((_title(case), *_RANKED.values()), cells)


def _time_tables(run: Run) -> Iterator[tuple[Case, str]]:
    for operator in (name for name in operators(run) if not rankings(run, name)):
        timed = (grid for grid in grids(run, operator, TIMES) if grid.metric == LATENCY)
        grid = next((grid for grid in timed if grid.method != UNMEASURED), None)
        for case in reversed(grid.cases if grid else []):
            if grid and (rows := _times(grid, case)):
                header = (_title(case), f"{grid.phase} (ms)", "faster than dense", "x base", "MB")
                yield case, _table(header, rows)


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


def _title(case: Case) -> str:
    return captions.layer(case) + (f", {case.members} members" if case.members > 1 else "")


def _name(variant: Variant) -> str:
    return {DENSE: f"{DENSE} (dense noise)", "Base": "Base (plain layer)"}.get(variant.name, variant.name)


def _shorten(text: str) -> str:
    return text.replace("at least ", ">= ").replace("about ", "~")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table with a dash in empty cells; columns that are empty in all rows are left out."""
    names, *columns = zip(header, *rows, strict=True)
    lines = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in map(one_line, names)]
    width = max(map(len, lines))
    lines = [f"{line:<{width}}" for line in lines]
    for column in columns:
        if any(column[1:]):
            width = max(map(len, column))
            lines = [f"{line}  {cell or NOTHING:>{width}}" for line, cell in zip(lines, column, strict=True)]
    return "\n".join(lines)
