"""The command export: files that other tools read as they are, and one line for all that can go wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from esbench.schema import Run, RunEnd
from esbench.store import encode, read_run
from tests import synthetic
from tests.cli_runner import run
from tests.report.export_cases import CASE, HOSTILE, failed, hostile, of_cuda
from tests.synthetic import DENSE, time_row

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "amd-epyc" / "20261122T151454Z-quick-c095.jsonl.gz"
Captured = pytest.CaptureFixture[str]
FORMS = ("pytest-benchmark", "github-action", "csv")


def stored(run: Run, path: Path) -> Path:
    """Write a run's file."""
    records = [run.header, *run.rows, *([run.end] if run.end else [])]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    return path


def exported(path: Path, out: Path, form: str = "pytest-benchmark") -> Path:
    """Export a run with the command."""
    assert run("export", str(path), "--format", form, "--out", str(out)) == 0
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
    """Run the tool's own comparison with each list of arguments, and return what it prints."""
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
    """How many tests the tool says that there are in each group."""
    return [int(count) for count in re.findall(r"'?: (\d+) tests", printed)]


def test_pytest_benchmark_reads_an_exported_run(tmp_path: Path) -> None:
    """Its compare makes one group of each case and phase, groups by other parameters, and draws."""
    found = exported(COMMITTED, tmp_path / "run.json")
    times = len(json.loads(found.read_text())["benchmarks"])
    headings = {
        "func": "'forward'",
        "fullname": "'forward[Base-Linear(128, 128) members=256-latency_ns-host]'",
        "param:variant": "'variant=PermutedLinear'",
        "param:phase,param:method": "'phase=sample method=host'",
    }
    columns = ("--columns", "min,median,iqr,outliers,rounds")
    printed, *grouped = compare(
        (found, "--histogram", tmp_path / "pictures" / "run"),
        *((found, "--group-by", by, *columns) for by in headings),
    )
    groups = counted(printed)
    assert len(groups) == 12
    assert sum(groups) == times > 100
    assert "benchmark 'Linear(128, 128) members=256, forward, latency_ns (host)'" in printed
    pictures = sorted((tmp_path / "pictures").glob("run-*.svg"))
    assert len(pictures) == 12
    labels = pictures[0].read_text(encoding="utf-8").replace("Conv2d", "Linear")
    assert "PermutedLinear(in_sparsity=0.1)" in labels
    for heading, text in zip(headings.values(), grouped, strict=True):
        assert f"benchmark {heading}: " in text
        assert re.search(r"Min +Median +IQR +Outliers +Rounds", text)


def test_pytest_benchmark_sets_two_runs_side_by_side(tmp_path: Path) -> None:
    """Rows of the same name meet; a variant of one run only is in a group by itself."""
    run, _ = read_run(COMMITTED)
    assert run is not None
    rows = tuple(row for row in run.rows if row.variant.scheme != "Permuted")
    newer = stored(msgspec.structs.replace(run, rows=rows), tmp_path / "newer.jsonl")
    files = [exported(path, tmp_path / f"{k}.json") for k, path in enumerate((COMMITTED, newer))]
    names = [{one["name"] for one in json.loads(file.read_text())["benchmarks"]} for file in files]
    grouped, between = compare(
        (*files, "--columns", "median", "--group-by", "fullname"), (*files, "--between", "median")
    )
    assert counted(grouped).count(2) == len(names[0] & names[1]) > 50
    assert counted(grouped).count(1) == len(names[0] ^ names[1]) > 0
    assert "Median" in between


def test_pytest_benchmark_reads_every_run(tmp_path: Path) -> None:
    """Whatever variants and cases are called; figures of a GPU, a sample of 1 ns, and a run without rows."""
    rows = [*of_cuda(), time_row(DENSE, CASE, 1e-6, phase="step")]
    runs = (hostile(), synthetic.run(rows), Run(header=synthetic.header(), rows=()))
    names, gpu, none = (
        exported(stored(one, tmp_path / f"{k}.jsonl"), tmp_path / f"{k}.json") for k, one in enumerate(runs)
    )
    *grouped, of_gpu, of_none = compare(
        *((names, "--group-by", by) for by in ("group", "func", "param:variant")),
        (names, "--histogram", tmp_path / "pictures" / "run"),
        (gpu,),
        (none,),
    )
    assert {sum(counted(text)) for text in grouped} == {4 * len(HOSTILE)}
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {tmp_path / "pictures"}
    assert (sum(counted(of_gpu)), sum(counted(of_none))) == (6, 0)


