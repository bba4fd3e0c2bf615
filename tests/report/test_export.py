"""Runs exported for other tools: the exported figures, their names, and the rows that are left out."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.stats import Stats

from esbench.report.formats.exporters import FORMATS, export, unit
from esbench.report.formats.exporters import pytest_benchmark_stats as stats
from esbench.schema import Case, Row, Run, RunEnd, Variant
from esbench.store import encode, read_run
from tests import synthetic
from tests.cli.cli_runner import run as command
from tests.report.report_cases import ROOT
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant

QUICK = ROOT / "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz"
CASE = linear(128, members=256)
HOSTILE = (
    *("=cmd|' /C calc'!A0", '"quoted", and | piped', "line\nbreak\r\nand\ttab", "rocket 🚀", "'=1", "-1"),
    *("\x00nul\x1b[31m", "../../up", "<svg onload=x>", "%s {0}", ""),
)
"""Names that schemes, operators, metrics and methods of a foreign file may have."""
FRACTIONS = st.lists(st.integers(0, 2**30).map(lambda number: number / 2**20), min_size=1, max_size=40)
"""Samples whose sums and quarters are exact."""
Captured = pytest.CaptureFixture[str]


def hostile() -> Run:
    """Return a run with variants, operators, metrics and methods of each hostile name."""
    rows: list[Row] = []
    for text in HOSTILE:
        case = Case(operator=text, out_channels=4, in_channels=4)
        rows += [time_row(variant(text), CASE, 1.0, 2.0), time_row(DENSE, case, 1.0, 2.0)]
        rows += [time_row(DENSE, CASE, 1.0, metric=f"{text}_ns"), time_row(DENSE, CASE, 1.0, method=text)]
        rows.append(skipped(variant(text), case, text))
    return synthetic.run(rows, run_id="=cmd()", device_name='"GPU", 🚀')


def failed(one: Variant = DENSE, case: Case = CASE, **fields: object) -> Row:
    """Return a row of a variant with a wrong result."""
    row = skipped(one, case, "oracle: wrong", "forward")
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


def committed(path: Path) -> Run:
    """Return a run stored in this repository."""
    run, problems = read_run(path)
    assert run is not None
    assert not problems
    return run


def benchmarks(run: Run) -> list[dict[str, Any]]:
    """Return the benchmarks that pytest-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "pytest-benchmark").content)["benchmarks"]
    return found


def entries(run: Run) -> list[dict[str, Any]]:
    """Return the entries that github-action-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "github-action").content)
    return found


def sheet(run: Run) -> list[dict[str, str]]:
    """Return the rows that a spreadsheet would read."""
    return list(csv.DictReader(io.StringIO(export(run, "csv").content.decode(), newline="")))


def test_committed_and_empty_runs_are_exported_in_every_format() -> None:
    """CSV has every row, JSON has times and bytes, and names are unique."""
    run = committed(QUICK)
    times = sum(unit(row.metric) == "ns" for row in run.measurements)
    bytes_ = sum(unit(row.metric) == "bytes" for row in run.measurements)
    assert len(sheet(run)) == len(run.rows)
    for found, count in ((benchmarks(run), times), (entries(run), times + bytes_)):
        assert len({one["name"] for one in found}) == len(found) == count > 100
    none = Run(header=synthetic.header(), rows=())
    assert benchmarks(none) == entries(none) == sheet(none) == []


@given(FRACTIONS)
def test_statistics_are_those_of_pytest_benchmark(samples: list[float]) -> None:
    """Every statistic equals the one that pytest-benchmark computes from the same samples."""
    theirs: Any = Stats()  # type: ignore[no-untyped-call]  # the tool has no hints
    for sample in samples:
        theirs.update(sample)
    found = stats(samples)
    assert found.pop("data") == samples
    assert found.pop("iterations") == 1
    for name, value in theirs.as_dict().items():
        assert found.pop(name) == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), name
    assert not found


def test_json_has_machine_names_units_and_other_figures() -> None:
    """Methods and metrics are groups; bytes, launches and labels are extra figures."""
    labelled = msgspec.structs.replace(of_cuda()[0], labels=("dispatch-bound",))
    run = synthetic.run([labelled, *of_cuda()[1:]], invalid=("somebody else",))
    document = json.loads(export(run, "pytest-benchmark").content)
    assert document["datetime"] == run.header.started
    assert (document["commit_info"]["id"], document["commit_info"]["dirty"]) == ("0123456789abcdef", False)
    assert document["machine_info"]["esbench"] == json.loads(msgspec.json.encode(run.header.environment))
    found = document["benchmarks"]
    assert found[0]["name"] == "forward[PerturbedLinear-Linear(128, 128) members=256-latency_ns-eager]"
    assert len({one["group"] for one in found}) == 4
    eager = [one for one in found if one["group"].endswith("forward, latency_ns (eager)")]
    assert [one["params"]["variant"] for one in eager] == ["PerturbedLinear", "Base"]
    assert eager[0]["stats"]["data"] == [0.001, 0.003]
    extra = found[0]["extra_info"]
    assert (extra["peak_bytes"], extra["launches"], extra["rounds"]) == (4096.0, 3.0, 2)
    assert extra["labels"] == ["INVALID: somebody else", "dispatch-bound"]
    found = entries(run)
    assert [one["unit"] for one in found] == ["ns"] * 4 + ["bytes", "ns"]
    assert (found[0]["value"], found[0]["range"]) == (2e6, "p20 1.4e+06, p80 2.6e+06")
    assert "range" not in found[4]
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


def test_what_failed_has_no_time() -> None:
    """A variant that fails after it was measured has only a reason; failures elsewhere do not matter."""
    measured: list[Row] = [time_row(DENSE, CASE, 7, 7), time_row(BASE, CASE, 1, 1)]
    for form in FORMATS:
        for failure in (failed(), failed(phase=None)):
            content, summary = export(synthetic.run([*measured, failure]), form)
            assert b"7000000" not in content
            assert b"0.007" not in content
            assert summary.endswith("withheld: 1 of variants that failed")
    elsewhere = [failed(phase="step"), failed(case=linear(512)), failed(method="graph")]
    assert len(benchmarks(synthetic.run([*measured, *elsewhere]))) == 2


def test_names_are_unique_and_stay_on_their_lines() -> None:
    """No cell can be a formula; equal names get a digest, whatever the order of the rows."""
    run = hostile()
    assert export(run, "csv").content.count(b"\n") == len(run.rows) + 1
    texts = [cell for row in sheet(run) for name, cell in row.items() if name not in {"median", "p20", "p80"}]
    assert not [text for text in texts if text.startswith(("=", "+", "-", "@"))]
    assert {"'=cmd|' /C calc'!A0", "''=1", "'-1"} <= set(texts)
    names = [one["name"] for one in benchmarks(run)]
    assert len(set(names)) == len(names) == 4 * len(HOSTILE)
    assert all(name.isprintable() for name in names)
    assert [one["name"] for one in entries(run)] == names
    alike: list[Row] = [
        time_row(DENSE, msgspec.structs.replace(CASE, sigma=s), 1.0) for s in (0.32, 0.32000000001)
    ]
    alike += [time_row(variant("Sparse", k=k), CASE, 1.0 + k) for k in (1, 1.0, True)]
    one, other = ([b["name"] for b in benchmarks(synthetic.run(order))] for order in (alike, alike[::-1]))
    assert sorted(one) == sorted(other)
    assert len(set(one)) == 5
    assert not any(" #" in name for name in [b["name"] for b in benchmarks(synthetic.run(alike[:1]))])


# The command


def stored(run: Run, path: Path) -> Path:
    """Write a run's file."""
    records = [run.header, *run.rows, *([run.end] if run.end else [])]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


