"""The runs of a device as series: time(variant) / time(base) of each variant and case over the runs.

Only values that may be compared stand in one series: of one device, case, phase and method, from runs that
are complete and valid. A multiple is computed inside each run, so that drift cancels.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from esbench.errors import UserError
from esbench.report.analysis.comparison import different_devices
from esbench.report.analysis.pivot import Grid, by_size, latency_grids, operators
from esbench.report.analysis.run_selection import reasons_unusable
from esbench.schema import Case, Phase, Run, Variant
from esbench.text import first_names, one_line, suggest
from esbench.units import ABSENT, format_value

_COMMIT_DIGITS = 7
_DECIMALS = 2
MIN_LEVEL_RUNS = 3
"""Fewer runs are no level: two disturbed runs in a row are too common."""
MIN_RUNS = 2 * MIN_LEVEL_RUNS
"""The shortest series that can have a change point."""
_MIN_NOISE = 1e-3
"""Added to the noise of a series, so that a change of 0.1 % after identical values is no change point."""


class ChangePoint(NamedTuple):
    """A change of level: the position of its first value, and the medians of the levels before and after."""

    position: int
    before: float
    after: float


class Key(NamedTuple):
    """The case, method and reference of multipliers that the series of a panel share."""

    case: Case
    method: str
    against: str


class Point(NamedTuple):
    """The value of a run, by its position, with the 95 % interval."""

    run: int
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Series:
    """The values of one variant in the order of their runs, and where their level changes."""

    variant: Variant
    key: Key
    points: tuple[Point, ...]
    change_points: tuple[ChangePoint, ...]

    @property
    def name(self) -> str:
        """The label of the variant, as in the rows of a table."""
        return self.variant.label(self.key.case.operator)

    def runs_around(self, change: ChangePoint) -> tuple[int, int]:
        """Return the positions of the last run before a change and of the first run after it."""
        return self.points[change.position - 1].run, self.points[change.position].run


@dataclass(frozen=True)
class History:
    """The series of the runs of one device.

    Attributes:
        runs: the runs that may be compared, by their start.
        series: those of a panel are adjacent.
        left_out: why other runs, cases and values are not shown.
        in_few_runs: labels of cases that too few runs measured.
    """

    phase: Phase
    runs: tuple[Run, ...]
    series: tuple[Series, ...]
    left_out: tuple[str, ...]
    in_few_runs: tuple[str, ...] = ()

    @property
    def panels(self) -> dict[Key, list[Series]]:
        """The series of each panel."""
        panels: dict[Key, list[Series]] = {}
        for series in self.series:
            panels.setdefault(series.key, []).append(series)
        return panels


def devices(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs by the name of their device's folder."""
    by_device: dict[str, list[Run]] = {}
    for run in runs:
        by_device.setdefault(run.header.environment.slug, []).append(run)
    return dict(sorted(by_device.items()))


def history(
    runs: Iterable[Run],
    *,
    phase: Phase = "forward",
    variants: Sequence[str] = ("*",),
    cases: str = "*",
    fewest: int = 1,
) -> History:
    """Collect the series of the runs of one device; :func:`why_empty` explains why there are none.

    ``variants`` are globs over names or labels, ``cases`` is one over labels. A case must have values in
    ``fewest`` runs.

    Raises:
        UserError: a glob matches nothing, or ruptures is not installed.
    """
    shown, left_out = select_comparable(runs)
    by_series: dict[tuple[Key, Variant], list[Point]] = {}
    for number, run in enumerate(shown):
        for grid in _grids(run, phase):
            for variant, case, _ in grid.cells:
                if point := _point(grid, variant, case, number):
                    key = Key(case, grid.method, _against(grid))
                    by_series.setdefault((key, variant), []).append(point)
    runs_of_key: dict[Key, set[int]] = {}
    for (key, _), points in by_series.items():
        runs_of_key.setdefault(key, set()).update(point.run for point in points)
    chosen = _choose(by_series, variants, cases, left_out)
    rare_keys = [key for key, _ in chosen if len(runs_of_key[key]) < fewest]
    in_few_runs = list(dict.fromkeys(key.case.label for key in rare_keys))
    if in_few_runs:
        left_out.append(f"left out, measured in fewer than {fewest} runs: {first_names(in_few_runs)}")
    # Baselines come last; other variants are in the order in which the runs first have them.
    order = {variant: index for index, variant in enumerate(dict.fromkeys(v for _, v in by_series))}
    chosen.sort(key=lambda pair: (*_sort_key(pair[0]), pair[1].baseline, order[pair[1]]))
    series = (
        Series(
            variant,
            key,
            tuple(by_series[key, variant]),
            change_points([point.value for point in by_series[key, variant]]),
        )
        for key, variant in chosen
        if len(runs_of_key[key]) >= fewest
    )
    return History(phase, shown, tuple(series), tuple(left_out), tuple(in_few_runs))


def select_comparable(runs: Iterable[Run]) -> tuple[tuple[Run, ...], list[str]]:
    """Return the runs to compare, oldest first, and why each other run is left out.

    Left out are runs that are unfinished, invalid, or of another device than the newest one.
    """
    ordered = sorted(runs, key=lambda run: run.header.run_id)
    usable = [run for run in ordered if not any(reasons_unusable(run))]
    comparable, left_out = [], []
    for run in ordered:
        if flaws := " and ".join(reasons_unusable(run)):
            reason = f"it {flaws}"
        else:
            reason = different_devices(run, usable[-1], "it ran on {}, the newest one on {}")
        if reason:
            left_out.append(f"run {run.header.run_id} is left out, {reason}")
        else:
            comparable.append(run)
    return tuple(comparable), left_out


