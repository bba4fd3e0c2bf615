"""Reading and writing runs on disk."""

import math
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esbench.schema import Case, Measurement, Record, RunEnd, Skipped
from esbench.store import Problem, Writer, encode, new_run_id, read_results, read_run
from tests import synthetic

COUNTS = st.integers(0, 2**62)
MANY = st.integers(1, 2**62)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.floats(0, 1e24)
SIZES = st.lists(COUNTS, max_size=3).map(tuple)
CASES = st.builds(
    Case,
    operator=TEXT,
    out_channels=MANY,
    in_channels=MANY,
    kernel_size=SIZES,
    input_size=SIZES,
    stride=COUNTS | SIZES,
    padding=COUNTS | SIZES | TEXT,
    dilation=COUNTS | SIZES,
    members=MANY,
    antithetic=st.booleans(),
)
OPTIONS = st.lists(st.tuples(TEXT, st.booleans() | COUNTS | NUMBERS | TEXT), max_size=3).map(tuple)
VARIANTS = OPTIONS.map(lambda options: msgspec.structs.replace(synthetic.DENSE, options=options))
PHASES = st.sampled_from(["sample", "forward", "update", "step"])
ROWS = st.builds(
    Measurement,
    variant=VARIANTS,
    case=CASES,
    phase=PHASES,
    metric=TEXT,
    method=TEXT,
    samples=st.lists(st.lists(NUMBERS, max_size=3).map(tuple), max_size=3).map(tuple),
    group=COUNTS,
    stop=TEXT,
) | st.builds(
    Skipped,
    variant=VARIANTS,
    case=CASES,
    phase=st.none() | PHASES,
    status=st.sampled_from(["unavailable", "failed"]),
    reason=TEXT,
)
ENDS = st.builds(RunEnd, status=st.sampled_from(["complete", "interrupted", "failed"]), wall_s=NUMBERS)
IN_TMP_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

ROW = synthetic.time_row(synthetic.DENSE, synthetic.linear(), 1.0, 2.0)
END = RunEnd(status="complete", wall_s=1.5)


def lines(*records: Record) -> bytes:
    """Return records as lines of a run's file."""
    return b"".join(encode(record) + b"\n" for record in records)


def write(tmp_path: Path, content: bytes) -> Path:
    """Write a file with this content; return its path."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    return path


def said(problems: list[Problem]) -> str:
    """Return the problems as shown to users."""
    return "\n".join(map(str, problems))


def test_a_number_that_no_instrument_reads_is_named(tmp_path: Path) -> None:
    """A negative or absurd sample and an empty population are problems with line and field."""
    cases: list[tuple[bytes, bytes, str]] = [
        (b'"samples":[[1', b'"samples":[[-1', "samples"),
        (b'"samples":[[1', b'"samples":[[1e300,1', "samples"),
        (b'"members":1024', b'"members":0', "case.members"),
    ]
    for old, new, field in cases:
        with Writer(tmp_path / new.hex(), synthetic.header()) as writer:
            writer.write(synthetic.time_row(synthetic.DENSE, synthetic.linear(), 1.0))
            writer.write(synthetic.time_row(synthetic.BASE, synthetic.linear(), 2.0))
        writer.path.write_bytes(writer.path.read_bytes().replace(old, new, 1))
        read, problems = read_run(writer.path)
        assert read is not None
        assert len(read.rows) == 1
        (problem,) = problems
        assert problem.line == 2
        assert problem.field is not None
        assert problem.field.startswith(field)


@given(rows=st.lists(ROWS, max_size=4), end=st.none() | ENDS)
def test_round_trip(rows: list[Measurement | Skipped], end: RunEnd | None) -> None:
    """Any records that are written are read back equal, without problems."""
    header = synthetic.header()
    with tempfile.TemporaryDirectory() as folder:
        with Writer(Path(folder), header) as writer:
            for record in [*rows, *([end] if end else [])]:
                writer.write(record)
        run, problems = read_run(writer.path)
    assert problems == []
    assert run is not None
    assert (run.header, run.rows, run.end) == (header, tuple(rows), end)


def test_file_has_the_place_that_the_header_names(tmp_path: Path) -> None:
    """A run's file is in the folder of its device and named after its id."""
    with Writer(tmp_path, synthetic.header("id", device_name="Tesla V100 (16 GB)")) as writer:
        pass
    assert writer.path == tmp_path / "tesla-v100-16-gb" / "id.jsonl"


