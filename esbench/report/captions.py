"""What stands beside a table: where its figures come from and how they were taken."""

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from esbench.report.analysis.pivot import Grid, Reference, headings
from esbench.report.text import counted
from esbench.schema import QUALITY, Case, Measurement, Request, Run
from esbench.stats import OFF_CLOCK, OUTLYING, Ratio, median_clock, off_clock, outliers, throttled
from esbench.units import format_number, format_value

PUBLISHED = "published"
"""The method of figures that others measured."""


_COMMIT_DIGITS = 7


_LISTED = 4
"""Of more batches than these only the first and the last are named."""


_SHORT = 28


_IDLE = 0.25  # of the threads: a load average above it is of other programs


METRICS = {
    "latency_ns": "Time",
    "warm_latency_ns": "Time with warm caches",
    "host_latency_ns": "Host time of issuing the call",
    "peak_bytes": "Peak memory above the level before the call",
    "noise_bytes": "Noise state of one step",
    "reserved_bytes": "Memory that the allocator reserved",
    "process_bytes": "Memory of the process",
    "launches": "Launches of one call (kernels on a GPU, operators on a CPU)",
    "largest_members": "Largest population that fits, in members",
    "utilization_percent": "Share of a window with a kernel running (NVML)",
    "power_w": "Power draw (NVML)",
    "clock_hz": "Clock of the multiprocessors (NVML)",
    "temperature_c": "Temperature (NVML)",
    "throttled_percent": "Share of readings with a reason to throttle (NVML)",
    "energy_j": "Energy of one call, with what the idle device draws",
    "net_energy_j": "Net energy of one call, less what the idle device draws",
    "kappa": "Kappa of the quality law",
    "effective_members": "Effective members",
    "kept_percent": "Effective members as a share of all",
    "cosine": "Cosine to backpropagation's gradient",
    "singular_values": "Singular values of one perturbation, over their root mean square",
    "stable_rank": "Stable rank of one perturbation",
    "dot_mean": "Mean of scaled products of two members' perturbations",
    "dot_variance": "Variance of scaled products of two members' perturbations",
    "correlation": "Correlation of entries",
    "floor_percent": "Percent of the floor",
    "achieved_bytes_per_s": "Achieved bandwidth",
    "achieved_flops_per_s": "Achieved arithmetic",
}


def metric(name: str) -> str:
    """What a metric is, in words; its own name where nobody wrote any."""
    return METRICS.get(name, name)


def short_metric(name: str) -> str:
    """What a metric is, without how it was read: for a title."""
    words = re.split(r" above| \(|,", metric(name))[0]
    return words[:1].lower() + words[1:]


def apart(grid: Grid) -> str:
    """Number format and method as the end of a heading, where the run has several."""
    dtypes = {row.case.dtype for row in _alike(grid)}
    return f"{f', {grid.dtype}' if len(dtypes) > 1 else ''}{method(grid)}"


def method(grid: Grid) -> str:
    """The method as the end of a heading, where the run has several."""
    return f", method {grid.method}" if len({row.method for row in _alike(grid)}) > 1 else ""


def _alike(grid: Grid) -> Iterator[Measurement]:
    """The rows of the same operator, phase and metric, in any number format and by any method."""
    for row in grid.run.measurements:
        if (row.case.operator, row.phase, row.metric) == (grid.operator, grid.phase, grid.metric):
            yield row


def conditions(grid: Grid, cases: Sequence[Case]) -> str:
    """Number format, batch and method of these columns."""
    batches = list(dict.fromkeys(f"{case.members} x {case.repeats}" for case in cases))
    if len(batches) > _LISTED:
        batches = [f"{batches[0]} to {batches[-1]}"]
    what = [
        " and ".join(dict.fromkeys(case.dtype for case in cases)),
        f"{', '.join(batches)} (members x repeats)",
        *(["antithetic"] if any(case.antithetic for case in cases) else []),
        *([] if grid.method == PUBLISHED or grid.phase == QUALITY else [f"method {grid.method}"]),
    ]
    return f"{', '.join(what)}."


def device(run: Run) -> str:
    """The name of the device alone."""
    return run.header.environment.device_name


def source(run: Run) -> str:
    """The device, and whose figures they are where they are not ours."""
    name = device(run)
    return f"{name}, published by others ({run.header.suite})" if is_published(run) else name


def origin(run: Run) -> str:
    """Which run it is: device, suite, date, its name, commit, versions."""
    here = run.header.environment
    if is_published(run):
        return f"{source(run)}, not measured by esbench."
    commit = f"commit {here.commit[:_COMMIT_DIGITS]}" if here.commit else "commit unknown"
    commit += " with uncommitted changes" if here.dirty else ""
    where = here.device_name + (f" ({counted(here.threads, 'thread')})" if here.device == "cpu" else "")
    return (
        f"{invalid(run)}{where}, suite {run.header.suite} of {run.header.started[:10]}, "
        f"run {run.header.run_id}, {commit}, esbench {here.esbench}, torch {here.torch}."
        f"{_partial(run)}{unfinished(run)}{_disturbed(run)}"
    )


def invalid(run: Run) -> str:
    """A warning in front of everything where the figures of a run must not be used."""
    return f"INVALID: {'; '.join(run.end.invalid)}. " if run.end and run.end.invalid else ""