COMPARE = """
import json, sys
from pytest_benchmark.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["py.test-benchmark", "compare", *arguments]
    main()
    print("=" * 9, flush=True)
"""


def compare(*calls: Sequence[str | Path]) -> list[list[int]]:
    """Run pytest-benchmark's comparison with each list of arguments; return the sizes of its groups."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, json.dumps([list(map(str, arguments)) for arguments in calls])],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stderr
    assert "Traceback" not in done.stderr
    printed = done.stdout.split("=" * 9 + "\n")[:-1]
    return [[int(count) for count in re.findall(r"'?: (\d+) tests", text)] for text in printed]


def test_pytest_benchmark_reads_exported_runs(tmp_path: Path) -> None:
    """pytest-benchmark groups and compares exported runs, even with hostile names or no rows."""
    run = committed(QUICK)
    rows = tuple(row for row in run.rows if row.variant.scheme != "Permuted")
    runs = run, msgspec.structs.replace(run, rows=rows), hostile(), Run(header=synthetic.header(), rows=())
    files = [tmp_path / f"{k}.json" for k in range(len(runs))]
    for one, file in zip(runs, files, strict=True):
        arguments = ("--format", "pytest-benchmark", "--out", str(file))
        assert command("export", str(stored(one, tmp_path / "run.jsonl")), *arguments) == 0
    quick, newer, names, none = files
    times, fewer = ({one["name"] for one in json.loads(file.read_text())["benchmarks"]} for file in files[:2])
    found = compare(
        (quick,), (quick, newer, "--columns", "median", "--group-by", "fullname"), (names,), (none,)
    )
    assert sum(found[0]) == len(times) > 100
    assert found[1].count(2) == len(times & fewer) > 50
    assert found[1].count(1) == len(times ^ fewer) > 0
    assert [sum(counts) for counts in found[2:]] == [4 * len(HOSTILE), 0]


def test_the_command_says_what_it_cannot_export(capsys: Captured, tmp_path: Path) -> None:
    """Stdout has only the export; a bad line of the run is exit code 1, a bad option 2, in one line."""
    whole = synthetic.run([*of_cuda(), failed(phase="step")], invalid=("somebody else",))
    file = stored(whole, tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    for content, code, words in (
        (lines, 0, "INVALID, do not use these figures: somebody else\nrows of times and bytes: 6 of 8\n"),
        (lines[:-1], 0, "the run is incomplete"),
        ([lines[0], b'{"record":"measurement"}\n', *lines[1:]], 1, "run.jsonl:2: field variant: is missing"),
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
        ("{file} --format xml", "no format 'xml'; there are: pytest-benchmark, github-action, csv"),
        ("{file} --format csv --out {file}", "is the run itself: name another file"),
        ("{file} --format csv --out {folder}/no/such/out.csv", "No such file or directory"),
    ):
        assert command("export", *arguments.format(file=file, folder=tmp_path).split()) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    assert file.read_bytes() == before