@IN_TMP_PATH
@given(rows=st.lists(ROWS, min_size=1, max_size=3), data=st.data())
def test_truncation_keeps_finished_rows(
    tmp_path: Path, rows: list[Measurement | Skipped], data: st.DataObject
) -> None:
    """Wherever a file is cut off, every complete row is read, and a partial row is reported."""
    first = encode(synthetic.header()) + b"\n"
    content = first + lines(*rows)
    cut = data.draw(st.integers(len(first), len(content)))
    run, problems = read_run(write(tmp_path, content[:cut]))
    ends = [len(first + lines(*rows[: count + 1])) for count in range(len(rows))]
    finished = sum(cut >= end - 1 for end in ends)
    assert run is not None
    assert run.rows == tuple(rows[:finished])
    whole = cut in {len(first), *ends, *(end - 1 for end in ends)}
    assert ["half a line" in str(problem) for problem in problems] == ([] if whole else [True])


@IN_TMP_PATH
@given(garbage=st.lists(st.binary(max_size=40) | TEXT.map(str.encode), max_size=5), head=st.booleans())
def test_garbage_never_raises(tmp_path: Path, garbage: list[bytes], head: bool) -> None:
    """From any bytes, the readable records are returned, and a problem for the rest."""
    begin = lines(synthetic.header(), ROW) if head else b""
    run, problems = read_run(write(tmp_path, begin + b"\n".join(garbage)))
    assert (run is not None) == head
    assert run is None or run.rows == (ROW,)
    assert problems or not b"".join(garbage)


def test_foreign_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    """A line that is not a record is reported by file, line and field; the lines around it are read."""
    cases: list[tuple[bytes, list[str]]] = [
        (b"{}", ["x.jsonl:2:", "field record", "is missing"]),
        (b"[1]", ["x.jsonl:2:", "object", "array"]),
        (
            b"\x00\xff",
            ["jsonl:2: no valid JSON from its byte 0 (NaN or damage?): this line is left out;"],
        ),
        (b'{"record":"verdict"}', ["x.jsonl:2:", "field record", "verdict"]),
        (
            b'{"record":"end","status":"complete","wall_s":1,"extra":1}',
            ["x.jsonl:2:", "field extra", "is unknown"],
        ),
        (encode(ROW).replace(b'"scheme":"Perturbed"', b'"scheme":3'), ["field variant.scheme", "str", "int"]),
        (encode(ROW).replace(b'"members":', b'"member":'), ["field case.member", "is unknown"]),
        (encode(ROW).replace(b"1000000.0", b"NaN"), ["x.jsonl:2:", "(NaN or damage?)"]),
        (
            encode(ROW).replace(b"1000000.0", b"0.0"),
            ["field samples[0][0]", "a time of 0 ns"],
        ),
        (encode(ROW).replace(b"1000000.0", b"-1.0"), ["field samples[0][0]", ">= 0.0"]),
        (encode(ROW).replace(b"1000000.0", b"1e999"), ["x.jsonl:2:", "out of range"]),
        (b"[" * 200_000, ["x.jsonl:2:"]),
        (b'{"record":' * 200_000, ["x.jsonl:2:"]),
        (b'{"record":"end","deep":' + b"[" * 200_000, ["x.jsonl:2:"]),
        (b'"' + b"x" * 5_000_000, ["x.jsonl:2:"]),
        (b'{"record":"end","status":"complete","wall_s":1e999}', ["field wall_s", "out of range"]),
        (encode(synthetic.header()), ["x.jsonl:2:", "second header"]),
        (b'{"record":"\xff"}', ["x.jsonl:2:", "no valid JSON"]),
    ]
    for line, parts in cases:
        run, problems = read_run(write(tmp_path, lines(synthetic.header()) + line + b"\n" + lines(ROW, END)))
        assert run is not None
        assert (run.rows, run.end) == ((ROW,), END)
        assert len(problems) == 1
        assert all(part in said(problems) for part in parts), said(problems)
        assert "\n" not in said(problems)


def test_blank_lines_and_a_byte_order_mark_are_no_damage(tmp_path: Path) -> None:
    """Text that editors add is skipped, and line numbers count it."""
    content = b"\xef\xbb\xbf\n" + lines(synthetic.header()) + b"\n \r\n" + lines(ROW) + b"\n" + lines(END)
    run, problems = read_run(write(tmp_path, content + b"\n  "))
    assert run is not None
    assert (run.rows, run.end, problems) == ((ROW,), END, [])
    _, (problem,) = read_run(write(tmp_path, content + b"{}\n"))
    assert problem.line == 8


