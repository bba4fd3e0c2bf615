"""The folder of reports: its pages, and which run each of them shows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from esbench.cli import app
from esbench.report.formats import FORMATS
from esbench.report.site import render_reports
from esbench.schema import Request, Run, RunEnd
from esbench.store import Writer
from tests import synthetic
from tests.report.report_cases import ROOT, a_run, readme, store
from tests.synthetic import BASE, DENSE, linear, time_row


def odd_run(folder: Path, samples: str) -> int:
    """Store a run in which the times of a variant are this text; return in how many rows."""
    usual = "[[3000000.0],[6000000.0]]"
    cases = [linear(members=n) for n in (64, 128, 256)]
    rows = [time_row(v, case, f, 2 * f) for case in cases for v, f in ((BASE, 1), (DENSE, 3))]
    file = folder / store(folder, synthetic.run(rows))
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(usual, samples), encoding="utf-8")
    return text.count(usual)


def test_reports_have_a_folder_for_each_device_and_suite(tmp_path: Path) -> None:
    """The newest run of each suite has its tables and plots, and published figures have a page."""
    readme(tmp_path)
    store(tmp_path, a_run("20250101T000000Z-quick-0000", factor=7.0))
    store(tmp_path, a_run("1", suite="readme", device_name="GPU 1"))
    out = tmp_path / "reports"
    written, problems = render_reports(tmp_path / "results", out)
    assert problems == []
    assert sorted(written) == sorted(path for path in out.rglob("*") if path.is_file())
    plots = ["conv2d-multipliers", "linear-multipliers", "linear-time-population"]
    for folder in ("test-cpu/quick", "gpu-1/readme"):
        names = {str(path.relative_to(out / folder)) for path in written if path.is_relative_to(out / folder)}
        assert names == {"tables.md", "times.csv", *(f"{stem}.svg" for stem in plots)}
    tables = (out / "test-cpu/quick/tables.md").read_text(encoding="utf-8")
    assert "3.00x" in tables
    assert "7.00x" not in tables
    alternative = "Linear: forward time against the plain layer"
    assert f'<img src="linear-multipliers.svg" alt="{alternative}" width="900">' in tables
    assert "GeForce RTX 2070" in (out / "published.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", FORMATS)
def test_same_results_same_bytes(tmp_path: Path, form: str) -> None:
    """Rendered twice from one folder, in two processes without torch, the reports are equal to the byte."""
    readme(tmp_path)
    script = (
        "import sys\n"
        "class NoTorch:\n"  # a finder that finds nothing else, and lets nobody find torch
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'torch', 'impls'}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from esbench.cli import app\n"
        "app(sys.argv[1:])\n"
    )
    contents = []
    for seed, name in enumerate(("a", "b")):
        paths = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / name)]
        command = [sys.executable, "-c", script, "report", *paths, "--format", form]
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([(path.relative_to(tmp_path / name), path.read_bytes()) for path in files])
    assert contents[0]
    assert contents[0] == contents[1]


def test_pictures_of_an_earlier_run_go(tmp_path: Path) -> None:
    """A figure that the newest run lacks is removed, also its twin in another format; other files stay."""
    with Writer(tmp_path / "results", synthetic.header()) as writer:
        for row in synthetic.three(synthetic.linear()):
            writer.write(row)
    written, _ = render_reports(tmp_path / "results", tmp_path / "reports")
    folder = next(path.parent for path in written if path.suffix == ".svg")
    for name in ("old.svg", "linear-multipliers.png"):
        (folder / name).write_text("of an earlier run")
    (folder / "notes.txt").write_text("mine")
    again, _ = render_reports(tmp_path / "results", tmp_path / "reports")
    assert again == written
    assert not (folder / "old.svg").exists()
    assert not (folder / "linear-multipliers.png").exists()
    assert (folder / "notes.txt").exists()


def test_foreign_run_chooses_no_path(tmp_path: Path) -> None:
    """A suite and an operator from a foreign file cannot make reports leave their folder."""
    odd = msgspec.structs.replace(linear(), operator="../../Linear")
    run = synthetic.run([time_row(BASE, odd, 1.0), time_row(DENSE, odd, 2.0)], run_id="x", suite="../../up")
    store(tmp_path, run)
    out = tmp_path / "deep" / "reports"
    written, _ = render_reports(tmp_path / "results", out)
    assert written
    assert all(path.resolve().is_relative_to(out.resolve()) for path in written)


def test_run_without_rows_hides_nothing(tmp_path: Path) -> None:
    """A newer run that was killed before its first row does not take the place of the last one."""
    store(tmp_path, a_run())
    store(tmp_path, msgspec.structs.replace(a_run("20270101T000000Z-quick-0002"), rows=(), end=None))
    render_reports(tmp_path / "results", tmp_path)
    assert "3.00x" in (tmp_path / "test-cpu/quick/tables.md").read_text(encoding="utf-8")


WHOLE, PART = "20260101T000000Z-quick-0001", "20270101T000000Z-quick-0002"


def flawed(flaw: str) -> Run:
    """A newer run that must not take the place of a whole one."""
    run = a_run(PART, factor=9.0)
    end = RunEnd(status="interrupted" if flaw == "was interrupted" else "complete", wall_s=1.0)
    if flaw.startswith("is invalid"):
        end = msgspec.structs.replace(end, invalid=("throttled",))
    asked = Request(variants=("Base",)) if flaw.startswith("holds part") else Request()
    header = msgspec.structs.replace(run.header, request=asked)
    return msgspec.structs.replace(run, header=header, end=None if flaw == "has no end" else end)


@pytest.mark.parametrize(
    "flaw",
    [
        "was interrupted",
        "has no end",
        "is invalid (throttled)",
        "holds part of its suite (variants Base)",
    ],
)
def test_flawed_run_hides_no_whole_one(tmp_path: Path, flaw: str) -> None:
    """A newer run that is unfinished, invalid or partial is passed over and said, unless it is alone."""
    out = tmp_path / "reports"
    store(tmp_path, flawed(flaw))
    assert render_reports(tmp_path / "results", out)[1] == []
    assert "9.00x" in (out / "test-cpu/quick/tables.md").read_text(encoding="utf-8")
    store(tmp_path, a_run(WHOLE))
    _, (problem,) = render_reports(tmp_path / "results", out)
    assert "3.00x" in (out / "test-cpu/quick/tables.md").read_text(encoding="utf-8")
    assert str(problem) == (
        f"{out / 'test-cpu/quick'}: shows run {WHOLE}: the newer {PART} was passed over, it {flaw}"
    )
    assert not problem.lost


def test_another_number_format_has_a_page_of_its_own(tmp_path: Path) -> None:
    """A run in a type that was asked for neither hides the suite's own nor is hidden by it."""
    store(tmp_path, a_run(WHOLE))
    run = a_run(PART, factor=9.0)
    header = msgspec.structs.replace(run.header, request=Request(dtype="bfloat16"))
    store(tmp_path, msgspec.structs.replace(run, header=header))
    assert render_reports(tmp_path / "results", tmp_path)[1] == []
    for page, shown in (("quick", "3.00x"), ("quick-bfloat16", "9.00x")):
        assert shown in (tmp_path / "test-cpu" / page / "tables.md").read_text(encoding="utf-8")