def _grids(run: Run, phase: Phase) -> list[Grid]:
    found = (grid for operator in operators(run) for grid in latency_grids(run, operator))
    return [grid for grid in found if grid.phase == phase]


def _against(grid: Grid) -> str:
    """Return what multipliers are relative to: ``Base``, or ``Base's forward`` if base lacks the phase."""
    reference = grid.reference("base")
    if reference is None:
        return ""
    name = reference.variant.name
    return name if reference.phase == grid.phase else f"{name}'s {reference.phase}"


def _point(grid: Grid, variant: Variant, case: Case, number: int) -> Point | None:
    """Return the multiple of base of a cell; None if it is not finite, and for base itself."""
    ratio = None if variant.mode == "base" else grid.multiplier(variant, case, "base")
    if ratio is None or not math.isfinite(ratio.value):
        return None
    return Point(number, ratio.value, ratio.low, ratio.high)


def _choose(
    measured_keys: Iterable[tuple[Key, Variant]], variants: Sequence[str], cases: str, left_out: Sequence[str]
) -> list[tuple[Key, Variant]]:
    """Return the series that match the globs.

    Raises:
        UserError: none does; the message has the closest names, then ``left_out``.
    """
    known = sorted(measured_keys, key=lambda pair: _sort_key(pair[0]))
    chosen = [
        (key, variant)
        for key, variant in known
        if variant.matches(variants, key.case.operator) and fnmatchcase(key.case.label, cases)
    ]
    if known and not chosen:
        labels = list(dict.fromkeys(key.case.label for key, _ in known))
        names = list(dict.fromkeys(variant.name for _, variant in known))
        if not any(fnmatchcase(label, cases) for label in labels):
            message = f"no case matches {cases!r} in these runs; {suggest(cases, labels, 'esbench history')}"
        elif not any(variant.matches(variants, key.case.operator) for key, variant in known):
            globs = ", ".join(map(repr, variants))
            message = f"no variant matches {globs} in these runs; {suggest(globs, names, 'esbench history')}"
        else:
            message = f"no variant {', '.join(variants)} was measured on a case {cases} in these runs"
        raise UserError(one_line("; ".join([message, *left_out])))
    return chosen


def why_empty(history: History) -> str:
    """Return why a history has no series."""
    if not history.runs:
        return f"no run of this device can be shown: {'; '.join(history.left_out)}"
    if history.in_few_runs:
        remedy = f"measure again with `esbench run`; {'; '.join(history.left_out)}"
        return f"no case was measured in two runs in {history.phase}: {remedy}"
    return f"no run of this device has times of base and of another variant in {history.phase}"


def _sort_key(key: Key) -> tuple[object, ...]:
    """Sort layers without spatial dimensions first, then by size."""
    case = key.case
    return len(case.kernel_size), case.operator, case.dtype, *by_size(case), key.method, key.against


def measured_in(panel: Sequence[Series]) -> list[int]:
    """Return the positions of the runs that have a value in any of these series."""
    return sorted({point.run for series in panel for point in series.points})


def change_points(values: Sequence[float]) -> tuple[ChangePoint, ...]:
    """Return the changes of level in a series of positive values.

    PELT (Killick et al. 2012) minimizes sum |log y_i - median of its level| / noise + penalty * changes, with
    noise = median |log y_i+1 - log y_i| and penalty = 3 + log(number of values). In simulations it marks
    at most 2 % of series without a change, 10 % if neighbors correlate by 0.5. It finds a step of four times
    the noise in two of three series with three runs on each side, and in all with ten.

    Raises:
        UserError: ruptures is not installed.
    """
    if len(values) < MIN_RUNS:
        return ()
    try:
        from ruptures.detection import Pelt  # noqa: PLC0415  # slow to import, and has no release for Python 3.14
    except ModuleNotFoundError as error:
        raise UserError(
            "change points need ruptures, which is not installed here: pip install ruptures"
        ) from error
    logarithms = np.log(values)
    noise = np.median(np.abs(np.diff(logarithms))) + _MIN_NOISE
    search = Pelt(model="l1", min_size=MIN_LEVEL_RUNS, jump=1).fit(logarithms / noise)
    ends: list[int] = search.predict(pen=3 + math.log(len(values)))
    levels = [statistics.median(values[begin:end]) for begin, end in pairwise([0, *ends])]
    return tuple(
        ChangePoint(index, before, after)
        for index, (before, after) in zip(ends[:-1], pairwise(levels), strict=True)
    )


def percentage(before: float, after: float) -> str:
    """Return the relative change of a value as text, with its sign."""
    percent = 100 * (after / before - 1)
    if not math.isfinite(percent):
        return ABSENT
    rounded = round(percent, _DECIMALS)
    sign = "+" if rounded > 0 else "-" if rounded < 0 else ""
    return f"{sign}{format_value('change_percent', abs(rounded))}"


def moment(run: Run, between: str = " ") -> str:
    """Return the date and commit of a run; a plus after the commit stands for uncommitted changes."""
    environment = run.header.environment
    commit = environment.commit[:_COMMIT_DIGITS] if environment.commit else "no commit"
    if environment.commit and environment.dirty:
        commit += "+"
    return f"{run.header.started[:10]}{between}{commit}"


def source(history: History, runs: Sequence[int]) -> str:
    """Return the device, the number and the dates of the runs at these positions, at least one."""
    first, last = history.runs[runs[0]], history.runs[runs[-1]]
    name = last.header.environment.device_name
    if len(runs) == 1:
        return f"{name}, one run, of {moment(first)}"
    return f"{name}, {len(runs)} runs from {moment(first)} to {moment(last)}"
