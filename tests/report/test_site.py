"""The folder of reports: its pages, the runs that they show, and errors."""

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
from esbench.report.formats.exporters import FORMATS as EXPORTS
from esbench.report.site import console_tables
from esbench.schema import Request
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import rows
from tests.report.report_cases import ROOT, a_run, readme, render_reports, store
from tests.synthetic import BASE, DENSE, linear, time_row

pytestmark = pytest.mark.xdist_group("site")  # one worker makes what these tests share

WHOLE, PART = "20260101T000000Z-quick-0001", "20270101T000000Z-quick-0002"
FOLDERS = ("test-cpu/quick", "test-cpu/quick-bfloat16", "gpu-1/a-b")
PLOTS = ("conv2d-multipliers", "linear-multipliers", "linear-time-population")
ELSEWHERE = """
import importlib, pkgutil, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'torch', 'impls'}: raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
import esbench.store, esbench.units, esbench.stats
assert not {'pandas', 'matplotlib'} & set(sys.modules)
import matplotlib
from esbench.cli import app
matplotlib.rcParams['font.size'] = 31
def settings(): return [matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend']
before = settings()
for command in sys.argv[1:]:
    app(command.split(), standalone_mode=False)
assert settings() == before
for module in pkgutil.walk_packages(esbench.report.__path__, 'esbench.report.'):
    importlib.import_module(module.name)
assert 'matplotlib.pyplot' not in sys.modules
"""


def report(folder: Path, *options: str) -> list[str]:
    """Return the command that renders the reports of a folder."""
    return ["report", "--results", str(folder / "results"), "--out", str(folder / "reports"), *options]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Render reports of two devices, with an older run, a run in another dtype, and older report files."""
    folder = tmp_path_factory.mktemp("reports")
    readme(folder)
    store(folder, a_run("20250101T000000Z-quick-0000", factor=7.0))
    store(folder, a_run("1", suite="[a](b)", device_name="GPU 1"))
    store(folder, synthetic.changed(a_run(PART, factor=9.0), request=Request(dtype="bfloat16")))
    page = folder / "reports/test-cpu/quick"
    page.mkdir(parents=True)
    for name in ("old.svg", "notes.txt"):
        (page / name).write_text("of an earlier run")
    written, problems = render_reports(folder / "results", folder / "reports")
    assert problems == []
    return folder / "reports", written


def test_each_device_and_suite_has_a_folder(rendered: tuple[Path, list[Path]]) -> None:
    """The newest run of each suite and dtype has tables and plots; published values have a page."""
    out, written = rendered
    kept = out / "test-cpu/quick/notes.txt"
    assert sorted([*written, kept]) == sorted(path for path in out.rglob("*") if path.is_file())
    for folder in FOLDERS:
        names = {path.name for path in written if path.parent == out / folder}
        assert names == {"tables.md", *(f"{stem}.svg" for stem in PLOTS)}, folder
    tables = (out / "test-cpu/quick/tables.md").read_text(encoding="utf-8")
    assert "3.00x" in tables
    assert "7.00x" not in tables
    assert "9.00x" not in tables
    alternative = "Linear, forward: Perturbed takes 3.00x the plain layer&#x27;s time"
    assert f'<img src="linear-multipliers.svg" alt="{alternative}" width="900">' in tables
    assert "9.00x" in (out / "test-cpu/quick-bfloat16/tables.md").read_text(encoding="utf-8")
    assert "GeForce RTX 2070" in (out / "published.md").read_text(encoding="utf-8")
    title = (out / "gpu-1/a-b/tables.md").read_text(encoding="utf-8").splitlines()[0]
    assert title == "# GPU 1: suite \\[a\\](b)"


def test_same_results_same_bytes_without_torch(rendered: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Another process, without torch and with other settings, writes the same bytes in every format.

    It imports pandas only when needed, no pyplot, and keeps matplotlib's settings.
    """
    results = rendered[0].parent / "results"
    (file,) = results.rglob("20250101*.jsonl")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    commands = {
        out: [
            *(f"report --results {results} --out {out}/{form} --format {form}" for form in FORMATS),
            *(f"export {file} --out {out}/to-{form} --format {form}" for form in EXPORTS),
        ]
        for out in (here, there)
    }
    for command in commands[here]:
        if not command.endswith("markdown"):  # that is rendered already
            CliRunner().invoke(app, command.split(), catch_exceptions=False)
    shutil.copytree(rendered[0], here / "markdown", ignore=shutil.ignore_patterns("notes.txt"))
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    program = [sys.executable, "-c", ELSEWHERE, *commands[there]]
    subprocess.run(program, cwd=ROOT, check=True, env=environment, capture_output=True)
    contents, theirs = (
        {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for out in (here, there)
    )
    assert contents == theirs
    assert contents.keys() > {"markdown/test-cpu/history.md", *(f"to-{form}" for form in EXPORTS)}
    for form, suffix, words in (("latex", ".tex", b"\\toprule"), ("csv", ".csv", b"latency_ns")):
        names = {name for name in contents if name.startswith(f"{form}/")}
        pages = {f"{form}/{folder}/tables{suffix}" for folder in FOLDERS} | {f"{form}/published{suffix}"}
        assert names == pages | ({"latex/references.bib"} if form == "latex" else set())
        assert words in contents[f"{form}/test-cpu/quick/tables{suffix}"]


def test_names_in_a_run_do_not_choose_a_path(tmp_path: Path) -> None:
    """Names of suites, operators and devices cannot leave the folder, collide, or be too long for a path."""
    odd = msgspec.structs.replace(linear(), operator="../../Linear")
    long = msgspec.structs.replace(linear(), operator="o" * 300)
    store(tmp_path, synthetic.run([time_row(v, odd, 1.0) for v in (BASE, DENSE)], suite="../../up"))
    for end in ("a", "b"):
        measured = [time_row(v, long, 1.0) for v in (BASE, DENSE)]
        store(tmp_path, synthetic.run(measured, run_id=f"x{end}", suite="s" * 300 + end))
    for file in (tmp_path / "results").rglob("x*.jsonl"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("Test CPU", "d" * 300), encoding="utf-8")
    out = tmp_path / "deep" / "reports"
    written, problems = render_reports(tmp_path / "results", out)
    assert problems == []
    assert all(path.resolve().is_relative_to(out.resolve()) for path in written)
    assert len({path for path in written if path.name == "tables.md"}) == 3
    assert max(len(name) for path in written for name in path.relative_to(tmp_path).parts) <= 84


ODD = ("[]", "[[]]", "[[],[1]]", "[[1e24]]", "[[1e-300]]", "[[1e24],[1e-300]]")
NO_TIMES = (
    *("null", "[[null]]", '[["NaN"]]', "[[NaN]]", "[[1e400]]", "[[-1]]"),
    *("[[0]]", "[[1],[0]]", "[[[1]]]", "[[1e25]]"),
)


def test_odd_samples_are_shown_and_unreadable_ones_are_problems(tmp_path: Path) -> None:
    """Odd samples do not break tables or plots; each row without times is a problem, exit code 1."""
    usual = "[[3000000.0],[6000000.0]]"
    samples = [*ODD, *NO_TIMES]
    cases = [linear(members=2**k) for k in range(len(samples))]
    file = tmp_path / store(
        tmp_path,
        synthetic.run([time_row(v, case, f, 2 * f) for case in cases for v, f in ((BASE, 1), (DENSE, 3))]),
    )
    text = file.read_text(encoding="utf-8")
    for odd in samples:
        text = text.replace(usual, odd, 1)
    assert usual not in text
    file.write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "results/published", tmp_path / "results/published")
    (tmp_path / "results/published/bad.jsonl").write_text("a\n", encoding="utf-8")
    result = CliRunner().invoke(app, report(tmp_path))
    assert result.exit_code == 1
    assert f"{len(NO_TIMES)} lines could not be read" in result.stderr
    assert "bad.jsonl" in result.stderr
    assert " plots in " in result.stdout
    assert result.stdout.count("\n") == 1
    tables = (tmp_path / "reports/test-cpu/quick/tables.md").read_text(encoding="utf-8")
    assert not {"nan", "inf", "None"} & set(tables.replace("|", " ").split())


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    """A folder without a run that has rows is an error; the page says which runs have none."""
    results = tmp_path / "results"
    results.mkdir()
    message = f"no run with rows in {results}:"
    assert str(CliRunner().invoke(app, report(tmp_path)).exception).startswith(message)
    store(tmp_path, synthetic.run([], run_id=WHOLE))
    result = CliRunner().invoke(app, report(tmp_path))
    assert str(result.exception).startswith(message)
    assert f"left out, without a row: {WHOLE}" in result.stderr
    page = (tmp_path / "reports/index.html").read_text(encoding="utf-8")
    assert f"left out, without a row: {WHOLE}" in page
    file = tmp_path / store(tmp_path, a_run(PART))
    file.write_text(file.read_text(encoding="utf-8").replace('"schema":6', '"schema":3'), encoding="utf-8")
    CliRunner().invoke(app, report(tmp_path))
    assert "written with schema version 3" in (tmp_path / "reports/index.html").read_text(encoding="utf-8")


