"""Launches of a call, from hand-written traces like those of a GPU and from real CPU traces."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from esbench.measure import profiler
from esbench.measure.profiler import (
    CALL,
    MARKER,
    ProfileError,
    Trace,
    cpu_trace,
    cuda_trace,
    profile,
    read,
    trace,
)

Span = dict[str, Any]

HOST, CURRENT, OTHER = 4711, 7, 21


def span(category: str, name: str, track: int, ts: float, dur: float, **args: int) -> Span:
    """Return a span of a thread or stream, in microseconds as in a Chrome trace."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 0}
    return {**event, "tid": track, "ts": ts, "dur": dur, "args": args}


def host(
    name: str, ts: float, dur: float, category: str = "cuda_runtime", correlation: int | None = None
) -> Span:
    """Return a span of the host's thread."""
    shared = {} if correlation is None else {"correlation": correlation}
    return span(category, name, HOST, ts, dur, **shared)


def device(name: str, ts: float, dur: float, correlation: int, stream: int = CURRENT) -> Span:
    """Return a span of a stream."""
    category = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.partition(" ")[0], "kernel")
    return span(category, name, stream, ts, dur, stream=stream, correlation=correlation)


def launched(at: float, correlation: int, stream: int = CURRENT) -> list[Span]:
    """Return a launch and its kernel."""
    return [
        host("cudaLaunchKernel", at, 2, correlation=correlation),
        device("kernel", at + 20, 1, correlation, stream),
    ]


