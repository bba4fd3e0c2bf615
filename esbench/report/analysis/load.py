"""Load: cases on which other programs slowed base down, so that their times rank nothing."""

from collections.abc import Iterable, Iterator

from esbench.report.analysis.comparison import LOADED, different_devices
from esbench.report.analysis.roofline import bound_ns
from esbench.report.analysis.run_selection import reasons_unusable
from esbench.schema import Case, Measurement, Phase, Run
from esbench.stats import median
from esbench.units import format_value

UNRELIABLE = "unreliable: load"
FAR, FAR_NS = 250.0, 5e6
"""Base is far from its roofline if it takes more than this many times its bound, and more than these
nanoseconds: a call of a tiny layer takes some microseconds whatever its work."""

_Key = tuple[Case, Phase, str]


def reasons_unreliable(run: Run, history: Iterable[Run] = ()) -> dict[Case, str]:
    """Return the cases on which base is far from its roofline or from other runs -> the reason.

    Args:
        run: the run.
        history: stored runs; those of other devices, and unfinished or invalid ones, are left out.
    """
    fastest: dict[_Key, float] = {}
    for other in history:
        if other is not run and not any(reasons_unusable(other)) and not different_devices(run, other):
            for key, ns, _ in _times(other):
                fastest[key] = min(ns, fastest.get(key, ns))
    found: dict[Case, str] = {}
    for key, ns, bound in _times(run):
        case, phase, _ = key
        took = f"{UNRELIABLE}: the {phase} of base took {format_value('latency_ns', ns)}"
        if bound and ns > FAR * bound and ns > FAR_NS:
            found.setdefault(case, f"{took}, {ns / bound:.0f} times its roofline bound")
        elif key in fastest and ns >= LOADED * fastest[key]:
            found.setdefault(case, f"{took}, {ns / fastest[key]:.3g}x as long as in an earlier run")
    return found


def _times(run: Run) -> Iterator[tuple[_Key, float, float | None]]:
    """Yield each time of base in ns with its roofline bound; base is in every group, and the first counts."""
    rows: dict[_Key, Measurement] = {}
    for row in run.measurements:
        if row.variant.mode == "base" and row.metric == "latency_ns":
            rows.setdefault((row.case, row.phase, row.method), row)
    for key, row in rows.items():
        if ns := median(row):
            yield key, ns, bound_ns(run, row.case.dtype, row.work)
