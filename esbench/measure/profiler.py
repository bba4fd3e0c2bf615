"""The launches of a call, counted in a Chrome trace of torch's profiler.

The profiler may lose records of kernels. Each launch on the host must have its record on the device:
otherwise :class:`ProfileError` is raised, and no wrong number is returned.
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esbench.measure.timers import quiet
from esbench.workload import UnavailableError

METHOD = "profiler"

ATTEMPTS = 3
"""The number of times that a trace is taken, as long as records are missing."""
ROWS, WIDTH = 15, 60
"""The most rows of a printed table, and the most characters of a name in it."""

MARKER = "esbench.marker"
CALL = "esbench.call"
"""Annotations in the trace: around a kernel that identifies the current stream, and around the call."""

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
ANNOTATION = "user_annotation"
CATEGORIES = ON_DEVICE | RUNTIME | {"cpu_op", ANNOTATION}

LAUNCHES = tuple(
    f"{api}{name}"
    for api in ("cuda", "cu")
    for name in ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch", "Memcpy", "Memset")
)
"""The beginnings of the names of CUDA functions that launch work on the device."""

WAITS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree"),
    *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpy", "cuMemFree"),
)
"""The beginnings of the names of CUDA functions that wait for the device, unless ``Async`` is in the name."""

TICK_NS = 2
"""The rounding error of a start time, which the trace gives in microseconds since 1970 as a float64."""


class ProfileError(UnavailableError):
    """The profiler lost records."""


class Record(NamedTuple):
    """A span of a trace.

    ``track`` is the stream on a device and the thread on the host. ``correlation`` is a number that a launch
    on the host shares with its work on the device.
    """

    name: str
    category: str
    track: int
    start_ns: float
    duration_ns: float
    correlation: int | None = None

    @property
    def end_ns(self) -> float:
        """The end of the span."""
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


def read(chrome_trace: Mapping[str, Any]) -> list[Record]:
    """Return the spans of a Chrome trace of torch's profiler in the order of their start."""
    spans = [
        event
        for event in chrome_trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in CATEGORIES
    ]
    return sorted((_record(span) for span in spans), key=lambda record: record.start_ns)


def cuda_trace(records: Sequence[Record]) -> Trace:
    """Count what a call launched on the device, from the records of its trace.

    Launches of other threads count as well, also after the call has returned.

    Raises:
        ProfileError: the records of the call, of the marker, or of a launch's work are missing.
    """
    call, marker = _find_annotation(records, CALL), _find_annotation(records, MARKER)
    current_stream = {record.track for record in _device_work(records, marker.start_ns, marker.end_ns)}
    if len(current_stream) != 1:
        raise ProfileError(
            "torch's profiler lost records: none shows which CUDA stream the call ran on: measure again"
        )
    work = _device_work(records, call.start_ns)
    return Trace(
        launches=len(work),
        waits=tuple(
            record.name
            for record in records
            if record.category in RUNTIME
            and call.start_ns <= record.start_ns <= call.end_ns
            and record.name.startswith(WAITS)
            and "Async" not in record.name
        ),
        other_streams=tuple(sorted({record.track for record in work} - current_stream)),
    )


def cpu_trace(records: Sequence[Record]) -> Trace:
    """Count the ATen operators of a call that are not called by other ATen operators."""
    call = _find_annotation(records, CALL)
    operators = [
        record
        for record in records
        if record.name.startswith("aten::") and call.start_ns <= record.start_ns <= call.end_ns
    ]
    launches = 0
    end_ns = defaultdict[int, float](float)  # thread -> the end of the last operator that was counted
    # The calling operator comes first. A called operator starts before the calling one has ended.
    for operator in sorted(operators, key=lambda record: (record.start_ns, -record.duration_ns)):
        if operator.start_ns >= end_ns[operator.track] - TICK_NS:
            launches += 1
            end_ns[operator.track] = operator.end_ns
    return Trace(launches)


class Profile(NamedTuple):
    """The profile of a call: torch's table of kernels or operators, and the launches."""

    table: str
    trace: Trace


