"""Every time of a run with all that is known of it, as CSV: for whom the tables say too little.

Times are in ns, shares between 0 and 1, ratios as in the tables' multipliers.
"""

import csv
import io

from esbench.report.analysis.pivot import TIMES, Grid, grids, operators
from esbench.report.analysis.roofline import bound_ns
from esbench.schema import Case, Measurement, Mode, Run, Variant
from esbench.stats import interval, median_clock, off_clock, outliers, round_medians, spread, throttled

_MODES: tuple[Mode, ...] = ("naive", "base")


def times_csv(run: Run) -> str:
    """One line for each time of the tables: quantiles, interval, remarks, multipliers with theirs, floor.

    ``low`` and ``high`` are the 95 % interval of the median of the rounds' medians.
    """
    found = [grid for operator in operators(run) for grid in grids(run, operator, TIMES)]
    clock = median_clock(run)
    lines = [
        _key(grid, row) | _views(grid, row, clock) | _multipliers(grid, variant, case)
        for grid in found
        for variant, case, row in grid.cells
    ]
    if not lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _key(grid: Grid, row: Measurement) -> dict[str, object]:
    return {
        "variant": row.variant.label(grid.operator),
        "case": row.case.label,
        "dtype": row.case.dtype,
        "members": row.case.members,
        "phase": row.phase,
        "metric": row.metric,
        "method": row.method,
        "group": row.group,
    }


def _views(grid: Grid, row: Measurement, clock_hz: float | None) -> dict[str, object]:
    quantiles = spread(row)
    sure = interval([value for value in round_medians(row) if value is not None])
    return {
        "rounds": len(row.samples),
        "samples": sum(map(len, row.samples)),
        "p20": quantiles and quantiles.p20,
        "median": quantiles and quantiles.median,
        "p80": quantiles and quantiles.p80,
        "low": sure and sure.low,
        "high": sure and sure.high,
        "outliers": outliers(row),
        "off_clock": off_clock(row, clock_hz),
        "throttled": throttled(row),
        "floor": bound_ns(grid.run, row.case.dtype, row.work),
        "warm_up": row.warm_up,
        "stop": row.stop,
        "labels": "; ".join(row.labels),
    }


def _multipliers(grid: Grid, variant: Variant, case: Case) -> dict[str, object]:
    cells: dict[str, object] = {}
    for mode in _MODES:
        found = grid.multiplier(variant, case, mode)
        name = "naive_by_this" if mode == "naive" else "this_by_base"
        cells |= {
            name: found and found.value,
            f"{name}_low": found and found.low,
            f"{name}_high": found and found.high,
            f"{name}_taken": found and found.method,
        }
    return cells
