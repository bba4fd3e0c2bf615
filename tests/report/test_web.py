"""The data of the report page: its texts are those of the tables, and foreign text stays text."""

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator

import matplotlib as mpl
import msgspec
import pytest

from esbench.cli.options import load_entries
from esbench.registry import REGISTRY, scheme_docs
from esbench.report.analysis.pivot import grids, operators
from esbench.report.analysis.ranking import rankings
from esbench.report.plots.style import FAMILIES
from esbench.report.tables import measured
from esbench.report.tables.ranking import ranking_section
from esbench.report.web.answers import TASKS, Answer, answer
from esbench.report.web.data import MAX_TEXT
from esbench.report.web.render import as_json, page, read
from esbench.report.web.views import RATE_METRIC, views
from esbench.schema import Row, Run, SchemeDoc, Variant
from esbench.store import read_run
from tests import synthetic
from tests.report import ranking_cases, web_cases
from tests.report.ranking_cases import CORES, HADAMARD, LOW_RANK, SQUARE, orthogonal, quality_row, rows
from tests.report.report_cases import ROOT
from tests.report.web_cases import ALERT, EVIL, NEW, OLD, hostile_run, page_data, page_rows, parsed, usual_run
from tests.synthetic import BASE, DENSE, time_row, variant

QUICK = ROOT / "results/amd-epyc/20261129T074518Z-quick-7192.jsonl.gz"
RANKING = {
    "n_eff / ms": "n_eff / ms",
    "rate, x Perturbed": "x dense noise",
    "time, x base": "x plain layer",
    "n_eff / n (%)": "kept (%)",
    "step (ms)": "step (ms)",
    "peak (MB)": "memory (MB)",
    "kappa": "kappa",
}
"""The heading of a ranking's table -> the column of the page."""
MULTIPLES = {"Time multiplier vs. base": "x plain layer", "Speed multiplier vs. naive": "faster than naive"}


Key = tuple[str, str, str, str, str]
"""Case, variant, phase, metric and column of the page."""


def table_texts(run: Run) -> Iterator[tuple[Key, str]]:
    """Yield the texts of a run's rankings, and of its tables of times, memory and other metrics."""
    for operator in operators(run):
        for ranking in rankings(run, operator):
            for case in ranking.cases:
                (block,) = ranking_section(ranking, case).blocks
                for ranked, texts in zip(ranking.of(case), block.table.texts(), strict=True):
                    for heading, text in zip(block.table.headings, texts, strict=True):
                        column = RANKING.get(heading, "")
                        yield (case.label, ranked.variant.name, "step", RATE_METRIC, column), text
        for grid in grids(run, operator, ""):
            first, *others = measured.section(grid).blocks
            blocks = {first.title[0].lower() + first.title[1:]: first}
            blocks |= {MULTIPLES[block.title]: block for block in others if block.title in MULTIPLES}
            for column, block in blocks.items():
                for shown_variant, texts in zip(grid.variants, block.table.texts(), strict=True):
                    for case, text in zip(grid.cases, texts, strict=True):
                        yield (case.label, shown_variant.name, grid.phase, grid.metric, column), text


def test_texts_are_those_of_the_tables() -> None:
    """Each time, multiple, peak and ranking value of a committed run reads as in its tables."""
    run, _ = read_run(QUICK)
    assert run
    shown = {
        (case["label"], name, quantity["phase"], quantity["metric"], column): text
        for _, quantity, case, name, row in page_rows(page_data(page([run])))
        for column, text in row["texts"].items()
    }
    checked = Counter[str]()
    for key, text in table_texts(run):
        figure = re.sub(r" \[\d+\]$", "", text)  # without its footnote
        if key in shown and re.match(r"exact|more than dense|(at least |about )?-?\d", figure):
            assert shown[key] == figure, key
            checked[key[-1]] += 1
    wanted = {*RANKING.values(), *MULTIPLES.values(), "time (ms)"}
    assert min(checked[column] for column in wanted) > 50, checked


@pytest.mark.xdist_group("committed page")
def test_committed_runs_fit_in_a_megabyte() -> None:
    """The page of the committed runs is at most 1 MB, and every task that they measured has an answer."""
    text = web_cases.committed_page()
    assert len(text) < 1_000_000
    data = page_data(text)
    for answer_data in data["answers"]:
        view = data["views"][answer_data["view"]]
        assert answer_data["best"], data["cases"][view["case"]]["label"]
        roles = {data["variants"][number]["role"] for number in answer_data["best"]}
        assert roles <= {"scheme", "dense"}, answer_data
    assert {case["group"] for case in data["cases"]} >= {task.group for task in TASKS.values()}
    start = data["views"][data["start"]]
    assert data["cases"][start["case"]]["label"] == "Linear(64, 64) members=16384"


def answer_of(measured_rows: list[Row], operator: str = "Linear") -> Answer:
    """Return the answer of a run's only case."""
    return answer(list(views(synthetic.run(measured_rows), operator)), lambda best: f"99 ({best.scheme})")


