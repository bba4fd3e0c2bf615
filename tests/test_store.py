"""Reading and writing runs on disk."""

import gzip
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esbench.errors import UserError
from esbench.schema import Case, Measurement, Record, RunEnd, Skipped
from esbench.store import Problem, Writer, encode, new_run_id, read_document, read_results, read_run
from esbench.studies.timer_accuracy import Study
from tests import synthetic

if TYPE_CHECKING:
    from collections.abc import Callable

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
    is_complete = cut in {len(first), *ends, *(end - 1 for end in ends)}
    assert ["half a line" in str(problem) for problem in problems] == ([] if is_complete else [True])


@IN_TMP_PATH
@given(garbage=st.lists(st.binary(max_size=40) | TEXT.map(str.encode), max_size=5), head=st.booleans())
def test_garbage_never_raises(tmp_path: Path, garbage: list[bytes], head: bool) -> None:
    """From any bytes, the readable records are returned, and a problem for the rest."""
    begin = lines(synthetic.header(), ROW) if head else b""
    run, problems = read_run(write(tmp_path, begin + b"\n".join(garbage)))
    assert (run is not None) == head
    assert run is None or run.rows == (ROW,)
    assert problems or not b"".join(garbage)


def test_a_line_that_is_not_a_record_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    """The problem has file, line and field, in one line; the lines around it are read."""
    row = encode(ROW)
    cases: list[tuple[bytes, str]] = [
        (b"{}", "`record`"),
        (b"[1]", "`array`"),
        (b"\x00\xff", "malformed"),
        (b'{"record":"verdict"}', "'verdict'"),
        (b'{"record":"end","status":"complete","wall_s":1,"two\\nlines":1}', "unknown field `two lines`"),
        (row.replace(b'"scheme":"Perturbed"', b'"scheme":3'), "got `int` - at `$.variant.scheme`"),
        (row.replace(b'"members":1024', b'"members":0'), "at `$.case.members`"),
        (row.replace(b"1000000.0", b"NaN"), "malformed"),
        (row.replace(b"1000000.0", b"0.0"), "a call took 0 ns, so it was not timed - at `$.samples[0]`"),
        (row.replace(b"1000000.0", b"1000000.0,0.0"), "a call took 0 ns"),
        (row.replace(b"1000000.0", b"-1.0"), ">= 0.0 - at `$.samples[0][0]`"),
        (row.replace(b"1000000.0", b"1e300"), "<= 1e+24 - at `$.samples[0][0]`"),
        (b"[" * 200_000, ""),
        (b'{"record":"end","deep":' + b"[" * 200_000, ""),
        (b'{"record":"end","status":"complete","wall_s":1e999}', "out of range"),
        (encode(synthetic.header()), "'run'"),
        (b'{"record":"\xff"}', "utf-8"),
    ]
    for line, words in cases:
        run, (problem,) = read_run(
            write(tmp_path, lines(synthetic.header()) + line + b"\n" + lines(ROW, END))
        )
        assert run is not None
        assert (run.rows, run.end) == ((ROW,), END)
        message = str(problem)
        assert message.startswith(f"{tmp_path / 'x.jsonl'}:2: ")
        assert words in message
        assert message.endswith("this line is left out; run again, or restore it from a copy")
        assert "\n" not in message
    # What editors add is skipped: a byte order mark, blank lines, other line ends.
    content = b"\xef\xbb\xbf\n" + lines(synthetic.header()) + b"\n \r\n" + lines(ROW) + b"\n" + lines(END)
    run, problems = read_run(write(tmp_path, content + b"\n  "))
    assert run is not None
    assert (run.rows, run.end, problems) == ((ROW,), END, [])
    _, (problem,) = read_run(write(tmp_path, content + b"{}\n"))
    assert problem.line == 8


def test_a_file_without_a_header_holds_no_run(tmp_path: Path) -> None:
    """Such a file is refused in one line; a header of another version names both versions."""
    header = lines(synthetic.header())
    for content, words in (
        (b"\n\n", "is empty"),
        (b"\xff\xfe\x00", "x.jsonl:1: "),
        (lines(ROW), "without its header the file holds no run"),
        (lines(ROW)[:30], "x.jsonl:1: "),
        (header.replace(b'"schema":6', b'"schema":7'), "with schema version 7, this esbench reads version 6"),
        (header.replace(b'"schema":6', b'"schema":5,"old":[]'), "schema version 5"),
        (header.replace(b'"threads":2', b'"threads":"two"'), "at `$.environment.threads`"),
    ):
        run, (problem,) = read_run(write(tmp_path, content))
        assert run is None
        assert words in str(problem)


