"""Runs exported for other tools: the exported figures, and the rows that are left out."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esbench.report.formats.exporters import FORMATS, export, unit
from esbench.schema import Row, Run, RunEnd
from esbench.store import encode, read_run
from tests import synthetic
from tests.cli.cli_runner import run as command
from tests.report.report_cases import ROOT
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant

QUICK = ROOT / "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz"
CASE = linear(128, members=256)
HOSTILE = ("=cmd|' /C calc'!A0", '"quoted", and | piped', "line\nbreak\r\nand\ttab", "rocket 🚀", "-1", "")
"""Names that a scheme of a foreign file may have."""


def failed(**fields: object) -> Row:
    """Return a row of a variant with a wrong result."""
    row = skipped(DENSE, CASE, "oracle: wrong", "forward")
    return msgspec.structs.replace(row, status="failed", **fields)


def of_cuda() -> list[Row]:
    """Return GPU rows of one phase: two methods, three times of one of them, bytes and launches."""
    metrics = [("eager", "latency_ns"), ("eager", "warm_latency_ns"), ("eager", "host_latency_ns")]
    times: list[Row] = [
        time_row(DENSE, CASE, 1.0, 3.0, method=method, metric=metric)
        for method, metric in [*metrics, ("graph", "latency_ns")]
    ]
    counts = [bytes_row(DENSE, CASE, "peak_bytes", 4096), bytes_row(DENSE, CASE, "launches", 3)]
    return [*times, *counts, time_row(BASE, CASE, 0.5, 0.5, method="eager")]


def benchmarks(run: Run) -> list[dict[str, Any]]:
    """Return the benchmarks that pytest-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "pytest-benchmark").text)["benchmarks"]
    return found


def entries(run: Run) -> list[dict[str, Any]]:
    """Return the entries that github-action-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "github-action").text)
    return found


def sheet(run: Run) -> list[dict[str, str]]:
    """Return the rows that a spreadsheet would read."""
    return list(csv.DictReader(io.StringIO(export(run, "csv").text, newline="")))


def test_json_has_machine_names_units_and_other_figures() -> None:
    """Methods and metrics are groups; bytes, launches and labels are extra figures."""
    labelled = msgspec.structs.replace(of_cuda()[0], labels=("dispatch-bound",))
    run = synthetic.run([labelled, *of_cuda()[1:]], invalid=("somebody else",))
    document = json.loads(export(run, "pytest-benchmark").text)
    assert document["datetime"] == run.header.started
    assert (document["commit_info"]["id"], document["commit_info"]["dirty"]) == ("0123456789abcdef", False)
    found = document["benchmarks"]
    assert found[0]["name"] == "forward[PerturbedLinear-Linear(128, 128) members=256-latency_ns-eager]"
    assert len({one["group"] for one in found}) == 4
    eager = [one for one in found if one["group"].endswith("forward, latency_ns (eager)")]
    assert [one["params"]["variant"] for one in eager] == ["PerturbedLinear", "Base"]
    assert (eager[0]["stats"]["data"], eager[0]["stats"]["median"]) == ([0.001, 0.003], 0.002)
    extra = found[0]["extra_info"]
    assert (extra["peak_bytes"], extra["launches"], extra["rounds"]) == (4096.0, 3.0, 2)
    assert extra["labels"] == ["INVALID: somebody else", "dispatch-bound"]
    found = entries(run)
    assert [one["unit"] for one in found] == ["ns"] * 4 + ["bytes", "ns"]
    assert found[0]["value"] == 2e6
    assert "range" not in found[0]
    assert found[0]["extra"].startswith("samples: 2, rounds: 2\nINVALID: somebody else. Test CPU")
    run = synthetic.run([time_row(DENSE, CASE, 1, 2, 3, 4, 5, 6)])
    assert entries(run)[0]["range"] == "95 % interval 1e+06 to 6e+06"


def test_rows_of_the_table() -> None:
    """The table has medians with intervals, replicates of quality, each baseline once, and reasons."""
    replicates = ((-0.5, 0.25, 0.5, 0.75, 1.0, 1.25),)
    kappa = time_row(DENSE, CASE, phase="quality", metric="kappa", method="linear fitness")
    rows: list[Row] = [
        time_row(DENSE, CASE, 1, 2, 3, 4, 5, 6),
        msgspec.structs.replace(kappa, samples=replicates),
        time_row(BASE, CASE, 1, 1),
        time_row(BASE, CASE, 5, 5, group=1),
        *[skipped(NAIVE, CASE, "draws no noise", "sample")] * 2,
        time_row(variant("Roundless"), CASE),
        skipped(DENSE, linear(512), "out of memory: tried, in vain"),
    ]
    run = synthetic.run(rows)
    shown = [
        [row[name] for name in ("median", "low", "high", "rounds", "unit", "status", "reason")]
        for row in sheet(run)
    ]
    assert shown == [
        ["3500000.0", "1000000.0", "6000000.0", "6", "ns", "measured", ""],
        ["0.625", "-0.5", "1.25", "1", "", "measured", ""],
        ["1000000.0", "", "", "2", "ns", "measured", ""],
        ["", "", "", "", "", "unavailable", "draws no noise"],
        ["", "", "", "0", "ns", "measured", ""],
        ["", "", "", "", "", "unavailable", "out of memory: tried, in vain"],
    ]
    assert [one["stats"]["median"] for one in benchmarks(run)] == [3.5e-3, 1e-3]


def test_a_variant_that_failed_has_no_time() -> None:
    """A variant that fails after it was measured has only a reason; failures elsewhere do not matter."""
    measured: list[Row] = [time_row(DENSE, CASE, 7, 7), time_row(BASE, CASE, 1, 1)]
    for form in FORMATS:
        for failure in (failed(), failed(phase=None)):
            text, summary = export(synthetic.run([*measured, failure]), form)
            assert "7000000" not in text
            assert "0.007" not in text
            assert summary.endswith("withheld: 1 of variants that failed")
    elsewhere = [failed(phase="step"), failed(case=linear(512)), failed(method="graph")]
    assert len(benchmarks(synthetic.run([*measured, *elsewhere]))) == 2


def test_names_are_no_formulas_and_stay_on_their_lines() -> None:
    """A spreadsheet evaluates no cell; each row is one line."""
    rows: list[Row] = [time_row(variant(text), CASE, 1.0) for text in HOSTILE]
    run = synthetic.run([*rows, skipped(DENSE, CASE, "=1")], run_id="=cmd()", device_name='"GPU", 🚀')
    assert export(run, "csv").text.count("\n") == len(run.rows) + 1
    texts = [cell for row in sheet(run) for cell in row.values()]
    assert not [text for text in texts if text.startswith(("=", "+", "-", "@"))]
    assert {"'=cmd|' /C calc'!A0Linear", "'=1", "'=cmd()"} <= set(texts)
    assert all(one["name"].isprintable() for one in benchmarks(run))


# The command


def stored(run: Run, path: Path) -> Path:
    """Write a run's file."""
    records = [run.header, *run.rows, *([run.end] if run.end else [])]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


