"""Roofline bounds: the least time that a call can take on its device.

The bound of a row is the time that the minimum work of its variant takes at the device peaks of the run: the
longer of its arithmetic at the rate of a matrix product in the case's dtype, and its traffic at the rate of a
copy.
Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

import math
from functools import lru_cache
from typing import Literal

from esbench.schema import Case, DevicePeak, Measurement, Run, Variant, Work
from esbench.stats import median, middle_60_percent

CACHE_BYTES = 2**30
"""More bytes than a cache holds."""
_ALLOWED_OVER_BASE = 2.0
"""If base exceeds the peak of arithmetic, variants may be up to this many times as far above it as base."""
_MOST_OVER_PEAK = 1.25
"""A sample of a peak that is further above it is an error of the timer."""
DISTURBED = "the peak was measured under a disturbance, so bounds computed from it are too high"


_PeakKind = Literal["copy", "matmul"]


def rate(run: Run, kind: _PeakKind, dtype: str) -> float | None:
    """Return a device peak in bytes or flops per ns: amount over the 20th percentile of its samples.

    A disturbance makes a sample slower, and the very fastest may be a timer error: hence the 20th percentile.
    A matrix product gives the peak of its dtype only (TF32 is ``tfloat32``), a copy that of all dtypes. None
    if the run has no such peak.
    """
    rates = (
        _rate(peak)
        for peak in run.device_peaks
        if peak.kind == kind and (kind == "copy" or peak.dtype == dtype)
    )
    return max((value for value in rates if value is not None), default=None)


@lru_cache(2**8)  # a report needs the few peaks of a run for each of its rows
def _rate(peak: DevicePeak) -> float | None:
    """Return the amount of a peak over the 20th percentile of its samples, None without a positive one."""
    spread = middle_60_percent(peak.samples)
    return peak.amount / spread.p20 if spread and spread.p20 > 0 else None


def _fastest_over_peak(run: Run, dtype: str) -> float:
    """Return the rate of the fastest matrix product of a dtype as a multiple of the peak, at most 1.25."""
    peaks = [peak for peak in run.device_peaks if peak.kind == "matmul" and peak.dtype == dtype]
    fastest = max(peak.amount / (min(peak.samples) or 1.0) for peak in peaks if _rate(peak))
    return min(fastest / (rate(run, "matmul", dtype) or math.inf), _MOST_OVER_PEAK)


def bound_ns(run: Run, dtype: str, work: Work | None) -> float | None:
    """Return the roofline bound of some work in ns, None without work or without the peak it needs."""
    return max(_min_ns(run, dtype, work).values(), default=None)


def exceeds_matmul_peak(run: Run, row: Measurement) -> bool:
    """Return whether the arithmetic of a call is above the peak of the matrix product.

    Traffic above its peak may come from a cache; for arithmetic there is no such explanation.
    """
    least_ns, ns = _min_ns(run, row.case.dtype, row.work).get("matmul"), median(row)
    return bool(least_ns and ns and least_ns > ns)


def percent_of_bound(run: Run, row: Measurement) -> float | None:
    """Return the roofline bound of a row in percent of its time, None without a bound or a time."""
    bound, ns = bound_ns(run, row.case.dtype, row.work), median(row)
    return 100 * bound / ns if bound and ns else None


def impossible_results(run: Run) -> dict[tuple[Variant, Case], str]:
    """Return the reason for each variant and case with an impossible result.

    A result is impossible if

    - its arithmetic exceeds the device peak, and the fastest sample of that peak. If that of base does too,
      the measured peak is too low, and the limit follows from base;
    - its traffic exceeds a cache, and twice the rate of a copy: a call that only reads may be twice as fast
      as a copy, which also writes;
    - its peak memory is below the bytes of its output.
    """
    timed = [row for row in run.measurements if row.metric == "latency_ns" and row.work]
    above_bound = [
        (row, percent)
        for row in timed
        if (percent := percent_of_bound(run, row)) and percent > 100  # noqa: PLR2004  # percent
    ]
    arithmetic_limits: dict[Case, float] = {}
    for row, percent in above_bound:
        if row.variant.mode == "base" and exceeds_matmul_peak(run, row):
            limit = _ALLOWED_OVER_BASE * percent
            arithmetic_limits[row.case] = max(arithmetic_limits.get(row.case, 0.0), limit)
    reasons: dict[tuple[Variant, Case], str] = {}
    for row, percent in above_bound:
        if exceeds_matmul_peak(run, row):
            kind = "arithmetic"
            limit = arithmetic_limits.get(row.case) or 100 * _fastest_over_peak(run, row.case.dtype)
        else:
            fits_in_cache = row.work is None or row.work.moved_bytes <= CACHE_BYTES
            kind, limit = "traffic", math.inf if fits_in_cache else 200.0
        if percent > limit:
            reason = f"{row.phase} reaches {percent:.0f} % of the roofline bound ({kind})"
            reasons.setdefault((row.variant, row.case), reason)
    peaks = {
        (row.variant, row.case, row.phase): median(row)
        for row in run.measurements
        if row.metric == "peak_bytes"
    }
    for row in timed:
        peak = peaks.get((row.variant, row.case, row.phase))
        if row.work and peak is not None and peak < row.work.output_bytes:
            text = f"{row.phase} has a peak of {peak:.0f} bytes and an output of {row.work.output_bytes:.0f}"
            reasons.setdefault((row.variant, row.case), text)
    return reasons


def _min_ns(run: Run, dtype: str, work: Work | None) -> dict[_PeakKind, float]:
    """Return the least time in ns of the arithmetic and of the traffic of some work.

    Work without arithmetic, or without traffic, has no such entry. If a peak is missing, there is no entry
    at all, because the longer of the two times is unknown.
    """
    if work is None:
        return {}
    amounts: dict[_PeakKind, float] = {"matmul": work.flops, "copy": work.moved_bytes}
    times: dict[_PeakKind, float] = {}
    for kind, amount in amounts.items():
        if amount:
            per_ns = rate(run, kind, dtype)
            if not per_ns:
                return {}
            times[kind] = amount / per_ns
    return times