def test_long_names_are_cut(tmp_path: Path) -> None:
    """Names of foreign devices, suites and operators end in names that a file system takes, still apart."""
    for end in ("a", "b"):
        run = synthetic.run(
            [time_row(v, msgspec.structs.replace(linear(), operator="o" * 300), 1.0) for v in (BASE, DENSE)],
            run_id=f"x{end}",
            suite="s" * 300 + end,
        )
        store(tmp_path, run)
    file = next((tmp_path / "results").rglob("*.jsonl"))
    text = file.read_text(encoding="utf-8").replace("Test CPU", "d" * 300)
    file.write_text(text, encoding="utf-8")
    written, problems = render_reports(tmp_path / "results", tmp_path / "reports")
    assert problems == []
    assert len({path for path in written if path.name == "tables.md"}) == 2
    assert max(len(part) for path in written for part in path.relative_to(tmp_path).parts) <= 84


def test_a_run_without_times_has_no_file_of_them(tmp_path: Path) -> None:
    """No empty times.csv is written, and one that an earlier run left is removed."""
    store(tmp_path, synthetic.run([synthetic.bytes_row(BASE, linear(), "peak_bytes", 7)]))
    old = tmp_path / "reports/test-cpu/quick/times.csv"
    old.parent.mkdir(parents=True)
    old.touch()
    written, _ = render_reports(tmp_path / "results", tmp_path / "reports")
    assert {path.name for path in written} == {"index.html", "tables.md", "runs.md"}
    assert not old.exists()


def test_titles_of_pages_are_words(tmp_path: Path) -> None:
    """The heading of a page holds no live link of a foreign suite."""
    store(tmp_path, synthetic.run(synthetic.three(linear()), suite="[a](b)", run_id="x"))
    render_reports(tmp_path / "results", tmp_path / "reports")
    (page,) = (tmp_path / "reports").rglob("tables.md")
    assert page.read_text(encoding="utf-8").startswith("# Test CPU: suite \\[a\\](b)\n")


def test_what_cannot_be_read_is_exit_code_1(tmp_path: Path) -> None:
    """The command renders the rest, says the line, and ends with 1; a run passed over alone is no failure."""
    odd_run(tmp_path, "[[NaN]]")
    arguments = ["report", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "reports")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "no valid JSON" in result.stderr
    assert "tables.md" in result.stdout
    shutil.rmtree(tmp_path / "results")
    for run in (a_run(WHOLE), flawed("has no end")):
        store(tmp_path, run)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "was passed over" in result.stderr


