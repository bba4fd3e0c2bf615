"""A run as comma-separated values: one line for each row, those without a number too, with their reason."""

import csv
import io
from collections.abc import Sequence

from esbench.report.export.rows import Chosen, Rows, unit
from esbench.report.words import one_line
from esbench.schema import QUALITY, Measurement, Row, Run, Skipped
from esbench.stats import interval, round_medians, spread

COLUMNS = (
    *("run", "device", "variant", "case", "phase", "metric", "method", "unit"),
    *("median", "p20", "p80", "low", "high", "rounds", "samples", "status", "reason", "labels"),
)
"""``low`` and ``high`` are the 95 % order-statistic interval of the rounds' medians, where there is one."""

_FORMULAS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "'")  # noqa: RUF001  # wide forms are read as formulas too


def lines(run: Run, rows: Rows) -> Chosen:
    """Write every row: a header, then lines that hold no line break inside, in UTF-8."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows.all:
        numbers = _numbers(row)
        writer.writerow([numbers.get(name, plain(text)) for name, text in _texts(run, rows, row).items()])
    reasons = len(rows.skipped)
    parts = f"rows ({reasons} without a number)" if reasons else "rows"
    return Chosen(file.getvalue(), parts, len(rows.all), reasons=True)


def _texts(run: Run, rows: Rows, row: Row) -> dict[str, str]:
    """The cells of a row as text; those of numbers are empty."""
    found = dict.fromkeys(COLUMNS, "") | {
        "run": run.header.run_id,
        "device": run.header.environment.device_name,
        "variant": row.variant.label(row.case.operator),
        "case": row.case.label,
        "phase": row.phase or "",
        "method": row.method or "",
    }
    if isinstance(row, Skipped):
        return found | {"status": row.status, "reason": row.reason}
    labels = "; ".join(rows.remarks(row))
    return found | {"metric": row.metric, "unit": unit(row.metric), "status": "measured", "labels": labels}


def _numbers(row: Row) -> dict[str, str]:
    """The cells of numbers, in the unit that they are stored in; no cell where there is no number."""
    if isinstance(row, Skipped):
        return {}
    numbers = {"rounds": str(len(row.samples)), "samples": str(sum(map(len, row.samples)))}
    if middle := spread(row):
        numbers |= {"median": repr(middle.median), "p20": repr(middle.p20), "p80": repr(middle.p80)}
    if reach := interval(_independent(row)):
        numbers |= {"low": repr(reach.low), "high": repr(reach.high)}
    return numbers


def _independent(row: Measurement) -> Sequence[float]:
    """Values whose median is asked for: those of rounds, or of a quality its replicates."""
    if row.phase == QUALITY:
        return [sample for visits in row.samples for sample in visits]
    return [value for value in round_medians(row) if value is not None]


def plain(text: str) -> str:
    """A text on one line that no spreadsheet takes for a formula: what begins like one gets an apostrophe.

    So does what begins with an apostrophe itself, so that one can be taken away again.
    """
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULAS) else line
