"""The data of the report page: figures can be traced to samples, and foreign text stays text."""

import importlib
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from esbench import units
from esbench.cli.options import load_entries
from esbench.registry import REGISTRY, scheme_docs
from esbench.report.site import all_sections
from esbench.report.tables.table import (
    MEMORY_MULTIPLIER,
    RATE_PER_MS,
    SPEED_MULTIPLIER,
    TIME_MULTIPLIER,
)
from esbench.report.web.data import MAX_TEXT
from esbench.report.web.render import as_json, page, render_page
from esbench.schema import SchemeDoc
from esbench.store import read_run
from tests import synthetic
from tests.report.report_cases import ROOT
from tests.report.web_cases import ALERT, EVIL, NEW, OLD, embedded, evil, figures, parsed, usual

QUICK = ROOT / "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz"
COLUMNS = {TIME_MULTIPLIER: "time", MEMORY_MULTIPLIER: "time", SPEED_MULTIPLIER: "speed"}
"""The name of a table's number -> its place in the page's data."""


def test_figures_are_those_of_the_tables() -> None:
    """The page's data has every time, byte count, multiplier and rate of a committed run, with intervals."""
    run, _ = read_run(QUICK)
    assert run
    shown = {}
    for _, quantity, case, name, figure in figures(embedded(page([run]))):
        place = (case["label"], name, quantity["phase"], quantity["method"], quantity["metric"])
        scale = units.quantity(quantity["metric"]).column.size
        values = [figure.get(end) for end in ("value", "low", "high")]
        shown[*place, ""] = [value and value * scale for value in values]
        for column in ("time", "speed"):
            if column in figure:
                shown[*place, column] = figure[column]
    checked = Counter[str]()
    cells = (
        cell
        for section in all_sections(run)
        for block in section.blocks
        for row in block.table.cells
        for cell in row
    )
    for number in (number for cell in cells for number in cell.numbers):
        if number.trace is None or number.value is None or number.trace.rows[0].phase == "quality":
            continue
        row = number.trace.rows[0]
        metric = "n_eff_per_ms" if number.name == RATE_PER_MS else row.metric
        if number.name in {row.metric, RATE_PER_MS, *COLUMNS}:
            column = COLUMNS.get(number.name, "")
            key = (row.case.label, row.variant.name, row.phase, row.method, metric, column)
            for found, end in zip(shown[key], (number.value, number.low, number.high), strict=False):
                assert end is None or found == pytest.approx(end, rel=1e-6), (key, number)
            checked[number.name] += 1
    assert min(checked[name] for name in ("latency_ns", "peak_bytes", RATE_PER_MS, *COLUMNS)) > 50, checked


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    """The page links to no other file, its policy forbids other scripts, and it has no samples."""
    text = page([usual()])
    tags = parsed(text).tags
    wanted = {"src", "href", "data", "srcset", "action", "poster"}
    assert {attributes[name] for _, attributes in tags for name in wanted & attributes.keys()} == {"#main"}
    (policy,) = [one["content"] for tag, one in tags if one.get("http-equiv")]
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-")
    assert "http" not in text.replace("http-equiv", "")
    first = usual().measurements[-1]
    longer = msgspec.structs.replace(first, samples=tuple((2e6,) for _ in range(1000)))
    run = msgspec.structs.replace(usual(), rows=tuple(longer if r == first else r for r in usual().rows))
    assert abs(len(page([run])) - len(text)) < 100
    (path,) = render_page([usual()], tmp_path)
    assert path.read_bytes() == render_page([usual()], tmp_path / "again")[0].read_bytes()


