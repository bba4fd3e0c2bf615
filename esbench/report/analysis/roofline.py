"""How near a call comes to what its device can do at most: the roofline view.

A row's floor is the time that the least work of its variant takes at the ceilings of the run: the longer of
its arithmetic at the rate of a matrix product in the case's type, and its traffic at the rate of a copy.
Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

from typing import Literal

from esbench.schema import Measurement, Run, Work
from esbench.stats import median, quantiles

DISTURBED = "that ceiling was measured while something disturbed it, and floors by it are too high"


def rate(run: Run, kind: Literal["copy", "matmul"], dtype: str) -> float | None:
    """A ceiling in bytes or flops per ns: its amount over the p20 of its samples, the best of several.

    What disturbs a ceiling only makes it slower, so the faster samples count; the fastest alone may be a slip
    of the timer. A matrix product counts for its own type only, TF32 (``tfloat32``) apart from float32; a
    copy for all. ``None`` where the run holds no such ceiling.
    """
    found = (
        ceiling.amount / spread.p20
        for ceiling in run.device_peaks
        if ceiling.kind == kind and (kind == "copy" or ceiling.dtype == dtype)
        if (spread := quantiles(ceiling.samples)) and spread.p20 > 0
    )
    return max(found, default=None)


def floor_ns(run: Run, dtype: str, work: Work | None) -> float | None:
    """The least time of some work in ns, ``None`` without work or without the ceiling it needs."""
    return max(_least_ns(run, dtype, work).values(), default=None)


def beats_arithmetic(run: Run, row: Measurement) -> bool:
    """Whether a call did arithmetic faster than its ceiling, the matrix product: no cache explains that."""
    least, ns = _least_ns(run, row.case.dtype, row.work).get("matmul"), median(row)
    return bool(least and ns and least > ns)


def _least_ns(run: Run, dtype: str, work: Work | None) -> dict[str, float]:
    """The least times of arithmetic and of traffic, nothing where a ceiling that one needs is missing."""
    amounts = {"matmul": work.flops, "copy": work.moved_bytes} if work else {}
    rates = {"matmul": rate(run, "matmul", dtype), "copy": rate(run, "copy", dtype)}
    times = {kind: (amount, rates[kind]) for kind, amount in amounts.items() if amount}
    known = {kind: amount / per_ns for kind, (amount, per_ns) in times.items() if per_ns}
    return known if len(known) == len(times) else {}
