"""Formatting of quantities: the one table that maps a metric's name to its formatter.

Records hold numbers in the unit given by the suffix of the metric's name (``latency_ns``,
``peak_bytes``, ``power_w``); a name without a known suffix is a plain count. Nothing
else in the project formats a measured number.

The interval of a number decides how many digits are printed, see :func:`last_digit_exponent`.
"""

import math
from dataclasses import dataclass

ABSENT = "n/a"
"""The text for a missing, NaN or infinite number."""

_DIGITS = 3
"""The significant digits of a number whose interval is unknown."""
_MAX_DIGITS = 6
"""The most significant digits, however narrow the interval."""
_MIN_POINT = 1e-6
"""Smaller numbers are printed in scientific notation."""
_ROUNDING = 1e-9
"""A half width below this share of the number comes from the rounding of floats."""
_COARSE = 2.0  # a half width that begins with 1 keeps a second digit: 0.14 instead of 0.1


@dataclass(frozen=True)
class Unit:
    """A unit for display: its symbol, and its size in stored units."""

    symbol: str
    size: float


@dataclass(frozen=True)
class Quantity:
    """The unit of a metric in tables, ``column``, and its units in sentences, ``ladder``, ascending.

    Without a ladder the column's unit is that of sentences, too.
    """

    column: Unit
    ladder: tuple[Unit, ...] = ()


_MEGABYTE = Unit("MB", 1e6)
_MILLIJOULE = Unit("mJ", 1e-3)
_WATT = Unit("W", 1.0)
_MEGAHERTZ = Unit("MHz", 1e6)
_TERAFLOPS = Unit("TFLOP/s", 1e12)
_GIGABYTES = Unit("GB/s", 1e9)
_COUNT = Unit("", 1.0)

QUANTITIES: dict[str, Quantity] = {
    "_ns": Quantity(Unit("ms", 1e6)),
    "_bytes": Quantity(
        _MEGABYTE, (Unit("B", 1.0), Unit("kB", 1e3), _MEGABYTE, Unit("GB", 1e9), Unit("TB", 1e12))
    ),
    "_percent": Quantity(Unit("%", 1.0)),
    "accuracy": Quantity(Unit("%", 0.01)),
    "_count": Quantity(_COUNT),
    "_j": Quantity(_MILLIJOULE, (Unit("µJ", 1e-6), _MILLIJOULE, Unit("J", 1.0), Unit("kJ", 1e3))),
    "_w": Quantity(_WATT, (Unit("mW", 1e-3), _WATT, Unit("kW", 1e3))),
    "_hz": Quantity(_MEGAHERTZ, (_MEGAHERTZ, Unit("GHz", 1e9))),
    "_c": Quantity(Unit("°C", 1.0)),
    "_over_largest": Quantity(Unit("x", 1.0)),
    "flops_per_s": Quantity(_TERAFLOPS, (Unit("MFLOP/s", 1e6), Unit("GFLOP/s", 1e9), _TERAFLOPS)),
    "bytes_per_s": Quantity(_GIGABYTES, (Unit("MB/s", 1e6), _GIGABYTES, Unit("TB/s", 1e12))),
}
"""Suffix of a metric's name -> its units."""


def quantity(metric: str) -> Quantity:
    """Return the units of a metric from the suffix of its name; those of a count without a known suffix."""
    matching = (units for suffix, units in QUANTITIES.items() if metric.endswith(suffix))
    return next(matching, Quantity(_COUNT))


def last_digit_exponent(value: float, half: float | None = None) -> int:
    """Return the power of ten of the last digit to print of a number: -2 for 1.23, 1 for 420.

    With an interval, the last digit is the leading digit of the half width, or the digit after it if the
    leading digit is 1. At least one and at most six significant digits are printed. Without an interval, or
    if it is as narrow as the rounding of floats, three significant digits are printed. All digits before the
    decimal point are printed in either case, unless the interval rounds them. ``half`` is half the width of
    the 95 % interval.
    """
    if not _is_known(value, half):
        return min(0, _leading_exponent(value, _DIGITS) - _DIGITS + 1) if value else 0
    exponent = _half_width_exponent(half or 0.0)
    if value == 0:
        return exponent
    leading = _leading_exponent(value)
    return max(min(exponent, leading), _lowest_exponent(leading))