def test_no_runs_is_said_only_where_there_are_none(tmp_path: Path) -> None:
    """Runs without a row, or that cannot be read, are not called none."""
    results = tmp_path / "results"
    results.mkdir()
    arguments = ["report", "--results", str(results), "--out", str(tmp_path / "reports")]
    assert str(CliRunner().invoke(app, arguments).exception).startswith(f"no runs in {results}:")
    store(tmp_path, synthetic.run([]))
    result = CliRunner().invoke(app, arguments)
    assert str(result.exception).startswith(f"no run with rows in {results}:")
    assert "holds no row" in result.stderr


def test_problems_are_handed_on(tmp_path: Path) -> None:
    """What could not be read in measured and published files is reported, and the rest is rendered."""
    readme(tmp_path)
    (tmp_path / "results/test-cpu/bad.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "results/published/bad.csv").write_text("a\n", encoding="utf-8")
    written, problems = render_reports(tmp_path / "results", tmp_path / "reports")
    assert {problem.path.name for problem in problems} == {"bad.jsonl", "bad.csv"}
    assert tmp_path / "reports/test-cpu/quick/tables.md" in written


@pytest.mark.parametrize("samples", ["[]", "[[]]", "[[],[1]]", "[[1e24]]", "[[1e-300]]", "[[1e24],[1e-300]]"])
def test_odd_samples_end_in_a_labelled_cell(tmp_path: Path, samples: str) -> None:
    """Samples that no clock reads are rendered: as a number or as none, and break no picture."""
    assert odd_run(tmp_path, samples) == 3
    written, problems = render_reports(tmp_path / "results", tmp_path / "reports")
    assert problems == []
    assert any(path.suffix == ".svg" for path in written)
    tables = (tmp_path / "reports/test-cpu/quick/tables.md").read_text(encoding="utf-8")
    assert not {"nan", "inf", "None"} & set(tables.replace("|", " ").split())


@pytest.mark.parametrize(
    "samples",
    [
        "null",
        "[[null]]",
        '[["NaN"]]',
        "[[NaN]]",
        "[[1e400]]",
        "[[-1]]",
        "[[0]]",
        "[[1],[0]]",
        "[[[1]]]",
        "[[1e25]]",
    ],
)
def test_samples_that_are_no_times_are_one_line(tmp_path: Path, samples: str) -> None:
    """Rows whose samples are no times are a problem for each line, and the rest is rendered."""
    odd_run(tmp_path, samples)
    written, problems = render_reports(tmp_path / "results", tmp_path / "reports")
    assert len(problems) == 3
    assert all("\n" not in str(problem) and problem.line for problem in problems)
    assert any(path.name == "tables.md" for path in written)


def test_reading_loads_no_torch() -> None:
    """Reading, rendering and printing a run work without torch, and light parts without pandas."""
    script = (
        "import importlib, pkgutil, sys\n"
        "import esbench.store, esbench.units, esbench.stats\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "import esbench.report\n"
        "found = list(pkgutil.walk_packages(esbench.report.__path__, 'esbench.report.'))\n"
        "assert len(found) > 50\n"
        "for module in found: importlib.import_module(module.name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_another_format_has_the_tables(tmp_path: Path) -> None:
    """Each format has a file for each page of tables; one that there is not ends in one line."""
    readme(tmp_path)
    arguments = ["report", "--results", str(tmp_path / "results"), "--out"]
    for form, suffix, words in (
        ("latex", ".tex", "\\toprule"),
        ("html", ".html", "<caption>"),
        ("csv", ".csv", "latency_ns"),
    ):
        out = tmp_path / form
        result = CliRunner().invoke(app, [*arguments, str(out), "--format", form])
        assert result.exit_code == 0
        names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        pages = {f"{name}{suffix}" for name in ("test-cpu/quick/tables", "runs", "published")}
        assert names == pages | ({"references.bib"} if form == "latex" else set())
        assert words in (out / f"test-cpu/quick/tables{suffix}").read_text(encoding="utf-8")
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "word"), "--format", "word"])
    assert str(result.exception) == "no format 'word'; there are: markdown, latex, csv, html"


def test_intervals_stand_in_tables_on_demand(tmp_path: Path) -> None:
    """With --intervals a number stands with half the width of its interval, and without it alone."""
    rows = [
        time_row(v, linear(), *(f * ms for ms in (1, 1.1, 1.2, 1, 0.9, 1)))
        for v, f in ((BASE, 1), (DENSE, 3))
    ]
    store(tmp_path, synthetic.run(rows))
    arguments = ["report", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    for more, shown in (([], "3.0"), (["--intervals"], "3.0 ± 0.6")):
        CliRunner().invoke(app, [*arguments, *more])
        page = (tmp_path / "out/test-cpu/quick/tables.md").read_text(encoding="utf-8")
        assert shown in [cell.strip() for cell in page.split("|")]
