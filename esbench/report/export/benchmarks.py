"""Times in the layout of pytest-benchmark's files, in seconds: what its ``compare`` and bencher read.

Every sample is one of its rounds, of one iteration. Machine, commit and date are the run's.
"""

import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from esbench.report.export.rows import Chosen, Rows, group, parameters, unit
from esbench.schema import Case, Environment, Measurement, Run, Variant
from esbench.stats import median

LAYOUT = "5.3.1"
"""The release of pytest-benchmark whose layout this is."""

_FENCE = 1.5
_NS = 1e9

Notes = dict[tuple[Variant, Case, str], dict[str, float]]


def document(run: Run, rows: Rows) -> Chosen:
    """Write the times of a run as one JSON object."""
    times = [row for row in rows.measured if unit(row.metric) == "ns"]
    notes = _notes(rows)
    found = {
        "machine_info": machine(run.header.environment),
        "commit_info": commit(run.header.environment),
        "benchmarks": [_benchmark(run, rows, row, notes) for row in times],
        "datetime": run.header.started,
        "version": LAYOUT,
    }
    return Chosen(json.dumps(found, allow_nan=False) + "\n", "rows of times", len(times), kind="times")


def machine(here: Environment) -> dict[str, object]:
    """The machine of a run, by pytest-benchmark's names as far as the run tells, and whole as ``esbench``."""
    system, _, release = here.platform.partition("-")
    return {
        "node": "",
        "processor": here.cpu,
        "machine": "",
        "python_version": here.python,
        "system": system,
        "release": release,
        "cpu": {"brand_raw": here.cpu, "count": here.threads},
        "esbench": msgspec.to_builtins(here),
    }


def commit(here: Environment) -> dict[str, object]:
    """The code of a run, by pytest-benchmark's names."""
    return {
        "id": here.commit or "unknown",
        "time": None,
        "author_time": None,
        "dirty": here.dirty,
        "project": "esbench",
        "branch": "(unknown)",
    }


def stats(seconds: Sequence[float]) -> dict[str, object]:
    """All that pytest-benchmark knows of a benchmark, of at least one sample, as it defines each of it."""
    ordered, count = sorted(seconds), len(seconds)
    total, mean = math.fsum(ordered), statistics.mean(ordered)
    deviation = statistics.stdev(ordered) if count > 1 else 0.0
    per_second = count / total if total else math.inf
    low, high = (_quantile(ordered, share) for share in (0.25, 0.75))
    reach = _FENCE * (high - low)
    far = _outside(ordered, mean - deviation, mean + deviation)
    further = _outside(ordered, low - reach, high + reach)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": count,
        "median": _quantile(ordered, 0.5),
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": further,
        "stddev_outliers": far,
        "outliers": f"{far};{further}",
        "ld15iqr": ordered[bisect_left(ordered, low - reach)],
        "hd15iqr": ordered[bisect_right(ordered, high + reach) - 1],
        "ops": per_second if math.isfinite(per_second) else 0.0,
        "total": total,
        "data": list(seconds),
        "iterations": 1,
    }


def _benchmark(run: Run, rows: Rows, row: Measurement, notes: Notes) -> dict[str, object]:
    name, named = rows.name(row), parameters(row)
    return {
        "group": group(row),
        "name": name,
        "fullname": name,
        "params": named,
        "param": name.partition("[")[2].rpartition("]")[0],
        "extra_info": _extra(run, rows, row, notes),
        "options": {},
        "stats": stats([sample / _NS for visits in row.samples for sample in visits]),
    }


def _extra(run: Run, rows: Rows, row: Measurement, notes: Notes) -> dict[str, object]:
    counts: Mapping[str, float] = notes.get((row.variant, row.case, row.phase), {})
    return {
        "run": run.header.run_id,
        "rounds": len(row.samples),
        "labels": rows.remarks(row),
        "stop": row.stop,
        "warm_up": row.warm_up,
        **counts,
    }


def _notes(rows: Rows) -> Notes:
    """What else was read of a variant's phase: bytes, launches, energy; the median of each."""
    found: Notes = {}
    for row in rows.measured:
        value = median(row)
        if unit(row.metric) != "ns" and value is not None:
            found.setdefault((row.variant, row.case, row.phase), {})[row.metric] = value
    return found


def _quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile, by Hazen's plotting positions: quarters of it are the quartiles of pytest-benchmark."""
    place = min(max(len(ordered) * share - 0.5, 0.0), len(ordered) - 1.0)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    a, b = ordered[below], ordered[above]
    return min(max(a + (b - a) * (place - below), a), b)


def _outside(ordered: Sequence[float], low: float, high: float) -> int:
    return bisect_left(ordered, low) + len(ordered) - bisect_right(ordered, high)
