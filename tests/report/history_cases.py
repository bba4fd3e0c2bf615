"""Runs of one device over several days, for tests of histories."""

from collections.abc import Sequence
from pathlib import Path

from esbench.schema import Case, Measurement, Row, Run, Variant
from tests import synthetic
from tests.report import report_cases
from tests.synthetic import BASE, DENSE, linear, time_row

SMALL = linear(256)
EIGHT = (0.99, 1.01, 1.0, 1.0, 0.995, 1.005, 1.0, 1.0)
"""Rounds with a median of 1 that has an interval."""


def rows(
    factor: float, case: Case = SMALL, variant: Variant = DENSE, drift: float = 1.0
) -> list[Measurement]:
    """Return a variant that takes a multiple of the time of base, on a machine whose speed drifts."""
    times = [drift * value for value in EIGHT]
    return [time_row(BASE, case, *times), time_row(variant, case, *(factor * value for value in times))]


def a_run(day: int, measured_rows: Sequence[Row], **environment: object) -> Run:
    """Return the run of a day, at a commit made that day."""
    run = synthetic.run(measured_rows, run_id=f"202601{day:02d}T000000Z-quick-{day:04d}")
    started = f"2026-01-{day:02d}T00:00:00Z"
    return synthetic.changed(run, **{"commit": f"{day:02d}abcdef01", "started": started, **environment})


def over_days(*factors: float) -> list[Run]:
    """Return a run for each factor, on a machine that gets slower every day."""
    return [a_run(day, rows(factor, drift=1 + day / 10)) for day, factor in enumerate(factors, start=1)]


def stored(folder: Path, runs: Sequence[Run]) -> Path:
    """Write runs; return the folder of results."""
    for run in runs:
        report_cases.store(folder, run)
    return folder / "results"
