"""Pages of prose and tables, in every format."""

import csv
import io
from pathlib import Path

import pytest

from esbench.report.accuracy import accuracy_page
from esbench.report.formats import FORMATS, Style, write_document
from esbench.report.goals import NOT_MET
from esbench.report.kernels import kernels_page
from esbench.report.passages import Document, table
from esbench.report.site import render_reports
from esbench.report.text import escape
from esbench.studies.digits import write_study as write_digits
from esbench.studies.timer_accuracy import write_study
from tests import accuracy_cases, test_digits_study, test_kernels_page
from tests.report.report_cases import a_run, store
from tests.report.web_cases import ALERT

PAGE = Document(
    [
        "# A page of `esbench`",
        "What it says, **first**.",
        f"## {escape(ALERT)}",
        "Where it was taken.",
        table(("goal", "found", "verdict"), [(f"a | {ALERT}", "=1+1", NOT_MET), ("b", "2", "met")]),
        "### Beside others",
        "Why.",
        table(("kernel", "time (ms)"), [("add", "1.23")]),
        "And of another kind:",
        table(("kernel", "x base"), [("mul", "4.56x")]),
        "- what is missing",
    ]
)


def of(form: str, folder: Path) -> str:
    """The page in a format."""
    return write_document(folder / "page", PAGE, Style(form)).read_text(encoding="utf-8")


def test_markdown_is_the_page_as_it_stands(tmp_path: Path) -> None:
    """Its parts, an empty line apart."""
    assert of("markdown", tmp_path) == PAGE == "\n\n".join(PAGE.parts) + "\n"
    assert r"| a \| \<script\>" in PAGE


def test_prose_stands_with_its_tables() -> None:
    """What is above a first table is said of the section, above another one of it, below all at the end."""
    first, second, third = PAGE.sections
    assert (first.title, first.origin, first.blocks) == ("A page of esbench", "What it says, first.", ())
    assert (second.title, second.origin) == (ALERT, "Where it was taken.")
    assert second.blocks[0].table.texts() == [["=1+1", "not met"], ["2", "met"]]
    assert second.blocks[0].table.labels == (f"a | {ALERT}", "b")
    assert (third.title, third.origin) == (f"{ALERT}: Beside others", "Why.")
    assert [block.note for block in third.blocks] == ["", ": And of another kind:"]
    assert third.footnotes == ("- what is missing",)


def test_html_has_no_live_words(tmp_path: Path) -> None:
    """Prose and tables are there, and a planted script is text."""
    text = of("html", tmp_path)
    assert "<script" not in text
    assert "<h1>A page of esbench</h1>" in text
    assert text.count("<table>") == 3
    assert "&lt;script&gt;" in text


def test_csv_has_a_line_for_each_row(tmp_path: Path) -> None:
    """With the columns of all tables, and no cell that a spreadsheet would take for a formula."""
    lines = list(csv.DictReader(io.StringIO(of("csv", tmp_path))))
    assert [(line["goal"], line["found"], line["verdict"]) for line in lines][:2] == [
        (f"a | {ALERT}", "'=1+1", "not met"),
        ("b", "2", "met"),
    ]
    assert [(line["section"], line["kernel"], line["x base"]) for line in lines][2:] == [
        (f"{ALERT}: Beside others", "add", ""),
        (f"{ALERT}: Beside others", "mul", "4.56x"),
    ]


def test_latex_has_every_table(tmp_path: Path) -> None:
    """With its caption, and nothing of Markdown."""
    text = of("latex", tmp_path)
    assert text.count("\\begin{tabular}") == 3
    assert "**" not in text
    assert "4.56x" in text


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_pages_of_studies_are_in_every_format(tmp_path: Path, form: str) -> None:
    """What a report is asked for has these pages too; no file of it is empty."""
    results = tmp_path / "results"
    store(tmp_path, a_run("20260101T000000Z-quick-0001"))
    write_study(accuracy_cases.WHOLE, results)
    write_digits(test_digits_study.WHOLE, results)
    written, problems = render_reports(results, tmp_path / "out", Style(form))
    assert problems == []
    suffix = FORMATS[form][0]
    names = {path.name for path in written}
    assert {f"{name}{suffix}" for name in ("accuracy", "digits", "runs", "tables")} <= names
    assert all(path.stat().st_size for path in written)


def test_every_number_of_a_page_is_in_every_format(tmp_path: Path) -> None:
    """The cells of the tables of a study and of kernels are those of the page, in every format."""
    documents = (accuracy_page([accuracy_cases.WHOLE], []), kernels_page(test_kernels_page.WHOLE, []))
    for document in documents:
        cells = {
            text
            for section in document.sections
            for block in section.blocks
            for row in block.table.texts()
            for text in row
            if text.replace(".", "").isdigit()
        }
        assert len(cells) > 5
        for form in FORMATS:
            text = write_document(tmp_path / "x", document, Style(form)).read_text(encoding="utf-8")
            assert {cell for cell in cells if cell not in text} == set()
