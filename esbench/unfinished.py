"""Runs that were cut off: what of them is kept when they are resumed.

A run goes on behind the last line that says its rows are settled; what stands below is measured again,
at most the phase of one case that was under way. The file is cut there before anything is added.
"""

from dataclasses import dataclass
from pathlib import Path

from esbench.errors import UserError
from esbench.schema import Request, Run
from esbench.store import parse_run, read_bytes, read_run, run_files

SETTLED = b'{"record":"checkpoint"'
"""What a line begins with that says that all rows of something stand above it."""


class ResumeError(UserError):
    """A run that cannot be resumed; the message says why and what to do."""


@dataclass(frozen=True)
class Unfinished:
    """The part of a run that is kept, its first ``kept_bytes``: what it holds, and what was asked for."""

    path: Path
    run: Run
    request: Request
    kept_bytes: int


def find(results: Path, device: str) -> Path:
    """Return the newest unfinished run in a device's folder.

    Raises:
        ResumeError: there is none.

    """
    paths = [path for path in run_files(results) if path.parent.name == device]
    for path in sorted(paths, key=lambda path: path.name, reverse=True):
        run, _ = read_run(path)
        if run is not None and _is_unfinished(run):
            return path
    message = f"nothing to resume: every run in {results / device} came to its end"
    raise ResumeError(message)


def read(path: Path) -> Unfinished:
    """Read what is kept of a run that was cut off.

    Raises:
        ResumeError: it holds no run, came to its end, or does not say what was asked for.

    """
    run, problems = read_run(path)
    if run is None:
        raise ResumeError(str(problems[0]))
    if not _is_unfinished(run):
        message = f"{path} came to its end: there is nothing to resume"
        raise ResumeError(message)
    request = run.header.request
    if request is None:
        message = f"{path} was written by an older esbench, which did not store what was asked for: run again"
        raise ResumeError(message)
    content = read_bytes(path)
    kept_bytes = _kept_bytes(content)
    kept, problems = parse_run(path, content[:kept_bytes])
    if kept is None or problems:
        message = f"{problems[0]}; a run with a damaged line cannot be resumed: run again"
        raise ResumeError(message)
    return Unfinished(path, kept, request, kept_bytes)


def _kept_bytes(content: bytes) -> int:
    """Return where the last settled line ends, or the header where nothing is settled."""
    place = kept = content.index(b"\n") + 1
    for line in content[place:].splitlines(keepends=True):
        place += len(line)
        # Rows are long and many, settled lines short and few.
        if line.startswith(SETTLED) and line.endswith(b"\n"):
            kept = place
    return kept


def _is_unfinished(run: Run) -> bool:
    return run.end is None or run.end.status == "interrupted"
