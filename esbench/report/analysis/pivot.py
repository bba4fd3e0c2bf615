"""A run as grids of variants by cases, one metric in each: the input of tables and plots."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from esbench import schema
from esbench.schema import PHASES, QUALITY, Case, Measurement, Mode, Phase, Row, Run, Skipped, Variant
from esbench.stats import Ratio, median, ratio

BASELINES = ("Base", "Naive", "Loop", "Vmap")
"""The order of the last rows."""
TIMES, MEMORY = "_ns", "_bytes"
"""Suffixes of metrics: times, and memory."""
LATENCY, HOST, WARM = "latency_ns", "host_latency_ns", "warm_latency_ns"
PEAK, LARGEST = "peak_bytes", "largest_members"
UNMEASURED = "none"
"""The method of a grid that holds only reasons."""
_METRICS = (LATENCY, HOST, WARM, PEAK)
_METHODS = tuple(itertools.chain.from_iterable(schema.METHODS.values()))
_Key = tuple[Phase, str, str]  # phase, metric and method


@dataclass(frozen=True)
class Reference:
    """The variant and phase that multipliers are relative to."""

    variant: Variant
    phase: Phase


@dataclass(frozen=True)
class Grid:
    """A table of variants (rows) by cases (columns): one metric of a run, in one phase and by one method.

    The cases are those of one operator and dtype, plain or antithetic.
    """

    run: Run
    operator: str
    dtype: str
    antithetic: bool
    phase: Phase
    metric: str
    method: str

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """The columns, sorted by size, because a run measures its cases in random order."""
        return tuple(sorted({row.case for row in self._rows}, key=by_size))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The rows in the order of the run, baselines last; some have only reasons and no number."""
        in_grid = {row.variant for row in self._rows}
        return tuple(sorted((v for v in self.run.variants if v in in_grid), key=_baselines_last))

    def at(self, variant: Variant, case: Case) -> Measurement | Skipped | None:
        """Return the row of a cell. For a variant that failed this is the failure, never a measurement."""
        skipped = self._skipped.get((variant, case))
        measured = self.measured(variant, case, self.phase)
        if skipped is not None and (measured is None or skipped.status == "failed"):
            return skipped
        return measured

    def measured(
        self, variant: Variant, case: Case, phase: Phase, group: int | None = None
    ) -> Measurement | None:
        """Return a measurement of any phase in this metric and method.

        Baselines are measured again in every co-resident group: this returns the one of ``group``, or
        the first if that group has no such measurement.
        """
        rows = self._measured.get((variant, case, phase), ())
        return next((row for row in rows if row.group == group), next(iter(rows), None))

    def reference(self, mode: Mode) -> Reference | None:
        """Return the baseline of a mode in this phase, or its forward if it has no such phase."""
        return self._references.get(mode)

    def multiplier(self, variant: Variant, case: Case, mode: Mode) -> Ratio | None:
        """Return the ratio of a row to base, or of naive to the row; None without both numbers."""
        pair = self.compared_rows(variant, case, mode)
        if pair is None:
            return None
        row, baseline = pair
        return ratio(baseline, row) if mode == "naive" else ratio(row, baseline)

    def compared_rows(
        self, variant: Variant, case: Case, mode: Mode
    ) -> tuple[Measurement, Measurement] | None:
        """Return a row and the baseline that it is compared with, None if one of the two is missing."""
        row, reference = self.at(variant, case), self.reference(mode)
        if reference is None or not isinstance(row, Measurement):
            return None
        baseline = self.measured(reference.variant, case, reference.phase, row.group)
        return None if baseline is None else (row, baseline)

    @cached_property
    def cells(self) -> tuple[tuple[Variant, Case, Measurement], ...]:
        """The cells that were measured, row by row."""
        cells = ((variant, case, self.at(variant, case)) for variant in self.variants for case in self.cases)
        return tuple((variant, case, row) for variant, case, row in cells if isinstance(row, Measurement))

    def by_median(self, case: Case) -> dict[Variant, Measurement]:
        """Return the variants with a median on a case and their rows, the smallest median first."""
        rows = ((variant, self.at(variant, case)) for variant in self.variants)
        known = {variant: row for variant, row in rows if isinstance(row, Measurement) and median(row)}
        return dict(sorted(known.items(), key=lambda item: median(item[1]) or 0.0))

    @cached_property
    def _references(self) -> dict[Mode, Reference]:
        """The baseline of each mode: the first variant with a time in this phase, else in the forward."""
        references: dict[Mode, Reference] = {}
        known = sorted({variant: None for variant, _, _ in self._measured}, key=_baselines_last)
        for phase in (self.phase, "forward"):
            for variant in known:
                if any(self.measured(variant, case, phase) for case in self.cases):
                    references.setdefault(variant.mode, Reference(variant, phase))
        return references

    @cached_property
    def peaks(self) -> dict[tuple[Variant, Case], Measurement]:
        """The peak memory of each cell in this phase; its method is not that of the times."""
        peaks = [row for row in self.run.measurements if (row.phase, row.metric) == (self.phase, PEAK)]
        return {(row.variant, row.case): row for row in reversed(peaks)}  # the first co-resident group counts

    @cached_property
    def largest(self) -> dict[tuple[Variant, Case], Measurement]:
        """The largest population that fits of each cell for which it was searched."""
        rows = (row for row in self.run.measurements if row.metric == LARGEST)
        return {(row.variant, row.case): row for row in rows if median(row) is not None}

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        """The measurements of the grid, and the skipped rows that give reasons for its empty cells."""
        kind = (self.operator, self.dtype, self.antithetic)
        return tuple(row for row in self.run.rows if self._is_of_grid(row) and _kind(row.case) == kind)

    def _is_of_grid(self, row: Row) -> bool:
        if isinstance(row, Skipped):
            return row.phase in {None, self.phase} and row.method in {None, self.method}
        return _key(row) == (self.phase, self.metric, self.method)

    @cached_property
    def _skipped(self) -> dict[tuple[Variant, Case], Skipped]:
        skipped = [row for row in self._rows if isinstance(row, Skipped)]
        skipped.sort(key=lambda row: row.status == "failed")  # a failure overwrites other reasons
        return {(row.variant, row.case): row for row in skipped}

    @cached_property
    def _measured(self) -> dict[tuple[Variant, Case, Phase], list[Measurement]]:
        """The measurements in all phases: a baseline may be that of the forward."""
        by_cell: dict[tuple[Variant, Case, Phase], list[Measurement]] = {}
        kind = (self.operator, self.dtype, self.antithetic)
        for row in self.run.measurements:
            if (row.metric, row.method) == (self.metric, self.method) and _kind(row.case) == kind:
                by_cell.setdefault((row.variant, row.case, row.phase), []).append(row)
        return by_cell


