r"""Tables as LaTeX: booktabs, with captions and labels, for a paper to take over as they are.

A page is a file to ``\input``. It needs the packages booktabs and longtable, and compiles with any of
LaTeX's engines, whatever a name or a reason holds.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from esbench.report.cells import Table
from esbench.report.tables import Block, Section
from esbench.report.words import file_name, label, one_line

NEEDS = "% needs \\usepackage{booktabs} and \\usepackage{longtable}"

_LONGEST = 45
"""More rows than this do not fit on a page: the table may break."""
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
    # A bracket behind the end of a row would be its argument.
    "[": "{[}",
    "]": "{]}",
    # Two of them would be one long dash.
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
    """A text that LaTeX sets as it is: nothing in it is a command, and no character is one it does not know.

    What has no letter in LaTeX's fonts, such as an emoji, is written as its code point: ``U+1F600``.
    """
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
    r"""A page of tables.

    Args:
        title: what the page is of.
        sections: its tables.
        key: what the labels of its tables begin with: ``\ref{tab:<key>-1}`` is the first.
        cited: keys of the bibliography beside it, of what the variants of the page come from.
        intervals: whether numbers stand with their intervals.

    """
    parts = [f"% {one_line(title)}: written by `esbench report --format latex`\n{NEEDS}"]
    if cited:
        parts.append(f"\\noindent The variants are after \\cite{{{','.join(cited)}}}.")
    number = 0
    for section in sections:
        for block in section.blocks:
            number += 1
            parts.append(_table(section, block, f"tab:{file_name(key)}-{number}", intervals=intervals))
        parts.append("\\clearpage  % LaTeX holds back only so many tables")
    return "\n\n".join(parts) + "\n"


def _table(section: Section, block: Block, key: str, *, intervals: bool) -> str:
    what = escape(f"{block.title}{block.note}").removesuffix(".")
    caption = f"{escape(section.title)}. {what}."
    source = escape(f"{section.origin} {section.conditions}")
    head = f"\\caption[{escape(section.title)}]{{{caption} {source}}}\n\\label{{{key}}}"
    columns = f"l{'r' * len(block.table.headings)}"
    top, body = _rows(block.table, intervals=intervals)
    notes = "\n".join(f"\\par\\raggedright\\footnotesize {escape(note)}" for note in section.footnotes)
    if len(block.table.labels) > _LONGEST:
        start, ends = f"\\toprule\n{top}\n\\midrule", "\\bottomrule\n\\endlastfoot"
        lines = [
            *("{\\footnotesize", f"\\begin{{longtable}}{{{columns}}}", f"{head}\\\\"),
            *(start, "\\endfirsthead", start, "\\endhead", ends, body, "\\end{longtable}}"),
        ]
        return "\n".join([*lines, *([f"{{{notes}\\par}}"] if notes else [])])
    tabular = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", top, "\\midrule", body]
    lines = ["\\begin{table}", "\\centering", head, "\\footnotesize", *tabular]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *filter(None, [notes]), "\\end{table}"])


def _rows(table: Table, *, intervals: bool) -> tuple[str, str]:
    """The heading and the rows below it."""
    top = _row([table.corner, *table.headings])
    texts = table.texts(intervals=intervals)
    body = [_row([label(name), *row]) for name, row in zip(table.labels, texts, strict=True)]
    return top, "\n".join(body)


def _row(texts: Iterable[str]) -> str:
    return " & ".join(map(_cell, texts)) + r" \\"


def _cell(text: str) -> str:
    """A cell: a number with a power of ten is set as one."""
    found = _POWER.fullmatch(text)
    if found:
        return f"\\ensuremath{{{found[1]} \\times 10^{{{int(found[2])}}}}}"
    return escape(text)