def test_the_answer_is_the_best_rate() -> None:
    """The best scheme has five values; a fast one that keeps few members is named with how many."""
    result = answer_of(rows())
    assert (result.lead, result.best) == ("Use", (HADAMARD,))
    assert {words: text for text, words in result.picks[0].figures} == {
        "the n_eff per ms of dense noise": "40.0x",
        "the time of the plain layer": "5.00x",
        "of the members kept": "100 %",
        "a step of 1,024 members": "5.00 ms",
        "peak memory": "1.00 MB",
    }
    assert result.notes == (
        "Flipped has the fastest step, 4.00 ms, but keeps only 59.4 of its 1,024 members.",
        "Accuracy on handwritten digits with Hadamard, in % of dense noise's: 99 (Hadamard).",
    )
    more = answer_of(rows(kappas={**ranking_cases.KAPPAS, HADAMARD: -1.0}))
    assert ("100 %", "of the members kept, and more") in more.picks[0].figures


def test_ties_and_exact_estimates_are_named() -> None:
    """A tied variant is recommended as well; after an exact one the best of the others is shown."""
    tied_variant = variant("LowRank", rank=2)
    times = [4.9, 5.0, 5.0, 5.0, 5.0, 5.3]
    tied = [*rows(), *qualities_of(tied_variant), time_row(tied_variant, SQUARE, *times, phase="step")]
    result = answer_of(tied)
    assert set(result.best) == {HADAMARD, tied_variant}
    assert [pick.why for pick in result.picks] == ["", "tied, its 95 % interval overlaps"]
    result = answer_of([*rows(), *orthogonal(SQUARE)])
    assert [best.name for best in result.best] == ["Orthogonal"]
    assert [pick.variant.name for pick in result.picks] == ["Orthogonal", "Hadamard"]
    assert "exact" in dict(result.picks[0].figures)
    result = answer_of([*tied, *orthogonal(SQUARE)])
    (note,) = [note for note in result.notes if note.startswith("Tied with ")]
    assert {"Hadamard", "LowRank(rank=2)"} == set(re.findall(r"Tied with (\S+): (\S+)\. Their", note)[0])


def qualities_of(variant_of_row: Variant) -> list[Row]:
    """Return the quality rows of another variant with independent members."""
    return [quality_row(variant_of_row, SQUARE, "effective_members", "linear fitness", 1024.0, 1024.0)]


def test_a_run_without_a_row_of_a_scheme_says_so() -> None:
    """The answer says so where the other lines of the run's file could not be read."""
    result = answer_of([synthetic.skipped(BASE, SQUARE, "has no update", "update")])
    assert result.lead == "No row of a scheme could be read or was measured"


def test_controls_and_baselines_are_never_recommended() -> None:
    """A control with the best value is named, but another variant is recommended."""
    case = msgspec.structs.replace(SQUARE, operator="SparseMLP", members=1)
    steps = {Variant(scheme="DenseTraining", mode="base", baseline=True): 3.0, variant("Static"): 1.0}
    measured_steps = {**steps, variant("RigL"): 4.0, variant("RigL", by="foreach"): 5.0}
    result = answer_of(
        [time_row(timed, case, *[ms] * 7, phase="step") for timed, ms in measured_steps.items()], "SparseMLP"
    )
    assert (result.lead, result.best) == ("Fastest sparse step:", (variant("RigL"),))
    assert result.notes == (
        "DenseTraining is better than all of them: 3.00 ms a step.",
        "For comparison only: Static.",
    )


def test_without_qualities_the_fastest_is_shown_with_a_warning() -> None:
    """A case without n_eff is answered by time; a run of failures alone has no value."""
    times = ((BASE, 1.0), (DENSE, 9.0), (CORES, 3.0))
    result = answer_of([time_row(v, SQUARE, *[ms] * 7) for v, ms in times])
    assert (result.lead, result.best) == ("Fastest forward:", (CORES,))
    assert ("3.00x", "faster than dense noise") in result.picks[0].figures
    assert "n_eff was not measured" in result.notes[0]
    failed = [synthetic.skipped(v, SQUARE, "out of memory: 9 GB", "forward") for v in (DENSE, LOW_RANK)]
    result = answer_of([*failed])
    assert result.best == ()
    assert result.lead.startswith("No variant has a number here")


def test_the_page_is_one_file_that_loads_no_other() -> None:
    """The page links to no other file and forbids other scripts; the same runs give the same bytes."""
    text = page([usual_run()])
    tags = parsed(text).tags
    wanted = {"src", "href", "data", "srcset", "action", "poster"}
    assert {attributes[name] for _, attributes in tags for name in wanted & attributes.keys()} == {"#main"}
    (policy,) = [meta["content"] for tag, meta in tags if meta.get("http-equiv")]
    digest = r"'sha256-[\w+/=]+'"
    assert re.fullmatch(f"default-src 'none'; style-src {digest}; script-src {digest}", str(policy))
    assert "http" not in text.replace("http-equiv", "")
    assert text == page([usual_run()])


