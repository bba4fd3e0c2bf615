"""Captions and footnotes of tables and plots: which run, which conditions, warnings on its samples."""

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from esbench import stats
from esbench.report.analysis.load import UNRELIABLE
from esbench.report.analysis.pivot import Grid, Reference, headings
from esbench.report.analysis.run_selection import partial_request
from esbench.schema import QUALITY, Case, Measurement, Run
from esbench.stats import BUSY, Ratio, median_clock, off_clock_share, outlier_share, throttled_share
from esbench.store import PUBLISHED
from esbench.text import pluralize
from esbench.units import format_number, format_value, quantity

_MAX_BATCHES = 4
"""If there are more batches, only the first and the last are named."""
_CELL_CHARS = 28
"""Longest reason in a cell of a table."""
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
    "energy_j": "Energy of one call, idle power included",
    "net_energy_j": "Net energy of one call, idle power subtracted",
    "kappa": "Kappa of the quality law",
    "bias": "Bias of the mean over many steps, as a kappa",
    "effective_members": "Effective members",
    "cosine": "Cosine to backpropagation's gradient",
    "singular_values": "Singular values of one perturbation, over their root mean square",
    "stable_rank": "Stable rank of one perturbation",
    "largest_change": "Largest change of one weight, in units of sigma",
    "dot_mean": "Mean of scaled products of two members' perturbations",
    "dot_variance": "Variance of scaled products of two members' perturbations",
    "correlation": "Correlation of entries",
    "floor_percent": "Percent of the roofline bound",
    "achieved_bytes_per_s": "Achieved bandwidth",
    "achieved_flops_per_s": "Achieved arithmetic",
}


def layer(case: Case) -> str:
    """Return the name of a layer with its sizes: ``Conv2d 16 -> 32, 3x3, 28x28, stride=2``."""
    sizes = [f"{case.in_channels} -> {case.out_channels}"]
    sizes += ["x".join(map(str, size)) for size in (case.kernel_size, case.input_size) if size]
    defaults = Case(operator=case.operator, out_channels=1, in_channels=1)
    named = (
        *("stride", "padding", "dilation", "groups", "padding_mode", "bias"),
        *("antithetic", "dtype", "repeats"),
    )
    options = [
        f"{name}={getattr(case, name)}" for name in named if getattr(case, name) != getattr(defaults, name)
    ]
    return f"{case.operator} {', '.join([*sizes, *options])}"


def layer_and_members(case: Case) -> str:
    """Return the name of a layer with its population: ``Linear 64 -> 64, 1024 members``."""
    return layer(case) + (f", {case.members} members" if case.members > 1 else "")


def metric(name: str) -> str:
    """Return the description of a metric, or its name if it has none."""
    return METRICS.get(name, name)


def short_metric(name: str) -> str:
    """Return the description of a metric up to its first detail, in lower case: ``peak memory``."""
    description = re.split(r" above| \(|,", metric(name))[0]
    return description[:1].lower() + description[1:]


def without_suffix(name: str) -> str:
    """Return the name of a metric in words, without the suffix that is its unit."""
    return name.rpartition("_")[0].replace("_", " ") or name


def with_unit(title: str, name: str) -> str:
    """Return the title of a metric with its unit, if it has one: ``Time (ms)``."""
    symbol = quantity(name).column.symbol
    return f"{title} ({symbol})" if symbol else title


def heading_suffix(grid: Grid) -> str:
    """Return the end of a heading: the dtype and the method, each only if the run has several of them."""
    dtypes = {row.case.dtype for row in _same_metric(grid)}
    dtype = f", {grid.dtype}" if len(dtypes) > 1 else ""
    return f"{dtype}{method(grid)}"


def method(grid: Grid) -> str:
    """Return the end of a heading: ``", method graph"`` if the run has several methods, else empty."""
    return f", method {grid.method}" if len({row.method for row in _same_metric(grid)}) > 1 else ""