def grids(run: Run, operator: str, suffix: str) -> list[Grid]:
    """Return all grids of an operator whose metric has this suffix, the forward pass first.

    For times, this includes phases and methods without a measurement, to show the reasons. Methods by which
    only base and naive were timed are left out: they are references of other phases.
    """
    kinds = dict.fromkeys(_kind(row.case) for row in run.rows if row.case.operator == operator)
    all_grids = [Grid(run, *kind, *key) for kind in kinds for key in _keys(run, kind, suffix)]
    return sorted((grid for grid in all_grids if grid.variants), key=_sort_key)


def latency_grids(run: Run, operator: str) -> list[Grid]:
    """Return the grids of an operator's times, without host times and times with warm caches."""
    return [grid for grid in grids(run, operator, TIMES) if grid.metric == LATENCY]


def _keys(run: Run, kind: tuple[str, str, bool], suffix: str) -> list[_Key]:
    """Return phase, metric and method of each grid, in the order of the run.

    ``kind`` is the operator, dtype and antithetic sampling of the grids' cases.
    """
    of_kind = [row for row in run.rows if _kind(row.case) == kind]
    rows = [row for row in of_kind if row.phase != QUALITY]
    measurements = [row for row in rows if isinstance(row, Measurement)]
    keys = dict.fromkeys(_key(row) for row in measurements if row.metric.endswith(suffix))
    if suffix == TIMES:
        is_empty = all(isinstance(row, Skipped) for row in of_kind)
        keys |= dict.fromkeys(_keys_of_reasons(rows, {phase for phase, _, _ in keys}, is_empty=is_empty))
    batched = [row for row in rows if row.variant.mode == "batched"]
    measured = {_key(row) for row in batched if isinstance(row, Measurement)}
    skipped = {(row.phase, row.method) for row in batched if isinstance(row, Skipped)}
    measured_by_any_method = {(phase, metric) for phase, metric, _ in measured}

    def only_baselines(key: _Key) -> bool:
        phase, metric, method = key
        by_other_method = key not in measured and (phase, metric) in measured_by_any_method
        return by_other_method and (phase, method) not in skipped

    return [key for key in keys if not only_baselines(key)]


