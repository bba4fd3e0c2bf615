"""Two runs compared: their devices and environments, and the rows that both have.

Rows match if variant, case (with its dtype), phase, metric and method are the same. Ratios are not a gate:
each run is one process, and the intervals do not cover differences between processes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.report.analysis.quality import quality
from esbench.schema import PHASES, QUALITY, Case, Environment, Measurement, Phase, Row, Run, Skipped, Variant
from esbench.stats import interval, median_of_values, round_medians

_SAME_DEVICE = ("device_name", "cpu", "threads", "device_memory_bytes")
_IGNORED = frozenset({"idle_w", "memory_bytes"})
"""Fields of the environment that differ between runs without an effect on times."""
MIN_DISTURBED_RATIO = 2.0
"""From this ratio of the times of base on, one of the runs is unreliable."""
_CONFIDENCE = 0.975
"""Confidence of the interval of A and of that of B: B / A then has at least 95 % (Bonferroni)."""
_COUNTS = ("peak_bytes", "noise_bytes", "reserved_bytes", "launches", "largest_members")


def different_devices(a: Run, b: Run, template: str = "A ran on {}, B on {}") -> str:
    """Return how the devices of two runs differ, formatted by a template; empty if they do not.

    Compared are name, processor, threads, memory and whether it is a whole GPU or a slice of one (the kind
    of its UUID, ``GPU`` or ``MIG``), as far as both runs have them.
    """

    def device(environment: Environment) -> dict[str, object]:
        uuid_kind = environment.uuid.partition("-")[0] if environment.uuid else None
        return {name: getattr(environment, name) for name in _SAME_DEVICE} | {"kind": uuid_kind}

    device_a, device_b = (device(run.header.environment) for run in (a, b))
    known = [name for name in device_a if None not in {device_a[name], device_b[name]}]
    differing = [name for name in known if device_a[name] != device_b[name]]

    def describe(device: dict[str, object]) -> str:
        return ", ".join(
            f"{device[name]}" if name == "device_name" else f"{name} {device[name]}" for name in differing
        )

    return template.format(describe(device_a), describe(device_b)) if differing else ""


def differences(a: Run, b: Run) -> dict[str, tuple[object, object]]:
    """Return the values in A and B of each field of the environment, seed and code digest that differs."""

    def facts(run: Run) -> dict[str, object]:
        fields = msgspec.structs.asdict(run.header.environment)
        environment = {name: value for name, value in fields.items() if name not in _IGNORED}
        code = {f"code of {variant}": digest for variant, digest in run.header.code.items()}
        return {"seed": run.header.seed} | environment | code

    facts_a, facts_b = facts(a), facts(b)
    in_both = {name: (facts_a[name], facts_b[name]) for name in facts_a if name in facts_b}
    return {name: values for name, values in in_both.items() if values[0] != values[1]}


def invalid(a: Run, b: Run) -> str:
    """Return why A, B or both are invalid; empty if both are valid."""
    sides = (("A", a), ("B", b))
    return ". ".join(
        f"{name}: {'; '.join(run.end.invalid)}" for name, run in sides if run.end and run.end.invalid
    )


def disturbed(compared: "Comparison") -> str:
    """Return a warning if base's times differ by MIN_DISTURBED_RATIO between two runs of a device, else "".

    The plain layer is the same code in both, so one of the runs was disturbed or had other settings.
    """
    base_factors = [
        (max(pair.ratio, 1 / pair.ratio), pair)
        for pair in compared.pairs
        if pair.key.variant.mode == "base" and pair.key.metric.endswith("latency_ns") and pair.ratio
    ]
    factor, pair = max(base_factors, key=lambda entry: entry[0], default=(1.0, None))
    if pair is None or factor < MIN_DISTURBED_RATIO:
        return ""
    slower, faster = ("B", "A") if pair.ratio and pair.ratio > 1 else ("A", "B")
    return (
        f"base takes {factor:.3g}x as long in {slower} as in {faster} ({pair.key.case.label}), "
        f"so {slower} ran under load or with other settings: measure it again"
    )


class Key(NamedTuple):
    """The fields in which two rows must agree to be compared."""

    variant: Variant
    case: Case
    phase: Phase
    metric: str
    method: str

    @property
    def table(self) -> tuple[int, str, bool, int, str, str]:
        """The table that shows the row, as a key to group and sort by: the forward before other phases."""
        operator = len(self.case.kernel_size), self.case.operator
        phase = (*PHASES, QUALITY).index(self.phase)
        return *operator, self.phase != "forward", phase, self.metric, self.method

    @property
    def is_exact(self) -> bool:
        """Whether the same code always gives the same value: counts and quality metrics."""
        return self.metric in _COUNTS or self.phase == QUALITY

    @property
    def names(self) -> dict[str, str]:
        """The key as text."""
        variant = self.variant.label(self.case.operator)
        names = {"phase": self.phase, "metric": self.metric, "method": self.method}
        return {"variant": variant, "case": self.case.label, **names}


class Pair(NamedTuple):
    """The medians of A and B, their ratio B / A, and its interval; None if a number is unknown.

    A quality metric is a mean or n_eff instead of a median, as in the tables of quality.
    """

    key: Key
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None


class Lone(NamedTuple):
    """A row that is missing from the other run, with the reason given there."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Two runs: ``pairs`` of measured values, ``counts`` that differ, and the number of ``equal`` counts."""

    a: Run
    b: Run
    pairs: tuple[Pair, ...]
    counts: tuple[Pair, ...]
    equal: int
    only_a: tuple[Lone, ...]
    only_b: tuple[Lone, ...]

    @property
    def matched(self) -> bool:
        """Whether any row is in both."""
        return bool(self.pairs or self.counts or self.equal)


