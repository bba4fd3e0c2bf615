"""Exports of one stored run for other tools: pytest-benchmark, github-action-benchmark and spreadsheets.

Every export is a pure function of the run, so the same run gives the same bytes on every machine.
"""

import csv
import hashlib
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from esbench.errors import UserError
from esbench.report.analysis.comparison import is_reason_for
from esbench.report.captions import origin
from esbench.report.text import one_line
from esbench.schema import QUALITY, Environment, Measurement, Row, Run, Skipped
from esbench.stats import interval, median, round_medians, spread
from esbench.units import QUANTITIES

PYTEST_BENCHMARK_VERSION = "5.3.1"
"""The release of pytest-benchmark whose file layout is written."""

CSV_COLUMNS = (
    *("run", "device", "variant", "case", "phase", "metric", "method", "unit"),
    *("median", "p20", "p80", "low", "high", "rounds", "samples", "status", "reason", "labels"),
)
"""``low`` and ``high`` are the 95 % order-statistic interval of the median over rounds."""

_FORMULAS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "'")  # noqa: RUF001  # spreadsheets accept wide forms
_DIGEST_CHARACTERS = 12
_NS_PER_S = 1e9


class Export(NamedTuple):
    """The content of an exported file, and one line that says what was written and what was left out."""

    content: bytes
    summary: str


class ExportRows:
    """The rows of a run that may be exported, without repeats, and a unique name for each.

    Baselines are measured once per co-resident group; only the first is exported. Measurements of a variant
    that later failed its check are withheld.
    """

    def __init__(self, run: Run) -> None:
        """Select the rows of a run."""
        failures = [row for row in run.skipped if row.status == "failed"]
        unique: dict[bytes, Row] = {}
        withheld = set()
        for row in run.rows:
            if isinstance(row, Measurement) and any(is_reason_for(one, row) for one in failures):
                withheld.add(_key(row))
            else:
                unique.setdefault(_key(row), row)
        self.run = run
        self.all = tuple(unique.values())
        self.measured = tuple(r for r in self.all if isinstance(r, Measurement) and median(r) is not None)
        self.withheld = len(withheld)

    def name(self, row: Measurement) -> str:
        """Return a unique name, such as ``forward[PermutedLinear-Linear(128, 128)-latency_ns-host]``.

        Rows whose names would be equal, such as options that differ in the seventh digit, get a digest of the
        row's key appended. The name does not depend on the other rows' order.
        """
        name = _short_name(row)
        return f"{name} {_digest(_key(row))}" if self._name_counts[name] > 1 else name

    def labels(self, row: Measurement) -> list[str]:
        """Return the row's own labels, and the reasons why the run is invalid, if it is."""
        invalid = self.run.end.invalid if self.run.end else ()
        return [*(f"INVALID: {one_line(reason)}" for reason in invalid), *map(one_line, row.labels)]

    def summary(self, written: str, count: int) -> str:
        """Say how many rows were written, and how many were withheld because their variant failed."""
        withheld = f"; withheld: {self.withheld} of variants that failed" if self.withheld else ""
        return f"{written}: {count} of {len(self.all)}{withheld}"

    @cached_property
    def _name_counts(self) -> Counter[str]:
        return Counter(map(_short_name, self.measured))


def export(run: Run, form: str) -> Export:
    """Write a run in one of :data:`FORMATS`.

    Raises:
        UserError: the format is unknown.

    """
    if form not in FORMATS:
        message = f"no format {form!r}; there are: {', '.join(FORMATS)}"
        raise UserError(message)
    text, summary = FORMATS[form](ExportRows(run))
    return Export(text.encode(), summary)


def unit(metric: str) -> str:
    """Return the unit in which a metric is stored, by its suffix: ``ns``, ``bytes``; empty for a count."""
    return next((suffix.removeprefix("_") for suffix in QUANTITIES if metric.endswith(suffix)), "")


# pytest-benchmark


def pytest_benchmark(rows: ExportRows) -> tuple[str, str]:
    """Write the times of a run as a file of pytest-benchmark: each sample is a round of one iteration."""
    run = rows.run
    times = [row for row in rows.measured if unit(row.metric) == "ns"]
    other: dict[object, dict[str, float | None]] = {}
    for row in rows.measured:
        if unit(row.metric) != "ns":
            other.setdefault((row.variant, row.case, row.phase), {})[row.metric] = median(row)
    benchmarks = []
    for row in times:
        name = rows.name(row)
        benchmarks.append(
            {
                "group": group(row),
                "name": name,
                "fullname": name,
                "params": _parameters(row),
                "param": name.partition("[")[2].rpartition("]")[0],
                "extra_info": {
                    "run": run.header.run_id,
                    "rounds": len(row.samples),
                    "labels": rows.labels(row),
                    "stop": row.stop,
                    "warm_up": row.warm_up,
                    **other.get((row.variant, row.case, row.phase), {}),
                },
                "options": {},
                "stats": pytest_benchmark_stats([s / _NS_PER_S for visits in row.samples for s in visits]),
            }
        )
    here = run.header.environment
    document = {
        "machine_info": _machine_info(here),
        "commit_info": {
            "id": here.commit or "unknown",
            "time": None,
            "author_time": None,
            "dirty": here.dirty,
            "project": "esbench",
            "branch": "(unknown)",
        },
        "benchmarks": benchmarks,
        "datetime": run.header.started,
        "version": PYTEST_BENCHMARK_VERSION,
    }
    text = json.dumps(document, allow_nan=False) + "\n"
    return text, rows.summary("rows of times", len(times))


def _machine_info(here: Environment) -> dict[str, object]:
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