def test_no_header_no_run(tmp_path: Path) -> None:
    """A file whose first line is not a header of this version is refused in one line with the reason."""
    cases: list[tuple[bytes, str]] = [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"\xff\xfe\x00", "x.jsonl:1:"),
        (lines(ROW), "first line must be a run's header"),
        (lines(ROW)[:30], "x.jsonl:1:"),
        (
            lines(synthetic.header()).replace(b'"schema":6', b'"schema":7'),
            "written with schema version 7, this esbench reads version 6",
        ),
        (
            lines(synthetic.header()).replace(b'"schema":6', b'"schema":5,"old":[]'),
            "written with schema version 5, this esbench reads version 6",
        ),
        (lines(synthetic.header()).replace(b'"threads":2', b'"threads":"two"'), "field environment.threads"),
    ]
    for content, part in cases:
        run, problems = read_run(write(tmp_path, content))
        assert run is None
        assert len(problems) == 1
        assert part in said(problems)


def test_unreadable_files_are_problems(tmp_path: Path) -> None:
    """A folder or a dangling link named like a run is reported, and its neighbours are read."""
    with Writer(tmp_path, synthetic.header()) as writer:
        writer.write(ROW)
    (writer.path.parent / "folder.jsonl").mkdir()
    (writer.path.parent / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    runs, problems = read_results(tmp_path)
    assert [run.rows for run in runs] == [(ROW,)]
    assert [problem.path.name for problem in problems] == ["folder.jsonl", "gone.jsonl"]


def test_refused_permission_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without read permission is reported."""

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, lines(synthetic.header()))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert read_run(path) == (None, [Problem(path, "cannot be read: Permission denied")])


def test_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    """A missing results folder is a problem that names the option to set."""
    runs, problems = read_results(tmp_path / "nowhere")
    assert runs == []
    assert "--results" in said(problems)


def test_results_are_sorted_and_published_is_left_out(tmp_path: Path) -> None:
    """Runs are sorted by device and time, without the published figures of other projects."""
    for device, run_id in [("B", "2"), ("A", "3"), ("B", "1"), ("published", "4")]:
        Writer(tmp_path, synthetic.header(run_id, device_name=device)).close()
    runs, problems = read_results(tmp_path)
    assert problems == []
    assert [run.header.run_id for run in runs] == ["3", "1", "2"]


def test_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    """A second run of the same name is refused, and the first one is unchanged."""
    with Writer(tmp_path, synthetic.header()) as writer:
        writer.write(ROW)
    before = writer.path.read_bytes()
    with pytest.raises(FileExistsError):
        Writer(tmp_path, synthetic.header())
    assert writer.path.read_bytes() == before


def test_nan_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """A record that could not be read back raises and leaves the file readable."""
    with Writer(tmp_path, synthetic.header()) as writer:
        with pytest.raises(ValueError, match="samples"):
            writer.write(synthetic.time_row(synthetic.DENSE, synthetic.linear(), math.nan))
        writer.write(ROW)
    run, problems = read_run(writer.path)
    assert (run is not None and run.rows, problems) == ((ROW,), [])


def test_a_kill_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """If the process is killed right after a write, that row can be read from an unfinished run."""
    script = (
        "import os, signal, sys, pathlib\n"
        "from tests import synthetic\n"
        "from esbench.store import Writer\n"
        "writer = Writer(pathlib.Path(sys.argv[1]), synthetic.header())\n"
        "writer.write(synthetic.time_row(synthetic.DENSE, synthetic.linear(), 1.0, 2.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parent.parent
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=False)
    runs, problems = read_results(tmp_path)
    assert process.returncode == -signal.SIGKILL
    assert problems == []
    assert [(run.rows, run.end) for run in runs] == [((ROW,), None)]


def test_run_ids_sort_by_time() -> None:
    """A run's id begins with its time in UTC, has its suite, and differs from the next one's."""
    now = datetime(2026, 11, 21, 12, 34, 56, tzinfo=UTC)
    first, second = new_run_id("my suite/2", now), new_run_id("my suite/2", now)
    assert first.startswith("20261121T123456Z-my-suite-2-")
    assert first != second


def test_half_a_line_of_a_run_that_was_cut_off_is_no_loss(tmp_path: Path) -> None:
    """In an unfinished run a partial last line is ignored; in a finished one it is damage."""
    cases: list[bool] = [
        False,
        True,
    ]
    for ended in cases:
        with Writer(tmp_path / str(ended), synthetic.header()) as writer:
            writer.write(*[END] * ended)
        with writer.path.open("ab") as file:
            file.write(b'{"record":"measure')
        run, (problem,) = read_run(writer.path)
        assert run is not None
        assert "half a line" in problem.message
        assert problem.lost == ended
