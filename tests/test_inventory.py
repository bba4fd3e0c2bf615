"""Which runs a report is made of, and why others are left out."""

import os
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from esbench.cli import app
from esbench.cli.options import say
from esbench.report import runs_page
from esbench.report.analysis import run_selection as module
from esbench.report.analysis.run_selection import Stored
from esbench.report.site import inventory, render_reports
from esbench.schema import Request, Run, RunEnd
from esbench.store import Problem, encode
from tests import synthetic
from tests.report_cases import a_run, store
from tests.synthetic import BASE, DENSE, linear, time_row

WHOLE = "20260105T000000Z-quick-0005"


def changed(run_id: str, **fields: object) -> Run:
    """A run of which the header's or the environment's fields, its end or its rows are others."""
    run = a_run(run_id)
    environment = {name: fields.pop(name) for name in ("dirty", "device_name") if name in fields}
    here = msgspec.structs.replace(run.header.environment, **environment)
    asked = {name: fields.pop(name) for name in ("request", "suite") if name in fields}
    header = msgspec.structs.replace(run.header, environment=here, **asked)
    return msgspec.structs.replace(run, header=header, **fields)


def fates(folder: Path, device: str | None = None) -> dict[str, Stored]:
    """What became of the files of a folder, by their names."""
    found = inventory(folder / "results", folder / "reports", device)
    return {one.path.stem: one for one in found.stored}


def test_every_run_says_what_became_of_it(tmp_path: Path) -> None:
    """One run of a page is shown; each of the others has its reason, and each file is in the page `runs`."""
    end = RunEnd(status="complete", wall_s=1.0)
    runs = {
        "20260101T000000Z-quick-0001": ("superseded by a newer run", a_run("20260101T000000Z-quick-0001")),
        WHOLE: ("shown", a_run(WHOLE)),
        "20260106": ("of uncommitted changes", changed("20260106", dirty=True)),
        "20260107": ("not of the whole suite", changed("20260107", request=Request(cases="Linear*"))),
        "20260108": ("invalid", changed("20260108", end=msgspec.structs.replace(end, invalid=("hot",)))),
        "20260109": ("cut off", changed("20260109", end=None)),
        "20260110": ("without a row", changed("20260110", rows=())),
        "20260111": ("shown", changed("20260111", device_name="Test GPU", dirty=True)),
    }
    for _, run in runs.values():
        store(tmp_path, run)
    folder = tmp_path / "results" / "test-cpu"
    (folder / "old.jsonl").write_bytes(
        encode(synthetic.header()).replace(b'"schema":5', b'"schema":9') + b"\n"
    )
    (folder / "bad.jsonl").write_text("{}\n")
    found = fates(tmp_path)
    expected = {name: fate for name, (fate, _) in runs.items()}
    expected |= {"old": "of another schema version", "bad": "unreadable"}
    assert {name: one.fate for name, one in found.items()} == expected
    assert found["20260111"].why == "although it was measured with uncommitted changes"
    render_reports(tmp_path / "results", tmp_path / "reports")
    page = (tmp_path / "reports" / "runs.md").read_text(encoding="utf-8")
    for words in (
        "2 of 10 runs are shown",
        f"superseded by a newer run: {WHOLE}",
        "not of the whole suite: it holds part of its suite (cases Linear\\*)",
        "invalid: it is invalid (hot)",
        "written with schema version 9, this esbench reads 1 to 5",
        "test-cpu/bad.jsonl",
        "test-gpu/quick, although it was measured with uncommitted changes",
    ):
        assert words in page
    assert "9.00x" not in (tmp_path / "reports/test-cpu/quick/tables.md").read_text(encoding="utf-8")


def test_a_dirty_run_is_shown_where_there_is_no_other(tmp_path: Path) -> None:
    """It is better than one that is invalid, and gives way to one of committed code, however old."""
    store(tmp_path, changed("20260107", end=None))
    store(tmp_path, changed("20260106", dirty=True))
    assert fates(tmp_path)["20260106"].fate == "shown"
    store(tmp_path, a_run("20250101"))
    assert fates(tmp_path)["20260106"].fate == "of uncommitted changes"


def test_the_command_says_each_reason_once(tmp_path: Path) -> None:
    """A line for each reason on stderr, with the first run and how many more; --device leaves others out."""
    for number in range(1, 5):
        store(tmp_path, a_run(f"2026010{number}"))
    store(tmp_path, changed("20260201", device_name="Test GPU"))
    arguments = ["report", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "reports")]
    result = CliRunner().invoke(app, [*arguments, "--format", "csv"])
    assert result.exit_code == 0
    assert "left out, superseded by a newer run: 20260101 and 2 more\n" in result.stderr
    result = CliRunner().invoke(app, [*arguments, "--format", "csv", "--device", "test-cpu"])
    assert "left out, of another device: 20260201\n" in result.stderr
    assert "test-gpu" not in result.stdout
    result = CliRunner().invoke(app, [*arguments, "--device", "nowhere"])
    assert "no device 'nowhere' has runs" in str(result.exception)
    assert str(result.exception).endswith("there are: test-cpu, test-gpu")


def test_a_device_has_the_name_that_its_runs_say(tmp_path: Path) -> None:
    """--device takes a name for reports and pictures alike, wherever somebody put the files of its runs."""
    store(tmp_path, a_run(WHOLE))
    results = tmp_path / "results"
    (results / "test-cpu").rename(results / "copied")
    out = ["--out", str(tmp_path / "reports")]
    plotted = ["plot", "multipliers", "--out", str(tmp_path / "a.svg")]
    for command in (["report", "--format", "csv", *out], plotted):
        arguments = [*command, "--results", str(results), "--device"]
        assert CliRunner().invoke(app, [*arguments, "test-cpu"]).exit_code == 0
        refused = CliRunner().invoke(app, [*arguments, "copied"])
        assert str(refused.exception) == f"no device 'copied' has runs in {results}; there are: test-cpu"