def _same_metric(grid: Grid) -> Iterator[Measurement]:
    """Yield the rows of the same operator, phase and metric, in any dtype and by any method."""
    for row in grid.run.measurements:
        if (row.case.operator, row.phase, row.metric) == (grid.operator, grid.phase, grid.metric):
            yield row


def conditions(grid: Grid, cases: Sequence[Case]) -> str:
    """Return dtype, batch, bias and method of these cases; the method of a CPU, "host", is left out."""
    batches = list(dict.fromkeys(f"{case.members} x {case.repeats}" for case in cases))
    if len(batches) > _MAX_BATCHES:
        batches = [f"{batches[0]} to {batches[-1]}"]
    dtypes = " and ".join(dict.fromkeys(case.dtype for case in cases))
    parts = [dtypes, f"{', '.join(batches)} (members x repeats)"]
    if any(case.antithetic for case in cases):
        parts.append("antithetic")
    if any(case.bias for case in cases):
        parts.append("bias")
    if grid.method not in {PUBLISHED, "host"} and grid.phase != QUALITY:
        parts.append(f"method {grid.method}")
    return f"{', '.join(parts)}."


def device(run: Run) -> str:
    """Return the name of the device."""
    return run.header.environment.device_name


def device_and_threads(run: Run) -> str:
    """Return the name of the device, and of a CPU the threads of the run: ``AMD EPYC (2 threads)``."""
    here = run.header.environment
    return here.device_name + (f" ({pluralize(here.threads, 'thread')})" if here.device == "cpu" else "")


def source(run: Run) -> str:
    """Return the device and, if the run is from a publication, its name."""
    name = device(run)
    return f"{name}, published by others ({run.header.suite})" if is_published(run) else name


def origin(run: Run) -> str:
    """Return the device, suite, date, id, commit and versions of a run, and warnings."""
    environment = run.header.environment
    if is_published(run):
        return f"{source(run)}, not measured by esbench."
    commit = f"commit {environment.commit[:7]}" if environment.commit else "commit unknown"
    commit += " with uncommitted changes" if environment.dirty else ""
    part = f" Part of the suite: {partial_request(run)}." if partial_request(run) else ""
    return (
        f"{invalid_note(run)}{device_and_threads(run)}, "
        f"suite {run.header.suite} of {run.header.started[:10]}, run {run.header.run_id}, "
        f"{commit}, esbench {environment.esbench}, torch {environment.torch}."
        f"{part}{unfinished_note(run)}{_disturbed_note(run)}"
    )


def short_origin(run: Run) -> str:
    """Return the device, id and torch version of a run, and warnings."""
    if is_published(run):
        return f"{source(run)}, not measured by esbench."
    torch_version = f"torch {run.header.environment.torch}"
    return (
        f"{invalid_note(run)}{device(run)}, run {run.header.run_id}, {torch_version}."
        f"{unfinished_note(run)}{_disturbed_note(run)}"
    )


def invalid_note(run: Run) -> str:
    """Return a warning if the values of a run must not be used, else empty."""
    return f"INVALID: {'; '.join(run.end.invalid)}. " if run.end and run.end.invalid else ""


def unfinished_note(run: Run) -> str:
    """Return a warning if a run was not completed, else empty."""
    if run.end is not None and run.end.status != "interrupted":
        return ""
    return f" The run {'was interrupted' if run.end else 'has no end'}: cells may be missing."


def stand_in_note(grid: Grid, reference: Reference) -> str:
    """Return a sentence if the forward of a baseline replaces a phase that it lacks, else empty."""
    if reference.phase == grid.phase:
        return ""
    return f" {reference.variant.name} has no {grid.phase}: its {reference.phase} of the same case stands in."


def ratio_methods(ratios: Sequence[Ratio]) -> str:
    """Return how the multipliers of a block were computed, and the widths of their intervals."""
    methods = sorted({ratio.method for ratio in ratios})
    if len(methods) > 1:
        return f"; ratios inside rounds where the rows share them, of medians elsewhere{_widths(ratios)}"
    return f"; ratios {methods[0]}{_widths(ratios)}" if methods else ""