def unfinished(run: Run) -> str:
    """A warning where a run did not come to its end."""
    if run.end is not None and run.end.status != "interrupted":
        return ""
    return f" The run {'was interrupted' if run.end else 'has no end'}: cells may be missing."


def part(run: Run) -> str:
    """Which part of its suite was asked for, in words; nothing where it was all of it.

    Another number format is the whole suite in that format, and a plugin adds to it.
    """
    asked = run.header.request or Request()
    everything = msgspec.structs.replace(Request(), dtype=asked.dtype, plugins=asked.plugins)
    words = {
        "variants": ", ".join(asked.variants),
        "cases": asked.cases,
        "phases": asked.phases,
        "methods": asked.methods,
    }
    return "; ".join(
        f"{name} {value}"
        for name, value in words.items()
        if getattr(asked, name) not in {getattr(everything, name), ("*",)}
    )


def stand_in(grid: Grid, reference: Reference) -> str:
    """A sentence where a baseline has no such phase and its forward is taken instead."""
    if reference.phase == grid.phase:
        return ""
    return f" {reference.variant.name} has no {grid.phase}: its {reference.phase} of the same case stands in."


def ratios_taken(ratios: Sequence[Ratio]) -> str:
    """How the multipliers of a block were found, and how sure they are."""
    methods = sorted({ratio.method for ratio in ratios})
    if len(methods) > 1:
        return f"; ratios inside rounds where the rows share them, of medians elsewhere{_widths(ratios)}"
    return f"; ratios {methods[0]}{_widths(ratios)}" if methods else ""


def shorten(reason: str, longest: int = _SHORT) -> str:
    """The first clause of a reason, for where there is no room for more, less a word that only says where."""
    clause = re.split(r"[:;,.(]\s", re.sub(r"^\S+: ", "", reason))[0].strip()
    return clause if len(clause) <= longest else f"{clause[: longest - 1].rstrip()}…"


def _widths(ratios: Sequence[Ratio]) -> str:
    widths = [100 * ratio.relative for ratio in ratios if ratio.relative is not None]
    if not widths:
        return f"; 95 % intervals for none of {len(ratios)} cells, the rows share too few rounds"
    usual, worst = (format_value("width_percent", width) for width in (median(widths), max(widths)))
    return (
        f"; 95 % intervals for {len(widths)} of {len(ratios)} cells: ±{usual} in the median, ±{worst} at most"
    )


def _partial(run: Run) -> str:
    return f" Part of the suite: {part(run)}." if part(run) else ""


def _disturbed(run: Run) -> str:
    """A warning where other programs had the processor when the run began."""
    here = run.header.environment
    if here.load is None or here.load <= _IDLE * here.threads:
        return ""
    return (
        f" Load {format_number(here.load)} on {counted(here.threads, 'thread')} at the start: "
        "other programs may have disturbed these times."
    )


def is_published(run: Run) -> bool:
    """Whether others measured it."""
    return any(row.method == PUBLISHED for row in run.measurements)


class _Share(NamedTuple):
    """A share of a cell's samples or visits, and above which part of them it is worth a footnote."""

    kind: str
    of: str
    share: Callable[[Measurement], float]
    notable: float = 0.0


def remarks(grid: Grid) -> Iterator[str]:
    """Labels, budgets that ended the sampling, outliers, visits off clock: how many cells, and the worst.

    Samples are labelled here and dropped nowhere.
    """
    names = dict(zip(grid.cases, headings(grid.cases), strict=True))
    rows = {f"{v.label(grid.operator)} {names[case]}": row for v, case, row in grid.cells}
    said: dict[str, list[tuple[str, str]]] = {}
    for name, row in rows.items():
        for text in _words(row):
            # Labels carry counts of their own, budgets seconds: the words before them say which kind it is.
            said.setdefault(re.split(r"[:,]|\bof [\d.]", text)[0], []).append((name, text))
    for texts in said.values():
        name, text = texts[0]
        yield f"{text}: {len(texts)} of {len(rows)} cells, {'such as ' if len(texts) > 1 else ''}{name}"
    clock = median_clock(grid.run)
    for kind, of, share, notable in (
        _Share(f"outliers (modified z-score above {OUTLYING:g}), kept", "samples", outliers, 0.1),
        _Share(
            f"off the run's median clock by more than {_percent(OFF_CLOCK)}",
            "visits",
            lambda row: off_clock(row, clock),
        ),
        _Share("throttled", "visits", throttled),
    ):
        found = {name: value for name, row in rows.items() if (value := share(row)) > notable}
        if found:
            worst = max(found, key=lambda name: found[name])
            above = f"more than {_percent(notable)} of the {of}" if notable else of
            yield (
                f"{kind}: {above} in {len(found)} of {len(rows)} cells, "
                f"at most {_percent(found[worst])} in {worst}"
            )


def _words(row: Measurement) -> Iterator[str]:
    yield from row.labels
    if row.warm_up.startswith("not flat"):
        yield f"warm-up: {row.warm_up}"
    if row.stop.startswith("budget"):
        yield f"stopped by the {row.stop}"
    elif row.stop.startswith("one sample"):
        yield row.stop


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