def pytest_benchmark_stats(seconds: Sequence[float]) -> dict[str, object]:
    """Return the statistics of at least one sample as pytest-benchmark defines them."""
    values = np.sort(seconds)
    count, total, mean = len(values), math.fsum(values), statistics.mean(values.tolist())
    deviation = statistics.stdev(values.tolist()) if count > 1 else 0.0
    # Hazen's plotting positions give pytest-benchmark's quartiles.
    q1, middle, q3 = np.quantile(values, (0.25, 0.5, 0.75), method="hazen").tolist()
    fence = 1.5 * (q3 - q1)
    near = values[(values >= q1 - fence) & (values <= q3 + fence)]
    far = int(np.sum(np.abs(values - mean) > deviation))
    return {
        "min": float(values[0]),
        "max": float(values[-1]),
        "mean": mean,
        "stddev": deviation,
        "rounds": count,
        "median": middle,
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": count - len(near),
        "stddev_outliers": far,
        "outliers": f"{far};{count - len(near)}",
        "ld15iqr": float(values[values >= q1 - fence][0]),
        "hd15iqr": float(values[values <= q3 + fence][-1]),
        "ops": count / total if total else 0.0,
        "total": total,
        "data": list(seconds),
        "iterations": 1,
    }


# github-action-benchmark


def github_action(rows: ExportRows) -> tuple[str, str]:
    """Write medians of times and bytes for github-action-benchmark's tool ``customSmallerIsBetter``."""
    chosen = [row for row in rows.measured if unit(row.metric) in {"ns", "bytes"}]
    source = one_line(origin(rows.run))
    entries = []
    for row in chosen:
        samples = f"samples: {sum(map(len, row.samples))}, rounds: {len(row.samples)}"
        entry = {
            "name": rows.name(row),
            "unit": unit(row.metric),
            "value": median(row),
            "extra": "\n".join([samples, source, *map(one_line, row.labels)]),
        }
        quantiles = spread(row)
        if sure := interval(_independent(row)):
            entry["range"] = f"95 % interval {sure.low:.6g} to {sure.high:.6g}"
        elif quantiles and quantiles.p20 != quantiles.p80:
            entry["range"] = f"p20 {quantiles.p20:.6g}, p80 {quantiles.p80:.6g}"
        entries.append(entry)
    text = json.dumps(entries, indent=1, allow_nan=False) + "\n"
    return text, rows.summary("rows of times and bytes", len(chosen))


# Comma-separated values


def csv_table(rows: ExportRows) -> tuple[str, str]:
    """Write every row, one per line, in the unit it is stored in; a row without a number has its reason."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows.all:
        texts = {
            "run": rows.run.header.run_id,
            "device": rows.run.header.environment.device_name,
            "variant": row.variant.label(row.case.operator),
            "case": row.case.label,
            "phase": row.phase or "",
            "method": row.method or "",
        }
        if isinstance(row, Skipped):
            texts |= {"status": row.status, "reason": row.reason}
        else:
            labels = "; ".join(rows.labels(row))
            texts |= {"metric": row.metric, "unit": unit(row.metric), "status": "measured", "labels": labels}
        numbers = _numbers(row) if isinstance(row, Measurement) else {}
        writer.writerow({name: plain_cell(text) for name, text in texts.items()} | numbers)
    return file.getvalue(), rows.summary("rows", len(rows.all))


def _numbers(row: Measurement) -> dict[str, str]:
    numbers = {"rounds": str(len(row.samples)), "samples": str(sum(map(len, row.samples)))}
    if quantiles := spread(row):
        numbers |= {"median": repr(quantiles.median), "p20": repr(quantiles.p20), "p80": repr(quantiles.p80)}
    if sure := interval(_independent(row)):
        numbers |= {"low": repr(sure.low), "high": repr(sure.high)}
    return numbers


def plain_cell(text: str) -> str:
    """Return a text on one line that no spreadsheet evaluates: what begins like a formula gets an apostrophe.

    A text that begins with an apostrophe gets another one, so that removing the first restores every text.
    """
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULAS) else line


FORMATS: dict[str, Callable[[ExportRows], tuple[str, str]]] = {
    "pytest-benchmark": pytest_benchmark,
    "github-action": github_action,
    "csv": csv_table,
}
"""Format -> the function that returns the text of the file and its summary."""


# Names


def group(row: Measurement) -> str:
    """Name what is compared with each other: the variants of one case, phase, metric and method."""
    named = _parameters(row)
    return f"{named['case']}, {named['phase']}, {named['metric']} ({named['method']})"


def _parameters(row: Measurement) -> dict[str, str]:
    named = {
        "variant": row.variant.label(row.case.operator),
        "case": row.case.label,
        "phase": row.phase,
        "metric": row.metric,
        "method": row.method,
    }
    return {name: one_line(text) for name, text in named.items()}


def _short_name(row: Measurement) -> str:
    named = _parameters(row)
    phase = named.pop("phase")
    return f"{phase}[{'-'.join(named.values())}]"


def _key(row: Row) -> bytes:
    """Encode what identifies a row; as JSON, so that the options 1 and 1.0 stay different."""
    metric = row.metric if isinstance(row, Measurement) else None
    return msgspec.json.encode((row.variant, row.case, row.phase, metric, row.method))


def _digest(content: bytes) -> str:
    return f"#{hashlib.sha256(content).hexdigest()[:_DIGEST_CHARACTERS]}"


def _independent(row: Measurement) -> Sequence[float]:
    """Return the values whose median has an interval: medians of rounds, or a quality's replicates."""
    if row.phase == QUALITY:
        return [sample for visits in row.samples for sample in visits]
    return [value for value in round_medians(row) if value is not None]
