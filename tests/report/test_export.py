"""Runs exported for other tools: what is written, under which name, and what is left out."""

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

from esbench.errors import UserError
from esbench.report.formats.exporters import FORMATS, ExportRows, export, group, unit
from esbench.report.formats.exporters import pytest_benchmark_stats as stats
from esbench.schema import Measurement, Row, Run, RunEnd
from esbench.store import encode, read_run
from tests import synthetic
from tests.cli.cli_runner import run as command
from tests.report.export_cases import CASE, HOSTILE, empty, failed, hostile, of_cuda
from tests.report.report_cases import ROOT
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, variant

QUICK = ROOT / "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz"
COMMITTED = [path for path in sorted(ROOT.glob("results/*/*.jsonl.gz")) if path.stat().st_size < 2**16]
FRACTIONS = st.lists(st.integers(0, 2**30).map(lambda number: number / 2**20), min_size=1, max_size=40)
"""Samples in whose sums and quarters there is no rounding."""
Captured = pytest.CaptureFixture[str]


def committed(path: Path) -> Run:
    """A run of this repository."""
    run, problems = read_run(path)
    assert run is not None
    assert not problems
    return run


def benchmarks(run: Run) -> list[dict[str, Any]]:
    """What pytest-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "pytest-benchmark").content)["benchmarks"]
    return found


def entries(run: Run) -> list[dict[str, Any]]:
    """What github-action-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "github-action").content)
    return found


def sheet(run: Run) -> list[dict[str, str]]:
    """What a spreadsheet would read."""
    return list(csv.DictReader(io.StringIO(export(run, "csv").content.decode(), newline="")))


def test_committed_and_empty_runs_are_exported_in_every_format() -> None:
    """Every row is in the table, times and bytes are in JSON, and names are unique."""
    assert COMMITTED
    for run in map(committed, COMMITTED):
        times = sum(unit(row.metric) == "ns" for row in run.measurements)
        bytes_ = sum(unit(row.metric) == "bytes" for row in run.measurements)
        assert len(sheet(run)) == len(run.rows)
        for found, count in ((benchmarks(run), times), (entries(run), times + bytes_)):
            assert len({one["name"] for one in found}) == len(found) == count
    none = Run(header=synthetic.header(), rows=())
    assert benchmarks(none) == entries(none) == sheet(none) == []
    with pytest.raises(UserError, match="no format 'xml'; there are: pytest-benchmark, github-action, csv"):
        export(none, "xml")


@given(FRACTIONS)
def test_statistics_are_those_of_pytest_benchmark(samples: list[float]) -> None:
    """Every figure of a benchmark is what the tool itself computes from the same samples."""
    theirs: Any = Stats()  # type: ignore[no-untyped-call]  # the tool has no hints
    for sample in samples:
        theirs.update(sample)
    found = stats(samples)
    assert found.pop("data") == samples
    assert found.pop("iterations") == 1
    for name, value in theirs.as_dict().items():
        assert found.pop(name) == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), name
    assert not found


def test_a_benchmark_has_its_machine_its_name_and_other_figures() -> None:
    """Times of other methods and metrics are other groups; bytes, launches and labels are extra figures."""
    run = synthetic.run(of_cuda(), invalid=("somebody else",))
    document = json.loads(export(run, "pytest-benchmark").content)
    here = run.header.environment
    assert document["datetime"] == run.header.started
    assert (document["commit_info"]["id"], document["commit_info"]["dirty"]) == ("0123456789abcdef", False)
    assert document["machine_info"]["esbench"] == json.loads(msgspec.json.encode(here))
    assert document["machine_info"]["cpu"]["brand_raw"] == "Test CPU"
    found = document["benchmarks"]
    assert [one["name"] for one in found][:2] == [
        "forward[PerturbedLinear-Linear(128, 128) members=256-latency_ns-eager]",
        "forward[PerturbedLinear-Linear(128, 128) members=256-warm_latency_ns-eager]",
    ]
    assert len({one["group"] for one in found}) == 4
    eager = [one for one in found if one["group"].endswith("forward, latency_ns (eager)")]
    assert [one["params"]["variant"] for one in eager] == ["PerturbedLinear", "Base"]
    assert eager[0]["stats"]["data"] == [0.001, 0.003]
    labelled = msgspec.structs.replace(of_cuda()[0], labels=("dispatch-bound",))
    run = synthetic.run([labelled, *of_cuda()[4:]], invalid=("somebody else",))
    extra = benchmarks(run)[0]["extra_info"]
    assert (extra["peak_bytes"], extra["launches"], extra["rounds"]) == (4096.0, 3.0, 2)
    assert extra["labels"] == ["INVALID: somebody else", "dispatch-bound"]


