"""Formatting of quantities: the one table that maps a metric's name to its formatter.

Records hold numbers in the unit given by the suffix of the metric's name (``latency_ns``,
``peak_bytes``, ``power_w``); a name without a known suffix is a plain count. Nothing
else in the project formats a measured number.

The number of digits follows from the number's interval by one rule, :func:`last_place`: digits that the
interval does not determine are not printed.
"""

import math
from dataclasses import dataclass

ABSENT = "n/a"
"""What is shown for a missing, NaN or infinite number."""

_DIGITS = 3
"""The significant digits of a number whose interval is unknown."""
_MAX_DIGITS = 6
"""The most significant digits, however narrow the interval."""
_SMALLEST = 1e-6
_ROUNDING = 1e-9
"""A half width below this share of the number is rounding, not an interval."""
_COARSE = 2.0  # a half width that begins with 1 keeps a second digit: 0.14 is not shown as 0.1


@dataclass(frozen=True)
class Unit:
    """A unit for display: its symbol, and its size in stored units."""

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
    """Return how a metric is shown, by the suffix of its name; a count if it has none."""
    known = (shown for suffix, shown in QUANTITIES.items() if metric.endswith(suffix))
    return next(known, Quantity(_COUNT, (_COUNT,)))


def last_place(value: float, half: float | None = None) -> int:
    """Return the power of ten of the last digit that is shown of a number.

    Where half the width of its interval is known, and more than the rounding of floats, that is the place of
    the half width's leading digit, of its second one where the first is a 1; but the number keeps its own
    leading digit, and after six of them no more follow after the point. Where it is not, three significant
    digits are shown, and never fewer than there are before the point.

    Args:
        value: finite.
        half: half the width of the 95 % interval, in the unit of the value.

    """
    if not _known(value, half):
        return min(0, _exponent(value, _DIGITS) - _DIGITS + 1) if value else 0
    place = _place_of(half or 0.0)
    if value == 0:
        return place
    leading = _exponent(value, 1)
    return max(min(place, leading), _least(leading))


def format_number(value: float | None, half: float | None = None, *, with_interval: bool = False) -> str:
    """Return a number with the digits that its interval supports, or three without an interval.

    Args:
        value: the number.
        half: half the width of its interval.
        with_interval: whether the half width is shown as well, ``1.23 ± 0.04``, if it is known.

    """
    if value is None or not math.isfinite(value):
        return ABSENT
    if not with_interval or half is None or not _known(value, half):
        return "0" if value == 0 else _fixed(value, last_place(value, half))
    place = max(_place_of(half), _least(_exponent(value, 1))) if value else _place_of(half)
    # An interval that is narrower than the last digit is shown as one unit of it, not as 0.
    return f"{_fixed(value, place)} ± {_fixed(max(half, 10.0**place), place)}"


def _known(value: float, half: float | None) -> bool:
    """Return whether a half width is more than rounding."""
    return half is not None and math.isfinite(half) and half > _ROUNDING * abs(value)


def _place_of(half: float) -> int:
    """Return the place down to which a half width is shown."""
    leading = _exponent(half, 1)
    return leading - 1 if round(half / 10.0**leading, 1) < _COARSE else leading


def _least(leading: int) -> int:
    """Return the lowest place shown of a number whose leading digit is at this place."""
    return min(0, leading - _MAX_DIGITS + 1)


def _exponent(value: float, digits: int) -> int:
    """Return the power of ten of the leading digit, once the number is rounded to the given digits."""
    return int(f"{value:.{digits - 1}e}".partition("e")[2])


def _fixed(value: float, place: int) -> str:
    """Return the number down to a place, which may be before the point."""
    if value and abs(value) < _SMALLEST and place <= _exponent(value, 1):
        return f"{value:.{_exponent(value, 1) - place}e}"
    return f"{value:.{-place}f}" if place <= 0 else f"{round(value, -place):.0f}"


def format_cell(
    metric: str, value: float | None, half: float | None = None, *, with_interval: bool = False
) -> str:
    """Return a number for a table, in the unit of the metric's column: see :func:`format_number`."""
    if value is None or not math.isfinite(value):
        return ABSENT
    unit = quantity(metric).column
    if unit is _COUNT and not half and float(value).is_integer():
        return f"{value:.0f}"
    in_unit = None if half is None else half / unit.size
    return format_number(value / unit.size, in_unit, with_interval=with_interval)


def format_value(metric: str, value: float | None) -> str:
    """Return a number for a sentence, in the largest unit that it reaches, with the symbol."""
    if value is None or not math.isfinite(value):
        return ABSENT
    ladder = quantity(metric).ladder
    unit = next((unit for unit in reversed(ladder) if unit.size <= abs(value)), ladder[0])
    if unit is _COUNT:
        return format_cell(metric, value)
    return f"{format_number(value / unit.size)} {unit.symbol}"


def format_multiplier(value: float | None, half: float | None = None, *, with_interval: bool = False) -> str:
    """Return a ratio, ``2.39x`` or ``2.39 ± 0.12x``: see :func:`format_number`."""
    number = format_number(value, half, with_interval=with_interval)
    return number if number == ABSENT else f"{number}x"