def marked(*spans: Span) -> list[Span]:
    """Return a trace: a marker, an earlier call, a call from 100 to 200 us, and events that are not spans."""
    before = [
        host(MARKER, 10, 5, "user_annotation"),
        host("cudaLaunchKernel", 11, 2, correlation=1),
        device("marker", 20, 1, 1),
        host("cudaLaunchKernel", 40, 2, correlation=2),
        device("warm", 50, 9, 2, stream=OTHER),
        host("cudaDeviceSynchronize", 60, 20, correlation=3),
        host(CALL, 100, 100, "user_annotation"),
    ]
    after = [
        host("cudaDeviceSynchronize", 201, 50, correlation=900),
        {"ph": "M", "name": "process_name", "ts": 0, "pid": HOST, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": HOST, "tid": HOST, "ts": 110, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "gpu_user_annotation", "name": CALL, "pid": 0, "tid": 7, "ts": 120, "dur": 9},
    ]
    return [*after, *spans, *before]


def traced(spans: list[Span]) -> Trace:
    """Read a trace of a GPU."""
    return cuda_trace(read({"traceEvents": spans}))


ORDINARY = (
    host("aten::mm", 105, 20, "cpu_op"),
    host("cudaLaunchKernel", 110, 3, correlation=10),
    device("gemm", 130, 40, 10),
    host("cuLaunchKernelEx", 120, 3, "cuda_driver", 11),
    device("triton_", 170, 10, 11),
    host("cudaMemsetAsync", 130, 3, correlation=12),
    device("Memset (Device)", 180, 5, 12),
    host("cudaMemcpyAsync", 140, 3, correlation=13),
    device("Memcpy DtoD (Device -> Device)", 185, 5, 13),
    host("cudaLaunchKernel", 150, 3, correlation=14),
    device("gemm", 190, 20, 14),
)


def test_only_the_device_work_of_the_call_is_counted() -> None:
    """Kernels, copies and fills of the call are counted, not the marker or an earlier call.

    A graph's kernels count under the one launch that they share. A kernel whose launch is not recorded,
    because the profiler does not follow that interface, is assigned by its time.
    """
    assert traced(marked(*ORDINARY)) == Trace(launches=5)
    graph = [host("cudaGraphLaunch", 110, 9, correlation=30)]
    graph += [device(f"node{number}", 120 + number, 1, 30) for number in range(6)]
    assert traced(marked(*graph)).launches == 6
    stray = [device("stray", 150, 3, 77), device("earlier", 90, 3, 78)]
    assert traced(marked(*ORDINARY, *stray)).launches == 6


def test_waits_and_other_streams_are_listed() -> None:
    """Runtime calls that wait are listed; a blocking copy is a wait and a launch.

    A stream is listed once by its number, also if its launch comes after the call.
    """
    waiting = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaFree")
    for name in (*waiting, "cuStreamSynchronize"):
        trace = traced(marked(*ORDINARY, host(name, 160, 9, "cuda_driver", 15)))
        assert trace == Trace(launches=5, waits=(name,))
    for name in ("cudaFreeAsync", "cudaStreamWaitEvent", "cudaStreamIsCapturing", "cudaOccupancyMaxActive"):
        assert traced(marked(*ORDINARY, host(name, 160, 9, correlation=15))) == Trace(launches=5)
    copy = [host("cudaMemcpy", 160, 9, correlation=15), device("Memcpy", 161, 2, 15)]
    assert traced(marked(*copy)) == Trace(launches=1, waits=("cudaMemcpy",))
    elsewhere = [*launched(151, 20, OTHER), *launched(220, 21, OTHER + 1), *launched(152, 22, OTHER)]
    assert traced(marked(*ORDINARY, *elsewhere)) == Trace(8, (), (OTHER, OTHER + 1))


def test_a_lost_record_is_an_error() -> None:
    """A lost launch would make the count too small; without marks the call's records are unknown."""
    for lost in (2, 4, 6, 8, 10):
        with pytest.raises(ProfileError, match="lost records: for 1 of 5 launches"):
            traced(marked(*ORDINARY[:lost], *ORDINARY[lost + 1 :]))
    for name, words in ((CALL, f"no span {CALL}"), (MARKER, f"no span {MARKER}"), ("marker", "1 of 1")):
        with pytest.raises(ProfileError, match=words):
            traced([event for event in marked(*ORDINARY) if event["name"] != name])
    # Neither the marker's launch nor its kernel: the profiler recorded nothing on the device.
    events = [event for event in marked() if event["ts"] != 11 and event["name"] != "marker"]
    with pytest.raises(ProfileError, match="none shows which CUDA stream"):
        traced(events)


def test_outermost_operators_are_counted() -> None:
    """Top-level operators during the call are counted on each thread, also inside operators outside ATen."""
    spans = [
        host(CALL, 100, 100, "user_annotation"),
        host("aten::linear", 110, 40, "cpu_op"),
        host("aten::t", 112, 8, "cpu_op"),
        host("aten::transpose", 114, 2, "cpu_op"),
        host("aten::addmm", 120, 30, "cpu_op"),
        host("autograd::engine::evaluate_function: ReluBackward0", 150, 30, "cpu_op"),
        host("aten::relu", 150, 10, "cpu_op"),
        host("aten::mul", 165, 10, "cpu_op"),
        host("aten::zeros", 90, 5, "cpu_op"),
        host("aten::zeros", 201, 5, "cpu_op"),
        span("cpu_op", "aten::linear", HOST + 1, 115, 10),
    ]
    assert cpu_trace(read({"traceEvents": spans})) == Trace(launches=4)


def test_a_cpu_call_has_its_number_of_operators() -> None:
    """A product and a sum are two operators every time; an empty call has none."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    assert {trace(lambda: layer(x).sum(), "cpu") for _ in range(5)} == {Trace(2)}
    assert trace(lambda: None, "cpu") == Trace(0)
    assert trace(lambda: [x + 1 for _ in range(100)], "cpu") == Trace(100)


def test_the_profiler_is_usable_after_a_failed_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the call are raised; records that stay lost are an error after some attempts."""

    def call() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        trace(call, "cpu")
    assert trace(lambda: torch.ones(3) + 1, "cpu").launches == 2
    calls: list[int] = []
    monkeypatch.setattr(profiler, "read", lambda events: [span for span in read(events) if span.name != CALL])
    with pytest.raises(ProfileError, match=f"no span {CALL}"):
        trace(lambda: calls.append(1), "cpu")
    assert len(calls) == profiler.ATTEMPTS


def test_a_cuda_trace_records_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kineto a profile has host records only: no kernels, launches or streams."""

    class Started(Exception):  # noqa: N818  # it stops the test before the profiler starts
        def __init__(self, profiler: torch.autograd.profiler.profile) -> None:
            self.profiler = profiler

    class Profiler(torch.autograd.profiler.profile):
        def __enter__(self) -> NoReturn:
            raise Started(self)

    # Pretend that the machine has a GPU.
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.autograd.profiler, "_supported_activities", lambda: activities)
    monkeypatch.setattr(torch.autograd.profiler, "profile", Profiler)
    with pytest.raises(Started) as started:
        trace(lambda: None, "cuda")
    assert started.value.profiler.profiler_kind == torch._C._profiler.ProfilerState.KINETO  # noqa: SLF001  # there is no public attribute
    assert started.value.profiler.kineto_activities == activities


def test_a_profile_is_a_table_and_a_chrome_trace(tmp_path: Path) -> None:
    """The table names the operators; the trace can be opened in Perfetto and contains the call."""
    a, layer = torch.randn(64, 64), torch.nn.Linear(64, 64)
    path = tmp_path / "new" / "mine.json"
    profiled = profile(lambda: torch.sum(layer(a)), "cpu", path)
    assert profiled.trace == Trace(2)
    assert all(f" {name} " in profiled.table for name in ("aten::linear", "aten::addmm", "aten::sum"))
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(span) for span in spans)
    assert [span["cat"] for span in spans if span["name"] == CALL] == ["user_annotation"]