def test_entries_have_units_and_ranges() -> None:
    """Times and bytes in the unit that is stored, no launches; the interval from six rounds on."""
    found = entries(synthetic.run(of_cuda()))
    assert [one["unit"] for one in found] == ["ns"] * 4 + ["bytes", "ns"]
    assert found[0]["value"] == 2e6
    assert found[0]["range"] == "p20 1.4e+06, p80 2.6e+06"
    assert "range" not in found[4]
    assert found[0]["extra"].startswith("samples: 2, rounds: 2\nTest CPU")
    run = synthetic.run([time_row(DENSE, CASE, 1, 2, 3, 4, 5, 6)])
    assert entries(run)[0]["range"] == "95 % interval 1e+06 to 6e+06"


def test_rows_of_the_table() -> None:
    """Medians with intervals, replicates of a quality, baselines once, and reasons without a median."""
    quality = Measurement(
        variant=DENSE,
        case=CASE,
        phase="quality",
        metric="kappa",
        method="linear fitness",
        samples=((-0.5, 0.25, 0.5, 0.75, 1.0, 1.25),),
    )
    rows: list[Row] = [
        time_row(DENSE, CASE, 1, 2, 3, 4, 5, 6),
        quality,
        time_row(BASE, CASE, 1, 1),
        time_row(BASE, CASE, 5, 5, group=1),
        *[skipped(NAIVE, CASE, "draws no noise", "sample")] * 2,
        empty(),
        skipped(DENSE, linear(512), "out of memory: tried, in vain"),
    ]
    run = synthetic.run(rows)
    found = sheet(run)
    assert [row["median"] for row in found] == ["3500000.0", "0.625", "1000000.0", "", "", ""]
    time, kappa, *_, roundless, reason = found
    assert (time["low"], time["high"], time["rounds"], time["samples"]) == (
        "1000000.0",
        "6000000.0",
        "6",
        "6",
    )
    assert (time["unit"], time["status"]) == ("ns", "measured")
    assert (kappa["low"], kappa["high"], kappa["unit"]) == ("-0.5", "1.25", "")
    assert (roundless["low"], roundless["rounds"], roundless["samples"]) == ("", "0", "0")
    assert (reason["status"], reason["reason"]) == ("unavailable", "out of memory: tried, in vain")
    assert reason["phase"] == reason["metric"] == reason["method"] == ""
    assert [one["stats"]["median"] for one in benchmarks(run)] == [3.5e-3, 1e-3]


def test_what_failed_has_no_time() -> None:
    """A variant that fails after it was measured has a reason only; a failure elsewhere changes nothing."""
    for form in FORMATS:
        for phase in ("forward", None):
            rows: list[Row] = [
                time_row(DENSE, CASE, 7, 7),
                time_row(BASE, CASE, 1, 1),
                failed(DENSE, CASE, phase),
            ]
            content, summary = export(synthetic.run(rows), form)
            assert b"7000000" not in content
            assert b"0.007" not in content
            assert "1 of variants that failed" in summary
    other = msgspec.structs.replace(failed(DENSE, CASE), method="graph")
    others = [failed(DENSE, CASE, "step"), failed(DENSE, linear(512)), other]
    assert len(benchmarks(synthetic.run([time_row(DENSE, CASE, 7, 7), *others]))) == 1
    run = synthetic.run([*of_cuda(), skipped(NAIVE, CASE, "no"), failed(variant("Wrong"), CASE), empty()])
    without = "2 without a number (1 failed), 1 without usable samples"
    assert [export(run, form).summary for form in FORMATS] == [
        f"rows of times: 5; left out: {without}, 2 that are not times",
        f"rows of times and bytes: 6; left out: {without}, 1 that are not times or bytes",
        "rows (2 without a number): 10",
    ]


