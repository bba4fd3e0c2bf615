"""All plots by name, and the figures that can be drawn from stored runs.

A new plot is an entry of :data:`PLOTS`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.report.analysis.pivot import UNMEASURED, Grid, latency_grids, operators, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, KAPPA, LINEAR
from esbench.report.analysis.ranking import Rankings, rankings
from esbench.report.analysis.run_selection import flaws
from esbench.report.plots.hero import hero
from esbench.report.plots.kappa import kappa
from esbench.report.plots.multipliers import multipliers
from esbench.report.plots.pareto import pareto
from esbench.report.plots.roofline import roofline
from esbench.report.plots.style import PAGE, Figure
from esbench.report.plots.sweeps import POPULATION, WIDTH, kept_members, times
from esbench.schema import Phase, Row, Run
from esbench.text import file_name, first_names, one_line

Subject = Grid | Rankings


@dataclass(frozen=True)
class PlotRequest:
    """The rows that a plot shows; by default its usual ones.

    ``cases`` is a glob over labels and shapes, ``variants`` are globs over names and labels; ``width`` is in
    inches.
    """

    cases: str = "*"
    variants: Sequence[str] = ("*",)
    phase: Phase | None = None
    dtype: str | None = None
    method: str | None = None
    width: float = PAGE

    def narrowed(self, run: Run) -> Run:
        """Return the run with the requested rows and those of the plain layer, the reference."""
        return msgspec.structs.replace(run, rows=tuple(row for row in run.rows if self._selects(row)))

    def _selects(self, row: Row) -> bool:
        case, variant = row.case, row.variant
        return (
            self.dtype in {None, case.dtype}
            and (variant.mode == "base" or variant.matches(self.variants, case.operator))
            and _matches(_case_names(row), [self.cases])
        )

    def check(self, rows: Sequence[Row]) -> None:
        """Raise a UserError if a choice matches none of the rows."""
        for option, globs, names_of in (
            ("dtype", [self.dtype or "*"], lambda row: [row.case.dtype]),
            ("case", [self.cases], _case_names),
            ("variant", self.variants, _variant_names),
        ):
            for glob in globs:
                if glob != "*" and rows and not any(_matches(names_of(row), [glob]) for row in rows):
                    known = first_names(list(dict.fromkeys(names_of(row)[0] for row in rows)))
                    message = f"no {option} matches {glob!r} in these runs; available: {known}"
                    raise UserError(one_line(message))


def _case_names(row: Row) -> list[str]:
    return [row.case.label, row.case.shape]


def _variant_names(row: Row) -> list[str]:
    return [row.variant.name, row.variant.label(row.case.operator)]


def _matches(names: Sequence[str], globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


class Plot(NamedTuple):
    """A kind of plot.

    Attributes:
        description: what it shows.
        needs: what a run must have.
        draw: draws a grid or a ranking of a run; returns None where there is too little for a figure.
        subjects: returns the grids or rankings of a run that it can draw, the preferred ones first.
    """

    description: str
    needs: str
    draw: Callable[..., Figure | None]
    subjects: Callable[[Run, Phase | None], Iterable[Subject]]


def find(name: str) -> Plot:
    """Return the plot of that name; raise a UserError if there is none."""
    if name not in PLOTS:
        raise UserError(f"no plot {name!r}; available: {', '.join(PLOTS)}")
    return PLOTS[name]


def draw(name: str, runs: Iterable[Run], request: PlotRequest) -> Figure:
    """Draw a plot of the newest run without flaws that has the data, or else of the newest with flaws.

    Raises:
        UserError: there is no such plot, a choice matches nothing, or there is nothing to draw.
    """
    plot = find(name)
    if request.phase and plot.subjects is not _timed:
        raise UserError(f"the plot {name} has no choice of phase: leave --phase out")
    ordered = sorted(runs, key=lambda run: run.header.run_id, reverse=True)
    ordered.sort(key=lambda run: any(flaws(run)))  # stable: those without flaws first, each the newest first
    request.check([row for run in ordered for row in run.rows])
    for run in ordered:
        for subject in plot.subjects(request.narrowed(run), request.phase):
            is_requested = request.method in {None, _grid(subject).method}
            if is_requested and (figure := plot.draw(subject, width=request.width)):
                return figure
    choices = (("phase", request.phase), ("method", request.method))
    chosen = " and ".join(f"{option} {value}" for option, value in choices if value)
    message = f"nothing to draw{f' with {chosen}' if chosen else ''}: {name} needs {plot.needs}"
    raise UserError(one_line(message))


def standard_figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """Yield the figures on the page of a run, and the stems of their files.

    A stem is operator-plot, followed by each property that differs from the operator's first grid.
    """
    for name, plot in PLOTS.items():
        first_grids: dict[str, Grid] = {}
        for subject in plot.subjects(run, None):
            grid = _grid(subject)
            first = first_grids.setdefault(grid.operator, grid)
            if figure := plot.draw(subject):
                pairs = (
                    (grid.phase, first.phase),
                    (grid.method, first.method),
                    (grid.dtype, first.dtype),
                    ("antithetic" if grid.antithetic else "", "antithetic" if first.antithetic else ""),
                )
                differences = [here for here, usual in pairs if here != usual]
                yield file_name("-".join([grid.operator, name, *differences])), figure


def _grid(subject: Subject) -> Grid:
    return subject.grid if isinstance(subject, Rankings) else subject


def _timed(run: Run, phase: Phase | None) -> Iterator[Grid]:
    """Yield the grids of times of a phase; by default the forward of a layer, and all of other operators."""
    for operator in operators(run):
        timed = latency_grids(run, operator)
        is_layer = any(grid.phase in {"sample", "forward"} for grid in timed)
        wanted = phase or ("forward" if is_layer else None)
        for grid in timed:
            if wanted in {None, grid.phase} and grid.method != UNMEASURED:
                yield grid


def _ranked(run: Run, _: Phase | None) -> Iterator[Rankings]:
    for operator in operators(run):
        yield from (ranking for ranking in rankings(run, operator) if ranking.grid.method != UNMEASURED)


def _of_quality(run: Run, _: Phase | None, metric: str) -> Iterator[Grid]:
    for operator in operators(run):
        yield from quality_grids(run, operator, metric, LINEAR)


_STEP = "a run with the phases step and quality"

PLOTS = {
    "hero": Plot("members evaluated per ms, and n_eff per ms", _STEP, hero, _ranked),
    "pareto": Plot(
        "effective population per ms of a step, against its peak memory",
        f"{_STEP}, and peak memory",
        pareto,
        _ranked,
    ),
    "multipliers": Plot(
        "time as a multiple of the plain layer's, by family",
        "a run with times of the plain layer and of other variants",
        multipliers,
        _timed,
    ),
    "time-population": Plot(
        "time as a multiple of the plain layer's, against the population, best of each family",
        "a run with three cases that differ only in their members, such as suite population",
        partial(times, sweep=POPULATION),
        _timed,
    ),
    "time-width": Plot(
        "time as a multiple of the plain layer's, against the width, best of each family",
        "a run with three cases that differ only in their width, such as suite width",
        partial(times, sweep=WIDTH),
        _timed,
    ),
    "roofline": Plot(
        "the arithmetic that calls achieve, below the measured peaks of the device",
        "a run with the peaks of its device, and two variants that declare their minimum work",
        roofline,
        _timed,
    ),
    "kappa": Plot(
        "fitted kappa against its closed form",
        "a run with the phase quality",
        kappa,
        partial(_of_quality, metric=KAPPA),
    ),
    "kept-population": Plot(
        "share of the members kept, against the population",
        "a run with the phase quality and three populations, such as suite quality",
        kept_members,
        partial(_of_quality, metric=EFFECTIVE),
    ),
}
"""Name -> plot."""
