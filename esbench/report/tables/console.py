"""The result of a run in a few lines: the best variants, dense noise and the plain layer."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, PEAK, UNMEASURED, Grid, latency_grids, operators
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense, rankings
from esbench.report.analysis.roofline import impossible_results
from esbench.report.tables.ranking import COST, KEPT, PEAK_MEMORY, RATE, RELATIVE_RATE, STEP, ranking_texts
from esbench.report.tables.table import NOTHING
from esbench.schema import DENSE, Case, Run, Variant
from esbench.stats import median
from esbench.text import cut, first_names, one_line, pluralize
from esbench.units import format_cell, format_multiplier, format_number

BEST = 5
"""Variants of a table besides dense noise and base."""
TABLES = 3
"""Shapes that are shown; the rest is in all tables."""
FAILURES = 5
"""Failed variants that are named."""
_NAME_WIDTH = 42
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
_LABELS = {DENSE: "dense noise", "Base": "plain layer", "Naive": "one call per member"}
"""Variants to compare with -> what they are."""


def run_summary(run: Run, history: Iterable[Run] = ()) -> str:
    """Return a table for each of up to three shapes, 80 columns wide unless a name is long.

    Variants are ranked by n_eff per ms of a step; in a run without steps or quality metrics, by time.
    Shapes on which base was much faster in a run of ``history`` are not ranked.
    """
    ranked = {
        case: _ranking_table(ranking, case, ranking.of(case))
        for case, ranking in _ranked_cases(run, history).items()
    }
    tables = ranked | dict(_time_tables(run))
    if not tables:
        return ""
    cases = _sort_by_operator(tables)
    title = f"Best {BEST} variants of each shape, dense noise and base ({LEGEND}):"
    if not ranked:
        title = f"Fastest {BEST} variants of each shape, then dense noise, base and naive:"
    first, *others = (tables[case] for case in cases[:TABLES])
    parts = [f"{title}\n{first}", *others]
    if len(cases) > TABLES:
        parts.append(f"and {pluralize(len(cases) - TABLES, 'more shape')}: --tables prints all")
    return "\n\n".join(parts) + "\n"


def warnings(run: Run, history: Iterable[Run] = ()) -> list[str]:
    """Return warnings on variants that failed, are impossible or not checked, or have a small n_eff."""
    failures = {row.variant.name: one_line(row.reason) for row in run.skipped if row.status == "failed"}
    lines = [cut(f"{name} failed: {reason}") for name, reason in list(failures.items())[:FAILURES]]
    if len(failures) > FAILURES:
        lines.append(f"and {len(failures) - FAILURES} more variants failed: --tables gives the reasons")
    impossible = {variant.name: reason for (variant, _), reason in impossible_results(run).items()}
    lines += [cut(f"{name} is not ranked: impossible: {reason}") for name, reason in impossible.items()]
    not_checked: dict[str, dict[str, None]] = {}
    for row in run.measurements:
        for label in row.labels:
            if label.startswith("not checked"):
                not_checked.setdefault(label, {})[row.variant.name] = None
    lines += [f"{first_names([*names])}: {one_line(label)}" for label, names in not_checked.items()]
    cases = _ranked_cases(run, history)
    for case in _sort_by_operator(cases)[:TABLES]:
        all_ranked = [ranked for ranked in cases[case].of(case) if ranked.is_candidate]
        # A variant with a slower step than the best is not tempting, so it needs no warning.
        small = [
            ranked
            for ranked in all_ranked
            if ranked.wastes_members and (ranked.step_ns or 0.0) <= (all_ranked[0].step_ns or 0.0)
        ]
        small.sort(key=lambda ranked: ranked.share or 0.0)
        if names := [
            f"{ranked.variant.name} {format_number(ranked.effective.value)}"
            for ranked in small
            if ranked.effective
        ]:
            layer = captions.layer_and_members(case)
            lines.append(f"{layer}: fast, but of small n_eff: {first_names(names)}")
    return lines


def _ranked_cases(run: Run, history: Iterable[Run]) -> dict[Case, Rankings]:
    """Return the cases to show with their rankings: the main case of each operator, then one per shape."""
    found = (ranking for operator in operators(run) for ranking in rankings(run, operator, history)[:1])
    return {case: ranking for ranking in found for case in (ranking.main, *ranking.largest) if case}


def _sort_by_operator(cases: Collection[Case]) -> list[Case]:
    first = {case.operator: case for case in reversed([*cases])}
    return sorted(cases, key=lambda case: case != first[case.operator])


def _ranking_table(ranking: Rankings, case: Case, every: Sequence[RankedVariant]) -> str:
    """Return the figures of the five best variants of a ranking, of dense noise and of base.

    If there was load, the reason takes their place.
    """
    if reason := ranking.unreliable.get(case):
        return f"{captions.layer_and_members(case)}\n{reason}"
    best = [ranked for ranked in every if ranked.is_candidate]
    rows = best[:BEST] + [ranked for ranked in best[BEST:] if ranked.variant.name == DENSE]
    rows += [ranked for ranked in every if ranked.variant.mode == "base"]
    return figures_table(ranking, case, rows, dense(every))


def figures_table(
    ranking: Rankings, case: Case, rows: Sequence[RankedVariant], reference: RankedVariant | None
) -> str:
    """Return the figures of variants, as in all tables; ``reference`` is dense noise."""
    texts = [ranking_texts(ranking.grid, ranked, reference) for ranked in rows]
    cells = [
        (_name(ranked.variant), *(_shorten(row[heading]) for heading in _RANKED))
        for ranked, row in zip(rows, texts, strict=True)
    ]
    return _table((captions.layer_and_members(case), *_RANKED.values()), cells)


def _time_tables(run: Run) -> Iterator[tuple[Case, str]]:
    """Yield a table by time for each case, the last case first, of operators that have no ranking."""
    for operator in operators(run):
        if rankings(run, operator):
            continue
        timed = [grid for grid in latency_grids(run, operator) if grid.method != UNMEASURED]
        timed.sort(key=lambda grid: -len(grid.cells))  # some variants may lack a phase
        for grid in timed[:1]:
            for case in reversed(grid.cases):
                if rows := _rows_by_time(grid, case):
                    layer = captions.layer_and_members(case)
                    header = (layer, f"{grid.phase} (ms)", "faster than dense", "x base", "MB")
                    yield case, _table(header, rows)


def _rows_by_time(grid: Grid, case: Case) -> list[tuple[str, ...]]:
    """Return the rows of the fastest variants of a case, then those of dense noise, base and naive."""
    times_ns = {variant: median(row) or 0.0 for variant, row in grid.by_median(case).items()}
    shown = [variant for variant in times_ns if not variant.baseline][:BEST]
    references = [variant for variant in times_ns if variant.name == DENSE or variant.mode != "batched"]
    shown += [variant for variant in references if variant not in shown]
    dense_ns = times_ns.get(Variant(scheme=DENSE))

    def peak(variant: Variant) -> str:
        row = grid.peaks.get((variant, case))
        value = median(row) if row else None
        return format_cell(PEAK, value) if value else ""

    def times_base(variant: Variant) -> str:
        ratio = grid.multiplier(variant, case, "base")
        return format_multiplier(ratio.value) if ratio else ""

    return [
        (
            _name(variant),
            format_cell(LATENCY, times_ns[variant]),
            format_multiplier(dense_ns / times_ns[variant]) if dense_ns else "",
            times_base(variant),
            peak(variant),
        )
        for variant in shown
    ]


def _name(variant: Variant) -> str:
    return f"{variant.name} ({_LABELS[variant.name]})" if variant.name in _LABELS else variant.name


def _without_middle(name: str) -> str:
    """Return a name; if it is longer than _NAME_WIDTH, … replaces its middle, as options are at the end."""
    half = _NAME_WIDTH // 2
    return name if len(name) <= _NAME_WIDTH else f"{name[: half - 1]}…{name[-half:]}"


def _shorten(text: str) -> str:
    return text.replace("at least ", ">= ").replace("more than ", "> ").replace("about ", "~")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table with a dash in empty cells; columns that are empty in all rows are left out."""
    names, *columns = zip(header, *rows, strict=True)
    lines = [_without_middle(one_line(name)) for name in names]
    width = max(map(len, lines))
    lines = [f"{line:<{width}}" for line in lines]
    for column in columns:
        if any(column[1:]):
            width = max(map(len, column))
            lines = [f"{line}  {cell or NOTHING:>{width}}" for line, cell in zip(lines, column, strict=True)]
    return "\n".join(lines)