def test_hostile_names_stay_on_their_lines() -> None:
    """A row of the table is one line without a formula; names in JSON are unique and printable."""
    run = hostile()
    lines = export(run, "csv").content.decode().split("\n")
    rows = list(csv.reader(lines))
    assert len(lines) == len(run.rows) + 2
    assert {len(row) for row in rows[:-1]} == {18}
    texts = [cell for row in sheet(run) for name, cell in row.items() if name not in {"median", "p20", "p80"}]
    assert not [text for text in texts if text.startswith(("=", "+", "-", "@"))]
    assert {"'=cmd|' /C calc'!A0", "''=1", "'-1"} <= set(texts)
    names = [one["name"] for one in benchmarks(run)]
    assert len(set(names)) == len(names) == 4 * len(HOSTILE)
    assert all(name.isprintable() for name in names)
    assert [one["name"] for one in entries(run)] == names
    long = [msgspec.structs.replace(CASE, operator=f"{'🚀' * 200}{end}") for end in "ab"]
    groups = [group(time_row(DENSE, case, 1.0)) for case in long]
    assert len(set(groups)) == 2
    assert all(len(text.encode()) <= 150 for text in groups)


def test_names_that_read_alike_are_distinguished() -> None:
    """By a digest, whatever the order of the rows; the options 1, 1.0 and True are three variants."""
    alike: list[Row] = [
        time_row(DENSE, msgspec.structs.replace(CASE, sigma=s), 1.0) for s in (0.32, 0.32000000001)
    ]
    assert not any(" #" in one["name"] for one in benchmarks(synthetic.run(alike[:1])))
    first, second = (
        {one["name"] for one in benchmarks(synthetic.run(order))} for order in (alike, alike[::-1])
    )
    assert first == second
    assert len(first) == 2
    assert all(" #" in name for name in first)
    rows: list[Row] = [time_row(variant("Sparse", k=k), CASE, 1.0 + k) for k in (1, 1.0, True)]
    assert len({one["name"] for one in benchmarks(synthetic.run(rows))}) == 3


@given(st.lists(st.text(max_size=6), min_size=2, max_size=4, unique=True), st.randoms())
def test_names_are_unique_in_any_order_and_reasons_are_read_back(texts: list[str], rng: Any) -> None:
    """Whatever variants and methods are called, and whatever reasons hold."""
    rows: list[Row] = [time_row(variant(a), CASE, 1.0, method=b) for a in texts for b in texts]
    named = []
    for _ in range(2):
        run = ExportRows(synthetic.run(rows))
        named.append({run.name(row): (row.variant, row.method) for row in run.measured})
        rng.shuffle(rows)
    assert named[0] == named[1]
    assert len(named[0]) == len(rows)
    found = sheet(synthetic.run([skipped(variant(f"V{k}"), CASE, text) for k, text in enumerate(texts)]))
    assert [row["variant"] for row in found] == [f"V{k}Linear" for k in range(len(texts))]
    assert not [row for row in found if "\n" in row["reason"] or row["reason"].startswith("=")]


# The command


def stored(run: Run, path: Path) -> Path:
    """Write a run's file."""
    records = [run.header, *run.rows, *([run.end] if run.end else [])]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


def exported(path: Path, out: Path, form: str = "pytest-benchmark") -> Path:
    """Export a run with the command."""
    assert command("export", str(path), "--format", form, "--out", str(out)) == 0
    return out


COMPARE = """
import json, sys
from pytest_benchmark.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["py.test-benchmark", "compare", *arguments]
    main()
    print("=" * 9, flush=True)
"""


def compare(*calls: Sequence[str | Path]) -> list[str]:
    """Run pytest-benchmark's comparison with each list of arguments, and return what it prints."""
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
    return done.stdout.split("=" * 9 + "\n")[:-1]


def counted(printed: str) -> list[int]:
    """The number of tests in each group that the tool prints."""
    return [int(count) for count in re.findall(r"'?: (\d+) tests", printed)]


