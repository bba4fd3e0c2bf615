"""Cases whose times are unreliable, because other programs slowed base down: nothing is ranked on them."""

from collections.abc import Iterable, Iterator

from esbench.report.analysis.comparison import MIN_DISTURBED_RATIO, different_devices
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
    """Return case -> the reason, where base is far slower than its roofline bound or than in another run.

    ``history`` are stored runs; those of other devices, and unfinished or invalid ones, are left out.
    """
    fastest: dict[_Key, float] = {}
    for stored in history:
        if stored is not run and not any(reasons_unusable(stored)) and not different_devices(run, stored):
            for key, ns, _ in _times(stored):
                fastest[key] = min(ns, fastest.get(key, ns))
    reasons: dict[Case, str] = {}
    for key, ns, bound in _times(run):
        case, phase, _ = key
        took = f"{UNRELIABLE}: the {phase} of base took {format_value('latency_ns', ns)}"
        if bound and ns > FAR * bound and ns > FAR_NS:
            reasons.setdefault(case, f"{took}, {ns / bound:.0f} times its roofline bound")
        elif key in fastest and ns >= MIN_DISTURBED_RATIO * fastest[key]:
            reasons.setdefault(case, f"{took}, {ns / fastest[key]:.3g}x as long as in an earlier run")
    return reasons


def _times(run: Run) -> Iterator[tuple[_Key, float, float | None]]:
    """Yield case, phase and method, the time of base, and its roofline bound (None if unknown), in ns.

    Base is measured again in every co-resident group: its first row counts.
    """
    rows: dict[_Key, Measurement] = {}
    for row in run.measurements:
        if row.variant.mode == "base" and row.metric == "latency_ns":
            rows.setdefault((row.case, row.phase, row.method), row)
    for key, row in rows.items():
        if ns := median(row):
            yield key, ns, bound_ns(run, row.case.dtype, row.work)
