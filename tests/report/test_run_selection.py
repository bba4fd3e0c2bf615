"""The runs that a report shows, and the reasons why others are left out."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from esbench.cli import app
from esbench.cli.options import say
from esbench.report.analysis.run_selection import StoredRun
from esbench.report.site import selection
from esbench.report.tables import runs as runs_page
from esbench.schema import Request, Run, RunEnd
from esbench.store import Problem, encode
from tests import synthetic
from tests.report.report_cases import a_run, store

WHOLE = "20260105T000000Z-quick-0005"
COMPLETE = RunEnd(status="complete", wall_s=1.0)


def changed(run_id: str, **fields: object) -> Run:
    """Return a run with some fields of its header or environment, its end or its rows replaced."""
    run = a_run(run_id)
    environment = {name: fields.pop(name) for name in ("dirty", "device_name") if name in fields}
    here = msgspec.structs.replace(run.header.environment, **environment)
    asked = {name: fields.pop(name) for name in ("request", "suite") if name in fields}
    header = msgspec.structs.replace(run.header, environment=here, **asked)
    return msgspec.structs.replace(run, header=header, **fields)


def statuses(folder: Path, device: str | None = None) -> dict[str, StoredRun]:
    """Return the status of each file in a folder by name."""
    found = selection(folder / "results", folder / "reports", device)
    return {one.path.stem: one for one in found.stored}


def test_every_run_has_a_status(tmp_path: Path) -> None:
    """Each page shows one run; other runs have reasons; the page `runs` lists every file."""
    runs: dict[str, tuple[str, dict[str, object]]] = {
        "20260101T000000Z-quick-0001": ("superseded by a newer run", {}),
        WHOLE: ("shown", {}),
        "20260106": ("passed over", {"dirty": True}),
        "20260107": ("passed over", {"request": Request(cases="Linear*")}),
        "20260108": ("passed over", {"end": msgspec.structs.replace(COMPLETE, invalid=("hot",))}),
        "20260109": ("passed over", {"end": None}),
        "20260109b": ("passed over", {"end": RunEnd(status="interrupted", wall_s=1.0)}),
        "20260110": ("without a row", {"rows": ()}),
        "20260111": ("shown", {"device_name": "Test GPU", "dirty": True}),
    }
    for name, (_, fields) in runs.items():
        store(tmp_path, changed(name, **fields))
    folder = tmp_path / "results" / "test-cpu"
    header = encode(synthetic.header())
    (folder / "old.jsonl").write_bytes(header.replace(b'"schema":', b'"schema":9') + b"\n")
    (folder / "bad.jsonl").write_text("{}\n")
    found = statuses(tmp_path)
    expected = {name: status for name, (status, _) in runs.items()}
    expected |= {"old": "of another schema version", "bad": "unreadable"}
    assert {name: one.status for name, one in found.items()} == expected
    assert found["20260111"].reason == "although it was measured with uncommitted changes"
    assert found["20260107"].reason == "it holds part of its suite (cases Linear*)"
    assert found["20260101T000000Z-quick-0001"].reason == WHOLE
    (section,) = runs_page.sections(selection(tmp_path / "results", tmp_path / "reports"))
    page = section.markdown()
    for words in (
        "2 of 11 runs are shown",
        f"superseded by a newer run: {WHOLE}",
        "passed over: it is invalid (hot)",
        "this esbench reads",
        "test-cpu/bad.jsonl",
        "test-gpu/quick, although it was measured with uncommitted changes",
    ):
        assert words in page


def test_a_run_of_uncommitted_code_is_shown_if_there_is_no_other(tmp_path: Path) -> None:
    """It is preferred to an invalid run, but not to an older run of committed code."""
    store(tmp_path, changed("20260107", end=None))
    store(tmp_path, changed("20260106", dirty=True))
    assert statuses(tmp_path)["20260106"].status == "shown"
    store(tmp_path, a_run("20250101"))
    assert statuses(tmp_path)["20260106"].status == "passed over"


def test_the_report_of_one_device(tmp_path: Path) -> None:
    """Each reason is a line on stderr; unreadable files belong to no device; names are those in the runs."""
    for number in range(1, 4):
        store(tmp_path, a_run(f"2026010{number}"))
    store(tmp_path, changed("20260201", device_name="Test GPU"))
    results = tmp_path / "results"
    (results / "test-cpu").rename(results / "copied")
    (results / "copied" / "bad.jsonl").write_text("{}\n")
    assert statuses(tmp_path, "test-gpu")["bad"].status == "unreadable"
    arguments = ["report", "--results", str(results), "--out", str(tmp_path / "reports"), "--format", "csv"]
    result = CliRunner().invoke(app, [*arguments, "--device", "test-cpu"])
    assert "left out, superseded by a newer run: 20260102 and 1 more\n" in result.stderr
    assert "left out, of another device: 20260201\n" in result.stderr
    assert "without its header the file holds no run" in result.stderr
    assert "test-gpu" not in result.stdout
    result = CliRunner().invoke(app, [*arguments, "--device", "copied"])
    assert str(result.exception).endswith("there are: test-cpu, test-gpu")


def test_bad_lines_of_a_file_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A file with several bad lines gets one line: their number, and the error of the first."""
    bad = [Problem(Path("a"), f"no {line}", line) for line in (2, 3, 7)]
    half, other = Problem(Path("a"), "half a line", 9, lost=False), Problem(Path("b"), "no row", 4)
    say([*bad, half, other, Problem(Path("c"), "is empty")])
    assert capsys.readouterr().err.splitlines() == [
        "esbench: a: 3 lines could not be read, the first: line 2: no 2",
        "esbench: a:9: half a line",
        "esbench: b:4: no row",
        "esbench: c: is empty",
    ]
