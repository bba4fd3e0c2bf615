"""Two runs side by side: the rows that both have, the counts that changed, and what only one of them has.

Rows meet where variant, case, phase, metric and method are the same; the type is part of the case. This
is a look and no gate: each run is one process, and what differs between processes is in no interval here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tabulate import tabulate

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.circumstances import differences, different_devices
from esbench.report.qualities import quality
from esbench.report.words import one_line
from esbench.schema import PHASES, QUALITY, Case, Measurement, Phase, Run, Skipped, Variant
from esbench.stats import interval, middle, round_medians
from esbench.units import ABSENT, format_multiplier, format_value

INTERVAL = (
    "A and B are the figures of a run's own tables: of a time the median of the rounds' medians; "
    "B / A is their ratio. Its interval holds at least 95 %: both medians' 97.5 % order-statistic intervals, "
    f"end divided by end; {ABSENT} where A or B has fewer than 7 rounds, or no usable samples. It knows the "
    "spread inside each process, not that between processes."
)

Group = tuple[int, str, bool, int, str, str]
Reasons = dict[tuple[Variant, Case], list[Skipped]]

_EACH = 0.975
_COUNTS = ("peak_bytes", "noise_bytes", "reserved_bytes", "launches", "largest_members")


class Key(NamedTuple):
    """What two rows must share to be compared."""

    variant: Variant
    case: Case
    phase: Phase
    metric: str
    method: str

    @property
    def group(self) -> Group:
        """The table that a row stands in, as tables are ordered: the forward before other phases."""
        operator = len(self.case.kernel_size), self.case.operator
        phase = (*PHASES, QUALITY).index(self.phase)
        return *operator, self.phase != "forward", phase, self.metric, self.method

    @property
    def exact(self) -> bool:
        """Whether the same code gives the same figure: counts do, and what is repeatable from the seed."""
        return self.metric in _COUNTS or self.phase == QUALITY

    @property
    def words(self) -> dict[str, str]:
        """The key as text."""
        variant = self.variant.label(self.case.operator)
        names = {"phase": self.phase, "metric": self.metric, "method": self.method}
        return {"variant": variant, "case": self.case.label, **names}


class Pair(NamedTuple):
    """The medians of both runs and B / A with its interval; ``None`` where there is no such number.

    Of a quality the figure of each run is the one that its pages show, by its replicates together.
    """

    key: Key
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None


class Lone(NamedTuple):
    """A row that the other run lacks, and the reason that stands there instead."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Comparison:
    """``pairs`` of measured figures, ``counts`` that differ, and how many counts are ``equal``."""

    a: Run
    b: Run
    pairs: tuple[Pair, ...]
    counts: tuple[Pair, ...]
    equal: int
    only_a: tuple[Lone, ...]
    only_b: tuple[Lone, ...]

    @property
    def matched(self) -> bool:
        """Whether anything is in both."""
        return bool(self.pairs or self.counts or self.equal)


def compare(a: Run, b: Run, *, across_devices: bool = False) -> Comparison:
    """Match the rows of two runs.

    Raises:
        UserError: they ran on different devices and that was not asked for.

    """
    if different_devices(a, b) and not across_devices:
        message = (
            f"{different_devices(a, b)}: a ratio of their times says nothing of the variants; "
            "--across-devices shows it nevertheless"
        )
        raise UserError(message)
    here, there = _measured(a), _measured(b)
    both = [_pair(key, here[key], there[key]) for key in here if key in there]
    exact = [pair for pair in both if pair.key.exact]
    counts = [pair for pair in exact if pair.a != pair.b]
    return Comparison(
        a,
        b,
        pairs=tuple(sorted((pair for pair in both if not pair.key.exact), key=_place)),
        counts=tuple(sorted(counts, key=_place)),
        equal=len(exact) - len(counts),
        only_a=_lone(here, there, b),
        only_b=_lone(there, here, a),
    )


def text(found: Comparison) -> str:
    """The comparison for a terminal."""
    parts = ["\n".join(one_line(f"{name}: {captions.origin(run)}") for name, run in _sides(found))]
    if changed := differences(found.a, found.b):
        lines = [one_line(f"{name}: {a} in A, {b} in B") for name, (a, b) in changed.items()]
        parts.append("\n".join(["Not the same in both:", *lines]))
    parts += [INTERVAL, *_tables(found)]
    if not found.pairs:
        parts.append("No measured row is in both.")
    if found.counts:
        parts.append(f"Counts that differ\n{_table(found.counts)}")
    parts.append(f"{found.equal} counts (bytes, launches) are the same in both.")
    for name, lone in (("A", found.only_a), ("B", found.only_b)):
        if lone:
            lines = [
                f"  {one_line(', '.join(one.key.words.values()) + (one.reason and f': {one.reason}'))}"
                for one in lone
            ]
            parts.append("\n".join([f"Only in {name}: {len(lone)} rows", *lines]))
    return "\n\n".join(parts) + "\n"


