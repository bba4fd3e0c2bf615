"""Tables of quality: the quality law, a trained network, and other metrics of a workload."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, by_size
from esbench.report.analysis.quality import (
    ABSOLUTE,
    CLOSED,
    CURVED,
    EFFECTIVE,
    KAPPA,
    LARGEST,
    LINEAR,
    ONE_WEIGHT,
    RELATIVE,
    EffectiveSize,
    Qualities,
)
from esbench.report.analysis.ranking import rankings
from esbench.report.tables.ranking import ranking_section
from esbench.report.tables.table import (
    INTERVAL,
    Block,
    Cell,
    CellNumber,
    Footnotes,
    Section,
    case_section,
    estimate_cell,
    mean_number,
    n_eff_cell,
    n_eff_interval_cell,
    number_cell,
    variants_table,
)
from esbench.schema import QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.units import format_number

BIAS, COSINE = "bias", "cosine"
LAW_METRICS = frozenset(
    {
        *("kappa", "bias", "effective_members", "dot_mean", "dot_variance", "correlation"),
        *("stable_rank", "singular_values", "largest_change", "cosine"),
    }
)
"""The metrics that have columns in the tables of the law and of a trained network."""
_DOTS = "pairs"
_SPECTRUM = "one perturbation"
_ACROSS = ("layers", "members", "steps")
_LAW_NOTE = (
    f": kappa fitted with a linear fitness, and its closed form, which holds if they differ by at most "
    f"{100 * RELATIVE:g} % or {ABSOLUTE:g}; scaled products of two members' perturbations, of mean 0 and "
    "variance 1 where they are independent; one perturbation's stable rank; correlation of entries."
)
_LARGEST_NOTE = " Largest change: of one weight, by any sampled member, in units of sigma."
_BIAS_NOTE = " Bias: what is left of kappa in the mean over many steps; 0 if that is the gradient."
_UNSEEN_NOTE = (
    "below its closed form by more than its interval. This does not contradict it: rare pairs of members "
    "that share much noise may be missing among the sampled pairs, and no interval covers their part"
)
_COSINE_NOTE = (
    ": cosine between the update and backpropagation's gradient of a trained network, by the scale of the "
    "noise; n_eff is that of the curved fitness at the sigma of the case; the last column has that of a "
    "linear fitness, by the quality law."
)


def quality_sections(run: Run, operator: str, history: Iterable[Run] = ()) -> list[Section]:
    """Return all tables of quality of an operator: rankings, the law, trained networks and other metrics."""
    qualities = Qualities(run)
    cases, by_method = _cases(qualities, operator), rankings(run, operator, history)
    return [
        *(ranking_section(ranking, case) for ranking in by_method for case in ranking.cases),
        *(_law_section(qualities, case) for case in cases if qualities.methods(case, KAPPA)),
        *(
            _network_section(qualities, case)
            for case in cases
            if qualities.methods(case, COSINE) or CURVED in qualities.methods(case, EFFECTIVE)
        ),
        *(section for case in cases for section in _metric_sections(qualities, case)),
    ]


def metric_sections(run: Run, operator: str) -> list[Section]:
    """Return tables of all other metrics that the workloads of an operator yield in the phase quality."""
    qualities = Qualities(run)
    return [section for case in _cases(qualities, operator) for section in _metric_sections(qualities, case)]


def _cases(qualities: Qualities, operator: str) -> list[Case]:
    return sorted((case for case in qualities.cases if case.operator == operator), key=by_size)


def _law_section(qualities: Qualities, case: Case) -> Section:
    notes = Footnotes()
    # Runs of older versions have no largest change and no bias.
    largest = ["largest change (sigma)"] if qualities.methods(case, LARGEST) else []
    has_bias = bool(qualities.methods(case, BIAS))

    def bias(variant: Variant) -> Cell | None:
        cell = _mean(qualities, variant, case, BIAS, LINEAR)
        if cell is None:
            return None
        return replace(cell, numbers=tuple(replace(number, has_interval=True) for number in cell.numbers))

    def cells(variant: Variant) -> dict[str, Cell | None]:
        fitted, fit = qualities.estimate(variant, case, KAPPA, LINEAR), qualities.fit(variant, case)
        fit_rows, form_rows = (qualities.rows(variant, case, (KAPPA, method)) for method in (LINEAR, CLOSED))
        form_cells: list[Cell | None] = [Cell("no form") if fitted else None] * 3
        if fit:
            closed, verdict = fit.closed.mean, fit.verdict
            if verdict != fit._replace(unseen=0.0).verdict:  # a contradiction without the unseen pairs
                verdict = notes.mark(verdict, _UNSEEN_NOTE)
            form_cells = [
                _plain("kappa_closed_form", closed, form_rows),
                _plain("kappa_difference", fit.fitted.mean - closed, fit_rows + form_rows),
                Cell(verdict),
            ]
        half = format_number(fitted.half) if fitted and fitted.half is not None else "one value"
        return {
            "kappa": estimate_cell("kappa_fitted", fitted, fit_rows),
            "±": Cell(half) if fitted else None,
            **dict(zip(("closed form", "difference", "holds"), form_cells, strict=True)),
            **({"bias": bias(variant)} if has_bias else {}),
            "dot mean": _mean(qualities, variant, case, "dot_mean", _DOTS),
            "dot variance": _mean(qualities, variant, case, "dot_variance", _DOTS),
            "stable rank": _mean(qualities, variant, case, "stable_rank", _SPECTRUM),
            **{heading: _mean(qualities, variant, case, LARGEST, ONE_WEIGHT) for heading in largest},
            **{
                f"correlation of {across}": _mean(qualities, variant, case, "correlation", across)
                for across in _ACROSS
            },
        }

    methods = {LINEAR, CLOSED, ONE_WEIGHT, _DOTS, _SPECTRUM, *_ACROSS}
    block = ("Quality law", _LAW_NOTE + (_LARGEST_NOTE if largest else "") + (_BIAS_NOTE if has_bias else ""))
    return _section(qualities, case, "quality of the gradient", block, cells, methods, notes)


def _network_section(qualities: Qualities, case: Case) -> Section:
    methods = sorted(qualities.methods(case, COSINE), key=_sigma)

    def cells(variant: Variant) -> dict[str, Cell | None]:
        effective = qualities.effective(variant, case, CURVED)
        n_eff = effective if isinstance(effective, EffectiveSize) else None
        rows = qualities.rows(variant, case, (EFFECTIVE, CURVED))
        percent = 100 * n_eff.value / case.members if n_eff else None
        linear = qualities.law(variant, case).effective
        return {
            **{method: _mean(qualities, variant, case, COSINE, method) for method in methods},
            f"n_eff at {case.sigma:g}": n_eff_cell("effective_members_at_sigma", n_eff, rows),
            INTERVAL: n_eff_interval_cell(n_eff),
            "n_eff / n (%)": _plain("effective_percent_at_sigma", percent, rows),
            "n_eff, linear": n_eff_cell(
                "effective_members",
                linear if isinstance(linear, EffectiveSize) else None,
                qualities.rows_of_law(variant, case),
            ),
        }

    cosines = (
        qualities.estimate(variant, case, COSINE, method)
        for method in methods
        for variant in qualities.variants(case)
    )
    widths = [cosine.half for cosine in cosines if cosine and cosine.half is not None]
    most = f" 95 % intervals of the cosines: ±{format_number(max(widths))} at most." if widths else ""
    title = "quality on a trained network" if methods else "effective population at sigma"
    block = ("Cosine to backpropagation", f"{_COSINE_NOTE}{most}")
    return _section(qualities, case, title, block, cells, {*methods, CURVED}, Footnotes())


def _sigma(method: str) -> float:
    """Return the number in ``sigma=0.01``; infinity for any other method."""
    try:
        return float(method.partition("=")[2])
    except ValueError:
        return math.inf


def _plain(metric: str, value: float | None, rows: tuple[Measurement, ...]) -> Cell | None:
    return None if value is None else number_cell(CellNumber(metric, value, rows, kind="number"))


def _mean(qualities: Qualities, variant: Variant, case: Case, metric: str, method: str) -> Cell | None:
    # A metric with a column for each of several methods has the method in its name.
    name = metric if method in {_DOTS, _SPECTRUM, ONE_WEIGHT} else f"{metric}_{method}"
    mean = qualities.estimate(variant, case, metric, method)
    return estimate_cell(name, mean, qualities.rows(variant, case, (metric, method)))


def _metric_sections(qualities: Qualities, case: Case) -> list[Section]:
    """Return a table of the quality metrics of a case that are not in LAW_METRICS, or no table."""
    rows = (row for row in qualities.run.measurements if row.case == case and row.phase == QUALITY)
    metrics = [metric for metric in dict.fromkeys(row.metric for row in rows) if metric not in LAW_METRICS]
    keys = {
        _metric_heading(qualities, case, metric, method): (metric, method)
        for metric in metrics
        for method in qualities.methods(case, metric)
    }

    def cell(variant: Variant, metric: str, method: str) -> Cell | None:
        mean = qualities.estimate(variant, case, metric, method)
        if mean is None:
            return None
        number = mean_number(metric, mean, qualities.rows(variant, case, (metric, method)))
        return number_cell(replace(number, has_interval=True))

    def cells(variant: Variant) -> dict[str, Cell | None]:
        return {heading: cell(variant, *key) for heading, key in keys.items()}

    block = ("Metrics", ": mean of the replicates, ± half their 95 % interval if there are several.")
    methods = {method for _, method in keys.values()}
    return [_section(qualities, case, "metrics", block, cells, methods, Footnotes())] if keys else []


def _metric_heading(qualities: Qualities, case: Case, metric: str, method: str) -> str:
    heading = captions.with_unit(captions.without_suffix(metric), metric)
    return heading + (f", {method}" if len(qualities.methods(case, metric)) > 1 else "")


def _section(  # noqa: PLR0913, PLR0917  # the parts of a section
    qualities: Qualities,
    case: Case,
    topic: str,
    block: tuple[str, str],
    cells: Callable[[Variant], dict[str, Cell | None]],
    methods: Collection[str],
    notes: Footnotes,
) -> Section:
    """Return a section with one table; a variant without a number shows its reason."""

    def reason(variant: Variant) -> Skipped | None:
        curved = qualities.effective(variant, case, CURVED) if CURVED in methods else None
        return qualities.reason(variant, case, methods) or (curved if isinstance(curved, Skipped) else None)

    table = variants_table(case, qualities.variants(case), cells, reason, notes)
    grid = Grid(qualities.run, case.operator, case.dtype, case.antithetic, QUALITY, KAPPA, LINEAR)
    return case_section(grid, case, topic, Block(*block, table), notes)