def test_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the folder, time zone and hash seed, on stdout or in a file; torch is not needed."""
    file = stored(hostile(), tmp_path / "run.jsonl")
    expected = [exported(file, tmp_path / "out", form).read_bytes() for form in FORMS]
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(file, tmp_path / "elsewhere" / "moved.jsonl")
    program = f"""
import sys
sys.modules["torch"] = None
from tests.cli_runner import run
for form in {FORMS}:
    run("export", {str(moved)!r}, "--format", form)
    print("=" * 9, flush=True)
"""
    others = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, **others},
        capture_output=True,
        check=True,
    )
    assert done.stdout.split(b"=========\n") == [*expected, b""]


def test_what_is_left_out_is_said_on_stderr(capsys: Captured, tmp_path: Path) -> None:
    """Standard output holds the export alone; a run without an end, or an invalid one, is named."""
    whole = synthetic.run([*of_cuda(), failed(DENSE, CASE, "step")], invalid=("somebody else",))
    file = stored(whole, tmp_path / "run.jsonl")
    assert run("export", str(file), "--format", "github-action") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 6
    assert captured.err.splitlines() == [
        "INVALID, do not use these figures: somebody else",
        "rows of times and bytes: 6; left out: 1 without a number (1 failed), 1 that are not times or bytes",
    ]
    stored(msgspec.structs.replace(whole, end=None), file)
    assert run("export", str(file), "--format", "csv") == 0
    assert "the run has no end" in capsys.readouterr().err


def test_an_interrupted_run_is_exported(capsys: Captured, tmp_path: Path) -> None:
    """Half a line at the end is said, and is no error: nothing is lost that was finished."""
    file = stored(synthetic.run(of_cuda()), tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:30])
    assert run("export", str(file), "--format", "github-action") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 5
    assert "half a line, the run was cut off here" in captured.err


def test_a_line_that_cannot_be_read_ends_in_code_1(capsys: Captured, tmp_path: Path) -> None:
    """The rest is exported, and the line is named."""
    file = stored(synthetic.run(of_cuda()), tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b'{"record":"measurement"}\n' + b"".join(lines[1:]))
    assert run("export", str(file), "--format", "pytest-benchmark") == 1
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["benchmarks"]) == 5
    assert "run.jsonl:2: field variant: is missing" in captured.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b'{"benchmarks": []}\n', "without its header the file holds no run"),
        (b"\x89PNG\r\n\x1a\n", "no valid JSON"),
        (encode(RunEnd(status="complete", wall_s=1.0)), "the first line must be a run's header"),
    ],
)
def test_a_foreign_file_is_refused(
    content: bytes | None, words: str, capsys: Captured, tmp_path: Path
) -> None:
    """One line says what is wrong with it and what export takes, and nothing is written."""
    file, out = tmp_path / "foreign.jsonl", tmp_path / "out.csv"
    if content is not None:
        file.write_bytes(content)
    assert run("export", str(file), "--format", "csv", "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert "export takes a run's .jsonl file" in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{file} --format xml", "no format 'xml'; there are: pytest-benchmark, github-action, csv"),
        ("{file}", "Missing option '--format'"),
        ("--format csv", "Missing argument 'RUN'"),
        ("{file} --format csv --out {file}", "is the run itself: name another file"),
        ("{file} --format csv --out {folder}/no/such/out.csv", "No such file or directory"),
        ("{file} --format csv --out {folder}", "Is a directory"),
        ("{folder} --format csv", "cannot be read: Is a directory"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: str, words: str, capsys: Captured, tmp_path: Path) -> None:
    """It ends with exit code 2, and the run's file is as it was."""
    file = stored(synthetic.run(of_cuda()), tmp_path / "run.jsonl")
    before = file.read_bytes()
    assert run("export", *arguments.format(file=file, folder=tmp_path).split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert file.read_bytes() == before
