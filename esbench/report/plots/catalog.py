"""All plots by name: what each shows and needs, and the figures that it can draw from stored runs.

A new plot is an entry of :data:`PLOTS`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.report.analysis.history import MULTIPLIER
from esbench.report.analysis.history import history as history_of
from esbench.report.analysis.pivot import LATENCY, UNMEASURED, Grid, grids, operators, quality_grids
from esbench.report.analysis.quality import KAPPA, LINEAR
from esbench.report.analysis.ranking import Rankings, rankings
from esbench.report.analysis.run_selection import flaws
from esbench.report.plots import multipliers as multiplier_plot
from esbench.report.plots import pareto as pareto_plot
from esbench.report.plots.hero import TITLE, hero
from esbench.report.plots.history import history, panels
from esbench.report.plots.kappa import kappa
from esbench.report.plots.multipliers import multipliers
from esbench.report.plots.pareto import pareto
from esbench.report.plots.roofline import roofline
from esbench.report.plots.style import PAGE, Figure
from esbench.report.plots.sweeps import POPULATION, WIDTH, share_grids, sweep
from esbench.report.text import file_name, listed, one_line
from esbench.schema import Phase, Row, Run


@dataclass(frozen=True)
class PlotRequest:
    """What a plot shall show; without a choice, its usual subject.

    Attributes:
        operator: such as Linear.
        cases: a glob over labels and shapes.
        variants: globs over names and labels.
        phase: of the timed ones.
        metric: a stored metric.
        dtype: such as float32.
        method: host, eager or graph.
        width: of the figure, in inches.

    """

    operator: str | None = None
    cases: str = "*"
    variants: tuple[str, ...] = ()
    phase: Phase | None = None
    metric: str | None = None
    dtype: str | None = None
    method: str | None = None
    width: float = PAGE

    def has_case(self, row: Row) -> bool:
        """Return whether a row is of the operator, dtype and cases."""
        case = row.case
        return (
            self.operator in {None, case.operator}
            and self.dtype in {None, case.dtype}
            and any(fnmatchcase(name, self.cases) for name in (case.label, case.shape))
        )

    def narrowed(self, run: Run) -> Run:
        """Return the run with the requested rows and the plain layer, which they are compared with."""
        rows = (row for row in run.rows if self.has_case(row))
        kept = tuple(row for row in rows if row.variant.mode == "base" or _matches(row, self.variants))
        return msgspec.structs.replace(run, rows=kept)


class Candidate(NamedTuple):
    """A figure that may be drawn, ``None`` where there is too little for it, and its grid if it has one."""

    draw: Callable[[], Figure | None]
    grid: Grid | None = None


Candidates = Callable[[Sequence[Run], PlotRequest], Iterable[Candidate]]


class Plot(NamedTuple):
    """A kind of plot.

    Attributes:
        description: what it shows.
        needs: what a run must have.
        candidates: its figures of some runs, the preferred ones first.
        options: which of phase and metric can be chosen.
        is_standard: whether it is on the page of a run.

    """

    description: str
    needs: str
    candidates: Candidates
    options: tuple[str, ...] = ()
    is_standard: bool = True


def find(name: str) -> Plot:
    """Return the plot of that name.

    Raises:
        UserError: no plot has this name.

    """
    if name not in PLOTS:
        message = f"no plot {name!r}; there are: {', '.join(PLOTS)}"
        raise UserError(message)
    return PLOTS[name]


def draw(name: str, runs: Iterable[Run], request: PlotRequest) -> Figure:
    """Draw the first figure of a plot that the runs have data for: newest runs first, those with flaws last.

    Raises:
        UserError: there is no such plot or option, a choice matches nothing, or there is nothing to draw.

    """
    plot = find(name)
    for option in ("phase", "metric"):
        if getattr(request, option) is not None and option not in plot.options:
            message = f"the plot {name} has no choice of {option}: leave --{option} out"
            raise UserError(message)
    newest = sorted(runs, key=lambda run: run.header.run_id, reverse=True)
    newest.sort(key=lambda run: any(flaws(run)))
    _check(newest, request)
    for candidate in plot.candidates(newest, request):
        if figure := candidate.draw():
            return figure
    choices = [(option, getattr(request, option)) for option in ("phase", "metric", "method")]
    chosen = " and ".join(f"{option} {value}" for option, value in choices if value)
    message = f"nothing to draw{f' with {chosen}' if chosen else ''}: {name} needs {plot.needs}"
    raise UserError(one_line(message))


def standard_figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """Yield the figures on the page of a run, by the stems of their files."""
    for name, plot in PLOTS.items():
        usual: dict[str, Grid] = {}
        for candidate in plot.candidates([run], PlotRequest()) if plot.is_standard else ():
            if (grid := candidate.grid) is None:
                continue
            differences = _differences(grid, usual.setdefault(grid.operator, grid))
            if figure := candidate.draw():
                yield file_name("-".join([grid.operator, name, *differences])), figure


def _differences(grid: Grid, usual: Grid) -> list[str]:
    """Return the properties in which a grid differs from the usual one, for its file name."""
    names = [name for name in ("phase", "method", "dtype") if getattr(grid, name) != getattr(usual, name)]
    return [getattr(grid, name) for name in names] + ["antithetic"] * (grid.antithetic != usual.antithetic)


def _matches(row: Row, globs: Sequence[str]) -> bool:
    names = (row.variant.name, row.variant.label(row.case.operator))
    return not globs or any(fnmatchcase(name, glob) for glob in globs for name in names)


def _check(runs: Sequence[Run], request: PlotRequest) -> None:
    """Raise a UserError where a choice matches nothing in any of the runs."""
    rows = [row for run in runs for row in run.rows]
    of_cases = [row for row in rows if request.has_case(row)]
    choices = [
        ("operator", request.operator, [row.case.operator for row in rows]),
        ("dtype", request.dtype, [row.case.dtype for row in rows]),
        ("case", None if of_cases else request.cases, [row.case.label for row in rows]),
    ]
    missing = [
        (kind, asked, there) for kind, asked, there in choices if asked is not None and asked not in there
    ]
    names = [row.variant.name for row in of_cases]
    missing += [
        ("variant", glob, names)
        for glob in request.variants
        if not any(_matches(row, [glob]) for row in of_cases)
    ]
    if rows and missing:
        kind, asked, there = missing[0]
        known = listed(list(dict.fromkeys(there)))
        message = f"no {kind} matches {asked!r} in these runs; there are: {known}"
        raise UserError(one_line(message))


def _of(
    plot: Callable[..., Figure | None], found: Callable[[Run, PlotRequest], Iterable[Any]], *arguments: object
) -> Candidates:
    """Return a function that yields a figure of each grid or ranking found in a run."""

    def candidates(runs: Sequence[Run], request: PlotRequest) -> Iterator[Candidate]:
        for run in runs:
            for one in found(request.narrowed(run), request):
                grid = one.grid if isinstance(one, Rankings) else one
                yield Candidate(partial(plot, one, *arguments, width=request.width), grid)

    return candidates


def _timed(run: Run, request: PlotRequest) -> Iterator[Grid]:
    """Yield the grids of times of the requested phase, by default a layer's forward."""
    for operator in operators(run):
        found = [grid for grid in grids(run, operator, LATENCY) if grid.metric == LATENCY]
        is_layer = any(grid.phase in {"sample", "forward"} for grid in found)
        phase = request.phase or ("forward" if is_layer else None)
        yield from (grid for grid in found if phase in {None, grid.phase} and _has_method(grid, request))