def test_families_have_the_colors_of_the_plots() -> None:
    """In the light theme the color of each family is that of the plots."""
    light = read("style.css").partition("@media")[0]
    for name, style in FAMILIES.items():
        assert (
            f"--{name.removesuffix(' noise').replace(' ', '-')}: {mpl.colors.to_hex(style.color)};" in light
        )
    assert {f'"{name}":' in read("app.js") for name in FAMILIES} == {True}


def test_markup_in_names_stays_text() -> None:
    """Markup in a name, reason or label adds no tag and cannot end the script; long text is cut."""
    text = page([hostile_run(), usual_run()], [EVIL])
    data = page_data(text)
    assert any(ALERT in entry["scheme"] for entry in data["variants"])
    assert any(ALERT in row.get("reason", "") for *_, row in page_rows(data))
    assert any(ALERT in row.get("remark", "") for *_, row in page_rows(data))
    assert len(parsed(text).tags) == len(parsed(page([usual_run()])).tags)
    assert "onerror=" not in {name for _, attributes in parsed(text).tags for name in attributes}
    assert ALERT not in text
    hostile = {"a": [EVIL, "<!--", "&amp;", "\u2029"]}
    escaped = as_json(hostile)
    assert not set("<>&'") & set(escaped)
    assert escaped.isascii()
    assert json.loads(escaped) == hostile
    row = synthetic.skipped(synthetic.DENSE, synthetic.linear(), "x" * 10**6)
    long = page_data(page([synthetic.run([*synthetic.three(synthetic.linear(512)), row])]))
    assert max(len(figure.get("reason", "")) for *_, figure in page_rows(long)) == MAX_TEXT


def test_cells_without_a_number_have_their_reason() -> None:
    """Skipped rows and rows without samples have reasons; infinite numbers are refused."""
    by_name = {name: row for *_, name, row in page_rows(page_data(page([hostile_run()])))}
    assert by_name["Reasoned"]["reason"].startswith("unavailable: </script>")
    assert "without any" in by_name["Empty"]["reason"]
    reasons = [
        row["reason"]
        for _, quantity, case, name, row in page_rows(page_data(page([usual_run()])))
        if (name, case["label"], quantity["metric"]) == ("Hadamard", "Linear(512, 512)", "latency_ns")
    ]
    assert reasons == ["unavailable: out of memory: 9 GB"]
    with pytest.raises(ValueError, match="Out of range float"):
        as_json(float("inf"))


def test_runs_of_any_device_and_dtype_are_shown_together() -> None:
    """Runs are listed newest first; a run without rows is left out."""
    older = usual_run(OLD, device_name="GPU 1")
    wide = synthetic.run(synthetic.three(synthetic.linear(dtype="bfloat16")), suite="wide", run_id="2025")
    empty = msgspec.structs.replace(usual_run(OLD), rows=())
    data = page_data(page([wide, usual_run(), older, empty]))
    assert [run["id"] for run in data["runs"]] == [NEW, OLD, "2025"]
    assert [run["device"] for run in data["runs"]] == ["Test CPU", "GPU 1", "Test CPU"]
    assert {case["dtype"] for case in data["cases"]} == {"float32", "bfloat16"}


def test_docstrings_of_schemes() -> None:
    """A docstring is split into formula, paragraphs and closed forms, without its markup."""
    data = page_data(page([usual_run()]))
    assert data["schemes"] == {
        "LowRank": {
            "module": "impls",
            "summary": "E_m = up_m @ down_m / sqrt(rank).",
            "text": [f"Both factors are normal: see Perturbed. {ALERT}"],
            "closed": {"Memory": "n * rank * (o + i) numbers.", "Work": "2 * rank * (o + i) flops."},
            "of": "",
        }
    }
    assert {entry["source"] for entry in data["variants"] if entry["scheme"] == "LowRank"} == {
        "arXiv:2511.16652"
    }
    fused = SchemeDoc(module="impls", text=":class:`LowRank` in one kernel.")
    assert (
        page_data(page([synthetic.changed(usual_run(), docs={"Fused": fused})]))["schemes"]["Fused"]["of"]
        == "LowRank"
    )


def test_every_scheme_states_memory_work_and_quality() -> None:
    """The page has the closed forms of each registered scheme that perturbs."""
    entries = [e for e in load_entries(None, None) if e.package == "impls"]
    schemes = page_data(page([synthetic.changed(usual_run(), docs=scheme_docs(entries))]))["schemes"]
    workloads = {e.variant.scheme for e in entries if set(e.operators or [""]) <= REGISTRY.reserved}
    perturbing = schemes.keys() - workloads - {"Base", "Naive"}
    assert len(perturbing) > 20
    for name in perturbing:
        assert schemes[name]["closed"].keys() == {"Memory", "Work", "Quality"}, name
        assert getattr(importlib.import_module(schemes[name]["module"]), name)
    assert schemes["FusedLowRank"]["of"] == "LowRank"
