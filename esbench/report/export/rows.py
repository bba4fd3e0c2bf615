"""The rows of a run as other tools see them: each once, in the order of the file, by a name of its own."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from esbench.report.words import one_line
from esbench.schema import Case, Measurement, Row, Run, Skipped, Variant
from esbench.stats import median
from esbench.units import QUANTITIES

Key = tuple[Variant, Case, str | None, str | None, str | None]

_LONGEST_BYTES = 150
"""A group names a file where pictures are drawn: its text may have so many bytes in UTF-8."""
_DIGITS = 12


class Chosen(NamedTuple):
    """A run in a format: the text, what its parts are called, and how many there are.

    ``kind`` is what a row must be to get in, in words; ``reasons`` says whether rows without a number do.
    """

    text: str
    parts: str
    total: int
    kind: str = ""
    reasons: bool = False


@dataclass(frozen=True)
class Rows:
    """What of a run may be shown, and under which names.

    Baselines are measured in every company, and the first counts. What was measured of a variant before it
    failed there is withheld: the reason stands for it.
    """

    run: Run

    @cached_property
    def all(self) -> tuple[Row, ...]:
        """The rows, measured or not, each once."""
        found: dict[bytes, Row] = {}
        for row in self.run.rows:
            if not (isinstance(row, Measurement) and self._failed(row)):
                found.setdefault(_encoded(row), row)
        return tuple(found.values())

    @cached_property
    def measured(self) -> tuple[Measurement, ...]:
        """The rows with samples that have a median."""
        return tuple(row for row in self.all if isinstance(row, Measurement) and median(row) is not None)

    @cached_property
    def skipped(self) -> tuple[Skipped, ...]:
        """The rows with a reason."""
        return tuple(row for row in self.all if isinstance(row, Skipped))

    def name(self, row: Measurement) -> str:
        """The row in a word: ``forward[PermutedLinear-Linear(128, 128)-latency_ns-host]``.

        Where rows that differ read alike, such as options that differ in the seventh digit, a digest of the
        row's key follows; so a name never stands for two rows, and is the same in every run that has both.
        """
        name = _name(row)
        return f"{name} {_digest(_encoded(row))}" if self._names[name] > 1 else name

    def remarks(self, row: Measurement) -> list[str]:
        """What must be said of a row's samples: its own labels, and why the run is invalid, if it is."""
        invalid = self.run.end.invalid if self.run.end else ()
        return [*(f"INVALID: {one_line(reason)}" for reason in invalid), *map(one_line, row.labels)]

    def summary(self, chosen: Chosen) -> str:
        """What of the run was written, and what was left out and why, in words."""
        left = []
        failed = sum(row.status == "failed" for row in self.skipped)
        if self.skipped and not chosen.reasons:
            left.append(f"{len(self.skipped)} without a number ({failed} failed)")
        measured = sum(isinstance(row, Measurement) for row in self.all)
        empty = 0 if chosen.reasons else measured - len(self.measured)
        if empty:
            left.append(f"{empty} without usable samples")
        other = measured - empty - chosen.total if chosen.kind else 0
        if other:
            left.append(f"{other} that are no {chosen.kind}")
        if withheld := len({_encoded(row) for row in self.run.measurements if self._failed(row)}):
            left.append(f"{withheld} of variants that failed")
        return f"{chosen.parts}: {chosen.total}" + (f"; left out: {', '.join(left)}" if left else "")

    @cached_property
    def _names(self) -> Counter[str]:
        return Counter(map(_name, self.measured))

    def _failed(self, row: Measurement) -> bool:
        """Whether the variant failed where this was measured."""
        return any(
            other.phase in {None, row.phase} and other.method in {None, row.method}
            for other in self._failures.get((row.variant, row.case), ())
        )

    @cached_property
    def _failures(self) -> dict[tuple[Variant, Case], list[Skipped]]:
        found: dict[tuple[Variant, Case], list[Skipped]] = {}
        for row in self.run.skipped:
            if row.status == "failed":
                found.setdefault((row.variant, row.case), []).append(row)
        return found


def unit(metric: str) -> str:
    """The unit that a metric is stored in, by the suffix of its name: ``ns``, ``bytes``; none of a count."""
    return next((suffix.removeprefix("_") for suffix in QUANTITIES if metric.endswith(suffix)), "")


def parameters(row: Measurement) -> dict[str, str]:
    """What tells a row from the others, as text of one line each."""
    named = {
        "variant": row.variant.label(row.case.operator),
        "case": row.case.label,
        "phase": row.phase,
        "metric": row.metric,
        "method": row.method,
    }
    return {name: one_line(text) for name, text in named.items()}


def group(row: Measurement) -> str:
    """What is compared with each other: the variants of a case and phase, by one metric and method."""
    named = parameters(row)
    text = f"{named['case']}, {named['phase']}, {named['metric']} ({named['method']})"
    content = text.encode()
    if len(content) <= _LONGEST_BYTES:
        return text
    return f"{content[: _LONGEST_BYTES - _DIGITS - 2].decode(errors='ignore')} {_digest(content)}"


def _name(row: Measurement) -> str:
    named = parameters(row)
    phase = named.pop("phase")
    return f"{phase}[{'-'.join(named.values())}]"


def _encoded(row: Row) -> bytes:
    """A row's key, by which 1 and 1.0 differ, as they may in what an option means."""
    metric = row.metric if isinstance(row, Measurement) else None
    key: Key = (row.variant, row.case, row.phase, metric, row.method)
    return msgspec.json.encode(key)


def _digest(content: bytes) -> str:
    return f"#{hashlib.sha256(content).hexdigest()[:_DIGITS]}"