def _has_method(grid: Grid, request: PlotRequest) -> bool:
    return grid.method != UNMEASURED and request.method in {None, grid.method}


def _ranked(run: Run, request: PlotRequest) -> Iterator[Rankings]:
    for operator in operators(run):
        yield from (one for one in rankings(run, operator) if _has_method(one.grid, request))


def _kappas(run: Run, _: PlotRequest) -> Iterator[Grid]:
    for operator in operators(run):
        yield from quality_grids(run, operator, KAPPA, LINEAR)


def _shares(run: Run, _: PlotRequest) -> Iterator[Grid]:
    for operator in operators(run):
        yield from share_grids(run, operator)


def _of_history(runs: Sequence[Run], request: PlotRequest) -> Iterator[Candidate]:
    every = replace(request, variants=())  # multipliers need the plain layer beside the variants

    def plot() -> Figure | None:
        found = history_of(
            [every.narrowed(run) for run in runs],
            metric=request.metric or MULTIPLIER,
            phase=request.phase or "forward",
            variants=request.variants or ("*",),
            fewest=2,
        )
        shown = panels(found)
        return history(found, shown, request.width) if shown else None

    yield Candidate(plot)


_STEP = "a run with the phases step and quality"

PLOTS = {
    "hero": Plot(
        TITLE,
        _STEP,
        _of(hero, _ranked),
    ),
    "pareto": Plot(
        pareto_plot.TITLE,
        f"{_STEP}, and peak memory",
        _of(pareto, _ranked),
    ),
    "multipliers": Plot(
        multiplier_plot.TITLE,
        "a run with times of the plain layer and of other variants",
        _of(multipliers, _timed),
        ("phase",),
    ),
    "time-population": Plot(
        "time as a multiple of the plain layer's over the population, best of each family",
        "a run with three cases that differ only in their members, such as suite population",
        _of(sweep, _timed, POPULATION),
        ("phase",),
    ),
    "time-width": Plot(
        "time as a multiple of the plain layer's over the width, best of each family",
        "a run with three cases that differ only in their width, such as suite width",
        _of(sweep, _timed, WIDTH),
        ("phase",),
    ),
    "roofline": Plot(
        "the arithmetic that calls achieve, below the measured peaks of the device",
        "a run with the peaks of its device, and two variants that declare their minimum work",
        _of(roofline, _timed),
        ("phase",),
    ),
    "kappa": Plot(
        "fitted kappa against its closed form",
        "a run with the phase quality",
        _of(kappa, _kappas),
    ),
    "kept-population": Plot(
        "share of the members kept, over the population",
        "a run with the phase quality and three populations, such as suite quality",
        _of(sweep, _shares, POPULATION),
    ),
    "history": Plot(
        "the runs of a device over time, with change points",
        "two complete and valid runs of a device with a variant and case in common",
        _of_history,
        ("phase", "metric"),
        is_standard=False,
    ),
}
"""Name -> plot."""
