"""Runs exported for other tools: the exported values, and the rows that are left out."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esbench.report.formats.exporters import FORMATS, export, unit
from esbench.schema import Row, Run, RunEnd
from esbench.store import encode
from tests import synthetic
from tests.cli.cli_runner import refusal
from tests.cli.cli_runner import run as command
from tests.report.golden_tables import exported
from tests.report.report_cases import a_run
from tests.synthetic import BASE, DENSE, NAIVE, linear, time_row

CASE = linear(128, members=256)


def benchmarks(run: Run) -> list[dict[str, Any]]:
    """Return the benchmarks that pytest-benchmark would read."""
    exported_rows: list[dict[str, Any]] = json.loads(export(run, "pytest-benchmark").text)["benchmarks"]
    return exported_rows


def test_pytest_benchmark_has_groups_names_and_other_metrics() -> None:
    """Methods and metrics are groups; bytes, launches and labels are extra values."""
    run = exported()
    document = json.loads(export(run, "pytest-benchmark").text)
    assert document["datetime"] == run.header.started
    assert (document["commit_info"]["id"], document["commit_info"]["dirty"]) == ("0123456789abcdef", False)
    first, *_ = exported_rows = document["benchmarks"]
    assert first["name"] == "forward[PerturbedLinear-Linear(128, 128) members=256-latency_ns-eager]"
    assert all(benchmark["name"].isprintable() for benchmark in exported_rows)
    eager = [row for row in exported_rows if row["group"].endswith("forward, latency_ns (eager)")]
    assert [benchmark["params"]["variant"] for benchmark in eager] == ["PerturbedLinear", "Base"]
    assert (first["stats"]["data"], first["stats"]["median"]) == ([0.001, 0.003], 0.002)
    extra = first["extra_info"]
    assert (extra["peak_bytes"], extra["launches"], extra["rounds"]) == (4096.0, 3.0, 2)
    assert extra["labels"] == ["INVALID: other processes", "dispatch-bound"]


def test_a_variant_that_failed_has_no_time() -> None:
    """A variant that fails after it was measured has only a reason; failures elsewhere do not matter."""
    measured: list[Row] = [time_row(DENSE, CASE, 7, 7), time_row(BASE, CASE, 1, 1)]
    wrong = synthetic.failed(DENSE, CASE, "wrong result: wrong", "forward")
    for form in FORMATS:
        for phase in ("forward", None):
            failure = msgspec.structs.replace(wrong, phase=phase)
            text, summary = export(synthetic.run([*measured, failure]), form)
            assert "7000000" not in text
            assert "0.007" not in text
            assert summary.endswith("withheld: 1 of variants that failed")
    fields: tuple[dict[str, object], ...] = ({"phase": "step"}, {"case": linear(512)}, {"method": "graph"})
    elsewhere = [msgspec.structs.replace(wrong, **changes) for changes in fields]
    assert len(benchmarks(synthetic.run([*measured, *elsewhere]))) == 2


def stored(run: Run, path: Path) -> Path:
    """Write a run's file."""
    records = [run.header, *run.rows, *([run.end] if run.end else [])]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


def test_pytest_benchmark_reads_exported_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest-benchmark groups the rows of a run, and compares two runs."""
    run = a_run()
    times = sum(unit(row.metric) == "ns" for row in run.measurements)
    assert export(run, "csv").text.count("\n") == len(run.rows) + 1
    fewer = msgspec.structs.replace(run, rows=tuple(row for row in run.rows if row.variant != NAIVE))
    files = [tmp_path / "all.json", tmp_path / "fewer.json"]
    for exported_run, file in zip((run, fewer), files, strict=True):
        out = ("--format", "pytest-benchmark", "--out", str(file))
        assert command("export", str(stored(exported_run, tmp_path / "run.jsonl")), *out) == 0
    names, of_fewer = ({row["name"] for row in json.loads(file.read_text())["benchmarks"]} for file in files)
    assert len(names) == times == 20
    options = ["--columns", "median", "--group-by", "fullname"]
    monkeypatch.setattr(sys, "argv", ["py.test-benchmark", "compare", *map(str, files), *options])
    importlib.import_module("pytest_benchmark.cli").main()
    sizes = [int(count) for count in re.findall(r"'?: (\d+) tests", capsys.readouterr().out)]
    assert (sizes.count(2), sizes.count(1)) == (len(of_fewer), len(names - of_fewer))


def test_the_command_warns_of_problems_with_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdout has only the export; a bad line of the run is exit code 1, a bad option 2, in one line."""
    run = exported()
    file = stored(run, tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    interrupted = encode(RunEnd(status="interrupted", wall_s=1.0)) + b"\n"
    for content, code, words in (
        (lines, 0, "INVALID: other processes.\nrows of times and bytes: 12 of 18; withheld: 1 of "),
        (lines[:-1], 0, "The run has no end: cells may be missing.\n"),
        ([*lines[:-1], interrupted], 0, "The run was interrupted: cells may be missing.\n"),
        ([lines[0], b'{"record":"measurement"}\n', *lines[1:]], 1, "run.jsonl:2: "),
    ):
        file.write_bytes(b"".join(content))
        assert command("export", str(file), "--format", "github-action") == code
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)) == 12
        assert words in captured.err
    before = stored(run, file).read_bytes()
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_bytes(encode(RunEnd(status="complete", wall_s=1.0)))
    for arguments, words in (
        ("{folder}/foreign.jsonl --format csv", "export takes a run's .jsonl file"),
        ("{file} --format xml", "'xml' is not one of 'pytest-benchmark', 'github-action', 'csv'"),
        ("{file} --format csv --out {file}", "is the run itself: name another file"),
        ("{file} --format csv --out {folder}", ": Is a directory"),
        ("{file} --format csv --out {file}/out.csv", "run.jsonl: File exists"),
    ):
        assert words in refusal(capsys, "export", *arguments.format(file=file, folder=tmp_path).split())
    assert file.read_bytes() == before
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    error = refusal(capsys, "export", str(file), "--format", "pytest-benchmark")
    assert "pip install pytest-benchmark" in error