def test_what_names_carry_stays_text() -> None:
    """Markup in a name, reason or label adds no tag and cannot end the script; long text is cut."""
    text = page([evil(), usual()])
    data = embedded(text)
    assert any(ALERT in one["scheme"] for one in data["variants"])
    assert any(ALERT in figure.get("reason", "") for *_, figure in figures(data))
    assert any(ALERT in figure.get("remark", "") for *_, figure in figures(data))
    assert len(parsed(text).tags) == len(parsed(page([usual()])).tags)
    assert "onerror=" not in {name for _, attributes in parsed(text).tags for name in attributes}
    assert ALERT not in text
    hostile = {"a": [EVIL, "<!--", "&amp;", "\u2029"]}
    escaped = as_json(hostile)
    assert not set("<>&'") & set(escaped)
    assert escaped.isascii()
    assert json.loads(escaped) == hostile
    row = synthetic.skipped(synthetic.DENSE, synthetic.linear(), "x" * 10**6)
    long = embedded(page([synthetic.run([*synthetic.three(synthetic.linear(512)), row])]))
    assert max(len(figure.get("reason", "")) for *_, figure in figures(long)) == MAX_TEXT


def test_figures_without_a_number_have_their_reason() -> None:
    """Skipped rows and rows without samples have reasons; infinite numbers are left out."""
    found = {name: figure for *_, name, figure in figures(embedded(page([evil()])))}
    assert found["Reasoned"]["reason"].startswith("unavailable: </script>")
    assert "without any" in found["Empty"]["reason"]
    reasons = [
        figure["reason"]
        for _, quantity, case, name, figure in figures(embedded(page([usual()])))
        if (name, case["label"], quantity["metric"]) == ("Hadamard", "Linear(512, 512)", "latency_ns")
    ]
    assert reasons == ["unavailable: out of memory: 9 GB"]
    with pytest.raises(ValueError, match="Out of range float"):
        as_json(float("inf"))


def test_runs_of_any_device_and_type_are_shown_together(tmp_path: Path) -> None:
    """Runs are listed newest first; a run without rows is left out, and without any row there is no page."""
    other = usual(OLD, device_name="GPU 1")
    wide = synthetic.run(synthetic.three(synthetic.linear(dtype="bfloat16")), suite="wide", run_id="2025")
    empty = msgspec.structs.replace(usual(OLD), rows=())
    data = embedded(page([wide, usual(), other, empty]))
    assert [run["id"] for run in data["runs"]] == [NEW, OLD, "2025"]
    assert [run["environment"]["device_name"] for run in data["runs"]] == ["Test CPU", "GPU 1", "Test CPU"]
    assert {one["dtype"] for one in data["cases"]} == {"float32", "bfloat16"}
    assert render_page([empty], tmp_path / "out") == []
    assert list(tmp_path.iterdir()) == []


def test_docstrings_of_schemes() -> None:
    """A docstring is split into formula, paragraphs and closed forms, without its markup."""
    data = embedded(page([usual()]))
    assert data["schemes"] == {
        "LowRank": {
            "module": "impls",
            "summary": "E_m = up_m @ down_m / sqrt(rank).",
            "text": [f"Both factors are normal: see Perturbed. {ALERT}"],
            "closed": {"Memory": "n * rank * (o + i) numbers.", "Work": "2 * rank * (o + i) flops."},
            "of": "",
        }
    }
    assert {one["source"] for one in data["variants"] if one["scheme"] == "LowRank"} == {"arXiv:2511.16652"}
    fused = SchemeDoc(module="impls", text=":class:`LowRank` in one kernel.")
    header = msgspec.structs.replace(usual().header, docs={"Fused": fused})
    data = embedded(page([msgspec.structs.replace(usual(), header=header)]))
    assert data["schemes"]["Fused"]["of"] == "LowRank"


def test_every_scheme_states_memory_work_and_quality() -> None:
    """The page has the closed forms of each registered scheme that perturbs."""
    entries = [e for e in load_entries(None, None) if e.package == "impls"]
    header = msgspec.structs.replace(usual().header, docs=scheme_docs(entries))
    schemes = embedded(page([msgspec.structs.replace(usual(), header=header)]))["schemes"]
    workloads = {e.variant.scheme for e in entries if set(e.operators or [""]) <= REGISTRY.reserved}
    perturbing = schemes.keys() - workloads - {"Base", "Naive"}
    assert len(perturbing) > 20
    for name in perturbing:
        assert schemes[name]["closed"].keys() == {"Memory", "Work", "Quality"}, name
        assert getattr(importlib.import_module(schemes[name]["module"]), name)
    assert schemes["FusedLowRank"]["of"] == "LowRank"
