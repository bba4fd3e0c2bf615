"""Runs of the measuring loop on fakes, and the rows that they store."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from esbench import store
from esbench.measure import runner
from esbench.measure.instruments import Instruments
from esbench.measure.plan import Plan
from esbench.measure.recorder import RunSummary, Stopwatch
from esbench.measure.runner import run_cases
from esbench.registry import Entry
from esbench.schema import Checkpoint, Measurement, Phase, Record, Row, Run, Skipped
from tests import synthetic
from tests.fakes import CASE, FakeScheme


def plan_of(
    *entries: Entry | FakeScheme, phases: Sequence[Phase] = ("sample", "forward"), **options: Any
) -> Plan:
    """Return a plan with a budget of a second for each cell, by default on one case."""
    made = [entry.entry() if isinstance(entry, FakeScheme) else entry for entry in entries]
    return Plan(entries=made, phases=phases, **{"cases": (CASE,), "cell_s": 1.0, **options})


def measure(
    *entries: Entry | FakeScheme,
    tools: Instruments | None = None,
    past: Iterable[Record] = (),
    stopwatch: Stopwatch | None = None,
    **options: Any,
) -> tuple[RunSummary, list[Record]]:
    """Run variants, by default with the instruments of a fake one's world; return summary and records."""
    lines: list[Record] = []
    plan = plan_of(*entries, **options)
    scheme: Any = plan.entries[0].scheme
    tools = tools or scheme.world.tools
    summary = run_cases(plan, lines.extend, lambda *_: None, tools, past, stopwatch)
    return summary, lines


def run_into(folder: Path, plan: Plan, tools: Instruments, *past: Checkpoint) -> tuple[RunSummary, Run]:
    """Run a plan, after checkpoints of an earlier part; return the summary and the stored run."""
    with runner.begin("quick", synthetic.environment(), 0, folder, entries=plan.entries) as writer:
        writer.write(*past)
        earlier, _ = store.read_run(writer.path) if past else (None, [])
        summary = runner.run(plan, writer, lambda *_: None, tools, past=earlier)
    return summary, stored_in(folder)


def stored_in(folder: Path) -> Run:
    """Return the one run in a folder of results."""
    (run,), problems = store.read_results(folder)
    assert not problems
    return run


def rows_of(lines: Sequence[Record]) -> list[Row]:
    """Return the rows among what a run stored."""
    return [line for line in lines if isinstance(line, Row)]


def measurements(lines: Sequence[Record], metric: str = "latency_ns") -> list[Measurement]:
    """Return the rows of a metric."""
    return [line for line in lines if isinstance(line, Measurement) and line.metric == metric]


def skipped(lines: Sequence[Record]) -> list[tuple[str, str | None, str, str]]:
    """Return name, phase, status and reason of the rows without a number."""
    return [(r.variant.scheme, r.phase, r.status, r.reason) for r in lines if isinstance(r, Skipped)]
