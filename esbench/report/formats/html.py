"""Tables as HTML fragments without style."""

from collections.abc import Iterable, Sequence
from html import escape as escaped

from esbench.report.tables.table import Section, Table
from esbench.report.text import one_line


def escape(text: str) -> str:
    """Return a text without markup, for elements and attributes."""
    return escaped(one_line(text), quote=True)


def page(title: str, sections: Iterable[Section], *, intervals: bool = False) -> str:
    """Return a fragment with one element per section."""
    parts = [f"<h1>{escape(title)}</h1>", *(_section(section, intervals=intervals) for section in sections)]
    return "\n".join(parts) + "\n"


def _section(section: Section, *, intervals: bool) -> str:
    lines = ["<section>", f"<h2>{escape(section.heading)}</h2>"]
    lines.append(f"<p>{escape(f'{section.origin} {section.conditions}')}</p>")
    for block in section.blocks:
        caption = f"<strong>{escape(block.title)}</strong>{escape(block.note)}"
        lines += _table(block.table, caption, intervals=intervals)
    if section.footnotes:
        lines += ["<ul>", *(f"<li>{escape(note)}</li>" for note in section.footnotes), "</ul>"]
    return "\n".join([*lines, "</section>"])


def _table(table: Table, caption: str, *, intervals: bool) -> list[str]:
    texts = table.texts(intervals=intervals)
    head = _row("th", [table.corner, *table.headings], ' scope="col"')
    body = [
        f'<tr><th scope="row">{escape(label)}</th>{_cells("td", row)}</tr>'
        for label, row in zip(table.labels, texts, strict=True)
    ]
    return [
        *("<table>", f"<caption>{caption}</caption>", "<thead>", head, "</thead>"),
        *("<tbody>", *body, "</tbody>", "</table>"),
    ]


def _row(element: str, texts: Sequence[str], attributes: str = "") -> str:
    return f"<tr>{_cells(element, texts, attributes)}</tr>"


def _cells(element: str, texts: Iterable[str], attributes: str = "") -> str:
    return "".join(f"<{element}{attributes}>{escape(text)}</{element}>" for text in texts)
