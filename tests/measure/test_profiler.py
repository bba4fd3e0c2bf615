"""What a call launches: traces as a GPU gives them, written by hand, and real ones of the CPU."""

import csv
import json
import random
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esbench.measure import profiler
from esbench.measure.profiler import (
    CALL,
    MARKER,
    OUTSIDE,
    Line,
    ProfileError,
    Trace,
    cpu_trace,
    cuda_trace,
    kernels,
    operators,
    profile,
    read,
    trace,
)

Span = dict[str, Any]

HOST, CURRENT, OTHER = 4711, 7, 21


def host(
    name: str, ts: float, dur: float, kind: str = "cuda_runtime", correlation: int | None = None
) -> Span:
    """Write a span of the host's thread, in microseconds as a Chrome trace has them."""
    args = {} if correlation is None else {"correlation": correlation, "cbid": 211}
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": HOST,
        "tid": HOST,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def device(name: str, ts: float, dur: float, correlation: int, stream: int = CURRENT) -> Span:
    """Write a span of a stream."""
    kind = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.partition(" ")[0], "kernel")
    args = {"stream": stream, "device": 0, "context": 1, "correlation": correlation}
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def marked(*spans: Span) -> dict[str, Any]:
    """Put a marker before the spans of a call from 100 to 200 us, another call, and what is no span."""
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
        {"ph": "i", "name": "Iteration Start", "ts": 1, "pid": HOST, "tid": HOST},
        {"ph": "X", "cat": "gpu_user_annotation", "name": CALL, "pid": 0, "tid": 7, "ts": 120, "dur": 9},
    ]
    return {"traceEvents": [*after, *spans, *before]}


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


def test_what_ran_on_the_device_is_counted_and_nothing_else() -> None:
    """Kernels, copies and fills of the call: not the marker, nor the call before; the host did not wait."""
    assert cuda_trace(read(marked(*ORDINARY))) == Trace(launches=5)


def test_kernels_are_summed_by_name() -> None:
    """Longest first, each with its share of the device's time."""
    assert kernels(read(marked(*ORDINARY))) == [
        Line("gemm", 2, 60e3, 0.75),
        Line("triton_", 1, 10e3, 0.125),
        Line("Memset (Device)", 1, 5e3, 0.0625),
        Line("Memcpy DtoD (Device -> Device)", 1, 5e3, 0.0625),
    ]


def test_waiting_for_the_device_is_told() -> None:
    """Those of the runtime's calls that make the host wait, inside the call alone."""
    cases: list[tuple[str, str, bool]] = [
        ("cudaStreamSynchronize", "cuda_runtime", True),
        ("cudaDeviceSynchronize", "cuda_runtime", True),
        ("cudaEventSynchronize", "cuda_runtime", True),
        ("cuStreamSynchronize", "cuda_driver", True),
        ("cudaFree", "cuda_runtime", True),
        ("cudaFreeAsync", "cuda_runtime", False),
        ("cudaStreamWaitEvent", "cuda_runtime", False),
        ("cudaStreamIsCapturing", "cuda_runtime", False),
        ("cudaOccupancyMaxActiveBlocksPerMultiprocessor", "cuda_runtime", False),
    ]
    for name, kind, waits in cases:
        found = cuda_trace(read(marked(*ORDINARY, host(name, 160, 9, kind, 15))))
        assert found == Trace(launches=5, waits=(name,) if waits else ())


def test_a_blocking_copy_is_a_launch_and_a_wait() -> None:
    """It is both at once."""
    copy = [host("cudaMemcpy", 160, 9, correlation=15), device("Memcpy", 161, 2, 15)]
    assert cuda_trace(read(marked(*copy))) == Trace(launches=1, waits=("cudaMemcpy",))


def test_work_on_another_stream_is_told() -> None:
    """By the stream's number, however often, and also where the launch comes after the call."""
    elsewhere = [
        host("cudaLaunchKernel", 151, 3, correlation=20),
        device("hidden", 155, 3, 20, stream=OTHER),
        host("cudaLaunchKernel", 220, 3, correlation=21),
        device("late", 230, 3, 21, stream=OTHER + 1),
        host("cudaLaunchKernel", 152, 3, correlation=22),
        device("hidden", 156, 3, 22, stream=OTHER),
    ]
    assert cuda_trace(read(marked(*ORDINARY, *elsewhere))) == Trace(8, (), (OTHER, OTHER + 1))


def test_a_graph_launches_many_kernels_at_once() -> None:
    """All of them count, under the one launch that they share."""
    graph = [host("cudaGraphLaunch", 110, 9, correlation=30)]
    graph += [device(f"node{number}", 120 + number, 1, 30) for number in range(6)]
    assert cuda_trace(read(marked(*graph))).launches == 6


def test_a_kernel_whose_launch_is_not_on_record_counts_by_its_time() -> None:
    """One launched by an interface that the profiler does not follow."""
    stray = [device("stray", 150, 3, 77), device("earlier", 90, 3, 78)]
    assert cuda_trace(read(marked(*ORDINARY, *stray))).launches == 6


def test_a_lost_record_is_an_error() -> None:
    """Of any launch: the count would be too small."""
    cases: list[int] = [
        2,
        4,
        6,
        8,
        10,
    ]
    for lost in cases:
        kept = [span for number, span in enumerate(ORDINARY) if number != lost]
        with pytest.raises(ProfileError, match="lost the records of 1 of 5 launches"):
            cuda_trace(read(marked(*kept)))


