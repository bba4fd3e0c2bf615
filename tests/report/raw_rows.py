"""A run's file read by nothing but JSON, and its figures worked out by numpy alone: a second opinion."""

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from scipy.stats import binom, sem, t

from esbench.schema import Case

Raw = dict[str, Any]

_SIZES = {"ns": 1e6, "bytes": 1e6}
"""How many stored units are one of the page's."""


@dataclass(frozen=True)
class RawRows:
    """The measurements of a file."""

    rows: Sequence[Raw]

    @classmethod
    def of(cls, path: Path) -> Self:
        """Those of a run's file."""
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        rows = [json.loads(line) for line in text.splitlines()]
        return cls([row for row in rows if row["record"] == "measurement"])

    def figure(self, quantity: Mapping[str, str], case: str, name: str, column: str) -> float | None:
        """A figure of the page from the samples of the rows that its place names; None where others count.

        Args:
            quantity: its phase, metric and method.
            case: the case's label.
            name: the variant's name.
            column: value, low or high; speed or time, a multiplier; n_eff.

        """
        metric = quantity["metric"]
        if metric == "n_eff_per_ms":
            return self._rate(case, name, quantity["method"])[column == "n_eff"]
        place = (case, quantity["phase"], metric, quantity["method"])
        row = self._row(name, place)
        if quantity["phase"] == "quality":
            values = np.concatenate(row["samples"])
            return float(1 / np.mean(1 / values) if metric == "effective_members" else np.mean(values))
        if column in {"speed", "time"}:
            return self._multiplier(row, place, column)
        size = _SIZES.get(metric.rpartition("_")[2], 1.0)
        if column == "value":
            return middle(row) / size
        found = ends(rounds(row))
        return found[column == "high"] / size if found else None

    def _row(self, name: str, place: tuple[str, ...], company: int | None = None) -> Raw:
        """The row of a variant at (case, phase, metric, method), of a company where it has one there."""
        found = [
            row
            for row in self.rows
            if (row["phase"], row["metric"], row["method"]) == place[1:]
            and name_of(row) == name
            and msgspec.convert(row["case"], Case).label == place[0]
        ]
        beside = [row for row in found if row.get("group", 0) == company]
        return next(iter([*beside, *found]), {})

    def _multiplier(self, row: Raw, place: tuple[str, ...], column: str) -> float | None:
        """Naive / this or this / base, inside rounds; a baseline without the phase is stood in for."""
        other = self._row({"speed": "Naive", "time": "Base"}[column], place, row.get("group", 0))
        if not other:
            return None
        pair = (other, row) if column == "speed" else (row, other)
        ratios = [a / b for a, b in zip(*map(rounds, pair), strict=False)]
        return float(np.median(ratios)) if len(ratios) > 1 else middle(pair[0]) / middle(pair[1])

    def _rate(self, case: str, name: str, method: str) -> tuple[float, float]:
        """n_eff per ms and n_eff: by the closed form of kappa where the fit allows it, or the replicates."""
        ms = middle(self._row(name, (case, "step", "latency_ns", method))) / 1e6
        closed, fitted, unseen = (
            self._row(name, (case, "quality", "kappa", how))
            for how in ("closed form", "linear fitness", "unseen")
        )
        worth = self._row(name, (case, "quality", "effective_members", "linear fitness"))
        found = float(1 / np.mean(1 / np.concatenate(worth["samples"])))
        if closed:
            one = worth["case"]
            size = one["out_channels"] * one["in_channels"] * math.prod(one["kernel_size"])
            kappa, estimates = closed["samples"][0][0], np.concatenate(fitted["samples"])
            off = float(np.mean(estimates)) - kappa
            # Student's interval of the mean, and below the form what unseen pairs of members would add.
            allowed = max(0.05 * abs(kappa), 0.02) + float(sem(estimates) * t.ppf(0.975, len(estimates) - 1))
            allowed += (unseen["samples"][0][0] if unseen else math.inf) if off < 0 else 0.0
            if abs(off) <= allowed:
                found = one["members"] / (1 + kappa * one["members"] / size)
        return found / ms, found


def name_of(row: Raw) -> str:
    """The name of a row's variant."""
    options = [f"{key}={f'{v:g}' if isinstance(v, float) else v}" for key, v in row["variant"]["options"]]
    return str(row["variant"]["scheme"]) + (f"({', '.join(options)})" if options else "")


def middle(row: Raw) -> float:
    """The median of the rounds' medians."""
    return float(np.median(rounds(row)))


def rounds(row: Raw) -> list[float]:
    """The median of each round."""
    return [float(np.median(visit)) for visit in row["samples"]]


def ends(values: Iterable[float]) -> tuple[float, float] | None:
    """The order-statistic interval of a median, by scipy's binomial."""
    ordered = sorted(values)
    count = len(ordered)
    ranks = [k for k in range(1, count // 2 + 1) if 2 * binom.cdf(k - 1, count, 0.5) <= 0.05]
    return (ordered[ranks[-1] - 1], ordered[-ranks[-1]]) if ranks else None
