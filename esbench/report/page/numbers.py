"""Numbers as the page holds them: in the unit of their column, and with no more digits than they support."""

import json
import math
from collections.abc import Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from esbench.units import format_number, quantity

FEWEST, MOST, ALONE = 3, 6, 4
"""Significant digits: at least, at most, and without an interval; more where a table's text needs them."""
_ALL = 17
"""As many as tell any two numbers apart."""

_INTERVAL_DIGITS = 2
"""Digits of half an interval that are kept: rounding then moves a number by 5 % of that at most."""

Cell = float | int | None


def rounded(value: float | None, *ends: float | None) -> list[Cell]:
    """A number and the ends of its interval, with the digits that the interval supports.

    Two digits of half its width, and so of the number as many as reach there, between :data:`FEWEST` and
    :data:`MOST` significant ones; :data:`ALONE` without an interval. So many more as it takes until the page,
    which knows nothing else, writes the number as the tables do. What is no finite number is ``None``.
    """
    numbers = [one if one is not None and math.isfinite(one) else None for one in (value, *ends)]
    middle = numbers[0]
    known = [one for one in numbers[1:] if one is not None]
    if middle is None:
        return [one and _short(one, ALONE) for one in numbers]
    half = _half(middle, known) if len(known) == len(ends) else None
    digits = ALONE
    if half is not None and half > 0 and middle:
        digits = min(max(_exponent(middle) - _exponent(half) + _INTERVAL_DIGITS, FEWEST), MOST)
    elif half == 0:
        digits = MOST
    text = format_number(middle, half)
    for more in range(digits, _ALL):
        places = more - 1 - _exponent(middle or half or 1.0)
        short = [None if one is None else round(one, places) for one in numbers]
        if _text(short) == text:
            numbers = short
            break
    return [None if one is None else _plain(one) for one in numbers]


def _text(numbers: Sequence[float | None]) -> str:
    """How the page writes a number that has these ends."""
    middle, *ends = numbers
    known = [one for one in ends if one is not None]
    return format_number(middle, _half(middle or 0.0, known) if len(known) == len(ends) else None)


def _half(middle: float, ends: Sequence[float]) -> float | None:
    """How far the farther end of an interval is from the number."""
    return max(abs(end - middle) for end in ends) if ends else None


def in_column(metric: str, value: float | None) -> float | None:
    """A number in the unit of its metric's column."""
    return None if value is None else value / quantity(metric).column.size


def exactly(value: float | None) -> Cell:
    """A count without rounding, another number with :data:`MOST` digits."""
    if value is None or not math.isfinite(value):
        return None
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    shorter = (_short(value, digits) for digits in range(MOST, _ALL))
    return next((one for one in shorter if format_number(one) == format_number(value)), value)


def dumped(value: object) -> str:
    """A value as JSON that may stand inside of a script: no tag and no line end of JavaScript is in it.

    Raises:
        ValueError: it holds a number that is none of JSON.

    """

    def plain(value: Any, **options: Any) -> str:  # noqa: ANN401  whatever JSON can hold
        return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False, **options)

    return str(htmlsafe_json_dumps(value, dumps=plain))


def columns(rows: Sequence[dict[str, Cell | str]]) -> dict[str, list[Cell | str]]:
    """Rows turned into columns; one that is empty in every row is left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name) for row in rows] for name in names}
    return {name: cells for name, cells in found.items() if any(cell is not None for cell in cells)}


def _short(value: float, digits: int) -> Cell:
    return _plain(round(value, digits - 1 - _exponent(value))) if value else 0


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def _plain(value: float) -> Cell:
    """A number as JSON writes it shortest: a whole one without its point."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