def test_what_cannot_be_read_is_of_no_other_device(tmp_path: Path) -> None:
    """A file without a header is unreadable, with its reason, whichever device was asked for."""
    store(tmp_path, a_run(WHOLE))
    bad = tmp_path / "results" / "other" / "bad.jsonl"
    bad.parent.mkdir()
    bad.write_text("{}\n")
    found = fates(tmp_path, "test-cpu")["bad"]
    assert found.fate == "unreadable"
    assert "without its header the file holds no run" in found.why


def test_bad_lines_of_a_file_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file with several bad lines one line says how many there are and what is wrong with the first."""
    bad = [Problem(Path("a"), f"no {line}", line, "x") for line in (2, 3, 7)]
    half, other = Problem(Path("a"), "half a line", 9, lost=False), Problem(Path("b"), "no row", 4)
    say([*bad, half, other, Problem(Path("c"), "is empty")])
    assert capsys.readouterr().err.splitlines() == [
        "esbench: a: 3 lines could not be read, the first: line 2: field x: no 2",
        "esbench: a:9: half a line",
        "esbench: b:4: no row",
        "esbench: c: is empty",
    ]


def test_lines_that_cannot_be_read_are_said_of_a_run_that_is_shown(tmp_path: Path) -> None:
    """The rest of such a run is shown, and how many of its lines are missing."""
    file = tmp_path / store(tmp_path, a_run(WHOLE))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:4], b"{\n", *lines[4:]]))
    one = fates(tmp_path)[WHOLE]
    assert one.fate == "shown"
    assert one.why.startswith("although it lacks 1 of its lines, the first: line 5: no valid JSON")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only three runs of each device are read whole."""
    monkeypatch.setattr(module, "READ", 3)


@pytest.mark.usefixtures("few")
def test_of_many_runs_only_those_that_are_needed_are_read(tmp_path: Path) -> None:
    """The newest ones, and of each page the one that it shows: the rest by first line and last."""
    for number in range(1, 8):
        store(tmp_path, changed(f"2026010{number}", request=Request(cases="L*") if number > 2 else None))
    store(tmp_path, changed("20250101", suite="other"))
    found = fates(tmp_path)
    assert {name for name, one in found.items() if one.is_whole} == {
        *("20260105", "20260106", "20260107"),
        "20260102",  # of the page quick, the newest of the whole suite
        "20250101",
    }
    assert {name for name, one in found.items() if one.fate == "shown"} == {"20260102", "20250101"}
    assert found["20260101"].why == "20260102; only its header and its end were read"


@pytest.mark.usefixtures("few")
def test_the_page_counts_the_runs_that_were_not_read(tmp_path: Path) -> None:
    """The page for a browser says how many runs there are in all, and that only the newest were read."""
    for number in range(1, 6):
        store(tmp_path, a_run(f"2026010{number}"))
    render_reports(tmp_path / "results", tmp_path / "reports")
    page = (tmp_path / "reports" / "index.html").read_text(encoding="utf-8")
    assert "3 of 5 runs are in this page; 2 were not read: of a device with very many runs only" in page
    assert "the newest 3 are" in page
    runs = (tmp_path / "reports" / "runs.md").read_text(encoding="utf-8")
    assert "those of a device's history, and the 2 that were not read in none" in runs


@pytest.mark.usefixtures("few")
def test_what_turns_out_to_be_empty_gives_way(tmp_path: Path) -> None:
    """Of runs that were not read whole, one without a row is not shown: the next one is, with its figures."""
    store(tmp_path, a_run("20250101"))
    store(tmp_path, changed("20250102", rows=()))
    for number in range(1, 5):
        store(tmp_path, changed(f"2026010{number}", suite="other"))
    found = fates(tmp_path)
    assert (found["20250102"].fate, found["20250101"].fate) == ("without a row", "shown")
    written, _ = render_reports(tmp_path / "results", tmp_path / "reports")
    assert tmp_path / "reports/test-cpu/quick/tables.md" in written


def test_ten_thousand_runs_are_rendered_like_a_hundred(tmp_path: Path) -> None:
    """A folder of many runs is thinned: its pages take seconds, and every file is accounted for."""
    store(tmp_path, a_run(WHOLE))
    folder = tmp_path / "results" / "test-cpu"
    rows = [time_row(v, linear(), f, 2 * f) for v, f in ((BASE, 1), (DENSE, 3))]
    end = RunEnd(status="complete", wall_s=1.0)
    text = b"\n".join([encode(synthetic.header()), *map(encode, rows), encode(end), b""])
    count = int(os.environ.get("ESBENCH_TEST_RUNS", "1000"))
    for number in range(count):
        name = f"2024{number:05d}"
        (folder / f"{name}.jsonl").write_bytes(text.replace(b"20260101T000000Z-quick-0001", name.encode()))
    start = time.monotonic()
    found = inventory(tmp_path / "results", tmp_path / "reports")
    assert time.monotonic() - start < 60
    assert len(found.stored) == count + 1
    assert len(found.runs) == module.READ
    (section,) = runs_page.sections(found)
    assert len(section.blocks[1].table.labels) == runs_page.LISTED
    assert f"{count - runs_page.LISTED} more are not listed" in section.blocks[1].note
    assert found.summary() == [f"left out, superseded by a newer run: 202400000 and {count - 1} more"]