def _keys_of_reasons(rows: Iterable[Row], timed: Collection[Phase], *, is_empty: bool) -> list[_Key]:
    """Return phase, metric and method of the time grids that show the reasons of skipped rows.

    A phase without any time or method has the method :data:`UNMEASURED` if a variant failed or ran out of
    memory in it, or if the run is empty; reasons for all phases are then shown in the forward.
    """
    skipped = [row for row in rows if isinstance(row, Skipped)]
    keys = [(row.phase, LATENCY, row.method) for row in skipped if row.phase and row.method in _METHODS]
    phases_with_grid = {*timed, *(phase for phase, _, _ in keys)}
    lost_phases = (row.phase or "forward" for row in skipped if is_empty or _is_lost(row))
    return [*keys, *((phase, LATENCY, UNMEASURED) for phase in lost_phases if phase not in phases_with_grid)]


def _key(row: Measurement) -> _Key:
    return row.phase, row.metric, row.method


def _is_lost(row: Skipped) -> bool:
    """Return whether a phase has no number because its variant failed or ran out of memory."""
    return row.phase is not None and (row.status == "failed" or row.reason.startswith(schema.OUT_OF_MEMORY))


def quality_grids(run: Run, operator: str, metric: str, method: str) -> list[Grid]:
    """Return the grids of a quality metric, one for each dtype of an operator, if they have any number."""
    kinds = dict.fromkeys(_kind(row.case) for row in run.rows if row.case.operator == operator)
    all_grids = (Grid(run, *kind, QUALITY, metric, method) for kind in kinds)
    return [grid for grid in all_grids if grid.cells]


def _kind(case: Case) -> tuple[str, str, bool]:
    return case.operator, case.dtype, case.antithetic


def _sort_key(grid: Grid) -> tuple[bool, int, int, int]:
    metric = _METRICS.index(grid.metric) if grid.metric in _METRICS else len(_METRICS)
    method = _METHODS.index(grid.method) if grid.method in _METHODS else len(_METHODS)
    return grid.phase != "forward", PHASES.index(grid.phase), metric, method


def operators(run: Run) -> list[str]:
    """Return the operators of a run, by their number of spatial axes."""
    axes = {row.case.operator: len(row.case.kernel_size) for row in run.rows}
    return sorted(axes, key=lambda operator: (axes[operator], operator))


def headings(cases: Iterable[Case]) -> list[str]:
    """Return a short name for each case: its shape, and fields that differ within this shape."""
    cases = list(cases)
    same_shape: dict[str, list[Case]] = {}
    for case in cases:
        same_shape.setdefault(case.shape, []).append(case)
    differing = {
        shape: [
            name for name in Case.__struct_fields__ if len({getattr(case, name) for case in of_shape}) > 1
        ]
        for shape, of_shape in same_shape.items()
    }
    return [
        " ".join([case.shape, *(f"{name}={getattr(case, name)}" for name in differing[case.shape])])
        for case in cases
    ]


def largest_populations(cases: Iterable[Case], numbers: Callable[[Case], int]) -> list[Case]:
    """Return for each shape the case with the most numbers; of several the one with the most members."""
    by_shape: dict[Case, list[Case]] = {}
    for case in cases:
        by_shape.setdefault(msgspec.structs.replace(case, members=1), []).append(case)
    return [max(same, key=lambda case: (numbers(case), case.members)) for same in by_shape.values()]


def by_size(case: Case) -> tuple[float, int, int, int, int, str]:
    """Return a sort key: large kernels first, then narrow before wide layers, then small populations."""
    taps = math.prod(case.kernel_size)
    return (-taps, case.out_channels, case.in_channels, case.members, case.repeats, case.label)


def _baselines_last(variant: Variant) -> int:
    """Return a sort key: baselines after all other variants, in the order of :data:`BASELINES`."""
    if not variant.baseline:
        return -1
    return BASELINES.index(variant.scheme) if variant.scheme in BASELINES else len(BASELINES)