def test_a_lost_mark_is_an_error() -> None:
    """Without the marks it is unknown what belongs to the call, and which stream was current."""
    cases: list[tuple[str, str]] = [
        (CALL, f"lost the record of {CALL}"),
        (MARKER, f"lost the record of {MARKER}"),
        ("marker", "1 of 1"),
    ]
    for name, words in cases:
        events = [event for event in marked(*ORDINARY)["traceEvents"] if event["name"] != name]
        with pytest.raises(ProfileError, match=words):
            cuda_trace(read({"traceEvents": events}))


def test_without_a_marker_on_the_device_no_stream_is_current() -> None:
    """Neither its launch nor its kernel is there: the profiler saw nothing of the device."""
    events = [event for event in marked()["traceEvents"] if event["ts"] != 11 and event["name"] != "marker"]
    with pytest.raises(ProfileError, match="the current stream"):
        cuda_trace(read({"traceEvents": events}))


def called() -> dict[str, Any]:
    """Two operators in 100 us, one of which calls others; a backward; ones before and after the call."""
    return {
        "traceEvents": [
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
            {**host("aten::linear", 115, 10, "cpu_op"), "tid": HOST + 1},
        ]
    }


def test_operators_that_no_operator_called_are_counted() -> None:
    """Of each thread, during the call, also inside other operators than ATen's."""
    assert cpu_trace(read(called())) == Trace(launches=4)


def test_operators_have_the_time_that_they_took_themselves() -> None:
    """Without those that they called; with what is outside of them, one thread adds up to the call."""
    one_thread = [span for span in called()["traceEvents"] if span["tid"] == HOST]
    lines = operators(read({"traceEvents": one_thread}))
    assert {line.name: line.total_ns for line in lines} == {
        OUTSIDE: 30e3,
        "aten::addmm": 30e3,
        "autograd::engine::evaluate_function: ReluBackward0": 10e3,
        "aten::mul": 10e3,
        "aten::relu": 10e3,
        "aten::t": 6e3,
        "aten::linear": 2e3,
        "aten::transpose": 2e3,
    }
    assert sum(line.share for line in lines) == pytest.approx(1)


@given(st.integers(0, 12), st.integers(0, 12), st.randoms(use_true_random=False))
def test_the_order_of_a_trace_does_not_matter(current: int, other: int, rng: random.Random) -> None:
    """However many kernels on two streams, and however the file is sorted."""
    spans_ = []
    for number in range(current + other):
        start = 100 + number
        spans_.append(host("cudaLaunchKernel", start, 0.5, correlation=50 + number))
        stream = CURRENT if number < current else OTHER
        spans_.append(device("kernel", start + 20, 1, 50 + number, stream))
    events = marked(*spans_)["traceEvents"]
    rng.shuffle(events)
    assert cuda_trace(read({"traceEvents": events})) == Trace(
        current + other, other_streams=(OTHER,) if other else ()
    )


def test_the_operators_of_a_call_on_the_cpu_are_counted() -> None:
    """One product and one sum, the same every time; a call that does nothing launches nothing."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    assert {trace(lambda: layer(x).sum(), "cpu") for _ in range(5)} == {Trace(2)}
    assert trace(lambda: None, "cpu") == Trace(0)
    assert trace(lambda: [x + 1 for _ in range(100)], "cpu") == Trace(100)


def test_records_that_stay_lost_are_an_error_after_some_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is taken again, and its error says why it is missing."""
    calls: list[int] = []
    monkeypatch.setattr(profiler, "read", lambda found: [one for one in read(found) if one.name != CALL])
    with pytest.raises(ProfileError, match=f"lost the record of {CALL}"):
        trace(lambda: calls.append(1), "cpu")
    assert len(calls) == profiler.ATTEMPTS


def test_what_a_call_raises_passes_through() -> None:
    """The profiler is stopped, so that the next call is traced."""

    def call() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        trace(call, "cpu")
    assert trace(lambda: torch.ones(3) + 1, "cpu").launches == 2


def test_a_trace_on_cuda_asks_the_profiler_for_what_ran_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kineto torch falls back to host records only: no kernel, no launch count, no stream."""

    class Started(Exception):  # noqa: N818  # it stops the test where the profiler would start, it is no error
        def __init__(self, asked: torch.autograd.profiler.profile) -> None:
            self.asked = asked

    class Profiler(torch.autograd.profiler.profile):
        def __enter__(self) -> NoReturn:
            raise Started(self)

    # As on a machine with a GPU.
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.autograd.profiler, "_supported_activities", lambda: activities)
    monkeypatch.setattr(torch.autograd.profiler, "profile", Profiler)
    with pytest.raises(Started) as started:
        trace(lambda: None, "cuda")
    assert started.value.asked.profiler_kind == torch._C._profiler.ProfilerState.KINETO  # noqa: SLF001  # nothing public tells it
    assert started.value.asked.kineto_activities == activities


def test_a_profile_is_a_table_and_a_chrome_trace(tmp_path: Path) -> None:
    """The table is CSV in nanoseconds; the trace is what Perfetto opens, with the call in it."""
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    found = profile(lambda: torch.sum(a @ b), "cpu", tmp_path / "new", "mine")
    assert found.trace == Trace(2)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mine.csv", "mine.json"]
    with found.table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Line(r["name"], int(r["calls"]), float(r["total_ns"]), float(r["share"])) for r in rows] == [
        *found.lines
    ]
    assert {"aten::mm", "aten::sum", OUTSIDE} <= {line.name for line in found.lines}
    assert sum(line.share for line in found.lines) == pytest.approx(1, abs=1e-3)
    events = json.loads(found.timeline.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(event) for event in complete)
    assert {"aten::mm", CALL} <= {event["name"] for event in complete}