def test_a_folder_of_failures_or_of_one_variant_has_a_page(tmp_path: Path) -> None:
    """Reports are written, with exit code 0; without any number the page refers to the reasons."""
    failed = synthetic.failed(DENSE, linear(), "boom")
    for name, row, words in (
        ("failures", failed, "No variant has a number here"),
        ("one", time_row(DENSE, linear(), 3.0, 3.0), "n_eff was not measured here"),
    ):
        store(tmp_path / name, synthetic.run([row], run_id=WHOLE))
        result = CliRunner().invoke(app, report(tmp_path / name))
        assert (result.exit_code, result.stdout.count("\n"), result.stderr) == (0, 1, "")
        assert words in (tmp_path / name / "reports/index.html").read_text(encoding="utf-8")


def test_intervals_are_shown_on_demand(tmp_path: Path) -> None:
    """With --intervals each number is followed by half the width of its interval."""
    measured = [
        time_row(v, linear(), *(f * ms for ms in (1, 1.1, 1.2, 1, 0.9, 1)))
        for v, f in ((BASE, 1), (DENSE, 3))
    ]
    store(tmp_path, synthetic.run(measured))
    for more, shown in (([], "3.0"), (["--intervals"], r"3.0 \ensuremath{\pm} 0.6")):
        CliRunner().invoke(app, report(tmp_path, "--format", "latex", *more))
        page = (tmp_path / "reports/test-cpu/quick/tables.tex").read_text(encoding="utf-8")
        assert f" & {shown} & 3.0" in page


def test_without_times_the_console_shows_quality() -> None:
    """A run without times has no ranking: its kappas are shown instead."""
    text = console_tables(ranking_cases.run(row for row in rows() if row.phase == "quality"))
    assert "Quality law: " in text
    assert "n_eff per ms" not in text
