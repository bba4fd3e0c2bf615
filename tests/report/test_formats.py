"""The bibliography and the tables of numbers that a report writes beside its pages."""

import csv
import math
import re
from pathlib import Path

import msgspec

from esbench.registry import REGISTRY, load
from esbench.report.formats import Style
from esbench.report.formats.csv import times
from esbench.report.formats.latex import cited_keys, references
from esbench.report.formats.markdown import NOT_MET, table
from esbench.report.site import render_reports
from tests import synthetic
from tests.report.report_cases import a_run, store
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant

SMALL = linear(256)
ROUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
WORK = re.compile(r"\d{4}\.\d{4,5}|10\.\d{4,9}/\S+[^\s,;.]|[A-Z]\w+(?:[\w, ]|et al\.)* (?:19|20)\d\d")
"""An arXiv number, a DOI, or authors and a year."""


def test_every_work_that_a_variant_comes_from_is_in_the_bibliography() -> None:
    """Each work that a registered source names is a keyword of an entry with a title."""
    load("impls")
    sources = {entry.source for entry in REGISTRY.entries.values() if entry.package == "impls"}
    named = {work for source in sources for work in WORK.findall(source)}
    keywords = [
        word for words in re.findall(r"keywords = \{(.*)\}", references()) for word in words.split("; ")
    ]
    assert len(named) > 8
    assert {work for work in named if not any(word in work for word in keywords)} == set()
    assert (
        references().count("@") == references().count("\n  title = ") == references().count("keywords = ") > 8
    )


def test_pages_cite_the_works_of_their_variants(tmp_path: Path) -> None:
    """By the sources that the run stores; references.bib has every cited key."""
    other = variant("Other", k=2)
    run = synthetic.run([time_row(DENSE, linear(), 1.0), time_row(other, linear(), 1.0)])
    assert cited_keys([run]) == []
    sources = {"Perturbed": "NESgpu; Wan et al. 2013", "Other(k=2)": "arXiv:2511.16652"}
    run = msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, sources=sources))
    assert cited_keys([run]) == ["nesgpu", "sarkar2025eggroll", "wan2013dropconnect"]
    stored = a_run()
    store(
        tmp_path,
        msgspec.structs.replace(stored, header=msgspec.structs.replace(stored.header, sources=sources)),
    )
    written, problems = render_reports(tmp_path / "results", tmp_path / "out", Style("latex"))
    assert problems == []
    assert {path.name for path in written} == {"tables.tex", "runs.tex", "references.bib"}
    (cite,) = re.findall(r"\\cite\{(.*?)\}", (tmp_path / "out/test-cpu/quick/tables.tex").read_text())
    keys = re.findall(r"^@\w+\{(.*),$", (tmp_path / "out/references.bib").read_text(), re.MULTILINE)
    assert set(cite.split(",")) <= set(keys)


def test_each_time_has_its_statistics_and_multipliers() -> None:
    """Quantiles, interval, bound and multipliers; empty cells without samples, no text without times."""
    dense = synthetic.working(time_row(DENSE, SMALL, *(2 * k for k in ROUNDS)), 1e7, 1e5)
    dense = msgspec.structs.replace(dense, stop="20 rounds", labels=("a", "b"))
    rows = [time_row(BASE, SMALL, *ROUNDS), time_row(NAIVE, SMALL, *(8 * k for k in ROUNDS)), dense]
    run = synthetic.run([*rows, bytes_row(DENSE, SMALL, "peak_bytes", 1)], synthetic.peaks())
    lines = list(csv.DictReader(times(run).splitlines()))
    assert len(lines) == 3
    expected = {
        "variant": "PerturbedLinear",
        "rounds": "6",
        "median": "7000000.0",
        "low": "2000000.0",
        "high": "12000000.0",
        "floor": "1000000.0",
        "stop": "20 rounds",
        "labels": "a; b",
        "naive_by_this": "4.0",
        "this_by_base": "2.0",
        "this_by_base_high": "2.0",
    }
    assert {name: lines[0][name] for name in expected} == expected
    dead = msgspec.structs.replace(time_row(DENSE, SMALL), samples=((), (math.nan,)))
    (line,) = csv.DictReader(times(synthetic.run([dead])).splitlines())
    assert {line[name] for name in ("median", "p20", "low", "floor", "this_by_base")} == {""}
    assert times(synthetic.run([skipped(DENSE, SMALL, "no")])) == ""


def test_a_markdown_table_escapes_all_but_its_verdicts() -> None:
    """Columns of numbers are aligned to the right."""
    text = table(("goal", "time", "verdict"), [("a | <b>", "1.23", NOT_MET), ("b", "n/a", "met")])
    assert "| a \\| \\<b\\> |" in text
    assert "**not met**" in text
    assert re.search(r"\|:-+\|-+:\|:-+\|", text)
