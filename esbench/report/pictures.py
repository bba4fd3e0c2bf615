"""All pictures by name: what each shows, what it needs, and what draws it. A new picture is a row here."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.gate.study import newest_of_each, read
from esbench.records import Run
from esbench.report import (
    distributions,
    gate_power,
    kappas,
    pareto,
    plots,
    roofs,
    spectra,
    sweeps,
    timelines,
)
from esbench.report.drawing import PAGE, Paper
from esbench.report.gate_findings import findings
from esbench.report.grid import LATENCY, PEAK, UNMEASURED, Grid, grids, operators, quality_grids
from esbench.report.history import MULTIPLIER, history
from esbench.report.qualities import KAPPA, LINEAR
from esbench.report.ranking import DENSE, rankings
from esbench.report.sheets import Sheet
from esbench.report.wishes import Source, Wish, check, fits, fits_case, narrowed
from esbench.report.words import one_line

MOST = 100
"""More rows or columns than this are no picture."""
_PANELS = 8


class Sketch(NamedTuple):
    """A picture that may be drawn: of which figures, and what draws it, if there is enough to."""

    draw: Callable[[], Sheet | None]
    grid: Grid | None = None


@dataclass(frozen=True)
class Picture:
    """A kind of picture.

    ``takes`` names the options that choose its figures. A ``standard`` one is part of a run's page; one that
    is not ``from_runs`` is drawn from something else under the results.
    """

    name: str
    description: str
    needs: str
    sketches: Callable[[Source, Wish], Iterable[Sketch]]
    takes: frozenset[str] = field(default_factory=frozenset)
    standard: bool = True
    from_runs: bool = True


def find(name: str) -> Picture:
    """The picture of that name.

    Raises:
        UserError: there is none.

    """
    if name not in PICTURES:
        message = f"no picture {name!r}; there are: {', '.join(PICTURES)}"
        raise UserError(message)
    return PICTURES[name]


def drawn(picture: Picture, source: Source, wish: Wish) -> Sheet:
    """The first picture of this kind that the source has figures for.

    Raises:
        UserError: an option does not suit the picture, a glob matches nothing, there are too many rows or
            columns, or there is nothing to draw.

    """
    for option in ("phase", "metric"):
        if getattr(wish, option) is not None and option not in picture.takes:
            message = f"{picture.name} shows figures of its own: leave --{option} away"
            raise UserError(message)
    if picture.from_runs:
        check(source.runs, wish)
    for sketch in picture.sketches(source, wish):
        if sketch.grid and size(sketch.grid) > MOST:
            much = f"{size(sketch.grid)} variants or cases are too many for a picture, {MOST} are the most"
            message = f"{much}: choose with --variants or --cases"
            raise UserError(message)
        sheet = sketch.draw()
        if sheet:
            return sheet
    asked = [
        f"{name} {value}"
        for name, value in (("phase", wish.phase), ("metric", wish.metric), ("method", wish.method))
        if value
    ]
    here = f" with {' and '.join(asked)}" if asked else ""
    message = f"nothing to draw{here}: {picture.name} needs {picture.needs}"
    raise UserError(one_line(message))


def size(grid: Grid) -> int:
    """Rows or columns, whichever are more."""
    return max(len(grid.variants), len(grid.cases))


def _of_grids(
    draw: Callable[[Grid, Paper], Sheet | None], metric: str
) -> Callable[[Source, Wish], Iterator[Sketch]]:
    """The picture of a grid of figures: of the forward, unless another phase was asked for."""

    def sketches(source: Source, wish: Wish) -> Iterator[Sketch]:
        for run in source.runs:
            for grid in _grids(narrowed(run, wish), wish, metric):
                yield Sketch(partial(draw, grid, wish.paper), grid)

    return sketches


def _grids(run: Run, wish: Wish, metric: str) -> Iterator[Grid]:
    """The grids of a quantity: of layers those of the forward, of work that has none whatever was timed."""
    name = wish.metric or metric
    for operator in operators(run):
        found = [grid for grid in grids(run, operator, name) if grid.metric == name]
        is_layer = any(grid.phase in {"sample", "forward"} for grid in found)
        phase = wish.phase or ("forward" if is_layer else None)
        yield from (grid for grid in found if phase in {None, grid.phase} and _timed_so(grid, wish))


def _timed_so(grid: Grid, wish: Wish) -> bool:
    return grid.method != UNMEASURED and wish.method in {None, grid.method}


def _of_qualities(
    draw: Callable[[Grid, Paper], Sheet | None], found: Callable[[Run, str], Iterable[Grid]]
) -> Callable[[Source, Wish], Iterator[Sketch]]:
    def sketches(source: Source, wish: Wish) -> Iterator[Sketch]:
        for run in source.runs:
            chosen = narrowed(run, wish)
            for operator in operators(chosen):
                for grid in found(chosen, operator):
                    yield Sketch(partial(draw, grid, wish.paper), grid)

    return sketches


def _of_rankings(plane: pareto.Plane) -> Callable[[Source, Wish], Iterator[Sketch]]:
    def sketches(source: Source, wish: Wish) -> Iterator[Sketch]:
        for run in source.runs:
            chosen = narrowed(run, wish)
            for operator in operators(chosen):
                for one in rankings(chosen, operator):
                    if _timed_so(one.grid, wish):
                        yield Sketch(partial(pareto.pareto, one, plane, wish.paper), one.grid)

    return sketches


def _samples(source: Source, wish: Wish) -> Iterator[Sketch]:
    """Where all variants that were asked for have samples, before where some of them have."""
    globs = wish.variants or ("Base", DENSE)
    found: list[tuple[int, Grid]] = []
    for run in source.runs:
        rows = tuple(row for row in run.rows if fits_case(row, wish) and fits(row.variant, row, globs))
        for grid in _grids(msgspec.structs.replace(run, rows=rows), wish, LATENCY):
            met = sum(any(fits(row.variant, row, [glob]) for _, _, row in grid.cells) for glob in globs)
            found.append((met, grid))
    for _, grid in sorted(found, key=lambda pair: -pair[0]):
        yield Sketch(partial(distributions.distributions, grid, wish.paper), grid)


def _history(source: Source, wish: Wish) -> Iterator[Sketch]:
    every = replace(wish, variants=())

    def draw() -> Sheet | None:
        found = history(
            [narrowed(run, every) for run in source.runs],
            metric=wish.metric or MULTIPLIER,
            phase=wish.phase or "forward",
            variants=wish.variants or ("*",),
            fewest=2,
        )
        panels = timelines.panels(found)
        shown = timelines.most_telling(panels, _PANELS if wish.paper is PAGE else _PANELS // 2)
        few = f"{len(shown)} of {len(panels)} panels, those with change points first: choose with --cases"
        notes = [few] if len(shown) < len(panels) else []
        return timelines.timeline(found, shown, wish.paper, notes) if shown else None

    yield Sketch(draw)


def _gate(source: Source, wish: Wish) -> Iterator[Sketch]:
    every = [findings(read(path)) for path in newest_of_each(source.results)]
    yield Sketch(partial(gate_power.power, every, wish.paper))


def _sweep(sweep: sweeps.Sweep) -> Callable[[Grid, Paper], Sheet | None]:
    return lambda grid, paper: sweeps.against(grid, sweep, paper)


_FIGURES = frozenset({"phase", "metric"})
_STEP = "a run with the phases step and quality"
_GROWS = "a run with three cases that differ in nothing but their {}, such as suite {}"

PICTURES = {
    picture.name: picture
    for picture in (
        Picture(
            "pareto",
            "effective members per millisecond of a step, against its peak memory",
            f"{_STEP}, and peak memory",
            _of_rankings(pareto.MEMORY),
        ),
        Picture(
            "multipliers",
            "time as a multiple of the plain layer's, with intervals and floors",
            "a run with the plain layer and times of other variants",
            _of_grids(plots.multipliers, LATENCY),
            _FIGURES,
        ),
        *(
            Picture(
                f"{kind}-{sweep.name}",
                f"{words} against the {sweep.name}, with the ends where no larger one has a number",
                _GROWS.format("number of members" if sweep is sweeps.POPULATION else "width", sweep.name),
                _of_grids(_sweep(sweep), metric),
                _FIGURES,
            )
            for kind, words, metric in (("time", "time", LATENCY), ("memory", "peak memory", PEAK))
            for sweep in sweeps.SWEEPS
        ),
        Picture(
            "roofline",
            "the arithmetic that calls achieve, and the device's measured ceilings",
            "a run with its device's ceilings, and variants that declare their least work",
            _of_grids(roofs.roofs, LATENCY),
            frozenset({"phase"}),
        ),
        Picture(
            "kappa",
            "kappa as it was fitted, against its closed form",
            "a run with the phase quality",
            _of_qualities(kappas.kappas, lambda run, name: quality_grids(run, name, KAPPA, LINEAR)),
        ),
        Picture(
            "kept-population",
            "effective members as a share of all, against the population",
            "a run with the phase quality and three populations, such as suite quality",
            _of_qualities(_sweep(sweeps.POPULATION), spectra.kept_grids),
        ),
        Picture(
            "spectrum",
            "singular values of one perturbation",
            "a run with the phase quality",
            _of_qualities(
                spectra.spectrum,
                lambda run, name: quality_grids(run, name, spectra.SPECTRUM, spectra.ONE),
            ),
            standard=False,
        ),
        Picture(
            "kept-time",
            "the share of members that is kept, against the time of a step",
            f"{_STEP}, and the plain layer",
            _of_rankings(pareto.TIME),
            standard=False,
        ),
        Picture(
            "samples",
            "how the samples of two variants are distributed; name them with --variants",
            "a run with samples of these variants",
            _samples,
            _FIGURES,
            standard=False,
        ),
        Picture(
            "history",
            "the runs of a device over time, with change points",
            "two complete and valid runs of a device with a same case and variant",
            _history,
            _FIGURES,
            standard=False,
        ),
        Picture(
            "gate-power",
            "how often the gate and the rules of other tools flag a slowdown",
            "a study of the gate, by `esbench gate-study`",
            _gate,
            standard=False,
            from_runs=False,
        ),
    )
}
"""Name -> picture."""
