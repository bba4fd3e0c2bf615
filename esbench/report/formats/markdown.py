"""Pages in Markdown: a page of tables, tables of a study, and images."""

import re
from collections.abc import Iterable, Sequence
from html import escape as html_escape

from tabulate import tabulate

from esbench.report.tables.table import Section
from esbench.text import escape

NOT_MET, NO = "**not met**", "**no**"
"""Verdicts in bold, the only markup in the cells of a table."""

_NUMBER = re.compile(r"([-+±]?[\d,.]+(e[-+]?\d+)?x?|n/a|)")


def page(title: str, sections: Iterable[Section], *, above: str = "", intervals: bool = False) -> str:
    """Return a page of tables, with text above them that is already Markdown."""
    tables = "\n".join(section.markdown(level=2, intervals=intervals) for section in sections)
    return f"# {escape(title)}\n\n{above}{tables}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    columns = zip(*texts, strict=True) if texts else [()] * len(header)
    align = ["right" if all(map(_NUMBER.fullmatch, column)) else "left" for column in columns]
    cells = [[cell if cell in {NOT_MET, NO} else escape(cell) for cell in row] for row in texts]
    return tabulate(cells, header, tablefmt="pipe", disable_numparse=True, colalign=align if cells else None)


def join(parts: Iterable[str]) -> str:
    """Return paragraphs, tables and headings as a page."""
    return "\n\n".join(parts) + "\n"


def image(source: str, alternative: str) -> str:
    """Return an image, 900 pixels wide."""
    return f'<img src="{html_escape(source)}" alt="{html_escape(alternative)}" width="900">'
