"""Tables in every format, compared letter by letter with golden files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pylatexenc.latexwalker import LatexCharsNode, LatexGroupNode, LatexMacroNode, LatexNode, LatexWalker

from esbench.report.formats import latex
from esbench.report.tables.paper import paper_sections
from esbench.store import read_run
from tests.report.golden_tables import FOLDER, NAMES, texts

MACROS = {
    *("textbackslash", "textasciicircum", "textasciitilde", "textless", "textgreater", "textbar"),
    *("textquotedblright", "ldots", "ensuremath", "pm", "times", "mu", "circ", "approx", "geq"),
    *("{", "}", "#", "$", "%", "&", "_", "`", "^"),
}
"""Macros allowed in escaped text: they print letters, and read, write or change nothing."""
RESULTS = Path(__file__).parents[2] / "results/amd-epyc"


def test_tables_are_these_texts() -> None:
    """After an intended change, `python -m tests.report.golden_tables` writes the golden files again."""
    assert {path.name for path in FOLDER.iterdir()} == set(texts())
    for name, text in texts().items():
        assert text == (FOLDER / name).read_text(encoding="utf-8"), name


def nodes(outer: list[LatexNode]) -> list[LatexNode]:
    """Return these nodes and all inside them."""
    all_nodes = []
    for node in outer:
        if node is None:
            continue
        all_nodes.append(node)
        inner = list(getattr(node, "nodelist", None) or [])
        arguments = getattr(node, "nodeargd", None)
        all_nodes += nodes([*inner, *(getattr(arguments, "argnlist", None) or [])])
    return all_nodes


def parsed(text: str) -> list[LatexNode]:
    """Return all nodes of a text in LaTeX, which must be well-formed."""
    walker = LatexWalker(text, tolerant_parsing=False)
    outer, *_ = walker.get_latex_nodes()
    return nodes(outer)


@given(st.one_of(st.text(), st.sampled_from(list(NAMES.values())), st.text(alphabet="\\{}$%&#_^~[]-\"'`<>|")))
def test_latex_escapes_anything(text: str) -> None:
    """Escaped text has only letters, groups and macros for letters: no comments, formulas or commands."""
    shown = latex.escape(text)
    assert shown.isascii()
    for node in parsed(shown):
        assert isinstance(node, LatexCharsNode | LatexGroupNode | LatexMacroNode)
        if isinstance(node, LatexMacroNode):
            assert node.macroname in MACROS
        if isinstance(node, LatexCharsNode):
            assert "--" not in node.chars
            assert not set(node.chars) & set("#&_$%")
    assert not set("[]") & set(shown.replace("{[}", "").replace("{]}", ""))


def test_latex_pages_are_well_formed() -> None:
    """Environments are closed, each table has a unique label, and rows have all their cells."""
    text = texts()["tables.tex"]
    assert parsed(text)
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert len(labels) == len(set(labels)) == text.count("\\begin{table}") > 1
    assert r"scheme & / ms & $\times$~dense & (\%) &" in text
    tables = re.findall(r"X(r+)\}(.*?)\\end\{tabularx\}", text, re.DOTALL)
    assert len(tables) == len(labels)
    for columns, table in tables:
        assert len(columns) < 6
        rows = [line for line in table.splitlines() if re.search(r"(?<!\\)&", line)]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(columns)}


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_latex_tables_fit_a_column(tmp_path: Path) -> None:
    """Tables of a run with long names fit into a column of an article with two of them."""
    run, _ = read_run(max(RESULTS.glob("*-quality-*")))
    assert run
    packages = r"\usepackage{booktabs}\usepackage{tabularx}"
    page = latex.page("", paper_sections(run, 8), key="")
    document = rf"\documentclass[twocolumn]{{article}}{packages}\begin{{document}}{page}\end{{document}}"
    (tmp_path / "a.tex").write_text(document, encoding="utf-8")
    subprocess.run(["pdflatex", "-interaction=batchmode", "a.tex"], cwd=tmp_path, check=True)  # noqa: S607  # wherever it is
    log = (tmp_path / "a.log").read_text(encoding="latin-1")
    assert "Output written" in log
    assert "Overfull" not in log
