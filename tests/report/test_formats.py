"""The bibliography of a report, and its small tables."""

import csv
import io
import math
import re
from pathlib import Path

from esbench.registry import REGISTRY, load
from esbench.report.formats import Style
from esbench.report.formats.csv import tidy_numbers
from esbench.report.formats.latex import cited_keys, references
from esbench.report.formats.markdown import NOT_MET, table
from esbench.report.tables.paper import paper_sections
from esbench.report.tables.table import Block, CellNumber, Section, Table, number_cell
from tests import synthetic
from tests.report import ranking_cases
from tests.report.report_cases import a_run, render_reports, store
from tests.synthetic import BASE, DENSE, changed, linear, time_row, variant

WORK = re.compile(r"\d{4}\.\d{4,5}|10\.\d{4,9}/\S+[^\s,;.]|[A-Z]\w+(?:[\w, ]|et al\.)* (?:19|20)\d\d")
"""An arXiv number, a DOI, or authors and a year."""


def test_every_work_that_a_variant_comes_from_is_in_the_bibliography() -> None:
    """Each work cited by a registered variant is a keyword of an entry with a title."""
    load("impls")
    sources = {entry.source for entry in REGISTRY.entries.values() if entry.package == "impls"}
    named = {work for source in sources for work in WORK.findall(source)}
    works = [word for words in re.findall(r"keywords = \{(.*)\}", references()) for word in words.split("; ")]
    assert len(named) > 8
    assert {work for work in named if not any(word in work for word in works)} == set()
    assert (
        references().count("@") == references().count("\n  title = ") == references().count("keywords = ") > 8
    )


def test_pages_cite_the_works_of_their_variants(tmp_path: Path) -> None:
    """A page cites by the sources stored in its run; references.bib has every cited key."""
    uncited = variant("Other", k=2)
    run = synthetic.run([time_row(DENSE, linear(), 1.0), time_row(uncited, linear(), 1.0)])
    assert cited_keys([run]) == []
    sources = {"Perturbed": "NESgpu; Wan et al. 2013", "Other(k=2)": "arXiv:2511.16652"}
    run = changed(run, sources=sources)
    assert cited_keys([run]) == ["nesgpu", "sarkar2025eggroll", "wan2013dropconnect"]
    store(tmp_path, changed(a_run(), sources=sources))
    written, problems = render_reports(tmp_path / "results", tmp_path / "out", Style("latex"))
    assert problems == []
    assert {path.name for path in written} == {"tables.tex", "references.bib"}
    (cite,) = re.findall(r"\\cite\{(.*?)\}", (tmp_path / "out/test-cpu/quick/tables.tex").read_text())
    keys = re.findall(r"^@\w+\{(.*),$", (tmp_path / "out/references.bib").read_text(), re.MULTILINE)
    assert set(cite.split(",")) <= set(keys)


def test_a_table_for_a_paper_has_the_best_schemes_and_dense_noise() -> None:
    """A row is the best variant of a scheme; dense noise is there wherever it ranks."""
    (ranking, *_) = paper_sections(ranking_cases.run(), best=2)
    assert ranking.blocks[0].table.labels == ("Hadamard", "LowRank(rank=1)", "Perturbed")
    rows = [time_row(v, linear(), ms) for v, ms in ((DENSE, 9), (variant("Fast"), 1), (variant("Slow"), 3))]
    (times,) = paper_sections(synthetic.run([*rows, time_row(BASE, linear(), 1)]), best=1)
    assert times.blocks[0].table.labels == ("Fast", "Base", "Perturbed")


def test_csv_has_no_number_that_is_not_finite() -> None:
    """NaN and infinity leave their field empty, and the column out if it has no other number."""
    numbers = (
        CellNumber("n_eff", math.inf, (time_row(variant("Exact"), linear(), 1.0),), low=3.0, high=math.inf),
        CellNumber("n_eff", 4.0, (time_row(variant("Usual"), linear(), 1.0),), low=math.nan, high=5.0),
        CellNumber("rate", -math.inf, (time_row(variant("None"), linear(), 1.0),)),
    )
    cells = tuple((number_cell(number),) for number in numbers)
    block = Block("", "", Table("variant", ("n_eff",), ("a", "b", "c"), cells))
    head, *lines = csv.reader(io.StringIO(tidy_numbers([], [Section("", "", "", (block,), ())])))
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    shown = [(row["variant"], row.get("n_eff"), row["n_eff_low"], row["n_eff_high"]) for row in rows]
    assert shown == [("ExactLinear", "", "3.0", ""), ("UsualLinear", "4.0", "", "5.0")]
    assert "rate" not in head


def test_a_markdown_table_escapes_all_but_its_verdicts() -> None:
    """Verdicts keep their markup; columns of numbers are right-aligned."""
    text = table(("goal", "time", "verdict"), [("a | <b>", "1.23", NOT_MET), ("b", "n/a", "met")])
    assert "| a \\| \\<b\\> |" in text
    assert "**not met**" in text
    assert re.search(r"\|:-+\|-+:\|:-+\|", text)