def test_unreadable_files_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing folder of results is a problem; so are folders and dangling links named like a run."""
    with Writer(tmp_path, synthetic.header()) as writer:
        writer.write(ROW)
    (writer.path.parent / "folder.jsonl").mkdir()
    (writer.path.parent / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    runs, problems = read_results(tmp_path)
    assert [run.rows for run in runs] == [(ROW,)]
    assert [problem.path.name for problem in problems] == ["folder.jsonl", "gone.jsonl"]
    runs, (problem,) = read_results(tmp_path / "nowhere")
    assert "--results" in str(problem)

    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert read_run(writer.path) == (None, [Problem(writer.path, "cannot be read: Permission denied")])


def test_a_file_is_in_the_folder_of_its_device(tmp_path: Path) -> None:
    """Runs are read by device and time, without published values."""
    for device, run_id in [("B (16 GB)", "2"), ("A", "3"), ("B (16 GB)", "1"), ("published", "4")]:
        Writer(tmp_path, synthetic.header(run_id, device_name=device)).close()
    runs, problems = read_results(tmp_path)
    assert problems == []
    assert [run.header.run_id for run in runs] == ["3", "1", "2"]
    plain = tmp_path / "b-16-gb" / "1.jsonl"
    plain.with_suffix(".jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))  # as a kill leaves both
    assert len(read_results(tmp_path)[0]) == 3


def test_only_what_can_be_read_is_written(tmp_path: Path) -> None:
    """A second run of the same name and a record with NaN are refused; the file is unchanged."""
    with Writer(tmp_path, synthetic.header()) as writer:
        with pytest.raises(ValueError, match="samples"):
            writer.write(ROW, synthetic.time_row(synthetic.DENSE, synthetic.linear(), math.nan))
        writer.write(ROW)
    with pytest.raises(FileExistsError):
        Writer(tmp_path, synthetic.header())
    assert writer.path.read_bytes() == lines(synthetic.header(), ROW)


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


def test_a_file_that_is_lost_during_the_run_is_an_error(tmp_path: Path) -> None:
    """Deleted, truncated or replaced by a copy, the file gets no more rows, and a large one no copy."""
    ways: list[tuple[Callable[[Path], object], str]] = [
        (Path.unlink, "was deleted or replaced"),
        (lambda path: os.truncate(path, 10), "has other contents"),
        (lambda path: path.write_bytes(b""), "has other contents"),
        (lambda path: Path(shutil.copy(path, tmp_path / "copy")).replace(path), "deleted or replaced"),
    ]
    for number, (lose, words) in enumerate(ways):
        with Writer(tmp_path / str(number), synthetic.header()) as writer:
            writer.write(ROW)
            lose(writer.path)
            before = writer.path.read_bytes() if writer.path.exists() else None
            for action in (partial(writer.write, ROW), writer.compress):
                with pytest.raises(UserError, match=rf"{words} while .*: run again"):
                    action()
            assert (writer.path.read_bytes() if writer.path.exists() else None) == before


def test_run_ids_sort_by_time() -> None:
    """A run's id begins with its time in UTC, has its suite, and differs from the next one's."""
    now = datetime(2026, 11, 21, 12, 34, 56, tzinfo=UTC)
    first, second = new_run_id("my suite/2", now), new_run_id("my suite/2", now)
    assert first.startswith("20261121T123456Z-my-suite-2-")
    assert first != second


def test_half_a_line_of_a_run_that_was_cut_off_is_no_loss(tmp_path: Path) -> None:
    """In an unfinished run a partial last line is ignored; in a finished one it is damage."""
    for is_ended in (False, True):
        with Writer(tmp_path / str(is_ended), synthetic.header()) as writer:
            writer.write(*[END] * is_ended)
        with writer.path.open("ab") as file:
            file.write(b'{"record":"measure')
        run, (problem,) = read_run(writer.path)
        assert run is not None
        assert "half a line" in problem.message
        assert problem.lost == is_ended


def test_only_a_failure_withdraws_the_numbers_of_its_phase(tmp_path: Path) -> None:
    """Times stay beside an unavailable row of the same phase; a failed one removes them."""
    reason = synthetic.skipped(ROW.variant, ROW.case, "no counters", ROW.phase)
    for status, kept in (("unavailable", (ROW,)), ("failed", ())):
        row = msgspec.structs.replace(reason, status=status)
        run, _ = read_run(write(tmp_path, lines(synthetic.header(), ROW, row, END)))
        assert run is not None
        assert run.rows == (*kept, row)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """A pipe in the place of a run or of a study is one error; reading from it would never end."""
    (tmp_path / "cpu").mkdir()
    os.mkfifo(tmp_path / "cpu/run.jsonl")
    runs, problems = read_results(tmp_path)
    assert not runs
    assert [problem.message for problem in problems] == ["cannot be read: it is not a regular file"]
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    assert read_run(path) == (None, [Problem(path, "cannot be read: it is not a regular file")])
    with pytest.raises(UserError, match=r"pipe\.json: cannot be read: it is not a regular file"):
        read_document(path, Study, what="timer study", schema=2, again="measure again")
