"""Exports of a stored run for other tools: pytest-benchmark, github-action-benchmark and spreadsheets.

The same run gives the same bytes on every machine.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.report.analysis.comparison import usable_rows
from esbench.report.analysis.quality import replicates
from esbench.report.captions import origin
from esbench.report.formats.csv import comma_separated
from esbench.schema import QUALITY, Measurement, Row, Run
from esbench.stats import interval, median, round_medians, spread
from esbench.text import one_line
from esbench.units import QUANTITIES

_NS_PER_S = 1e9
CSV_COLUMNS = (
    *("run", "device", "variant", "case", "phase", "metric", "method", "unit"),
    *("median", "p20", "p80", "low", "high", "rounds", "samples", "status", "reason", "labels"),
)
"""``low`` and ``high`` are the 95 % order-statistic interval of the median over rounds."""


class Export(NamedTuple):
    """The text of an exported file, and a line on how many rows it has."""

    text: str
    summary: str


def export(run: Run, form: str) -> Export:
    """Convert a run to one of :data:`FORMATS`; :func:`usable_rows` has the rows.

    Raises:
        UserError: the format needs a package that is not installed.
    """
    rows, withheld = usable_rows(run)
    text, written = FORMATS[form](run, rows)
    of_failures = f"; withheld: {withheld} of variants that failed" if withheld else ""
    return Export(text, f"{written} of {len(rows)}{of_failures}")


def unit(metric: str) -> str:
    """Return the unit in which a metric is stored, by its suffix: ``ns``, ``bytes``; empty for a count."""
    return next((suffix.removeprefix("_") for suffix in QUANTITIES if metric.endswith(suffix)), "")


def pytest_benchmark(run: Run, rows: Sequence[Row]) -> tuple[str, str]:
    """Return the times of a run as a file of pytest-benchmark: each sample is a round of one iteration."""
    try:
        from pytest_benchmark import __version__  # noqa: PLC0415  # only this format needs it
        from pytest_benchmark.stats import Stats  # noqa: PLC0415  # the same
    except ModuleNotFoundError as error:
        raise UserError(
            "this format needs pytest-benchmark, which is not installed here: pip install pytest-benchmark"
        ) from error
    measured = _measurements(rows)
    other_metrics: dict[object, dict[str, float | None]] = {}
    for row in measured:
        if unit(row.metric) != "ns":
            other_metrics.setdefault((row.variant, row.case, row.phase), {})[row.metric] = median(row)
    benchmarks = []
    for row in (row for row in measured if unit(row.metric) == "ns"):
        params, stats = _parameters(row), Stats()  # type: ignore[no-untyped-call]  # the package has no hints
        for sample in replicates(row):
            stats.update(sample / _NS_PER_S)  # type: ignore[no-untyped-call]  # the same
        statistics = stats.as_dict()  # type: ignore[no-untyped-call]  # the same
        benchmarks.append(
            {
                "group": f"{params['case']}, {row.phase}, {params['metric']} ({params['method']})",
                "name": _name(row),
                "fullname": _name(row),
                "params": params,
                "param": "-".join(value for name, value in params.items() if name != "phase"),
                "extra_info": {
                    "run": run.header.run_id,
                    "rounds": len(row.samples),
                    "labels": _labels(run, row),
                    "stop": row.stop,
                    "warm_up": row.warm_up,
                    **other_metrics.get((row.variant, row.case, row.phase), {}),
                },
                "options": {},
                "stats": {**statistics, "data": stats.data, "iterations": 1},
            }
        )
    environment = run.header.environment
    document = {
        "machine_info": {
            "node": "",
            "processor": environment.cpu,
            "machine": "",
            "python_version": environment.python,
            "system": environment.platform,
            "release": "",
            "cpu": {"brand_raw": environment.cpu, "count": environment.threads},
            "esbench": msgspec.to_builtins(environment),
        },
        "commit_info": {
            "id": environment.commit or "unknown",
            "time": None,
            "author_time": None,
            "dirty": environment.dirty,
            "project": "esbench",
            "branch": "(unknown)",
        },
        "benchmarks": benchmarks,
        "datetime": run.header.started,
        "version": __version__,
    }
    return json.dumps(document, allow_nan=False) + "\n", f"rows of times: {len(benchmarks)}"


def github_action(run: Run, rows: Sequence[Row]) -> tuple[str, str]:
    """Return medians of times and bytes for github-action-benchmark's tool ``customSmallerIsBetter``."""
    entries = []
    for row in (row for row in _measurements(rows) if unit(row.metric) in {"ns", "bytes"}):
        samples = f"samples: {len(replicates(row))}, rounds: {len(row.samples)}"
        entry = {
            "name": _name(row),
            "unit": unit(row.metric),
            "value": median(row),
            "extra": "\n".join([samples, one_line(origin(run)), *map(one_line, row.labels)]),
        }
        if ends := interval(_values_of_median(row)):
            entry["range"] = f"95 % interval {ends.low:.6g} to {ends.high:.6g}"
        entries.append(entry)
    return json.dumps(entries, indent=1, allow_nan=False) + "\n", f"rows of times and bytes: {len(entries)}"


