r"""Tables as LaTeX with booktabs, captions and labels, and the bibliography that they cite.

A page is a file to ``\input``. It needs the packages booktabs and longtable, and compiles with every engine,
whatever names and reasons contain.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from esbench.report.tables.table import Block, Section, Table
from esbench.schema import Run
from esbench.text import file_name, one_line, shorten_label

REFERENCES = "references.bib"
_Column = tuple[str, tuple[str, ...]]  # a heading, and the cells below it
_MAX_CHARACTERS = 90
"""Characters side by side in the width of the text, in the size ``scriptsize``."""
_GAP = 2
_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "{}#$%&_"},
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
    "±": r"\ensuremath{\pm}",
    "\u00d7": r"\ensuremath{\times}",
    "\u00b5": r"\ensuremath{\mu}",
    "°": r"\ensuremath{^{\circ}}",
    "…": r"\ldots{}",
    "≈": r"\ensuremath{\approx}",
}


def escape(text: str) -> str:
    """Return a text in which nothing is a command; a character that is not in ASCII becomes ``?``."""
    return re.sub("-(?=-)", "-{}", "".join(map(_letter, one_line(text))))  # two hyphens would be one dash


def _letter(letter: str) -> str:
    if letter in _SPECIAL:
        return _SPECIAL[letter]
    if letter.isascii():
        return letter
    plain = unicodedata.normalize("NFKD", letter)[0]  # without an accent
    return plain if plain.isascii() and plain.isalnum() else "?"


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
    head = f"% {one_line(title)}: written by `esbench report --format latex`"
    parts = [f"{head}\n% needs \\usepackage{{booktabs}} and \\usepackage{{longtable}}"]
    if cited:
        parts.append(f"\\noindent The variants come from \\cite{{{','.join(cited)}}}.")
    blocks = [(section, block) for section in sections for block in section.blocks]
    for number, (section, block) in enumerate(blocks, start=1):
        parts.append(_table(section, block, f"tab:{file_name(key)}-{number}", intervals=intervals))
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
    """Return a table with its caption and footnotes; columns that do not fit are in further parts."""
    title = escape(section.heading)
    parts = list(_parts(block.table, intervals=intervals))
    lines = ["{\\scriptsize"]
    for number, columns in enumerate(parts, start=1):
        part = f", part {number} of {len(parts)}" if len(parts) > 1 else ""
        caption = f"{title}: {escape(block.title)}{part}", title
        lines.append(_longtable(columns, caption, key if number == 1 else f"{key}-{number}"))
    about = f"{block.title}{block.note} {section.origin} {section.conditions}"
    lines += [f"\\par\\noindent {escape(note)}" for note in (about, *section.footnotes)]
    return "\n".join([*lines, "\\par}"])


def _longtable(columns: list[_Column], caption: tuple[str, str], key: str) -> str:
    import pandas as pd  # noqa: PLC0415  # slow to import

    names, texts = zip(*columns, strict=True)
    rows = [list(map(escape, row)) for row in zip(*texts, strict=True)]
    aligned = "l" + "r" * (len(columns) - 1)
    table = pd.DataFrame(rows, columns=list(map(escape, names)))
    return table.to_latex(
        index=False, caption=caption, label=key, column_format=aligned, longtable=True
    ).rstrip()


def _parts(table: Table, *, intervals: bool) -> Iterator[list[_Column]]:
    """Yield the columns of a table in groups that fit in the width of a page, each after the labels."""
    labels: _Column = table.corner, tuple(map(shorten_label, table.labels))
    part, used = [labels], _width(labels)
    for column in zip(table.headings, zip(*table.texts(intervals=intervals), strict=True), strict=True):
        if used + _width(column) > _MAX_CHARACTERS and len(part) > 1:
            yield part
            part, used = [labels], _width(labels)
        part.append(column)
        used += _width(column)
    yield part


def _width(column: _Column) -> int:
    name, texts = column
    return max(map(len, (name, *texts))) + _GAP
