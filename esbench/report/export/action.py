"""Times and counts of bytes as github-action-benchmark reads them with its tool ``customSmallerIsBetter``."""

import json

from esbench.report.captions import origin
from esbench.report.export.rows import Chosen, Rows, unit
from esbench.report.words import one_line
from esbench.schema import Measurement, Run
from esbench.stats import interval, round_medians, spread

UNITS = ("ns", "bytes")
"""Of what is in these, less is better."""


def entries(run: Run, rows: Rows) -> Chosen:
    """Write medians as one JSON array; no two entries have the same name."""
    chosen = [row for row in rows.measured if unit(row.metric) in UNITS]
    source = one_line(origin(run))
    found = [_entry(rows, row, source) for row in chosen]
    text = json.dumps(found, indent=1, allow_nan=False)
    return Chosen(text + "\n", "rows of times and bytes", len(found), kind="times or bytes")


def _entry(rows: Rows, row: Measurement, source: str) -> dict[str, object]:
    middle = spread(row)
    count = sum(map(len, row.samples))
    facts = [f"samples: {count}, rounds: {len(row.samples)}", source, *map(one_line, row.labels)]
    entry: dict[str, object] = {
        "name": rows.name(row),
        "unit": unit(row.metric),
        "value": middle.median if middle else None,
        "extra": "\n".join(facts),
    }
    if reach := _range(row):
        entry["range"] = reach
    return entry


def _range(row: Measurement) -> str:
    """Between which values the true median lies, or what most samples are where the rounds are too few."""
    found = interval([value for value in round_medians(row) if value is not None])
    if found:
        return f"95 % interval {found.low:.6g} to {found.high:.6g}"
    middle = spread(row)
    if middle is None or middle.p20 == middle.p80:
        return ""
    return f"p20 {middle.p20:.6g}, p80 {middle.p80:.6g}"
