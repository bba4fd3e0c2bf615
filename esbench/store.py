"""Runs on disk: one JSON Lines file for each, ``<results>/<device>/<run id>.jsonl``.

The first line is the header, then one row per line, then the end. Lines are on disk before the next cell is
measured, so a killed run keeps all finished rows. The large file of a complete run is compressed to
``<run id>.jsonl.gz``. An invalid line becomes a :class:`Problem`, and the other lines are read.
"""

import codecs
import contextlib
import gzip
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

from esbench.errors import UserError
from esbench.schema import (
    LAUNCHES,
    QUALITY,
    SCHEMA_VERSION,
    Checkpoint,
    DevicePeak,
    Measurement,
    Record,
    Row,
    Run,
    RunEnd,
    RunHeader,
    Skipped,
)

PUBLISHED = "published"
"""The folder of ``results/`` with published results of other projects, in other formats."""
LARGE_BYTES = 2**16
"""The file of a complete run is compressed if it is larger."""
PLAIN, COMPRESSED = ".jsonl", ".jsonl.gz"
"""Endings of the name of a run's file."""
TIMED = "latency_ns"
"""The suffix of metrics whose samples are the times of single calls."""

_GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""
_CHECKPOINT = b'{"record":"checkpoint"'
"""The beginning of a checkpoint's line."""
_HEADER: msgspec.json.Decoder[RunHeader] = msgspec.json.Decoder(RunHeader)
_LINE: msgspec.json.Decoder[DevicePeak | Measurement | Skipped | Checkpoint | RunEnd] = msgspec.json.Decoder(
    DevicePeak | Measurement | Skipped | Checkpoint | RunEnd
)


@dataclass(frozen=True)
class Problem:
    """A problem with a file in ``results/``.

    Attributes:
        message: the problem and what to do, in one line.
        line: number of the line.
        lost: whether data could not be read; otherwise the problem is a remark.
    """

    path: Path
    message: str
    line: int | None = None
    lost: bool = True

    def __str__(self) -> str:
        """Return one line: ``file:line: message``."""
        location = f"{self.path}:{self.line}" if self.line else str(self.path)
        return " ".join(f"{location}: {self.message}".split())

    @property
    def within(self) -> str:
        """The problem without its file: ``line 5: message``."""
        return " ".join(f"{f'line {self.line}: ' if self.line else ''}{self.message}".split())


def summarize_problems(problems: Iterable[Problem]) -> list[str]:
    """Return problems as text, one line each; the invalid lines of a file share one line."""
    groups: dict[object, list[Problem]] = {}
    for problem in problems:
        is_invalid_line = problem.line and problem.lost
        groups.setdefault(problem.path if is_invalid_line else problem, []).append(problem)
    return [
        f"{group[0].path}: {len(group)} lines could not be read, the first: {group[0].within}"
        if len(group) > 1
        else str(group[0])
        for group in groups.values()
    ]


def new_run_id(suite: str, now: datetime) -> str:
    """Return a name for a run that sorts by time: ``20261121T123456Z-quick-1a2b``."""
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    words = re.sub(r"[^A-Za-z0-9_]+", "-", suite).strip("-") or "run"
    return f"{stamp}-{words}-{secrets.token_hex(2)}"


# Writing


class Writer:
    """The file of a run, to which records are appended.

    Raises:
        FileExistsError: there is a run of that name already.
    """

    def __init__(self, results: Path, header: RunHeader, kept_bytes: int | None = None) -> None:
        """Create the file with the header, or cut the file of an unfinished run to ``kept_bytes``.

        If ``kept_bytes`` is 0, the header is written again.
        """
        self.path = results / header.environment.slug / f"{header.run_id}{PLAIN}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("xb" if kept_bytes is None else "ab")
        self._bytes = self._file.truncate(kept_bytes or 0)
        if not kept_bytes:
            self.write(header)

    def write(self, *records: Record) -> None:
        """Append records, and wait until they are on disk.

        Raises:
            ValueError: a record could not be read back, for instance because a sample is NaN.
            UserError: the file was deleted, replaced or changed since the last write.
        """
        content = b"".join(encode(record) + b"\n" for record in records)
        self._check_unchanged()
        try:
            self._file.write(content)
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:  # a full disk may take a part
            self._bytes = os.fstat(self._file.fileno()).st_size

    def _check_unchanged(self) -> None:
        """Check that the path still leads to the open file, and that the file has the bytes written to it."""
        state = os.fstat(self._file.fileno())
        try:
            is_here = os.path.samestat(self.path.stat(), state)
        except FileNotFoundError:
            is_here = False
        if not is_here or state.st_size != self._bytes:
            change = "has other contents" if is_here else "was deleted or replaced"
            raise UserError(f"{self.path} {change} while the run was writing it, rows are lost: run again")

    def close(self) -> None:
        """Close the file; a run without an end stays readable."""
        self._file.close()

    def compress(self) -> None:
        """Close the file and compress it if it is large; ``path`` is then the compressed file.

        The compressed file is on disk before the plain one is deleted. If the disk is full, the file stays
        uncompressed.

        Raises:
            UserError: the file was deleted, replaced or changed since the last write.
        """
        self._check_unchanged()
        self.close()
        if self.path.stat().st_size > LARGE_BYTES:
            with contextlib.suppress(OSError):
                _replace(_compressed_path(self.path), gzip.compress(self.path.read_bytes(), mtime=0))
                self.path.unlink()
                self.path = _compressed_path(self.path)

    def __enter__(self) -> Self:
        """Use the writer in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def encode(record: Record) -> bytes:
    """Return a record as one line of JSON without the line end; a ValueError if it could not be read back."""
    try:
        line = msgspec.json.encode(record)
        msgspec.json.decode(line, type=type(record))
    except msgspec.DecodeError as error:
        raise ValueError(f"cannot store this record, it could not be read back: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot store this record: {error}") from error
    return line


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: a crash leaves either the old or the new one."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _compressed_path(path: Path) -> Path:
    return path.with_name(run_name(path) + COMPRESSED)


# Reading


def run_files(results: Path) -> Iterator[Path]:
    """Yield the file of each run under a results folder, compressed or not, by device and time."""
    paths = {*results.glob(f"*/*{PLAIN}"), *results.glob(f"*/*{COMPRESSED}")}
    for path in sorted(paths):
        # Both files exist if the run was killed before the plain one was deleted.
        is_copy = path.name.endswith(COMPRESSED) and path.with_suffix("") in paths
        if path.parent.name != PUBLISHED and not is_copy:
            yield path


def run_name(path: Path) -> str:
    """Return the name of a run's file without its endings: the id of the run."""
    return path.name.removesuffix(COMPRESSED).removesuffix(PLAIN)


