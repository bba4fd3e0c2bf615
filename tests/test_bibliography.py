"""The works that variants come from."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.documentation import catalogue
from esbench.registry import REGISTRY, load_installed
from esbench.report.bibliography import bibtex, cited, sources, works, works_in
from esbench.report.formats import Style
from esbench.report.site import render_reports
from esbench.report.works import WORKS
from esbench.store import read_results
from tests import synthetic
from tests.report.report_cases import a_run, store
from tests.synthetic import DENSE, linear, time_row, variant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("NESgpu; Salimans et al. 2017, arXiv:1703.03864", ["nesgpu", "salimans2017es"]),
        ("EGGROLL, arXiv:2511.16652; the form for convolutions is ours", ["sarkar2025eggroll"]),
        ("Srivastava et al. 2014; Werfel, Xie, Seung 2005", ["srivastava2014dropout", "werfel2005learning"]),
        ("ours", []),
        ("torch.compile, with the scheme as it is", []),
        ("Foo et al., arXiv:1234.56789v2", ["arxiv-1234-56789"]),
        ("doi:10.1000/abc.def; more", ["doi-10-1000-abc-def"]),
        ("see https://example.org/a_b, please", ["url-https-example-org-a_b"]),
        ("Müller et al. 1999", ["muller-1999"]),
        ("Bar and Baz 2003; Qux 2004", ["bar-2003", "qux-2004"]),
        ("", []),
    ],
)
def test_words_name_works(words: str, keys: list[str]) -> None:
    """A work is found by its number, its address or its authors; of others there is what the words say."""
    assert [work.key for work in works_in(words)] == keys


def test_a_run_tells_its_sources_and_an_older_one_is_looked_up() -> None:
    """What the header says counts, by variant; where it says nothing the scheme's own words do."""
    other = variant("Other", k=2)
    run = synthetic.run([time_row(DENSE, linear(), 1.0), time_row(other, linear(), 1.0)])
    known = {"Perturbed": "NESgpu", "Other": "arXiv:1803.04386"}
    assert cited(run, known) == ["nesgpu", "wen2018flipout"]
    header = msgspec.structs.replace(run.header, sources={"Perturbed": "arXiv:2511.16652"})
    told = msgspec.structs.replace(run, header=header)
    assert sources(told, known) == {DENSE: "arXiv:2511.16652", other: "arXiv:1803.04386"}
    assert cited(told, {}) == ["sarkar2025eggroll"]


def test_the_committed_runs_have_a_bibliography() -> None:
    """Every work that a scheme of theirs is known to come from, each with a title and where it is found."""
    runs, _ = read_results(ROOT / "results")
    found = works(runs, catalogue())
    assert {work.key for work in found} >= {"nesgpu", "sarkar2025eggroll", "salimans2017es", "wen2018flipout"}
    assert all(work in WORKS for work in found)
    assert all({"title"} <= set(work.fields) for work in WORKS)
    text = bibtex(found)
    assert text.count("@") == len(found)
    assert "eprint = {2511.16652}" in text
    assert "url = {https://arxiv.org/abs/2511.16652}" in text


def test_what_is_read_from_files_is_what_is_registered() -> None:
    """The sources that stand in the packages' text are those of the schemes that they register."""
    load_installed()
    found = catalogue()
    entries = [entry for entry in REGISTRY.entries.values() if entry.package == "impls" and entry.source]
    assert len(entries) > 20
    for entry in entries:
        assert entry.source in found[entry.variant.scheme]


def test_a_package_is_read_without_being_loaded() -> None:
    """The catalogue of schemes needs no torch."""
    script = (
        "import sys\nfrom esbench.documentation import catalogue\nassert 'LowRank' in catalogue()\n"
        "assert not {'torch', 'impls'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@given(st.text() | st.text(alphabet="{}\\%@,\"' 10./arXiv:httpsABab"))
def test_no_words_break_the_bibliography(words: str) -> None:
    """Braces of what BibTeX reads are balanced, and a key is a word."""
    text = bibtex(works_in(f"Foo 2001 {words} arXiv:1234.56789"))
    depth = 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert all(re.fullmatch(r"[\w-]+", key) for key in re.findall(r"^@\w+\{(.*),$", text, re.MULTILINE))


def test_the_bibliography_stands_beside_the_pages(tmp_path: Path) -> None:
    """LaTeX comes with references.bib, in which every key is that the pages cite."""
    store(tmp_path, a_run())
    style = Style("latex", catalogue={"Perturbed": "NESgpu; Wan et al. 2013"})
    written, problems = render_reports(tmp_path / "results", tmp_path / "out", style)
    assert problems == []
    assert {path.name for path in written} == {"tables.tex", "runs.tex", "references.bib"}
    keys = re.findall(r"^@\w+\{(.*),$", (tmp_path / "out/references.bib").read_text(), re.MULTILINE)
    (cite,) = re.findall(r"\\cite\{(.*?)\}", (tmp_path / "out/test-cpu/quick/tables.tex").read_text())
    assert cite.split(",") == keys == ["nesgpu", "wan2013dropconnect"]
