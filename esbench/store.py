"""Runs on disk: one JSON Lines file for each, ``<results>/<device>/<run id>.jsonl``.

The first line is the header, then one row on each line, then the end. A line is on disk before
the next cell is measured, so a run that is killed keeps all it had finished. A large file is compressed
when its run has come to its end, and is then called ``<run id>.jsonl.gz``. Reading is strict
about each line and lenient about the file: what cannot be read becomes a :class:`Problem` that
names file, line and field, and the rest is read.
"""

import codecs
import contextlib
import gzip
import io
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, TypeVar

import msgspec

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]  # a missing module

from esbench.errors import UserError
from esbench.schema import (
    LAUNCHES,
    QUALITY,
    SCHEMA_VERSION,
    Checkpoint,
    DevicePeak,
    Measurement,
    Record,
    Request,
    Row,
    Run,
    RunEnd,
    RunHeader,
    Skipped,
)

PUBLISHED = "published"
"""The folder of ``results/`` that holds figures of others, in their own format."""

MOST_BYTES = 2**29
"""A compressed file that holds more is not read: no run is as large."""
LARGE_BYTES = 2**16
"""The file of a run that has ended is compressed if it is larger."""
PLAIN, COMPRESSED = ".jsonl", ".jsonl.gz"
"""Endings of the name of a run's file."""
_GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""

TIMED = "latency_ns"
"""The suffix of metrics whose samples are the times of single calls."""

_CHECKPOINT = b'{"record":"checkpoint"'
"""The beginning of a checkpoint's line."""

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_ENCODER = msgspec.json.Encoder()
_NO_JSON = ("JSON is malformed", "Input data was truncated", "'utf-8' codec", "maximum recursion")
"""How the decoder's message begins if a line is not JSON."""


@dataclass(frozen=True)
class Problem:
    """A problem with a file in ``results/``, with its place and what to do.

    ``lost``: a line could not be read; otherwise it was read, with a remark.
    """

    path: Path
    message: str
    line: int | None = None
    field: str | None = None
    lost: bool = True

    def __str__(self) -> str:
        """Return one line: ``file:line: field: message``."""
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return " ".join(f"{place}: {self._what}".split())

    @property
    def within(self) -> str:
        """The problem without its file: ``line 5: field: message``."""
        return " ".join(f"{f'line {self.line}: ' if self.line else ''}{self._what}".split())

    @property
    def _what(self) -> str:
        return f"field {self.field}: {self.message}" if self.field else self.message


class _Version(msgspec.Struct):
    """The fields by which a header of another version differs from a foreign line."""

    record: str
    schema: int


def new_run_id(suite: str, now: datetime | None = None) -> str:
    """Return a name for a run that sorts by time: ``20261121T123456Z-quick-1a2b``."""
    stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    words = re.sub(r"[^A-Za-z0-9_]+", "-", suite).strip("-") or "run"
    return f"{stamp}-{words}-{secrets.token_hex(2)}"


