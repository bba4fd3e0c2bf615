"""A comparison of two runs as text for a terminal."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from tabulate import tabulate

from esbench.report import captions
from esbench.report.analysis.comparison import Comparison, Pair, differences
from esbench.schema import Run
from esbench.text import first_names, one_line, pluralize
from esbench.units import ABSENT, format_multiplier, format_value

INTERVAL = (
    "A and B: the values in the tables of each run; a time is the median over rounds of their medians. "
    "interval: at least 95 % for B / A, from the 97.5 % order-statistic intervals of A and B; "
    f"{ABSENT} with fewer than 7 rounds or without usable samples. It covers the spread inside each process, "
    "not the differences between processes."
)


WORST = 5
"""Pairs of a summary."""
UNSURE = 2
"""Pairs of a summary without an interval, if enough have one."""


def summary(comparison: Comparison) -> str:
    """Return the comparison in ten lines: the median shift, the largest changes, and rows of one run only."""
    times = [pair for pair in comparison.pairs if pair.ratio and pair.key.metric == "latency_ns"]
    lines = [
        one_line(f"{name}: {captions.source(run)}, run {run.header.run_id}")
        for name, run in _sides(comparison)
    ]
    if changed := differences(comparison.a, comparison.b):
        lines.append(f"different: {one_line(first_names(list(changed)))}")
    if times:
        times.sort(key=lambda pair: -abs(math.log(pair.ratio or 1.0)))
        changed_times = [pair for pair in times if pair.low and pair.high and not pair.low <= 1 <= pair.high]
        without_interval = [pair for pair in times if not (pair.low and pair.high)]
        slower = sum((pair.ratio or 0.0) > 1 for pair in changed_times)
        shift = format_multiplier(median([pair.ratio or 0.0 for pair in times]))
        lines.append(
            f"B / A of {len(times)} times: median {shift}; beyond both intervals {slower} slower, "
            f"{len(changed_times) - slower} faster"
            + (f"; {len(without_interval)} without interval" if without_interval else "")
        )
        shown = changed_times[: WORST - min(len(without_interval), UNSURE)]
        shown += without_interval[: WORST - len(shown)]
        lines += [f"  {_change(pair)}" for pair in times if pair in (shown or times[:WORST])]
    else:
        lines.append("the runs have no times in common")
    lone = f"rows only in A {len(comparison.only_a)}, only in B {len(comparison.only_b)}"
    lines.append(f"bytes and launches: {len(comparison.counts)} differ, {comparison.equal} are equal; {lone}")
    lines.append(
        "one process each: `esbench gate` decides whether a change is a regression; --tables prints all"
    )
    return "\n".join(lines) + "\n"


def _change(pair: Pair) -> str:
    key = pair.key
    name = one_line(f"{key.variant.name}, {captions.layer(key.case)}, {key.phase}")
    values = f"{format_value(key.metric, pair.a)} -> {format_value(key.metric, pair.b)}"
    unsure = "" if pair.low and pair.high else " (no interval)"
    return f"{format_multiplier(pair.ratio)}  {name}: {values}{unsure}"


def text(comparison: Comparison) -> str:
    """Return all tables of the comparison, for a terminal."""
    parts = ["\n".join(one_line(f"{name}: {captions.origin(run)}") for name, run in _sides(comparison))]
    if changed := differences(comparison.a, comparison.b):
        lines = [one_line(f"{name}: {a} in A, {b} in B") for name, (a, b) in changed.items()]
        parts.append("\n".join(["Differences between the runs:", *lines]))
    parts += [INTERVAL, *_tables(comparison)]
    if not comparison.pairs:
        parts.append("The runs have no measured rows in common.")
    if comparison.counts:
        parts.append(f"Counts that differ\n{_table(comparison.counts)}")
    parts.append(f"{comparison.equal} counts (bytes, launches) are the same in both.")
    for name, lone in (("A", comparison.only_a), ("B", comparison.only_b)):
        if lone:
            lines = [
                f"  {one_line(', '.join(row.key.names.values()) + (row.reason and f': {row.reason}'))}"
                for row in lone
            ]
            parts.append("\n".join([f"Only in {name}: {pluralize(len(lone), 'row')}", *lines]))
    return "\n\n".join(parts) + "\n"


def _sides(comparison: Comparison) -> tuple[tuple[str, Run], tuple[str, Run]]:
    return ("A", comparison.a), ("B", comparison.b)


def _tables(comparison: Comparison) -> Iterator[str]:
    for _, group in groupby(comparison.pairs, key=lambda pair: pair.key.table):
        pairs = list(group)
        key = pairs[0].key
        name = f"{key.case.operator}, {key.phase}: {captions.metric(key.metric)} (method {key.method})"
        yield f"{one_line(name)}\n{_table(pairs)}"


def _table(pairs: Sequence[Pair]) -> str:
    """Return a table of times with intervals, or of counts with their phases and metrics."""
    rows = []
    for pair in pairs:
        key, metric = pair.key, pair.key.metric
        row = {"variant": key.variant.label(key.case.operator), "case": key.case.label}
        row |= {"phase": key.phase, "metric": metric} if key.is_exact else {}
        row |= {"A": format_value(metric, pair.a), "B": format_value(metric, pair.b)}
        row["B / A"] = format_multiplier(pair.ratio)
        if not key.is_exact:
            ends = [format_multiplier(end) for end in (pair.low, pair.high)]
            row["interval"] = ABSENT if ABSENT in ends else " to ".join(ends)
        rows.append({name: one_line(value) for name, value in row.items()})
    return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)
