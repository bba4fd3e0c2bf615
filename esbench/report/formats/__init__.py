"""The formats of a report's pages: Markdown, LaTeX and CSV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from esbench.report.formats import csv, latex, markdown
from esbench.report.tables.paper import paper_sections
from esbench.report.tables.table import Section
from esbench.schema import Run

MARKDOWN, LATEX = "markdown", "latex"


@dataclass(frozen=True)
class Style:
    """How pages are written.

    Attributes:
        form: one of :data:`FORMATS`.
        intervals: whether numbers have half the width of their 95 % intervals: ``1.23 ± 0.04``.
        best: number of schemes in a table in LaTeX.
    """

    form: str = MARKDOWN
    intervals: bool = False
    best: int = 8


@dataclass(frozen=True)
class Page:
    """A page of tables.

    Attributes:
        path: its file without the suffix.
        name: a name that differs from those of the report's other pages.
        above: Markdown above the tables; other formats leave it out.
    """

    path: Path
    name: str
    title: str
    runs: Sequence[Run]
    sections: Sequence[Section]
    above: str = ""


def _markdown(page: Page, style: Style) -> str:
    return markdown.page(page.title, page.sections, above=page.above, intervals=style.intervals)


def _latex(page: Page, style: Style) -> str:
    cited = latex.cited_keys(page.runs)
    sections = [section for run in page.runs for section in paper_sections(run, style.best)]
    return latex.page(page.title, sections, key=page.name, cited=cited, intervals=style.intervals)


def _csv(page: Page, _: Style) -> str:
    return csv.tidy_numbers(page.runs, page.sections)


FORMATS: dict[str, tuple[str, Callable[[Page, Style], str]]] = {
    MARKDOWN: (".md", _markdown),
    LATEX: (".tex", _latex),
    "csv": (".csv", _csv),
}
"""Format -> the suffix of its files, and the function that writes a page."""


def write_page(page: Page, style: Style) -> Path:
    """Write a page in the style's format and return its file."""
    suffix, text = FORMATS[style.form]
    return write(page.path.with_name(f"{page.path.name}{suffix}"), text(page, style))


def write(path: Path, text: str) -> Path:
    """Write a file of a report, with the same bytes on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