class Writer:
    """A run's file, appended to a few records at a time.

    Raises:
        FileExistsError: there is a run of that name already; it is left as it is.
        BlockingIOError: another process is writing it; it is left as it is.

    """

    def __init__(self, results: Path, header: RunHeader, kept_bytes: int | None = None) -> None:
        """Create the file with the header, or open that of an unfinished run and keep ``kept_bytes``."""
        self.path = results / header.environment.slug / f"{header.run_id}{PLAIN}"
        line = encode(header)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if kept_bytes is not None:
            _decompress(self.path)
        self._file = self.path.open("xb" if kept_bytes is None else "ab")
        _lock(self._file)
        if kept_bytes is None:
            self._append(line)
        else:
            self._file.truncate(kept_bytes)

    def write(self, *records: Record) -> None:
        """Append records that belong together; when this returns, they are on disk.

        Raises:
            ValueError: the record could not be read back, for instance because a sample is NaN.

        """
        self._append(*map(encode, records))

    def close(self) -> None:
        """Close the file; a run without an end stays readable."""
        self._file.close()

    def compress(self) -> None:
        """Close the file and compress it if it is large; ``path`` is then the compressed file.

        The compressed file is whole and on disk before the plain one is deleted, so nothing is lost at any
        moment. If both are there, readers take the plain one. If the disk is full, the file stays as it is.
        """
        self.close()
        if self.path.stat().st_size <= LARGE_BYTES:
            return
        target = _compressed(self.path)
        with contextlib.suppress(OSError):  # the disk is full, perhaps: the plain file is as good
            _replace(target, gzip.compress(self.path.read_bytes(), mtime=0))
            self.path.unlink()
            self.path = target

    def _append(self, *lines: bytes) -> None:
        self._file.write(b"".join(line + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        """Use the writer in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


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


def _compressed(path: Path) -> Path:
    return path.with_name(run_name(path) + COMPRESSED)


def _decompress(path: Path) -> None:
    """Turn the compressed file of a run into a plain one that can be appended to."""
    if not path.exists() and _compressed(path).exists():
        _replace(path, read_bytes(_compressed(path)))
        _compressed(path).unlink()


def _lock(file: IO[bytes]) -> None:
    """Lock the file against writing by other processes."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        message = f"{file.name} is being written by another process: wait until it ends"
        raise BlockingIOError(message) from None
    except OSError:
        pass  # a file system without locks


def encode(record: Record) -> bytes:
    """Return a record as one line of JSON without the line end.

    Raises:
        ValueError: the record could not be read back.

    """
    line = _ENCODER.encode(record)
    try:
        _DECODER.decode(line)
    except msgspec.DecodeError as error:
        message = f"cannot store this record, it could not be read back: {error}"
        raise ValueError(message) from error
    return line


def run_files(results: Path) -> Iterator[Path]:
    """Yield the file of each run under a results folder, compressed or not, by device and time."""
    named = (*results.glob(f"*/*{PLAIN}"), *results.glob(f"*/*{COMPRESSED}"))
    found = {path for path in named if path.is_file()}  # reading from a pipe or a device would never end
    for path in sorted(found):
        # Both are there if the run was killed between writing the one and deleting the other.
        is_copy = path.name.endswith(COMPRESSED) and path.with_suffix("") in found
        if path.parent.name != PUBLISHED and not is_copy:
            yield path


def run_name(path: Path) -> str:
    """Return the name of a run's file without its endings: the id of the run."""
    return path.name.removesuffix(COMPRESSED).removesuffix(PLAIN)


def read_bytes(path: Path) -> bytes:
    """Read a run's file, compressed or not; a file that was compressed since is found by its old name.

    Raises:
        OSError: it cannot be read, or not be decompressed.

    """
    compressed = _compressed(path)
    content = (path if path.exists() or not compressed.exists() else compressed).read_bytes()
    if not content.startswith(_GZIP):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            plain = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error) as error:
        message = f"it is damaged: {error}"
        raise OSError(message) from error
    if len(plain) > MOST_BYTES:
        message = f"it holds more than {MOST_BYTES >> 20} MiB: not a run"
        raise OSError(message)
    return plain


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
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        return None, [Problem(path, "is empty; delete it, or run again")]
    problems: list[Problem] = []
    first, line = filled[0]
    header = _decode(path, first, line)
    if isinstance(header, Problem):
        return None, [replace(header, message=f"{header.message}; without its header the file holds no run")]
    if not isinstance(header, RunHeader):
        return None, [Problem(path, "the first line must be a run's header; the file holds no run", first)]
    records: list[Record] = []
    for number, record in _decode_lines(path, filled[1:], last=len(lines)):
        match record:
            case Problem():
                problems.append(record)
            case RunHeader():
                problems.append(Problem(path, "a second header: one file holds one run", number))
            case _:
                records.append(record)
    return Run(
        header=header,
        rows=_joined([record for record in records if isinstance(record, Row)]),
        end=next((record for record in reversed(records) if isinstance(record, RunEnd)), None),
        device_peaks=tuple(record for record in records if isinstance(record, DevicePeak)),
        checkpoints=tuple(record for record in records if isinstance(record, Checkpoint)),
    ), problems


def read_results(results: Path) -> tuple[list[Run], list[Problem]]:
    """Read every run under a results folder, in the order of device and time."""
    if not results.is_dir():
        return [], [
            Problem(results, "is not a folder; measure something first, or name another with --results")
        ]
    runs: list[Run] = []
    problems: list[Problem] = []
    for path in run_files(results):
        run, found = read_run(path)
        runs += [run] if run else []
        problems += found
    return runs, problems


class ResumeError(UserError):
    """A run that cannot be resumed; the message has the reason and what to do."""


@dataclass(frozen=True)
class Unfinished:
    """The part of a run that is kept when it is resumed, its first ``kept_bytes``, and its request."""

    path: Path
    run: Run
    request: Request
    kept_bytes: int


def find_unfinished(results: Path, device: str) -> Path:
    """Return the newest unfinished run in a device's folder.

    Raises:
        ResumeError: there is no such run.

    """
    paths = [path for path in run_files(results) if path.parent.name == device]
    for path in sorted(paths, key=lambda path: path.name, reverse=True):
        run, _ = read_run(path)
        if run is not None and _is_unfinished(run):
            return path
    message = f"nothing to resume: no unfinished run in {results / device}"
    raise ResumeError(message)


def read_unfinished(path: Path) -> Unfinished:
    """Read the part of an interrupted run that is kept.

    Raises:
        ResumeError: the file holds no run, or one that is complete or lacks its request.

    """
    run, problems = read_run(path)
    if run is None:
        raise ResumeError(str(problems[0]))
    if not _is_unfinished(run):
        message = f"{path} is complete: there is nothing to resume"
        raise ResumeError(message)
    request = run.header.request
    if request is None:
        message = f"{path} was written by an older esbench, which did not store the request: run again"
        raise ResumeError(message)
    content = read_bytes(path)
    kept_bytes = _kept_bytes(content)
    kept, problems = parse_run(path, content[:kept_bytes])
    if kept is None or problems:
        message = f"{problems[0]}; a run with a damaged line cannot be resumed: run again"
        raise ResumeError(message)
    return Unfinished(path, kept, request, kept_bytes)


def _kept_bytes(content: bytes) -> int:
    """Return the end of the last checkpoint in bytes, or that of the header if there is none."""
    place = kept = content.index(b"\n") + 1
    for line in content[place:].splitlines(keepends=True):
        place += len(line)
        # Rows are long and many, settled lines short and few.
        if line.startswith(_CHECKPOINT) and line.endswith(b"\n"):
            kept = place
    return kept


def _is_unfinished(run: Run) -> bool:
    return run.end is None or run.end.status == "interrupted"


class Document(Protocol):
    """A record with the version of its kind."""

    @property
    def schema(self) -> int:
        """The version."""


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
    """Read a document of a kind.

    Args:
        path: the file.
        kind: the record's class.
        what: the kind, such as ``study of accuracy``, for messages.
        schema: the version that can be read.
        again: how a new one is had, where the version is another.

    Raises:
        UserError: the file cannot be read or does not hold one; the message names file and field.

    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise UserError(message) from error
    except ValueError as error:
        message = f"{path}: not a {what}: {error}"
        raise UserError(message) from error
    if document.schema != schema:
        message = f"{path}: a {what} of schema {document.schema}, this esbench reads {schema}: {again}"
        raise UserError(message)
    return document


def _joined(rows: list[Row]) -> tuple[Row, ...]:
    """Return the rows with the fields that are stored once for several rows, without withdrawn rows.

    Conditions are stored with the latency of their visits, and the labels of a trace with the launches; both
    apply to all times of the phase. A phase that failed after it was timed has no numbers.
    """
    failed = {
        (row.variant, row.case, row.phase)
        for row in rows
        if isinstance(row, Skipped) and row.status == "failed" and row.method is None
    }
    rows = [row for row in rows if isinstance(row, Skipped) or _phase(row) not in failed]
    traced = {
        _phase(row): row.labels
        for row in rows
        if isinstance(row, Measurement) and row.metric == LAUNCHES and row.labels
    }
    times = [row for row in rows if isinstance(row, Measurement) and row.metric.endswith(TIMED)]
    beside = {_visits(row): row.conditions for row in times if row.conditions}
    filled = {
        id(row): msgspec.structs.replace(
            row,
            conditions=row.conditions or beside.get(_visits(row), ()),
            labels=row.labels + traced.get(_phase(row), ()),
        )
        for row in times
        if _visits(row) in beside or _phase(row) in traced
    }
    # Launches that could not be counted are a label of the times.
    kept = (row for row in rows if isinstance(row, Skipped) or row.samples or row.metric != LAUNCHES)
    return tuple(filled.get(id(row), row) for row in kept)


def _phase(row: Measurement) -> object:
    return row.variant, row.case, row.phase


def _visits(row: Measurement) -> object:
    """Return the fields that all times of the same visits share."""
    return row.variant, row.case, row.phase, row.method, row.group


def _decode_lines(
    path: Path, lines: Iterable[tuple[int, bytes]], last: int
) -> Iterator[tuple[int, Record | Problem]]:
    ended = False
    for number, line in lines:
        record = _decode(path, number, line)
        if isinstance(record, Problem):
            # A kill in the middle of a write leaves half a line, always the last one, which has no end: of
            # a run that was cut off nothing is lost that was finished.
            half = f"half a line, the run was cut off here ({record.message})"
            whole = f"{record.message}: this line is left out; run again, or restore it from a copy"
            cut_off = number == last
            record = replace(record, message=half if cut_off else whole, lost=ended or not cut_off)
        ended |= isinstance(record, RunEnd)
        yield number, record


def _decode(path: Path, number: int, line: bytes) -> Record | Problem:
    version = _version(line)
    if version is not None and version != SCHEMA_VERSION:
        message = (
            f"written with schema version {version}, this esbench reads version {SCHEMA_VERSION}: "
            f"use the esbench that wrote it, or run again"
        )
        return Problem(path, message, number, "schema")
    try:
        record = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        message, field = _in_words(str(error))
        return Problem(path, message, number, field)
    place = _no_time(record)
    return (
        Problem(path, "a time of 0 ns cannot be: the clock missed the call", number, place)
        if place
        else record
    )


def _no_time(record: Record) -> str | None:
    """Return the place of the first time of 0 ns, which is impossible for a call."""
    if not isinstance(record, Measurement) or record.phase == QUALITY or not record.metric.endswith(TIMED):
        return None
    for place, visits in enumerate(record.samples):
        if 0 in visits:
            return f"samples[{place}][{visits.index(0)}]"
    return None


def _in_words(error: str) -> tuple[str, str | None]:
    """Split a decoder's message into the error and the dotted name of the field."""
    message, _, place = error.partition(" - at `")
    if message.startswith(_NO_JSON):
        byte = re.search(r"byte (\d+)", message)
        return f"no valid JSON{f' from its byte {byte[1]}' if byte else ''} (NaN or damage?)", None
    parents = place.removesuffix("`").removeprefix("$").removeprefix(".")
    named = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", message)
    if named is None:
        return f"{message[:1].lower()}{message[1:]}", parents or None
    what = "is unknown" if named[1] == "contains unknown" else "is missing"
    return what, f"{parents}.{named[2]}".removeprefix(".")


def _version(line: bytes) -> int | None:
    try:
        head = msgspec.json.decode(line, type=_Version)
    except (ValueError, RecursionError):
        return None
    return head.schema if head.record == "run" else None