def short_reason(reason: str, longest: int = _CELL_CHARS) -> str:
    """Return the first clause of a reason, for a cell; a leading ``file:line:`` is dropped."""
    if reason.startswith(UNRELIABLE):
        return UNRELIABLE
    without_place = re.sub(r"^\S+: ", "", reason)
    clause = re.split(r"[:;,.(]\s", without_place)[0].strip()
    return clause if len(clause) <= longest else f"{clause[: longest - 1].rstrip()}…"


def _widths(ratios: Sequence[Ratio]) -> str:
    """Return a clause on how many ratios have an interval, and on the median and the largest half width."""
    widths = [100 * ratio.relative for ratio in ratios if ratio.relative is not None]
    if not widths:
        return f"; no 95 % intervals: the rows of {len(ratios)} cells share too few rounds"
    usual, worst = (format_value("width_percent", width) for width in (median(widths), max(widths)))
    return (
        f"; 95 % intervals for {len(widths)} of {len(ratios)} cells: ±{usual} in the median, ±{worst} at most"
    )


def _disturbed_note(run: Run) -> str:
    """Return a warning if other programs used the processor when the run began, else empty."""
    environment = run.header.environment
    if environment.load is None or environment.load <= BUSY * environment.threads:
        return ""
    threads = pluralize(environment.threads, "thread")
    return (
        f" Load {format_number(environment.load)} on {threads} at the start: "
        "other programs may have disturbed these times."
    )


def is_published(run: Run) -> bool:
    """Return whether the values of a run are from a publication."""
    return any(row.method == PUBLISHED for row in run.measurements)


def sample_warnings(grid: Grid) -> Iterator[str]:
    """Yield footnotes on the samples of a grid: labels, budgets, outliers, clocks, throttling.

    Each gives the number of cells that it concerns, and names the worst or the first of them. No sample is
    dropped.
    """
    names = dict(zip(grid.cases, headings(grid.cases), strict=True))
    rows = {f"{variant.label(grid.operator)} {names[case]}": row for variant, case, row in grid.cells}
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for name, row in rows.items():
        for warning in _warnings(row):
            # Counts and seconds differ between cells: the text before them is the kind of warning.
            kind_of_warning = re.split(r"[:,]|\bof [\d.]", warning)[0]
            by_kind.setdefault(kind_of_warning, []).append((name, warning))
    for same_kind in by_kind.values():
        name, warning = same_kind[0]
        example = f"such as {name}" if len(same_kind) > 1 else name
        yield f"{warning}: {len(same_kind)} of {len(rows)} cells, {example}"
    clock = median_clock(grid.run)
    outliers = f"outliers (modified z-score above {stats.MIN_OUTLIER_SCORE:g}), kept"
    off_clock = f"off the run's median clock by more than {_percent(stats.MAX_CLOCK_DEVIATION)}"
    kinds: tuple[tuple[str, str, Callable[[Measurement], float], float], ...] = (
        (outliers, "samples", outlier_share, 0.1),
        (off_clock, "visits", lambda row: off_clock_share(row, clock), 0.0),
        ("throttled", "visits", throttled_share, 0.0),
    )
    for kind, noun, share, threshold in kinds:
        shares = {name: value for name, row in rows.items() if (value := share(row)) > threshold}
        if shares:
            worst = max(shares, key=lambda name: shares[name])
            above = f"more than {_percent(threshold)} of the " if threshold else ""
            cells = f"{len(shares)} of {len(rows)} cells"
            yield f"{kind}: {above}{noun} in {cells}, at most {_percent(shares[worst])} in {worst}"


def _warnings(row: Measurement) -> Iterator[str]:
    yield from row.labels
    if row.warm_up.startswith("not flat"):
        yield f"warm-up: {row.warm_up}"
    if row.stop.startswith("budget"):
        yield f"stopped by the {row.stop}"
    elif row.stop.startswith("one sample"):
        yield row.stop


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