def trace(call: Callable[[], object], device: str) -> Trace:
    """Count the launches of a call; on CUDA, after a first call that is not counted.

    Raises:
        ProfileError: the profiler lost records in each of ATTEMPTS traces.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _trace_into(call, device, Path(folder) / "trace.json")


def profile(call: Callable[[], object], device: str, path: Path) -> Profile:
    """Profile one call as :func:`trace`, and write its Chrome trace to a file for ui.perfetto.dev."""
    path.parent.mkdir(parents=True, exist_ok=True)
    launches = _trace_into(call, device, path)
    on_gpu = device == "cuda"
    with torch.autograd.profiler.profile(use_device="cuda" if on_gpu else None, use_kineto=True) as profiled:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    table = profiled.key_averages().table(
        sort_by="self_cuda_time_total" if on_gpu else "self_cpu_time_total",
        row_limit=ROWS,
        max_name_column_width=WIDTH,
    )
    return Profile(table, launches)


def _trace_into(call: Callable[[], object], device: str, path: Path) -> Trace:
    """Trace a call into a file; repeat while records are missing."""
    attempts = 0
    while True:
        with quiet():
            profiled = _profile_on_cuda(call) if device == "cuda" else _profile_on_cpu(call)
        profiled.export_chrome_trace(str(path))
        records = read(json.loads(path.read_text(encoding="utf-8")))
        attempts += 1
        try:
            return cuda_trace(records) if device == "cuda" else cpu_trace(records)
        except ProfileError:
            if attempts == ATTEMPTS:
                raise


def _profile_on_cpu(call: Callable[[], object]) -> torch.autograd.profiler.profile:
    with torch.autograd.profiler.profile() as profiled, torch.autograd.profiler.record_function(CALL):
        call()
    return profiled


def _profile_on_cuda(call: Callable[[], object]) -> torch.autograd.profiler.profile:
    """Profile the marker and two calls on the current stream; only the second call is annotated.

    The profiler may lose the first records. The marker comes before the calls, which may change the stream.
    """
    # Keep CUPTI attached: detaching it after each trace races with the next trace (kineto#1554), and before
    # CUDA 12.6 it crashes if graphs were captured (pytorch#112507).
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    # Without Kineto, torch records nothing of the device.
    with torch.autograd.profiler.profile(use_device="cuda", use_kineto=True) as profiled:
        marker = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.autograd.profiler.record_function(MARKER):
            marker.add_(1)
        call()
        torch.cuda.synchronize()
        with torch.autograd.profiler.record_function(CALL):
            call()
        torch.cuda.synchronize()
    return profiled


def _record(span: Mapping[str, Any]) -> Record:
    arguments = span.get("args", {})
    return Record(
        name=span["name"],
        category=span["cat"],
        track=arguments["stream"] if span["cat"] in ON_DEVICE else span["tid"],
        start_ns=span["ts"] * 1e3,  # ts and dur are in microseconds
        duration_ns=span["dur"] * 1e3,
        correlation=arguments.get("correlation"),
    )


def _find_annotation(records: Iterable[Record], name: str) -> Record:
    for record in records:
        if record.category == ANNOTATION and record.name == name:
            return record
    raise ProfileError(f"torch's profiler lost records: its trace has no span {name}: measure again")


def _device_work(records: Sequence[Record], from_ns: float, to_ns: float = float("inf")) -> list[Record]:
    """Return the device's records of the work that the host launched in a span of time.

    Work without a record of its launch is selected by its own time.

    Raises:
        ProfileError: a launch has no record of its work.
    """
    runtime_calls = {record.correlation: record for record in records if record.category in RUNTIME}

    def is_in_span(record: Record) -> bool:
        return from_ns <= record.start_ns <= to_ns

    work = [
        record
        for record in records
        if record.category in ON_DEVICE and is_in_span(runtime_calls.get(record.correlation, record))
    ]
    launches = {
        correlation
        for correlation, call in runtime_calls.items()
        if is_in_span(call) and call.name.startswith(LAUNCHES)
    }
    if lost := len(launches - {record.correlation for record in work}):
        raise ProfileError(
            f"torch's profiler lost records: for {lost} of {len(launches)} launches it recorded no work on "
            "the device: measure again"
        )
    return work
