"""Runs of the loop on fakes, and the rows that they store."""

from collections.abc import Sequence

from esbench.measure.plan import Plan
from esbench.measure.recorder import RunSummary
from esbench.measure.runner import run_cases
from esbench.registry import Entry
from esbench.schema import Case, Measurement, Phase, Record, Row, Skipped
from tests.fakes import CASE, World


def measure(
    *entries: Entry,
    world: World,
    phases: tuple[Phase, ...] = ("sample", "forward"),
    checks: tuple[Case, ...] = (),
) -> tuple[RunSummary, list[Row]]:
    """Run entries on one case with a budget of a second; return the outcome and the rows."""
    lines: list[Record] = []
    plan = Plan(entries=entries, cases=(CASE,), phases=phases, cell_s=1.0, checks=checks)
    return run_cases(plan, lines.extend, lambda *_: None, world.tools), rows_of(lines)


def rows_of(lines: Sequence[Record]) -> list[Row]:
    """Return the rows among what a run stored."""
    return [line for line in lines if isinstance(line, Row)]


def latencies(rows: list[Row]) -> list[Measurement]:
    """Return the rows that are times."""
    return [row for row in rows if isinstance(row, Measurement) and row.metric == "latency_ns"]


def skipped(rows: list[Row]) -> list[tuple[str, str | None, str, str]]:
    """Return name, phase, status and reason of the rows without a number."""
    return [(r.variant.scheme, r.phase, r.status, r.reason) for r in rows if isinstance(r, Skipped)]
