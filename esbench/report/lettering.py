"""Words in pictures: only what the font can print, and no wider than there is room for."""

from collections.abc import Sequence
from functools import cache

from matplotlib import ft2font, textpath
from matplotlib.font_manager import FontProperties, findfont, get_font

from esbench.report.words import one_line

FAMILY = "DejaVu Sans"
"""The font that matplotlib brings along, so that every machine has it."""

_UNKNOWN = "\ufffd"
_POINTS = 72
_HEAD = 0.55
"""Of the characters that are kept of a long name: its options, which tell it from others, are at its end."""


@cache
def _known() -> frozenset[int]:
    font: ft2font.FT2Font = get_font(findfont(FontProperties(family=FAMILY)))
    return frozenset(font.get_charmap())


def printable(text: str) -> str:
    """A text as one line, with a mark in place of each character that the font has not: an emoji, say."""
    return "".join(one if ord(one) in _known() else _UNKNOWN for one in one_line(text))


@cache
def inches(text: str, points: float) -> float:
    """How wide a line of printable text is, in a font of this size."""
    font = FontProperties(family=FAMILY, size=points)
    width, _, _ = textpath.TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width) / _POINTS


def fit(text: str, room: float, points: float) -> str:
    """A text in one line of this many inches: where it is longer, its middle gives way to an ellipsis."""
    line = printable(text)
    if inches(line, points) <= room:
        return line
    few, many = 0, len(line)
    while many - few > 1:
        kept = (few + many) // 2
        few, many = (kept, many) if inches(_without_middle(line, kept), points) <= room else (few, kept)
    return _without_middle(line, few)


def fit_all(texts: Sequence[str], room: float, points: float) -> list[str]:
    """Texts in a line each; those that differ in nothing but what was cut out get numbers, and stay apart."""
    cut = [fit(text, room, points) for text in texts]
    numbers: dict[str, dict[str, int]] = {}
    for text, short in zip(texts, cut, strict=True):
        alike = numbers.setdefault(short, {})
        alike.setdefault(text, len(alike) + 1)
    found = []
    for text, short in zip(texts, cut, strict=True):
        mark = f" [{numbers[short][text]}]" if len(numbers[short]) > 1 else ""
        found.append(f"{fit(text, room - inches(mark, points), points)}{mark}" if mark else short)
    return found


def wrap(text: str, room: float, points: float, most: int = 99) -> list[str]:
    """A text in lines of this many inches, at most so many: an ellipsis says that more is left."""
    words = printable(text).split(" ")
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]} {word}" if lines else word
        if inches(longer, points) <= room and lines:
            lines[-1] = longer
        elif len(lines) == most:
            lines[-1] = _ended(lines[-1], room, points)
            break
        else:
            lines.append(fit(word, room, points))
    return lines


def _ended(line: str, room: float, points: float) -> str:
    while line and inches(f"{line} …", points) > room:
        line = line[:-1].rstrip()
    return f"{line} …"


def _without_middle(line: str, kept: int) -> str:
    head = -int(-kept * _HEAD // 1)
    tail = kept - head
    return f"{line[:head].rstrip()}…{line[len(line) - tail :].lstrip() if tail else ''}"
