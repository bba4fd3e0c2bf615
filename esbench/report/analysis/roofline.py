"""Roofline bounds: the least time that a call can take on its device.

The bound of a row is the time that the minimum work of its variant takes at the device peaks of the run: the
longer of its arithmetic at the rate of a matrix product in the case's dtype, and its traffic at the rate of a
copy.
Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

from typing import Literal

from esbench.schema import Case, Measurement, Run, Variant, Work
from esbench.stats import median, middle_60_percent

CACHE_BYTES = 2**30
"""More bytes than a cache holds."""
_WHOLE = 100.0
_EXCUSED = 2.0
"""How far beyond the peak others may be, relative to base, if base is beyond it."""
DISTURBED = "the peak was measured under a disturbance, so bounds computed from it are too high"


def rate(run: Run, kind: Literal["copy", "matmul"], dtype: str) -> float | None:
    """Return a device peak in bytes or flops per ns: amount over the 20th percentile of its samples.

    A disturbance makes a sample slower, and the very fastest may be a timer error: hence the 20th percentile.
    A matrix product gives the peak of its dtype only (TF32 is ``tfloat32``), a copy that of all dtypes. None
    if the run has no such peak.
    """
    rates = (
        peak.amount / spread.p20
        for peak in run.device_peaks
        if peak.kind == kind and (kind == "copy" or peak.dtype == dtype)
        if (spread := middle_60_percent(peak.samples)) and spread.p20 > 0
    )
    return max(rates, default=None)


def bound_ns(run: Run, dtype: str, work: Work | None) -> float | None:
    """Return the roofline bound of some work in ns, None without work or without the peak it needs."""
    return max(_min_ns(run, dtype, work).values(), default=None)


def beats_arithmetic(run: Run, row: Measurement) -> bool:
    """Return whether a call did arithmetic faster than a matrix product, which no cache explains."""
    least, ns = _min_ns(run, row.case.dtype, row.work).get("matmul"), median(row)
    return bool(least and ns and least > ns)


def impossible(run: Run) -> dict[tuple[Variant, Case], str]:
    """Return each variant and case whose numbers contradict each other -> the reason.

    A peak cannot be below the bytes of the output. Arithmetic above the device peak is a contradiction unless
    base exceeds the peak as far, which was then measured under a disturbance; traffic is one above twice the
    rate of a copy if the bytes fit in no cache: reading alone is faster than copying.
    """
    timed = [row for row in run.measurements if row.metric == "latency_ns" and row.work]
    peaks = {
        (row.variant, row.case, row.phase): median(row)
        for row in run.measurements
        if row.metric == "peak_bytes"
    }
    fast = [row for row in timed if _percent(run, row) > _WHOLE]
    excused: dict[Case, float] = {}
    for row in fast:
        if row.variant.mode == "base" and beats_arithmetic(run, row):
            excused[row.case] = max(excused.get(row.case, 0.0), _EXCUSED * _percent(run, row))
    found: dict[tuple[Variant, Case], str] = {}
    for row in fast:
        by_arithmetic = beats_arithmetic(run, row)
        is_large = row.work is not None and row.work.moved_bytes > CACHE_BYTES
        is_too_fast = is_large and _percent(run, row) > 2 * _WHOLE
        if _percent(run, row) > excused.get(row.case, 0.0) if by_arithmetic else is_too_fast:
            kind = "arithmetic" if by_arithmetic else "traffic"
            why = f"{row.phase} is at {_percent(run, row):.0f} % of the roofline bound, by {kind}"
            found.setdefault((row.variant, row.case), why)
    for row in timed:
        peak = peaks.get((row.variant, row.case, row.phase))
        if row.work and peak is not None and peak < row.work.output_bytes:
            why = f"{row.phase} has a peak of {peak:.0f} bytes and an output of {row.work.output_bytes:.0f}"
            found.setdefault((row.variant, row.case), why)
    return found


def _percent(run: Run, row: Measurement) -> float:
    bound, ns = bound_ns(run, row.case.dtype, row.work), median(row)
    return 100 * bound / ns if bound and ns else 0.0


def _min_ns(run: Run, dtype: str, work: Work | None) -> dict[str, float]:
    """Return the least times in ns of arithmetic and traffic, empty if a peak that one needs is unknown."""
    amounts = {"matmul": work.flops, "copy": work.moved_bytes} if work else {}
    rates = {"matmul": rate(run, "matmul", dtype), "copy": rate(run, "copy", dtype)}
    times = {kind: (amount, rates[kind]) for kind, amount in amounts.items() if amount}
    known = {kind: amount / per_ns for kind, (amount, per_ns) in times.items() if per_ns}
    return known if len(known) == len(times) else {}