def format_number(
    value: float | None, half: float | None = None, *, with_interval: bool = False, least_digits: int = 1
) -> str:
    """Return a number with the digits that its interval supports; without an interval, with three digits.

    Args:
        value: the number.
        half: half the width of its interval.
        with_interval: append the half width if it is known, ``1.23 ± 0.04``.
        least_digits: significant digits to print even if the interval supports fewer, without its half width.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    if with_interval and half is not None and _is_known(value, half):
        return _format_with_interval(value, half)
    if value == 0:
        return "0"
    exponent_of_least_digits = _leading_exponent(value, least_digits) - least_digits + 1
    return _round_to_exponent(value, min(last_digit_exponent(value, half), exponent_of_least_digits))


def _format_with_interval(value: float, half: float) -> str:
    """Return ``1.23 ± 0.04``, both with the digits that the half width supports."""
    exponent = _half_width_exponent(half)
    if value:
        exponent = max(exponent, _lowest_exponent(_leading_exponent(value)))
    # An interval narrower than the last digit is printed as one unit of that digit instead of 0.
    shown_half = max(half, 10.0**exponent)
    return f"{_round_to_exponent(value, exponent)} ± {_round_to_exponent(shown_half, exponent)}"


def _is_known(value: float, half: float | None) -> bool:
    """Return whether the half width is given, finite and wider than the rounding of floats."""
    return half is not None and math.isfinite(half) and half > _ROUNDING * abs(value)


def _half_width_exponent(half: float) -> int:
    """Return the power of ten of the last digit to print of a half width."""
    leading = _leading_exponent(half)
    return leading - 1 if round(half / 10.0**leading, 1) < _COARSE else leading


def _lowest_exponent(leading: int) -> int:
    """Return the power of ten of the sixth significant digit, or 0 if that digit is before the point."""
    return min(0, leading - _MAX_DIGITS + 1)


def _leading_exponent(value: float, digits: int = 1) -> int:
    """Return the power of ten of the leading digit after rounding to ``digits`` significant digits."""
    return int(f"{value:.{digits - 1}e}".partition("e")[2])


def _round_to_exponent(value: float, exponent: int) -> str:
    """Format the number rounded to a multiple of 10**exponent; below 1e-6 in scientific notation."""
    digits_after_leading = _leading_exponent(value) - exponent
    if value and abs(value) < _MIN_POINT and digits_after_leading >= 0:
        return f"{value:.{digits_after_leading}e}"
    return f"{value:.{-exponent}f}" if exponent <= 0 else f"{round(value, -exponent):.0f}"


def format_cell(
    metric: str,
    value: float | None,
    half: float | None = None,
    *,
    with_interval: bool = False,
    least_digits: int = 1,
) -> str:
    """Return a number for a table, in the unit of the metric's column: see :func:`format_number`."""
    if value is None or not math.isfinite(value):
        return ABSENT
    unit = quantity(metric).column
    if unit is _COUNT and not half and float(value).is_integer():
        return f"{value:.0f}"
    in_unit = None if half is None else half / unit.size
    return format_number(value / unit.size, in_unit, with_interval=with_interval, least_digits=least_digits)


def format_value(metric: str, value: float | None) -> str:
    """Return a number with its unit for a sentence, in the largest unit that it reaches."""
    if value is None or not math.isfinite(value):
        return ABSENT
    units = quantity(metric)
    ladder = units.ladder or (units.column,)
    unit = next((unit for unit in reversed(ladder) if unit.size <= abs(value)), ladder[0])
    if unit is _COUNT:
        return format_cell(metric, value)
    return f"{format_number(value / unit.size)} {unit.symbol}"


def format_multiplier(
    value: float | None, half: float | None = None, *, with_interval: bool = False, least_digits: int = 1
) -> str:
    """Return a ratio, ``2.39x`` or ``2.39 ± 0.12x``: see :func:`format_number`."""
    number = format_number(value, half, with_interval=with_interval, least_digits=least_digits)
    return number if number == ABSENT else f"{number}x"
