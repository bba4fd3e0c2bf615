"""Numbers as the page holds them: in the unit of their column, and with no more digits than they support."""

import json
import math
from collections.abc import Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from esbench.units import quantity

FEWEST, MOST, ALONE = 3, 6, 4
"""Significant digits: at least, at most, and of a number that has no interval."""

_INTERVAL_DIGITS = 2
"""Digits of half an interval that are kept: rounding then moves a number by 5 % of that at most."""

Cell = float | int | None


def rounded(value: float | None, *ends: float | None) -> list[Cell]:
    """A number and the ends of its interval, with the digits that the interval supports.

    Two digits of half its width, and so of the number as many as reach there, between :data:`FEWEST` and
    :data:`MOST` significant ones; :data:`ALONE` without an interval. What is no finite number is ``None``.
    """
    numbers = [one if one is not None and math.isfinite(one) else None for one in (value, *ends)]
    middle = numbers[0]
    known = [one for one in numbers[1:] if one is not None]
    if middle is None:
        return [one and _short(one, ALONE) for one in numbers]
    half = (max(known) - min(known)) / 2 if len(known) == len(ends) and known else None
    digits = ALONE
    if half is not None and half > 0 and middle:
        digits = min(max(_exponent(middle) - _exponent(half) + _INTERVAL_DIGITS, FEWEST), MOST)
    elif half == 0:
        digits = MOST
    places = digits - 1 - _exponent(middle or half or 1.0)
    return [None if one is None else _plain(round(one, places)) for one in numbers]


def in_column(metric: str, value: float | None) -> float | None:
    """A number in the unit of its metric's column."""
    return None if value is None else value / quantity(metric).column.size


def exactly(value: float | None) -> Cell:
    """A count without rounding, another number with :data:`MOST` digits."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else _short(value, MOST)


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
