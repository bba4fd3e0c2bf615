"""The phase that is not timed: what a variant says of its quality, as rows."""

import math
from collections.abc import Callable

from esbench.registry import Figure, UnavailableError, Workload
from esbench.schema import QUALITY, Measurement, Row, Skipped


def rows(workload: Workload, measurement: Callable[..., Measurement]) -> list[Row]:
    """Ask a workload for its quality, and write down each figure, or the reason that there is none.

    Raises:
        UnavailableError: the variant has no quality, and why.

    """
    ask = getattr(workload, "quality", None)
    if ask is None:
        message = "it says nothing of its quality: its workload has no method quality"
        raise UnavailableError(message)
    workload.enter(QUALITY)
    return [_row(figure, measurement) for figure in ask()]


def _row(figure: Figure, measurement: Callable[..., Measurement]) -> Row:
    row = measurement(metric=figure.metric, method=figure.method, samples=(figure.samples,))
    reason = figure.reason or _fault(figure.samples)
    if not reason:
        return row
    return Skipped(
        variant=row.variant,
        case=row.case,
        phase=QUALITY,
        status="unavailable",
        reason=reason,
        method=figure.method,
    )


def _fault(samples: tuple[float, ...]) -> str:
    """Say what is wrong with numbers that a file could not hold, or nothing."""
    bad = sum(not math.isfinite(sample) for sample in samples)
    return f"{bad} of {len(samples)} numbers are not finite" if bad or not samples else ""
