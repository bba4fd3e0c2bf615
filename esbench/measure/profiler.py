"""Launches of a call, from torch's profiler: a count, a table and a Chrome trace.

The profiler may lose records: a launch without its record is an error, never a smaller count. Reading a trace
does not need the device that it was taken on.
"""

import csv
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esbench.measure.timers import quiet
from esbench.registry import UnavailableError

METHOD = "profiler"

ATTEMPTS = 3
"""A trace that lost records is taken again, so often."""

MARKER = "esbench.marker"
CALL = "esbench.call"
"""Annotations in the trace: a kernel on the stream that is current, and the call."""

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
ANNOTATION = "user_annotation"
KINDS = ON_DEVICE | RUNTIME | {"cpu_op", ANNOTATION}

LAUNCHES = tuple(
    f"{api}{name}"
    for api in ("cuda", "cu")
    for name in ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch", "Memcpy", "Memset")
)
"""Calls of the CUDA runtime and driver that begin so give the device something to do."""

WAITS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree"),
    *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpy", "cuMemFree"),
)
"""Calls that begin so make the host wait for the device, unless they are asynchronous by name."""

TICK_NS = 2
"""Microseconds since 1970 in a double: two records that follow each other may overlap by so much."""


class ProfileError(UnavailableError):
    """The profiler lost records, or cannot run here; the message says which."""


class Record(NamedTuple):
    """One span of a trace: ``track`` is its stream on a device and its thread on the host."""

    name: str
    kind: str
    track: int
    start_ns: float
    duration_ns: float
    correlation: int | None = None

    @property
    def end_ns(self) -> float:
        """When it ended."""
        return self.start_ns + self.duration_ns


class Trace(NamedTuple):
    """The launches of a call.

    ``launches``: on CUDA the kernels, copies and fills that ran on the device; on the CPU the ATen operators
    that no other ATen operator called. ``waits``: the runtime's calls in which the host waited for the
    device, in order. ``other_streams``: CUDA's numbers of the streams on which something ran that was not
    the current one. The last two are empty on a CPU.
    """

    launches: int
    waits: tuple[str, ...] = ()
    other_streams: tuple[int, ...] = ()


class Line(NamedTuple):
    """A line of a profile: one kernel or operator, and its share of the whole.

    A kernel's share is that of all the device's time in the call. An operator's time is its own, without the
    operators that it calls, and its share that of the call; what remains is :data:`OUTSIDE`.
    """

    name: str
    calls: int
    total_ns: float
    share: float


OUTSIDE = "(outside operators)"
"""The part of a call on the CPU that is Python's, and torch's on the way to its operators."""


def read(chrome_trace: Mapping[str, Any]) -> list[Record]:
    """Return the spans of a Chrome trace, as torch's profiler writes it, in the order of their start."""
    spans = [
        event for event in chrome_trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in KINDS
    ]
    return sorted((_record(span) for span in spans), key=lambda record: record.start_ns)


def cuda_trace(records: Sequence[Record]) -> Trace:
    """Count what a call launched on the device, from the records of its trace.

    What another thread launches after the call returned is counted as well: it is the call's.

    Raises:
        ProfileError: a launch, or the marker, has no record of what ran on the device.

    """
    call, marker = _annotation(records, CALL), _annotation(records, MARKER)
    streams = {record.track for record in _launched(records, marker.start_ns, marker.end_ns)}
    if len(streams) != 1:
        message = "the profiler lost the record that identifies the current stream"
        raise ProfileError(message)
    ran = _launched(records, call.start_ns)
    return Trace(
        launches=len(ran),
        waits=tuple(
            record.name
            for record in records
            if record.kind in RUNTIME
            and call.start_ns <= record.start_ns <= call.end_ns
            and record.name.startswith(WAITS)
            and "Async" not in record.name
        ),
        other_streams=tuple(sorted({record.track for record in ran} - streams)),
    )


def cpu_trace(records: Sequence[Record]) -> Trace:
    """Count the outermost ATen operators of a call."""
    call = _annotation(records, CALL)
    aten = [
        record
        for record in records
        if record.name.startswith("aten::") and call.start_ns <= record.start_ns <= call.end_ns
    ]
    launches, end_ns = 0, defaultdict[int, float](float)
    for one in sorted(aten, key=lambda record: (record.start_ns, -record.duration_ns)):
        if one.start_ns >= end_ns[one.track] - TICK_NS:
            launches += 1
            end_ns[one.track] = one.end_ns
    return Trace(launches)


