"""Stored runs as a DataFrame: columns, values, files and folders."""

import runpy
from pathlib import Path

import msgspec
import pytest

import esbench
from esbench.errors import UserError
from esbench.schema import Row
from tests import synthetic
from tests.report import report_cases
from tests.synthetic import BASE, DENSE, linear, skipped, time_row, variant
from tests.test_readme_code import program

CASE = linear(128, members=256)
SPARSE = variant("SparsePerturbed", k=2, values="sign")
ROWS: list[Row] = [
    time_row(SPARSE, CASE, *[7.0] * 8, phase="step"),
    time_row(DENSE, CASE, 3, 5),
    time_row(BASE, CASE, 1, 1),
    msgspec.structs.replace(time_row(BASE, CASE, 9, 9), group=1),
    skipped(DENSE, CASE, "out of memory", "step"),
]


def test_a_row_has_one_value_with_its_case_and_scheme(tmp_path: Path) -> None:
    """Times are in ns; base is measured in each group and has one row; a row without value has a reason."""
    run = synthetic.run(ROWS)
    report_cases.store(tmp_path, run)
    frame = esbench.load(tmp_path / "results")
    sparse, dense, base, missing = frame.to_dict("records")
    names = ("operator", "shape", "members", "scheme", "options", "phase")
    values = ["Linear", "(128, 128)", 256, "SparsePerturbed", "k=2, values=sign", "step"]
    assert [sparse[name] for name in names] == values
    assert (sparse["metric"], sparse["unit"], sparse["median"]) == ("latency_ns", "ns", 7e6)
    assert (sparse["run"], sparse["low"], sparse["high"]) == (run.header.run_id, 7e6, 7e6)
    assert (dense["options"], dense["median"], dense["status"]) == ("", 4e6, "measured")
    assert (base["scheme"], base["mode"], base["median"]) == ("Base", "base", 1e6)
    assert (missing["status"], missing["reason"]) == ("unavailable", "out of memory")
    assert len({*frame.columns}) == len(frame.columns)
    odd = time_row(variant("Blocks", block="(2, 2)"), CASE, 1)
    report_cases.store(tmp_path / "odd", synthetic.run([odd]))
    assert list(esbench.load(tmp_path / "odd" / "results")["options"]) == ["block=(2, 2)"]


def test_a_file_and_the_folder_of_a_device_are_read(tmp_path: Path) -> None:
    """All three kinds of paths give the same rows; a path without runs is an error that names it."""
    report_cases.store(tmp_path, synthetic.run(ROWS))
    (file,) = (tmp_path / "results").rglob("*.jsonl")
    whole = esbench.load(tmp_path / "results")
    assert esbench.load(str(file)).equals(whole)
    assert esbench.load(file.parent).equals(whole)
    with pytest.raises(UserError, match=f"no runs in {tmp_path}/absent"):
        esbench.load(tmp_path / "absent")


def test_a_line_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    """The other rows are returned; the warning points to the caller."""
    report_cases.store(tmp_path, synthetic.run(ROWS))
    (file,) = (tmp_path / "results").rglob("*.jsonl")
    file.write_text(file.read_text() + "not JSON\n")
    with pytest.warns(UserWarning, match="this line is left out") as caught:
        assert len(esbench.load(file)) == 4
    assert caught[0].filename == __file__


def test_the_example_of_the_docs_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as it is printed, in a folder with results."""
    report_cases.store(tmp_path, synthetic.run([time_row(SPARSE, linear(256, members=64), 2, 2)]))
    monkeypatch.chdir(tmp_path)
    example = tmp_path / "example.py"
    example.write_text(program("esbench.load"))
    runpy.run_path(str(example))
    assert "SparsePerturbed k=2, values=sign  2000000.0" in capsys.readouterr().out