def csv_table(run: Run, rows: Sequence[Row]) -> tuple[str, str]:
    """Return a line for each row, in the unit it is stored in; a row without a number has its reason."""
    return comma_separated(CSV_COLUMNS, [csv_line(run, row) for row in rows]), f"rows: {len(rows)}"


def csv_line(run: Run, row: Row) -> dict[str, object]:
    """Return the values of a row by column; columns without a value are left out."""
    line: dict[str, object] = {
        "run": run.header.run_id,
        "device": run.header.environment.device_name,
        "variant": row.variant.label(row.case.operator),
        "case": row.case.label,
        "phase": row.phase or "",
        "method": row.method or "",
    }
    if not isinstance(row, Measurement):
        return line | {"status": row.status, "reason": row.reason}
    line |= {"metric": row.metric, "unit": unit(row.metric), "status": "measured"}
    line |= {"rounds": len(row.samples), "samples": len(replicates(row))}
    line["labels"] = "; ".join(_labels(run, row))
    if quantiles := spread(row):
        line |= {"median": quantiles.median, "p20": quantiles.p20, "p80": quantiles.p80}
    if ends := interval(_values_of_median(row)):
        line |= {"low": ends.low, "high": ends.high}
    return line


FORMATS: dict[str, Callable[[Run, Sequence[Row]], tuple[str, str]]] = {
    "pytest-benchmark": pytest_benchmark,
    "github-action": github_action,
    "csv": csv_table,
}
"""Format -> function that returns the text of the file and its number of rows: ``rows of times: 12``."""


def _measurements(rows: Sequence[Row]) -> list[Measurement]:
    return [row for row in rows if isinstance(row, Measurement) and median(row) is not None]


def _parameters(row: Measurement) -> dict[str, str]:
    """Return the fields that identify a row, by name, each as text on one line."""
    named = {
        "variant": row.variant.label(row.case.operator),
        "case": row.case.label,
        "phase": row.phase,
        "metric": row.metric,
        "method": row.method,
    }
    return {name: one_line(text) for name, text in named.items()}


def _name(row: Measurement) -> str:
    """Return the name of a row: ``forward[PermutedLinear-Linear(128, 128)-latency_ns-host]``."""
    named = _parameters(row)
    phase = named.pop("phase")
    return f"{phase}[{'-'.join(named.values())}]"


def _labels(run: Run, row: Measurement) -> list[str]:
    """Return the labels of a row, and the reasons why its run is invalid, if it is."""
    invalid = run.end.invalid if run.end else ()
    return [*(f"INVALID: {one_line(reason)}" for reason in invalid), *map(one_line, row.labels)]


def _values_of_median(row: Measurement) -> list[float]:
    """Return the values whose median has an interval: medians of rounds, or a quality's replicates."""
    return replicates(row) if row.phase == QUALITY else round_medians(row)