def test_pytest_benchmark_reads_exported_runs(tmp_path: Path) -> None:
    """pytest-benchmark groups the rows of a committed run, and compares two runs."""
    run, problems = read_run(QUICK)
    assert run is not None
    assert not problems
    times = sum(unit(row.metric) == "ns" for row in run.measurements)
    assert len(sheet(run)) == len(run.rows)
    fewer = msgspec.structs.replace(
        run, rows=tuple(row for row in run.rows if row.variant.scheme != "Permuted")
    )
    files = [tmp_path / "all.json", tmp_path / "fewer.json"]
    for one, file in zip((run, fewer), files, strict=True):
        out = ("--format", "pytest-benchmark", "--out", str(file))
        assert command("export", str(stored(one, tmp_path / "run.jsonl")), *out) == 0
    names, of_fewer = ({one["name"] for one in json.loads(file.read_text())["benchmarks"]} for file in files)
    assert len(names) == times > 100
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from pytest_benchmark.cli import main; main()", "compare"),
            *map(str, files),
            *("--columns", "median", "--group-by", "fullname"),
        ],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = [int(count) for count in re.findall(r"'?: (\d+) tests", done.stdout)]
    assert (sizes.count(2), sizes.count(1)) == (len(of_fewer), len(names - of_fewer))


def test_the_command_warns_of_problems_with_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdout has only the export; a bad line of the run is exit code 1, a bad option 2, in one line."""
    whole = synthetic.run([*of_cuda(), failed(phase="step")], invalid=("somebody else",))
    file = stored(whole, tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    interrupted = encode(RunEnd(status="interrupted", wall_s=1.0)) + b"\n"
    for content, code, words in (
        (lines, 0, "INVALID: somebody else.\nrows of times and bytes: 6 of 8\n"),
        (lines[:-1], 0, "The run has no end: cells may be missing.\n"),
        ([*lines[:-1], interrupted], 0, "The run was interrupted: cells may be missing.\n"),
        ([lines[0], b'{"record":"measurement"}\n', *lines[1:]], 1, "run.jsonl:2: "),
    ):
        file.write_bytes(b"".join(content))
        assert command("export", str(file), "--format", "github-action") == code
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)) == 6
        assert words in captured.err
    before = stored(whole, file).read_bytes()
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_bytes(encode(RunEnd(status="complete", wall_s=1.0)))
    for arguments, words in (
        ("{folder}/foreign.jsonl --format csv", "export takes a run's .jsonl file"),
        ("{file} --format xml", "'xml' is not one of 'pytest-benchmark', 'github-action', 'csv'"),
        ("{file} --format csv --out {file}", "is the run itself: name another file"),
        ("{file} --format csv --out {folder}", "is not a regular file: name a file"),
        ("{file} --format csv --out {file}/out.csv", "run.jsonl is not a folder"),
    ):
        assert command("export", *arguments.format(file=file, folder=tmp_path).split()) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    assert file.read_bytes() == before
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    assert command("export", str(file), "--format", "pytest-benchmark") == 2
    assert "pip install pytest-benchmark" in capsys.readouterr().err