def kernels(records: Sequence[Record]) -> list[Line]:
    """Return the time of each kernel, copy and fill of the call, longest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for record in _launched(records, _annotation(records, CALL).start_ns):
        times[record.name].append(record.duration_ns)
    whole_ns = sum(map(sum, times.values()))
    lines = [Line(name, len(own), sum(own), sum(own) / whole_ns) for name, own in times.items()]
    return sorted(lines, key=lambda line: line.total_ns, reverse=True)


def operators(taken: torch.autograd.profiler.profile) -> list[Line]:
    """Return the self time of each operator of a call, longest first, and the remaining time."""
    found = taken.key_averages()
    call_ns = next(one.cpu_time_total for one in found if one.key == CALL) * 1e3
    lines = []
    for one in found:
        own_ns = one.self_cpu_time_total * 1e3
        lines.append(Line(OUTSIDE if one.key == CALL else one.key, one.count, own_ns, own_ns / call_ns))
    return sorted(lines, key=lambda line: line.total_ns, reverse=True)


class Profile(NamedTuple):
    """The profile of a call, and the files it is in."""

    lines: tuple[Line, ...]
    trace: Trace
    table: Path
    timeline: Path


def trace(call: Callable[[], object], device: str) -> Trace:
    """Count the launches of one call; on CUDA after an untraced call.

    Raises:
        ProfileError: the profiler lost records, several times.

    """
    with tempfile.TemporaryDirectory() as folder:
        return _take(call, device, Path(folder) / "trace.json")[2]


def profile(call: Callable[[], object], device: str, folder: Path, stem: str) -> Profile:
    """Profile one call as :func:`trace`; write ``stem``.csv and, for Perfetto, the trace ``stem``.json."""
    folder.mkdir(parents=True, exist_ok=True)
    table, timeline = folder / f"{stem}.csv", folder / f"{stem}.json"
    taken, records, found = _take(call, device, timeline)
    lines = kernels(records) if device == "cuda" else operators(taken)
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Line._fields)
        writer.writerows(lines)
    return Profile(tuple(lines), found, table, timeline)


def _take(
    call: Callable[[], object], device: str, path: Path
) -> tuple[torch.autograd.profiler.profile, list[Record], Trace]:
    """Trace a call into a file until no record is missing."""
    for attempt in range(ATTEMPTS):
        with quiet():
            taken = _take_cuda(call) if device == "cuda" else _take_cpu(call)
        taken.export_chrome_trace(str(path))
        records = read(json.loads(path.read_text(encoding="utf-8")))
        try:
            return taken, records, cuda_trace(records) if device == "cuda" else cpu_trace(records)
        except ProfileError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _take_cpu(call: Callable[[], object]) -> torch.autograd.profiler.profile:
    with torch.autograd.profiler.profile() as taken, torch.autograd.profiler.record_function(CALL):
        call()
    return taken


def _take_cuda(call: Callable[[], object]) -> torch.autograd.profiler.profile:
    """Trace a call on the current stream, after other work, since the first records may be lost.

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


def _record(span: Mapping[str, Any]) -> Record:
    more = span.get("args", {})
    return Record(
        name=span["name"],
        kind=span["cat"],
        track=more["stream"] if span["cat"] in ON_DEVICE else span["tid"],
        start_ns=span["ts"] * 1e3,
        duration_ns=span["dur"] * 1e3,
        correlation=more.get("correlation"),
    )


def _annotation(records: Iterable[Record], name: str) -> Record:
    for record in records:
        if record.kind == ANNOTATION and record.name == name:
            return record
    message = f"the profiler lost the record of {name}"
    raise ProfileError(message)


def _launched(records: Sequence[Record], from_ns: float, to_ns: float = float("inf")) -> list[Record]:
    """Return the device work that was launched within a span of time.

    What ran without a launch on record counts by the time at which it ran.
    """
    host = {record.correlation: record for record in records if record.kind in RUNTIME}
    ran = []
    for record in records:
        if record.kind in ON_DEVICE:
            cause = host.get(record.correlation, record)
            if from_ns <= cause.start_ns <= to_ns:
                ran.append(record)
    asked = {
        correlation
        for correlation, record in host.items()
        if from_ns <= record.start_ns <= to_ns and record.name.startswith(LAUNCHES)
    }
    if lost := len(asked - {record.correlation for record in ran}):
        message = f"the profiler lost the records of {lost} of {len(asked)} launches"
        raise ProfileError(message)
    return ran