def read_bytes(path: Path) -> bytes:
    """Read a run's file, compressed or not; the plain name also finds the compressed file.

    Raises:
        OSError: it cannot be read or decompressed.
    """
    is_compressed = not path.exists() and _compressed_path(path).exists()
    content = read_regular_file(_compressed_path(path) if is_compressed else path)
    if not content.startswith(_GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error) as error:
        raise OSError(f"it is damaged: {error}") from error


def read_regular_file(path: Path) -> bytes:
    """Read a file; refuse a pipe or a device, from which reading may never end.

    Raises:
        OSError: the file is missing, cannot be read or is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.read_bytes()


def read_run(path: Path) -> tuple[Run | None, list[Problem]]:
    """Read a run's file; the run is None if the first line is not a header."""
    try:
        content = read_bytes(path)
    except OSError as error:
        return None, [Problem(path, f"cannot be read: {error.strerror or error}")]
    return parse_run(path, content)


def parse_run(path: Path, content: bytes) -> tuple[Run | None, list[Problem]]:
    """Read the content of a run's file, or a part of it."""
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        return None, [Problem(path, "is empty; delete it, or run again")]
    first, line = numbered[0]
    version = _version(line)
    if version not in {None, SCHEMA_VERSION}:
        message = (
            f"written with schema version {version}, this esbench reads version {SCHEMA_VERSION}: "
            "use the esbench that wrote it, or run again"
        )
        return None, [Problem(path, message, first)]
    try:
        header = _HEADER.decode(line)
    except (ValueError, RecursionError) as error:
        return None, [Problem(path, f"{error}; without its header the file holds no run", first)]
    rows: list[Row] = []
    device_peaks: list[DevicePeak] = []
    checkpoints: list[Checkpoint] = []
    end: RunEnd | None = None
    problems: list[Problem] = []
    for number, line in numbered[1:]:
        try:
            record = _LINE.decode(line)
            _check_times(record)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # without a line end: a kill leaves half a line, and no row is lost
                message = f"half a line, the run was cut off here ({error})"
                problems.append(Problem(path, message, number, lost=end is not None))
            else:
                message = f"{error}: this line is left out; run again, or restore it from a copy"
                problems.append(Problem(path, message, number))
            continue
        match record:
            case RunEnd():
                end = record
            case DevicePeak():
                device_peaks.append(record)
            case Checkpoint():
                checkpoints.append(record)
            case _:
                rows.append(record)
    run = Run(
        header=header,
        rows=_join_rows(rows),
        end=end,
        device_peaks=tuple(device_peaks),
        checkpoints=tuple(checkpoints),
    )
    return run, problems


def read_results(results: Path) -> tuple[list[Run], list[Problem]]:
    """Read every run under a results folder, in the order of device and time."""
    if not results.is_dir():
        message = "is not a folder; measure something first, or name another with --results"
        return [], [Problem(results, message)]
    runs: list[Run] = []
    problems: list[Problem] = []
    for path in run_files(results):
        run, file_problems = read_run(path)
        runs += [run] if run else []
        problems += file_problems
    return runs, problems


def _version(line: bytes) -> int | None:
    """Return the version of the schema in a header, None if there is none."""

    class Header(msgspec.Struct, tag_field="record", tag="run"):
        schema: int

    try:
        return msgspec.json.decode(line, type=Header).schema
    except (ValueError, RecursionError):
        return None


