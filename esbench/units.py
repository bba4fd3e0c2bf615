"""How quantities are shown: the one table from a metric's name to its formatter.

Records hold numbers in the unit that the suffix of the metric's name says (``latency_ns``,
``peak_bytes``, ``power_w``); a name without a known suffix is a plain count. Nothing
else in the project formats a measured number.
"""

import math
from dataclasses import dataclass

ABSENT = "n/a"
"""What is shown for a number that is none: missing, NaN or infinite."""

_DIGITS = 3
_SMALLEST = 1e-6


@dataclass(frozen=True)
class Unit:
    """A unit to show a number in: its symbol, and how many stored units make one of it."""

    symbol: str
    size: float


@dataclass(frozen=True)
class Quantity:
    """How a metric is shown: in ``column`` in a table, in the fitting one of ``ladder`` in a sentence."""

    column: Unit
    ladder: tuple[Unit, ...]


_MILLISECOND = Unit("ms", 1e6)
_MEGABYTE = Unit("MB", 1e6)
_PERCENT = Unit("%", 1.0)
_MILLIJOULE = Unit("mJ", 1e-3)
_WATT = Unit("W", 1.0)
_MEGAHERTZ = Unit("MHz", 1e6)
_DEGREE = Unit("°C", 1.0)
_TERAFLOPS = Unit("TFLOP/s", 1e12)
_GIGABYTES = Unit("GB/s", 1e9)
_SHARE = Unit("%", 0.01)
_COUNT = Unit("", 1.0)
_TIMES = Unit("x", 1.0)

QUANTITIES: dict[str, Quantity] = {
    "_ns": Quantity(_MILLISECOND, (_MILLISECOND,)),
    "_bytes": Quantity(
        _MEGABYTE, (Unit("B", 1.0), Unit("kB", 1e3), _MEGABYTE, Unit("GB", 1e9), Unit("TB", 1e12))
    ),
    "_percent": Quantity(_PERCENT, (_PERCENT,)),
    "accuracy": Quantity(_SHARE, (_SHARE,)),
    "_count": Quantity(_COUNT, (_COUNT,)),
    "_j": Quantity(_MILLIJOULE, (Unit("µJ", 1e-6), _MILLIJOULE, Unit("J", 1.0), Unit("kJ", 1e3))),
    "_w": Quantity(_WATT, (Unit("mW", 1e-3), _WATT, Unit("kW", 1e3))),
    "_hz": Quantity(_MEGAHERTZ, (_MEGAHERTZ, Unit("GHz", 1e9))),
    "_c": Quantity(_DEGREE, (_DEGREE,)),
    "_over_largest": Quantity(_TIMES, (_TIMES,)),
    "flops_per_s": Quantity(_TERAFLOPS, (Unit("MFLOP/s", 1e6), Unit("GFLOP/s", 1e9), _TERAFLOPS)),
    "bytes_per_s": Quantity(_GIGABYTES, (Unit("MB/s", 1e6), _GIGABYTES, Unit("TB/s", 1e12))),
}
"""The suffix of a metric's name -> how it is shown."""


def quantity(metric: str) -> Quantity:
    """How a metric is shown, by the suffix of its name; a count where there is none."""
    known = (shown for suffix, shown in QUANTITIES.items() if metric.endswith(suffix))
    return next(known, Quantity(_COUNT, (_COUNT,)))


def format_number(value: float | None) -> str:
    """Three significant digits, and never fewer than there are before the point."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    if abs(value) < _SMALLEST:
        return f"{value:.{_DIGITS - 1}e}"
    exponent = int(f"{value:.{_DIGITS - 1}e}".partition("e")[2])
    return f"{value:.{max(0, _DIGITS - 1 - exponent)}f}"


def format_cell(metric: str, value: float | None) -> str:
    """A number for a table, in the unit of the metric's column, without the symbol."""
    if value is None or not math.isfinite(value):
        return ABSENT
    unit = quantity(metric).column
    if unit is _COUNT and float(value).is_integer():
        return f"{value:.0f}"
    return format_number(value / unit.size)


def format_value(metric: str, value: float | None) -> str:
    """A number for a sentence, in the largest unit that it reaches, with the symbol."""
    if value is None or not math.isfinite(value):
        return ABSENT
    ladder = quantity(metric).ladder
    unit = next((unit for unit in reversed(ladder) if unit.size <= abs(value)), ladder[0])
    if unit is _COUNT:
        return format_cell(metric, value)
    return f"{format_number(value / unit.size)} {unit.symbol}"


def format_multiplier(value: float | None) -> str:
    """A ratio: ``2.39x``."""
    number = format_number(value)
    return number if number == ABSENT else f"{number}x"
