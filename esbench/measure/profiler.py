"""What a call launches, by torch's profiler: a count, a table and a Chrome trace."""

import csv
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from esbench.measure.spans import (
    CALL,
    MARKER,
    Line,
    ProfileError,
    Record,
    Trace,
    cpu_trace,
    cuda_trace,
    kernels,
    operators,
    read,
)
from esbench.measure.timers import quiet

__all__ = ["METHOD", "Line", "Profile", "ProfileError", "Trace", "profile", "trace"]

METHOD = "profiler"

ATTEMPTS = 3
"""A trace that lost records is taken again, so often."""


class Profile(NamedTuple):
    """The profile of a call, and the files it is in."""

    lines: tuple[Line, ...]
    trace: Trace
    table: Path
    timeline: Path


def trace(call: Callable[[], object], device: str) -> Trace:
    """Count what one call launches; on CUDA another call goes before it.

    Raises:
        ProfileError: the profiler lost records, several times.

    """
    with tempfile.TemporaryDirectory() as folder:
        return _take(call, device, Path(folder) / "trace.json")[1]


def profile(call: Callable[[], object], device: str, folder: Path, stem: str) -> Profile:
    """Profile one call; write its table (``stem``.csv) and its Chrome trace (``stem``.json), for Perfetto.

    Raises:
        ProfileError: the profiler lost records, several times.

    """
    folder.mkdir(parents=True, exist_ok=True)
    table, timeline = folder / f"{stem}.csv", folder / f"{stem}.json"
    records, found = _take(call, device, timeline)
    lines = kernels(records) if device == "cuda" else operators(records)
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Line._fields)
        writer.writerows(lines)
    return Profile(tuple(lines), found, table, timeline)


def _take(call: Callable[[], object], device: str, path: Path) -> tuple[list[Record], Trace]:
    """Trace a call into a file until no record is missing."""
    for attempt in range(ATTEMPTS):
        with quiet():
            taken = _take_cuda(call) if device == "cuda" else _take_cpu(call)
        taken.export_chrome_trace(str(path))
        records = read(json.loads(path.read_text(encoding="utf-8")))
        try:
            return records, cuda_trace(records) if device == "cuda" else cpu_trace(records)
        except ProfileError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _take_cpu(call: Callable[[], object]) -> torch.autograd.profiler.profile:
    with torch.autograd.profiler.profile() as taken, torch.autograd.profiler.record_function(CALL):
        call()
    return taken


def _take_cuda(call: Callable[[], object]) -> torch.autograd.profiler.profile:
    """Trace a call on the current stream; records at the start may be lost, so other work comes first.

    The marker stands before the first call: a call that changed the current stream would move it.
    """
    # CUPTI stays attached once it is. Taking it off after each trace races with the next one (kineto#1554),
    # and before CUDA 12.6 it crashes where graphs were captured (pytorch#112507).
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    # Without Kineto torch records no device.
    with torch.autograd.profiler.profile(use_device="cuda", use_kineto=True) as taken:
        spot = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.autograd.profiler.record_function(MARKER):
            spot.add_(1)
        call()
        torch.cuda.synchronize()
        with torch.autograd.profiler.record_function(CALL):
            call()
        torch.cuda.synchronize()
    return taken