def _check_times(record: object) -> None:
    """Raise a ValueError if a call took 0 ns."""
    if not isinstance(record, Measurement) or record.phase == QUALITY or not record.metric.endswith(TIMED):
        return
    for index, visits in enumerate(record.samples):
        if 0 in visits:
            raise ValueError(f"a call took 0 ns, so it was not timed - at `$.samples[{index}]`")


def _join_rows(rows: list[Row]) -> tuple[Row, ...]:
    """Copy fields that are stored once to all rows of the phase, and drop rows of failed phases.

    Conditions are stored with the latency, and the labels of a trace with the launches; both apply to all
    times of the phase. A phase that failed after it was timed has no numbers.
    """
    failed = {
        (row.variant, row.case, row.phase)
        for row in rows
        if isinstance(row, Skipped) and row.status == "failed" and row.method is None
    }
    labels: dict[object, tuple[str, ...]] = {}
    conditions = {}
    for row in rows:
        if isinstance(row, Measurement):
            if row.metric == LAUNCHES:
                labels[_phase_key(row)] = row.labels
            elif row.metric.endswith(TIMED) and row.conditions:
                conditions[_visits_key(row)] = row.conditions
    joined: list[Row] = []
    for row in rows:
        if isinstance(row, Skipped):
            joined.append(row)
        elif _phase_key(row) in failed or (row.metric == LAUNCHES and not row.samples):
            pass  # launches without samples could not be counted: they are only labels of the times
        elif row.metric.endswith(TIMED):
            joined.append(
                msgspec.structs.replace(
                    row,
                    conditions=row.conditions or conditions.get(_visits_key(row), ()),
                    labels=row.labels + labels.get(_phase_key(row), ()),
                )
            )
        else:
            joined.append(row)
    return tuple(joined)


def _phase_key(row: Measurement) -> object:
    return row.variant, row.case, row.phase


def _visits_key(row: Measurement) -> object:
    """Return a key that all times of the same visits share."""
    return row.variant, row.case, row.phase, row.method, row.group


# Resuming


@dataclass(frozen=True)
class Unfinished:
    """The rows of an unfinished run that are kept when it is resumed, and their bytes in the file.

    ``kept_bytes`` is 0 if the file ends within the line of its header.
    """

    path: Path
    run: Run
    kept_bytes: int


def find_unfinished(results: Path, device: str) -> Path:
    """Return the newest unfinished run in a device's folder; raise a UserError if there is none."""
    for path in sorted((results / device).glob(f"*{PLAIN}"), reverse=True):
        run, _ = read_run(path)
        if run is not None and _is_unfinished(run):
            return path
    raise UserError(f"nothing to resume: no unfinished run in {results / device}")


def read_unfinished(path: Path) -> Unfinished:
    """Read the lines of an unfinished run up to its last checkpoint.

    Raises:
        UserError: the file holds no run, or one that is complete or damaged.
    """
    run, problems = read_run(path)
    if run is None:
        raise UserError(str(problems[0]))
    if not _is_unfinished(run):
        raise UserError(f"{path} is complete: there is nothing to resume")
    content = read_bytes(path)
    header_end = content.find(b"\n") + 1
    if not header_end:
        return Unfinished(path, run, kept_bytes=0)
    line_end = kept_bytes = header_end
    for line in content[header_end:].splitlines(keepends=True):
        line_end += len(line)
        if line.startswith(_CHECKPOINT) and line.endswith(b"\n"):
            kept_bytes = line_end
    kept, problems = parse_run(path, content[:kept_bytes])
    if kept is None or problems:
        raise UserError(f"{problems[0]}; a run with a damaged line cannot be resumed: run again")
    return Unfinished(path, kept, kept_bytes)


def _is_unfinished(run: Run) -> bool:
    return run.end is None or run.end.status == "interrupted"


# Documents: other stored files, each one record


class Document(Protocol):
    """A record with a version."""

    @property
    def schema(self) -> int:
        """The version of the record."""


D = TypeVar("D", bound=Document)


def write_document(document: Document, path: Path) -> Path:
    """Replace a document atomically: an interrupt leaves either the old or the new one.

    Raises:
        ValueError: it could not be read back, for instance because a number is NaN.
    """
    text = msgspec.json.encode(document)
    msgspec.json.decode(text, type=type(document))
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text + b"\n")
    return path


def read_document(path: Path, kind: type[D], *, what: str, schema: int, again: str) -> D:
    """Read a document.

    ``what`` is its name in messages, such as ``timer study``, and ``again`` says what to do about a file with
    another version than ``schema``, such as ``measure again``.

    Raises:
        UserError: the file cannot be read or is invalid; the message has the file and the field.
    """
    try:
        document = msgspec.json.decode(read_regular_file(path), type=kind)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: not a {what}: {error}") from error
    if document.schema != schema:
        raise UserError(
            f"{path}: this is a {what} with schema version {document.schema}, but this esbench reads version "
            f"{schema}: {again}"
        )
    return document
