r"""Tables as LaTeX with booktabs, captions and labels, and the bibliography that they cite.

A page is a file to ``\input``. It needs the packages booktabs and tabularx, and compiles with every engine,
whatever names and reasons contain.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from importlib import resources

from esbench.report.tables.table import Block, Section
from esbench.schema import Run
from esbench.text import cut, file_name, one_line

REFERENCES = "references.bib"
_LONGEST = 60
"""The most characters of a caption, and of the name of a variant."""
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
    "≥": r"\ensuremath{\geq}",
}


def escape(text: str) -> str:
    """Return a text in which nothing is a command, on one line and in ASCII."""
    escaped = "".join(map(_escape_character, one_line(text)))
    return re.sub("-(?=-)", "-{}", escaped)  # LaTeX prints two hyphens as a dash


def _escape_character(character: str) -> str:
    """Return the LaTeX of a character; outside ASCII its letter without accents, or ``?`` if it has none."""
    if character in _SPECIAL:
        return _SPECIAL[character]
    if character.isascii():
        return character
    unaccented = unicodedata.normalize("NFKD", character)[0]
    return unaccented if unaccented.isascii() and unaccented.isalnum() else "?"


def page(
    title: str, sections: Iterable[Section], *, key: str, cited: Sequence[str] = (), intervals: bool = False
) -> str:
    r"""Return a page of tables, each as wide as a column of the text; with intervals, as wide as the text.

    The title is a comment in the first line. Tables have at most six columns; ``\ref{tab:<key>-1}`` is the
    first. ``cited`` are the keys of the works from which the variants of the page come.
    """
    head = f"% {one_line(title)}: written by `esbench report --format latex`"
    parts = [f"{head}\n% needs \\usepackage{{booktabs}} and \\usepackage{{tabularx}}"]
    if cited:
        parts.append(f"\\noindent The variants come from \\cite{{{','.join(cited)}}}.")
    blocks = [(section, block) for section in sections for block in section.blocks]
    if not blocks:
        parts.append("% the run has no times")
    for number, (section, block) in enumerate(blocks, start=1):
        parts.append(_table(section, block, f"tab:{file_name(key)}-{number}", intervals=intervals))
    return "\n\n".join(parts) + "\n"


def references() -> str:
    """Return the bibliography as BibTeX."""
    return (resources.files("esbench.report.formats") / REFERENCES).read_text(encoding="utf-8")


def cited_keys(runs: Iterable[Run]) -> list[str]:
    """Return the BibTeX keys of the works that some runs name as the origin of their variants.

    An entry is cited if one of its keywords occurs in the origin of a variant (``header.sources``).
    """
    sources = "\n".join(source for run in runs for source in run.header.sources.values())
    entries = re.findall(r"^@\w+\{([\w-]+),.*?keywords = \{(.*?)\}", references(), re.DOTALL | re.MULTILINE)
    return [key for key, words in entries if any(word in sources for word in words.split("; "))]


def _table(section: Section, block: Block, key: str, *, intervals: bool) -> str:
    """Return a table with its caption above and its origin and footnotes below."""
    table = block.table
    rows = [
        " & ".join([_breakable(name), *(_typeset(_shorten(cell)) for cell in cells)])
        for name, cells in zip(table.labels, table.texts(intervals=intervals), strict=True)
    ]
    caption = _typeset(cut(one_line(block.title), _LONGEST))
    # A heading of several words has two lines, because the columns of a paper are narrow.
    heads = [_typeset(heading).split(" ", 1) for heading in (table.corner, *table.headings)]
    upper, lower = ([head[0] if len(head) > 1 else "" for head in heads], [head[-1] for head in heads])
    columns = r">{\raggedright\arraybackslash}X" + "r" * len(table.headings)
    notes = [f"{section.origin} {section.conditions}", *section.footnotes]
    float_ = "table*" if intervals else "table"
    lines = [
        rf"\begin{{{float_}}}[htbp]",
        rf"\caption{{{caption}}} \label{{{key}}}",
        r"\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"\begin{{tabularx}}{{\linewidth}}{{{columns}}}",
        r"\toprule",
        *(rf"{' & '.join(line)} \\" for line in (upper, lower)),
        r"\midrule",
        *(rf"{row} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabularx}",
        *(rf"\par\smallskip\raggedright {_typeset(note)}" for note in notes),
        rf"\end{{{float_}}}",
    ]
    return "\n".join(lines)


def _shorten(cell: str) -> str:
    return cell.replace("at least ", "≥").replace("more than ", "> ").replace("about ", "≈")


def _typeset(text: str) -> str:
    """Return a text escaped, with n_eff, arrows and "x base" as formulas and numbers of footnotes raised."""
    formulas = (
        (r"n\_eff", r"$n_{\mathrm{eff}}$"),
        (r"-\textgreater{}", r"$\to$"),
        *((f"x {name}", rf"$\times$~{name}") for name in ("dense", "base", "naive")),
    )
    typeset = escape(text)
    for words, formula in formulas:
        typeset = typeset.replace(words, formula)
    return re.sub(r" ?\{\[\}(\d+)\{\]\}", r"\\textsuperscript{\1}", typeset)


def _breakable(name: str) -> str:
    """Return the name of a variant, escaped, with line breaks allowed between its options and words."""
    between = r"(?<=[(,=])|(?<=\\_)|(?<=[a-z])(?=[A-Z])"
    return re.sub(between, r"\\allowbreak{}", escape(cut(one_line(name), _LONGEST)))
