r"""Tables as LaTeX with booktabs, captions and labels, and the bibliography that they cite.

A page is a file to ``\input``. It needs the packages booktabs and graphicx and compiles with every engine,
whatever names and reasons contain. A table that is wider or longer than a page is split. pandas' ``to_latex``
is not used because a reason has to span several columns.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from esbench.report.tables.table import Block, Section, Table
from esbench.report.text import file_name, label, one_line
from esbench.schema import Run

NEEDS = "% needs \\usepackage{booktabs} and \\usepackage{graphicx}"

REFERENCES = "references.bib"

_MAX_ROWS = 32
"""Rows that fit on a page with a caption and footnotes."""
_MAX_CHARACTERS = 100
"""Characters side by side that are still readable when a table is shrunk to the width of the text."""
_GAP = 2
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "#": r"\#",
    "$": r"\$",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedblright{}",
    "'": "{'}",
    "`": r"\`{}",
    # A bracket after the end of a row would be its argument.
    "[": "{[}",
    "]": "{]}",
    # Two hyphens would be one dash.
    "-": "-{}",
    "±": r"\ensuremath{\pm}",
    "\u00d7": r"\ensuremath{\times}",
    "\u00b5": r"\ensuremath{\mu}",
    "\u03bc": r"\ensuremath{\mu}",
    "°": r"\ensuremath{^{\circ}}",
    "…": r"\ldots{}",
    "\u2013": "--",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
}
_ACCENTS = {
    "\u0300": r"\`",
    "\u0301": r"\'",
    "\u0302": r"\^",
    "\u0303": r"\~",
    "\u0308": r"\"",
    "\u030a": r"\r",
    "\u030c": r"\v",
    "\u0327": r"\c",
}
_PLAIN = re.compile(r"[A-Za-z0-9 .,:;!?()*+/=@]")
_POWER = re.compile(r"(-?\d+(?:\.\d+)?)e([+-]\d+)")


def escape(text: str) -> str:
    """Return a text in which nothing is a command; characters that LaTeX lacks are written as ``U+1F600``."""
    return re.sub(r"-\{\}(?!-)", "-", "".join(map(_letter, one_line(text))))


def _letter(letter: str) -> str:
    if letter in _SPECIAL:
        return _SPECIAL[letter]
    if _PLAIN.fullmatch(letter):
        return letter
    base, *marks = list(unicodedata.normalize("NFD", letter))
    if len(marks) == 1 and marks[0] in _ACCENTS and re.fullmatch(r"[A-Za-z]", base):
        return f"{_ACCENTS[marks[0]]}{{{base}}}"
    return f"U+{ord(letter):04X}"


def page(
    title: str, sections: Iterable[Section], *, key: str, cited: Sequence[str] = (), intervals: bool = False
) -> str:
    r"""Return a page of tables.

    Args:
        title: the title of the page.
        sections: its tables.
        key: the prefix of labels: ``\ref{tab:<key>-1}`` is the first table.
        cited: keys of the bibliography from which the variants of the page come.
        intervals: whether numbers are shown with their intervals.

    """
    parts = [f"% {one_line(title)}: written by `esbench report --format latex`\n{NEEDS}"]
    if cited:
        parts.append(f"\\noindent The variants come from \\cite{{{','.join(cited)}}}.")
    number = 0
    for section in sections:
        for block in section.blocks:
            number += 1
            parts.append(_table(section, block, f"tab:{file_name(key)}-{number}", intervals=intervals))
        parts.append("\\clearpage  % LaTeX can hold back only a few tables")
    return "\n\n".join(parts) + "\n"


def references() -> str:
    """Return the bibliography as BibTeX."""
    return (resources.files("esbench.report.formats") / REFERENCES).read_text(encoding="utf-8")


def cited_keys(runs: Iterable[Run]) -> list[str]:
    """Return the keys of the works that the variants of some runs come from.

    A work is cited if one of its keywords is in the source that a run gives for a variant.
    """
    sources = "\n".join(source for run in runs for source in run.header.sources.values())
    entries = re.findall(r"^@\w+\{([\w-]+),.*?keywords = \{(.*?)\}", references(), re.DOTALL | re.MULTILINE)
    return [key for key, words in entries if any(word in sources for word in words.split("; "))]


def _table(section: Section, block: Block, key: str, *, intervals: bool) -> str:
    what = escape(f"{block.title}{block.note}").removesuffix(".")
    source = escape(f"{section.origin} {section.conditions}")
    title = escape(section.heading)
    notes = "\n".join(f"\\par\\raggedright\\footnotesize {escape(note)}" for note in section.footnotes)
    parts = list(_parts(block.table, intervals=intervals))
    found = []
    for number, part in enumerate(parts, start=1):
        caption = f"\\caption[{title}]{{{title}. {what}. {source}}}\n\\label{{{key}}}"
        if number > 1:
            more = f"{title}. {escape(block.title)}, part {number} of {len(parts)}."
            caption = f"\\caption[{title}]{{{more}}}\n\\label{{{key}-{number}}}"
        below = [notes] if notes and number == len(parts) else []
        lines = ["\\begin{table}", "\\centering", caption, "\\footnotesize", part, *below, "\\end{table}"]
        found.append("\n".join(lines))
    return "\n\n".join(found)


def _parts(table: Table, *, intervals: bool) -> Iterator[str]:
    """Yield the parts of a table, each with the labels of its rows and shrunk if it is too wide."""
    texts = table.texts(intervals=intervals)
    labels = [label(name) for name in table.labels]
    every = zip(table.headings, *map(_narrow, texts), strict=True)
    widths = [max(map(len, column)) + _GAP for column in every]
    columns = _side_by_side(widths, _MAX_CHARACTERS - max(map(len, [table.corner, *labels])))
    for begin in range(0, max(len(labels), 1), _MAX_ROWS):
        for first, last in columns:
            rows = zip(labels[begin : begin + _MAX_ROWS], texts[begin : begin + _MAX_ROWS], strict=True)
            body = "\n".join(_row([_cell(name), *_cells(row, first, last)]) for name, row in rows)
            head = _row(map(_cell, [table.corner, *table.headings[first:last]]))
            tabular = f"\\begin{{tabular}}{{l{'r' * (last - first)}}}\n\\toprule\n{head}\n\\midrule\n{body}\n"
            whole = f"{tabular}\\bottomrule\n\\end{{tabular}}"
            yield f"\\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%\n{whole}}}"


def _narrow(texts: Sequence[str]) -> list[str]:
    """Return a row's cells without a reason that spans all columns after it."""
    end = _reason(texts)
    return [*texts[:end], *[""] * (len(texts) - end)]


def _reason(texts: Sequence[str]) -> int:
    """Return the position of a last filled cell that is followed by empty ones, or the number of cells."""
    filled = max((place for place, text in enumerate(texts, start=1) if text), default=0)
    return filled - 1 if 0 < filled < len(texts) else len(texts)


def _cells(texts: Sequence[str], first: int, last: int) -> Iterator[str]:
    """Yield the cells of some columns; a reason spans the columns after it."""
    where = _reason(texts)
    if not first <= where < last - 1:
        yield from map(_cell, texts[first:last])
        return
    yield from map(_cell, texts[first:where])
    yield f"\\multicolumn{{{last - where}}}{{l}}{{{_cell(texts[where])}}}"


def _side_by_side(widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Group columns into tables: at least one each, and as many as fit."""
    found, first, used = [], 0, 0
    for place, width in enumerate(widths):
        if used + width > room and place > first:
            found.append((first, place))
            first, used = place, 0
        used += width
    return [*found, (first, len(widths))]


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(text: str) -> str:
    """Return a cell; a number such as ``1e-6`` is set as a power of ten."""
    found = _POWER.fullmatch(text)
    if found:
        return f"\\ensuremath{{{found[1]} \\times 10^{{{int(found[2])}}}}}"
    return escape(text)
