"""What stands beside a table: where its figures come from and how they were taken."""

from collections.abc import Iterable, Sequence

from esbench.records import Case, Run
from esbench.report.grid import Grid, Reference
from esbench.statistics import Ratio

PUBLISHED = "published"
"""The method of figures that others measured."""

_COMMIT_DIGITS = 7

METRICS = {
    "latency_ns": "Time",
    "peak_bytes": "Peak memory above the level before the call",
    "noise_bytes": "Noise state of one step",
    "utilization_percent": "Share of a window with a kernel running (NVML)",
}


def metric(name: str) -> str:
    """What a metric is, in words; its own name where nobody wrote any."""
    return METRICS.get(name, name)


def conditions(grid: Grid, cases: Sequence[Case]) -> str:
    """Number format, batch and method of these columns."""
    batches = dict.fromkeys(f"{case.members} x {case.repeats}" for case in cases)
    what = [
        " and ".join(dict.fromkeys(case.dtype for case in cases)),
        f"{', '.join(batches)} (members x repeats)",
        *(["antithetic"] if any(case.antithetic for case in cases) else []),
        *([] if grid.method == PUBLISHED else [f"method {grid.method}"]),
    ]
    return f"{', '.join(what)}."


def source(run: Run) -> str:
    """The device, and whose figures they are where they are not ours."""
    name = run.header.environment.device_name
    return f"{name}, published by others ({run.header.suite})" if _is_published(run) else name


def origin(run: Run) -> str:
    """Which run it is: device, suite, date, commit, versions."""
    here = run.header.environment
    if _is_published(run):
        return f"{source(run)}, not measured by esbench."
    commit = f"commit {here.commit[:_COMMIT_DIGITS]}" if here.commit else "commit unknown"
    commit += " with uncommitted changes" if here.dirty else ""
    device = here.device_name + (f" ({here.threads} threads)" if here.device == "cpu" else "")
    return (
        f"{device}, suite {run.header.suite} of {run.header.started[:10]}, {commit}, "
        f"esbench {here.esbench}, torch {here.torch}.{unfinished(run)}"
    )


def unfinished(run: Run) -> str:
    """A warning where a run did not come to its end."""
    if run.end is not None and run.end.status != "interrupted":
        return ""
    return f" The run {'was interrupted' if run.end else 'has no end'}: cells may be missing."


def stand_in(grid: Grid, reference: Reference) -> str:
    """A sentence where a baseline has no such phase and its forward is taken instead."""
    if reference.phase == grid.phase:
        return ""
    return f" {reference.variant.name} has no {grid.phase}: its {reference.phase} of the same case stands in."


def ratios_taken(ratios: Iterable[Ratio]) -> str:
    """How the multipliers of a block were found."""
    methods = sorted({ratio.method for ratio in ratios})
    if len(methods) > 1:
        return "; ratios inside rounds where the rows share them, of medians elsewhere"
    return f"; ratios {methods[0]}" if methods else ""


def _is_published(run: Run) -> bool:
    return any(row.method == PUBLISHED for row in run.measurements)
