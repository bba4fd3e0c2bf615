"""The formats of a report: what its pages are written as, and in which style their numbers stand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from esbench.errors import UserError
from esbench.report.bibliography import bibtex, cited, works
from esbench.report.formats import csv, html, latex
from esbench.report.passages import Document
from esbench.report.tables.table import Section
from esbench.report.text import escape
from esbench.schema import Run

MARKDOWN, LATEX = "markdown", "latex"
BIBLIOGRAPHY = "references.bib"


@dataclass(frozen=True)
class Style:
    """How pages are written.

    Attributes:
        form: one of :data:`FORMATS`.
        intervals: whether numbers stand with half the width of their 95 % intervals: ``1.23 ± 0.04``.
        catalogue: what schemes come from, for runs that do not tell: class -> words.

    """

    form: str = MARKDOWN
    intervals: bool = False
    catalogue: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the pages that are more than tables are written too, and pictures drawn."""
        return self.form == MARKDOWN


@dataclass(frozen=True)
class Page:
    """A page of tables: its file without the end of its name, its title, the runs it shows, their tables.

    ``name`` tells it from the other pages of a report, and ``above`` is what it has above its tables where it
    is in Markdown.
    """

    path: Path
    name: str
    title: str
    runs: Sequence[Run]
    sections: Sequence[Section]
    above: str = ""


def _markdown(page: Page, style: Style) -> str:
    shown = "\n".join(section.markdown(level=2, intervals=style.intervals) for section in page.sections)
    return f"# {escape(page.title)}\n\n{page.above}{shown}"


def _latex(page: Page, style: Style) -> str:
    keys = sorted({key for run in page.runs for key in cited(run, style.catalogue)})
    return latex.page(page.title, page.sections, key=page.name, cited=keys, intervals=style.intervals)


def _csv(page: Page, _: Style) -> str:
    return csv.page(page.runs, page.sections) or csv.words(page.sections)


def _html(page: Page, style: Style) -> str:
    return html.page(page.title, page.sections, intervals=style.intervals)


FORMATS: dict[str, tuple[str, Callable[[Page, Style], str]]] = {
    MARKDOWN: (".md", _markdown),
    LATEX: (".tex", _latex),
    "csv": (".csv", _csv),
    "html": (".html", _html),
}
"""Format -> how its files' names end, and what writes a page in it."""


def check_format(name: str) -> str:
    """Return the name of a format.

    Raises:
        UserError: there is no such format.

    """
    if name not in FORMATS:
        message = f"no format {name!r}; there are: {', '.join(FORMATS)}"
        raise UserError(message)
    return name


def write_page(page: Page, style: Style) -> Path:
    """Write a page in the style's format; return its file."""
    suffix, text = FORMATS[style.form]
    return write(page.path.with_name(f"{page.path.name}{suffix}"), text(page, style))


def write_document(path: Path, document: Document, style: Style) -> Path:
    """Write a page of prose and tables in the style's format; return its file, whose name gets its end."""
    if style.form == MARKDOWN:
        return write(path.with_name(f"{path.name}{FORMATS[MARKDOWN][0]}"), document)
    return write_page(Page(path, path.name, document.heading, [], document.sections), style)


def write_bibliography(runs: Sequence[Run], out: Path, style: Style) -> list[Path]:
    """Write the works that the variants of these runs come from, for pages that cite them."""
    found = works(runs, style.catalogue) if style.form == LATEX else []
    return [write(out / BIBLIOGRAPHY, bibtex(found))] if found else []


def image(source: str, alternative: str, width: int = 900) -> str:
    """An image of this width in pixels on a Markdown page."""
    return f'<img src="{html.escape(source)}" alt="{html.escape(alternative)}" width="{width}">'


def write(path: Path, text: str) -> Path:
    """Write a file of a report, the same on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