def compare(a: Run, b: Run) -> Comparison:
    """Match the rows of two runs; raise a UserError if they are of different devices."""
    if devices := different_devices(a, b):
        raise UserError(f"{devices}: a ratio of their times does not compare the variants")
    rows_a, rows_b = _measured_rows(a), _measured_rows(b)
    pairs = [_pair(key, rows_a[key], rows_b[key]) for key in rows_a if key in rows_b]
    pairs.sort(key=lambda pair: (pair.key.table, -(pair.ratio or 0.0)))  # the largest ratio first
    exact = [pair for pair in pairs if pair.key.is_exact]
    counts = [pair for pair in exact if pair.a != pair.b]
    return Comparison(
        a,
        b,
        pairs=tuple(pair for pair in pairs if not pair.key.is_exact),
        counts=tuple(counts),
        equal=len(exact) - len(counts),
        only_a=tuple(_lone(key, b) for key in _sort_by_name(rows_a.keys() - rows_b.keys())),
        only_b=tuple(_lone(key, a) for key in _sort_by_name(rows_b.keys() - rows_a.keys())),
    )


def _sort_by_name(keys: set[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: tuple(key.names.values()))


def _measured_rows(run: Run) -> dict[Key, Measurement]:
    rows = (row for row in usable_rows(run)[0] if isinstance(row, Measurement))
    return {Key(row.variant, row.case, row.phase, row.metric, row.method): row for row in rows}


def usable_rows(run: Run) -> tuple[list[Row], int]:
    """Return the rows of a run, and how many measurements are left out because their variant failed.

    Baselines are measured in each co-resident group: only their first rows are returned.
    """
    failures = [row for row in run.skipped if row.status == "failed"]
    rows: dict[tuple[object, ...], Row] = {}
    withheld = 0
    for row in run.rows:
        if isinstance(row, Measurement) and any(is_reason_for(failure, row) for failure in failures):
            withheld += 1
            continue
        metric = row.metric if isinstance(row, Measurement) else None
        rows.setdefault((row.variant, row.case, row.phase, metric, row.method), row)
    return list(rows.values()), withheld


def is_reason_for(skipped: Skipped, key: "Key | Measurement") -> bool:
    """Return whether a skipped row gives the reason why the row with this key is missing."""
    return (
        (skipped.variant, skipped.case) == (key.variant, key.case)
        and skipped.phase in {None, key.phase}
        and skipped.method in {None, key.method}
    )


def _pair(key: Key, a: Measurement, b: Measurement) -> Pair:
    if key.phase == QUALITY:
        quality_a, quality_b = quality(a), quality(b)
        return Pair(key, quality_a, quality_b, _divide(quality_b, quality_a), None, None)
    medians_a, medians_b = round_medians(a), round_medians(b)
    median_a, median_b = median_of_values(medians_a), median_of_values(medians_b)
    interval_a, interval_b = interval(medians_a, _CONFIDENCE), interval(medians_b, _CONFIDENCE)
    low = _divide(interval_b.low, interval_a.high) if interval_a and interval_b else None
    high = _divide(interval_b.high, interval_a.low) if interval_a and interval_b else None
    return Pair(key, median_a, median_b, _divide(median_b, median_a), low, high)


def _divide(b: float | None, a: float | None) -> float | None:
    """Return B / A, None if it is not a finite number."""
    if a is None or b is None or a <= 0 or not math.isfinite(b / a):
        return None
    return b / a


def _lone(key: Key, other_run: Run) -> Lone:
    """Return a row that the other run lacks, with the reason there; a failure takes precedence."""
    reasons = [row for row in other_run.skipped if is_reason_for(row, key)]
    row = max(reasons, key=lambda row: row.status == "failed", default=None)
    return Lone(key, f"{row.status} in the other: {row.reason}" if row else "")
