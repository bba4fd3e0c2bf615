"""The command export: files that other tools read as they are, and one line for all that can go wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from esbench.schema import Run, RunEnd
from esbench.store import encode, read_run
from tests import synthetic
from tests.export_cases import CASE, HOSTILE, failed, hostile, of_cuda
from tests.synthetic import DENSE, time_row
from tests.test_cli import run

ROOT = Path(__file__).parent.parent
COMMITTED = ROOT / "results" / "amd-epyc" / "20261122T151454Z-quick-c095.jsonl.gz"
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


def compare(*arguments: str | Path, cwd: Path) -> str:
    """Run the tool's own comparison, and return what it prints."""
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def counted(printed: str) -> list[int]:
    """How many tests the tool says that there are in each group."""
    return [int(count) for count in re.findall(r"'?: (\d+) tests", printed)]


def test_pytest_benchmark_compares_an_exported_run(tmp_path: Path) -> None:
    """Its compare reads the file as it is, one group for each case and phase, all times in it."""
    found = exported(COMMITTED, tmp_path / "run.json")
    times = len(json.loads(found.read_text())["benchmarks"])
    printed = compare(found, cwd=tmp_path)
    groups = counted(printed)
    assert len(groups) == 12
    assert sum(groups) == times > 100
    assert "benchmark 'Linear(128, 128) members=256, forward, latency_ns (host)'" in printed


@pytest.mark.parametrize(
    ("by", "heading"),
    [
        ("func", "'forward'"),
        ("fullname", "'forward[Base-Linear(128, 128) members=256-latency_ns-host]'"),
        ("param:variant", "'variant=PermutedLinear'"),
        ("param:phase,param:method", "'phase=sample method=host'"),
    ],
)
def test_pytest_benchmark_groups_as_it_is_told(by: str, heading: str, tmp_path: Path) -> None:
    """Rows can be grouped by what a test's name and parameters would be."""
    found = exported(COMMITTED, tmp_path / "run.json")
    printed = compare(found, "--group-by", by, "--columns", "min,median,iqr,outliers,rounds", cwd=tmp_path)
    assert f"benchmark {heading}: " in printed
    assert re.search(r"Min +Median +IQR +Outliers +Rounds", printed)


def test_pytest_benchmark_sets_two_runs_side_by_side(tmp_path: Path) -> None:
    """Rows of the same name meet, and a variant that only one run has stands there once."""
    run, _ = read_run(COMMITTED)
    assert run is not None
    rows = tuple(row for row in run.rows if row.variant.scheme != "Permuted")
    newer = stored(msgspec.structs.replace(run, rows=rows), tmp_path / "newer.jsonl")
    files = [exported(path, tmp_path / f"{k}.json") for k, path in enumerate((COMMITTED, newer))]
    names = [{one["name"] for one in json.loads(file.read_text())["benchmarks"]} for file in files]
    printed = compare(*files, "--columns", "median", "--group-by", "fullname", cwd=tmp_path)
    groups = counted(printed)
    assert groups.count(2) == len(names[0] & names[1]) > 50
    assert groups.count(1) == len(names[0] ^ names[1]) > 0
    assert "Median" in compare(*files, "--between", "median", cwd=tmp_path)


def test_pytest_benchmark_draws_an_exported_run(tmp_path: Path) -> None:
    """There is a picture for each group, with a box for each variant."""
    found = exported(COMMITTED, tmp_path / "run.json")
    compare(found, "--histogram", "pictures/run", cwd=tmp_path)
    pictures = sorted((tmp_path / "pictures").glob("run-*.svg"))
    assert len(pictures) == 12
    assert "PermutedLinear(in_sparsity=0.1)" in pictures[0].read_text(encoding="utf-8").replace(
        "Conv2d", "Linear"
    )


def test_pytest_benchmark_reads_hostile_names(tmp_path: Path) -> None:
    """Whatever variants and cases are called, the tool groups, prints and draws all of them."""
    found = exported(stored(hostile(), tmp_path / "run.jsonl"), tmp_path / "run.json")
    for by in ("group", "func", "param:variant"):
        assert sum(counted(compare(found, "--group-by", by, cwd=tmp_path))) == 4 * len(HOSTILE)
    compare(found, "--histogram", "pictures/run", cwd=tmp_path)
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {tmp_path / "pictures"}


def test_pytest_benchmark_reads_every_method_and_nothing(tmp_path: Path) -> None:
    """Figures of a GPU, a sample of 1 ns and a run without rows are read as well."""
    rows = [*of_cuda(), time_row(DENSE, CASE, 1e-6, phase="step")]
    for name, one in (("gpu", synthetic.run(rows)), ("none", Run(header=synthetic.header(), rows=()))):
        found = exported(stored(one, tmp_path / f"{name}.jsonl"), tmp_path / f"{name}.json")
        assert sum(counted(compare(found, cwd=tmp_path))) == (6 if name == "gpu" else 0)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_the_same_in_every_process(form: str, tmp_path: Path) -> None:
    """On stdout or in a file, wherever it runs and whatever the hash seed, and torch is not needed."""
    file = stored(hostile(), tmp_path / "run.jsonl")
    expected = exported(file, tmp_path / "out", form).read_bytes()
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(file, tmp_path / "elsewhere" / "moved.jsonl")
    program = "import sys; sys.modules['torch'] = None; from esbench.cli import main; main()"
    for seed in "12":
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C",
            "TZ": "Asia/Tokyo",
        }
        command = [sys.executable, "-c", program, "export", str(moved), "--format", form]
        done = subprocess.run(
            command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, check=True
        )
        assert done.stdout == expected


def test_what_is_left_out_is_said_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_an_interrupted_run_is_exported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half a line at the end is said, and is no error: nothing is lost that was finished."""
    file = stored(synthetic.run(of_cuda()), tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:30])
    assert run("export", str(file), "--format", "github-action") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 5
    assert "half a line, the run was cut off here" in captured.err


def test_a_line_that_cannot_be_read_ends_in_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
    content: bytes | None, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
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
        ("{file} --format csv --out {file}", "is the run itself, which is never written over"),
        ("{file} --format csv --out {folder}/no/such/out.csv", "No such file or directory"),
        ("{file} --format csv --out {folder}", "Is a directory"),
        ("{folder} --format csv", "cannot be read: Is a directory"),
    ],
)
def test_a_wrong_request_is_one_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It ends with exit code 2, and the run's file is as it was."""
    file = stored(synthetic.run(of_cuda()), tmp_path / "run.jsonl")
    before = file.read_bytes()
    assert run("export", *arguments.format(file=file, folder=tmp_path).split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert file.read_bytes() == before


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """It names a file, a format and where to write."""
    assert run("export", "--help") == 0
    assert (
        "Example: esbench export results/my-gpu/run.jsonl --format pytest-benchmark"
        in capsys.readouterr().out
    )