def as_json(found: Comparison) -> dict[str, object]:
    """The comparison as one object: figures in the unit of their metric, ``null`` where there is none."""
    return {
        "a": found.a.header.run_id,
        "b": found.b.header.run_id,
        "different_devices": different_devices(found.a, found.b),
        "invalid": {name.lower(): run.end.invalid if run.end else () for name, run in _sides(found)},
        "differences": differences(found.a, found.b),
        "interval": INTERVAL,
        "rows": [pair.key.words | dict(zip(Pair._fields[1:], pair[1:], strict=True)) for pair in found.pairs],
        "counts": [pair.key.words | {"a": pair.a, "b": pair.b} for pair in found.counts],
        "equal_counts": found.equal,
        "only_in_a": [one.key.words | {"reason": one.reason} for one in found.only_a],
        "only_in_b": [one.key.words | {"reason": one.reason} for one in found.only_b],
    }


def _sides(found: Comparison) -> tuple[tuple[str, Run], tuple[str, Run]]:
    return ("A", found.a), ("B", found.b)


def _measured(run: Run) -> dict[Key, Measurement]:
    """The rows by their key, less those of a variant that failed there.

    Baselines are measured in every company, and the first counts.
    """
    found: dict[Key, Measurement] = {}
    reasons = _reasons(run)
    for row in run.measurements:
        key = Key(row.variant, row.case, row.phase, row.metric, row.method)
        skipped = _skipped(key, reasons)
        if skipped is None or skipped.status != "failed":
            found.setdefault(key, row)
    return found


def _pair(key: Key, a: Measurement, b: Measurement) -> Pair:
    if key.phase == QUALITY:
        here, there = quality(a), quality(b)
        return Pair(key, here, there, _divided(there, here), None, None)
    rounds = [[value for value in round_medians(row) if value is not None] for row in (a, b)]
    here, there = map(middle, rounds)
    below, above = (interval(values, _EACH) for values in rounds)
    low = _divided(above.low, below.high) if below and above else None
    high = _divided(above.high, below.low) if below and above else None
    return Pair(key, here, there, _divided(there, here), low, high)


def _divided(b: float | None, a: float | None) -> float | None:
    """B / A where that is a number."""
    if a is None or b is None or a <= 0 or not math.isfinite(b / a):
        return None
    return b / a


def _lone(here: dict[Key, Measurement], there: dict[Key, Measurement], other: Run) -> tuple[Lone, ...]:
    found = sorted((key for key in here if key not in there), key=lambda key: (*key.words.values(),))
    reasons = _reasons(other)
    rows = (_skipped(key, reasons) for key in found)
    return tuple(
        Lone(key, f"{row.status} in the other: {row.reason}" if row else "")
        for key, row in zip(found, rows, strict=True)
    )


def _reasons(run: Run) -> Reasons:
    found: Reasons = {}
    for row in run.skipped:
        found.setdefault((row.variant, row.case), []).append(row)
    return found


def _skipped(key: Key, reasons: Reasons) -> Skipped | None:
    """Why a run has no such row, the worst of several reasons."""
    found = [
        row
        for row in reasons.get((key.variant, key.case), ())
        if row.phase in {None, key.phase} and row.method in {None, key.method}
    ]
    return max(found, key=lambda row: row.status == "failed", default=None)


def _place(pair: Pair) -> tuple[Group, float]:
    """By table, and in it what grew most comes first."""
    return pair.key.group, -(pair.ratio or 0.0)


def _tables(found: Comparison) -> Iterator[str]:
    groups: dict[Group, list[Pair]] = {}
    for pair in found.pairs:
        groups.setdefault(pair.key.group, []).append(pair)
    for pairs in groups.values():
        key = pairs[0].key
        name = f"{key.case.operator}, {key.phase}: {captions.metric(key.metric)} (method {key.method})"
        yield f"{one_line(name)}\n{_table(pairs)}"


def _table(pairs: Sequence[Pair]) -> str:
    rows = [
        [
            pair.key.variant.label(pair.key.case.operator),
            pair.key.case.label,
            *([pair.key.phase, pair.key.metric] if pair.key.exact else []),
            format_value(pair.key.metric, pair.a),
            format_value(pair.key.metric, pair.b),
            format_multiplier(pair.ratio),
            *([] if pair.key.exact else [_range(pair)]),
        ]
        for pair in pairs
    ]
    exact = pairs[0].key.exact
    names = ["variant", "case", *(["phase", "metric"] if exact else []), "A", "B", "B / A"]
    names += [] if exact else ["interval"]
    rows = [list(map(one_line, row)) for row in rows]
    return tabulate(rows, headers=names, tablefmt="simple", disable_numparse=True)


def _range(pair: Pair) -> str:
    if pair.low is None or pair.high is None:
        return ABSENT
    return f"{format_multiplier(pair.low)} to {format_multiplier(pair.high)}"