def test_pytest_benchmark_reads_exported_runs(tmp_path: Path) -> None:
    """It groups and draws them, compares two runs, and reads hostile names, figures of a GPU and no rows."""
    run = committed(QUICK)
    rows = tuple(row for row in run.rows if row.variant.scheme != "Permuted")
    gpu = [*of_cuda(), time_row(DENSE, CASE, 1e-6, phase="step")]
    runs = (
        run,
        msgspec.structs.replace(run, rows=rows),
        hostile(),
        synthetic.run(gpu),
        Run(header=synthetic.header(), rows=()),
    )
    files = [
        exported(stored(one, tmp_path / f"{k}.jsonl"), tmp_path / f"{k}.json") for k, one in enumerate(runs)
    ]
    times, fewer = ({one["name"] for one in json.loads(file.read_text())["benchmarks"]} for file in files[:2])
    quick, newer, names, of_gpu, of_none = files
    columns = ("--columns", "min,median,iqr,outliers,rounds")
    pictures = tmp_path / "pictures" / "run"
    found = compare(
        (quick, "--histogram", pictures),
        (quick, "--group-by", "param:phase,param:method", *columns),
        (quick, newer, "--columns", "median", "--group-by", "fullname"),
        (names, "--group-by", "group", "--histogram", pictures.with_name("hostile")),
        (names, "--group-by", "param:variant"),
        (of_gpu,),
        (of_none,),
    )
    grouped, by_phase, beside, *of_hostile, of_gpu_, of_none_ = found
    assert len(counted(grouped)) == len(list(pictures.parent.glob("run-*.svg"))) == 12
    assert sum(counted(grouped)) == len(times) > 100
    assert "benchmark 'Linear(128, 128) members=256, forward, latency_ns (host)'" in grouped
    assert "benchmark 'phase=sample method=host': " in by_phase
    assert re.search(r"Min +Median +IQR +Outliers +Rounds", by_phase)
    assert counted(beside).count(2) == len(times & fewer) > 50
    assert counted(beside).count(1) == len(times ^ fewer) > 0
    assert {sum(counted(text)) for text in of_hostile} == {4 * len(HOSTILE)}
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {pictures.parent}
    assert (sum(counted(of_gpu_)), sum(counted(of_none_))) == (6, 0)


def test_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the folder, time zone and hash seed, on stdout or in a file; torch is not needed."""
    file = stored(hostile(), tmp_path / "run.jsonl")
    expected = [exported(file, tmp_path / "out", form).read_bytes() for form in FORMATS]
    program = f"""
import sys
sys.modules["torch"] = None
from tests.cli.cli_runner import run
for form in {tuple(FORMATS)}:
    run("export", {str(file)!r}, "--format", form)
    print("=" * 9, flush=True)
"""
    others = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **others},
        capture_output=True,
        check=True,
    )
    assert done.stdout.split(b"=========\n") == [*expected, b""]


def test_flaws_of_a_run_are_on_stderr(capsys: Captured, tmp_path: Path) -> None:
    """Stdout has the export alone; invalid, unfinished and cut-off runs are named, a bad line is code 1."""
    whole = synthetic.run([*of_cuda(), failed(DENSE, CASE, "step")], invalid=("somebody else",))
    file = stored(whole, tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    summary = (
        "rows of times and bytes: 6; left out: 1 without a number (1 failed), 1 that are not times or bytes"
    )
    for content, code, count, words in (
        (lines, 0, 6, f"INVALID, do not use these figures: somebody else\n{summary}\n"),
        (lines[:-1], 0, 6, "the run has no end"),
        ([*lines[:-2], lines[-2][:30]], 0, 6, "half a line, the run was cut off here"),
        (
            [lines[0], b'{"record":"measurement"}\n', *lines[1:]],
            1,
            6,
            "run.jsonl:2: field variant: is missing",
        ),
    ):
        file.write_bytes(b"".join(content))
        assert command("export", str(file), "--format", "github-action") == code
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)) == count
        assert words in captured.err


def test_what_cannot_be_exported_is_one_line(capsys: Captured, tmp_path: Path) -> None:
    """Foreign files and wrong requests end with exit code 2; nothing is written."""
    foreign, out = tmp_path / "foreign.jsonl", tmp_path / "out.csv"
    for content, words in (
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b'{"benchmarks": []}\n', "without its header the file holds no run"),
        (b"\x89PNG\r\n\x1a\n", "no valid JSON"),
        (encode(RunEnd(status="complete", wall_s=1.0)), "the first line must be a run's header"),
    ):
        if content is not None:
            foreign.write_bytes(content)
        assert command("export", str(foreign), "--format", "csv", "--out", str(out)) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
        assert "export takes a run's .jsonl file" in error
        assert not out.exists()
    file = stored(synthetic.run(of_cuda()), tmp_path / "run.jsonl")
    before = file.read_bytes()
    for arguments, words in (
        ("{file} --format xml", "no format 'xml'; there are: pytest-benchmark, github-action, csv"),
        ("{file}", "Missing option '--format'"),
        ("--format csv", "Missing argument 'RUN'"),
        ("{file} --format csv --out {file}", "is the run itself: name another file"),
        ("{file} --format csv --out {folder}/no/such/out.csv", "No such file or directory"),
        ("{file} --format csv --out {folder}", "Is a directory"),
        ("{folder} --format csv", "cannot be read: Is a directory"),
    ):
        assert command("export", *arguments.format(file=file, folder=tmp_path).split()) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert file.read_bytes() == before
