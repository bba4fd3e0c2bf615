"""Pages of prose and tables: Markdown that knows its tables, so that any format can be written of it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from tabulate import tabulate

from esbench.report.goals import BAD
from esbench.report.tables.table import Block, Cell, Section, Table
from esbench.report.text import escape

_WORDS = {
    "goal",
    "found",
    "verdict",
    "kernel",
    "timer",
    "within 1 %",
    "wait",
    "activity",
    "measuring or building",
    "variant",
    "unbiased",
    "what",
    "over cells",
    "cell",
    "control",
    "rule",
    "case",
    "phase",
}
"""Columns that hold words."""
_HEADING = re.compile(r"(#+) (.*)")
_MARKUP = re.compile(r"\\(.)|`|\*\*", re.DOTALL)
_PICTURE = "<img "
_SECTION = 2
"""The level of a page's sections; deeper headings are parts of them."""


class Exhibit(str):
    """A table as GitHub renders it, with its cells."""

    __slots__ = ("table",)
    table: Table


class Document(str):
    """A page as GitHub renders it, with its parts: headings, paragraphs, lists, pictures and exhibits."""

    __slots__ = ("parts",)
    parts: tuple[str, ...]

    def __new__(cls, parts: Sequence[str]) -> Self:
        """Put the parts below each other; the first one is the title."""
        self = super().__new__(cls, "\n\n".join(parts) + "\n")
        self.parts = tuple(parts)
        return self

    @property
    def heading(self) -> str:
        """The heading of the page, without markup."""
        return _heading(self.parts[0])[1]

    @property
    def sections(self) -> list[Section]:
        """What stands under each heading, as any format can write it; pictures are left out."""
        return [section for title, parts in _divided(self.parts) if (section := _section(title, parts))]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Exhibit:
    """A table with these headings, the first of which is that of the rows' names."""
    numbers = ["left" if name in _WORDS else "right" for name in header]
    texts = [[str(cell) for cell in row] for row in rows]
    cells = [[cell if cell in BAD else escape(cell) for cell in row] for row in texts]
    found = Exhibit(tabulate(cells, header, tablefmt="pipe", disable_numparse=True, colalign=numbers))
    plain = [[_plain(cell) if cell in BAD else cell for cell in row] for row in texts]
    found.table = Table(
        corner=header[0],
        headings=tuple(header[1:]),
        labels=tuple(row[0] for row in plain),
        cells=tuple(tuple(map(Cell, row[1:])) for row in plain),
    )
    return found


def _divided(parts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading with the one that it stands under, and the parts up to the next."""
    above, title, found = "", _heading(parts[0])[1], list[str]()
    for part in parts[1:]:
        level, words = _heading(part)
        if not level:
            found.append(part)
            continue
        yield title, found
        above = words if level == _SECTION else above
        title, found = words if level == _SECTION or not above else f"{above}: {words}", []
    yield title, found


def _heading(part: str) -> tuple[int, str]:
    """The level and the words of a heading; 0 of what is none."""
    found = None if isinstance(part, Exhibit) else _HEADING.fullmatch(part)
    return (len(found[1]), _plain(found[2])) if found else (0, "")


def _section(title: str, parts: Sequence[str]) -> Section | None:
    """What stands under a heading: prose above the first table, what is said of each other one, and below."""
    blocks: list[Block] = []
    prose: list[str] = []
    origin = ""
    for part in parts:
        if isinstance(part, Exhibit):
            words = " ".join(prose)
            origin = origin if blocks else words
            blocks.append(Block(title, f": {words}" if blocks and words else "", part.table))
            prose = []
        elif not part.startswith(_PICTURE):
            prose.append(_plain(part))
    if not blocks and not prose:
        return None
    if not blocks:
        return Section(title, " ".join(prose), "", (), ())
    return Section(title, origin, "", tuple(blocks), tuple(prose))


def _plain(text: str) -> str:
    """Markdown without its marks."""
    return _MARKUP.sub(lambda found: found[1] or "", text)
