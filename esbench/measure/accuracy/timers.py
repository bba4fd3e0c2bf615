"""Other timers, each as a clock that this harness's rounds can visit.

Each reads as it is meant to be used, and says in its name how: a timer that times a block of calls
gives one sample, the mean of the block.
"""

import importlib
import importlib.util
import os
import tempfile
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter as _host_s
from typing import Any

import torch
from torch.utils.benchmark import Timer as TorchTimer

from esbench.measure.timers import Call, Visit

TORCH = "torch.utils.benchmark"
TORCH_CALLS = "torch.utils.benchmark, call by call"
TIMEIT = "timeit"
DO_BENCH = "triton.testing.do_bench"
NVBENCH = "cuda-bench"
CUPTI = "CUPTI by torch.profiler"


@dataclass(frozen=True)
class Timer:
    """A timer in the place of the harness's clock: ``read`` returns nanoseconds for so many calls."""

    method: str
    read: Callable[[Call, int], Sequence[float]]
    warm_up_s: tuple[float, float] = (0.0, 0.1)

    def seconds(self) -> float:
        """Seconds since some moment."""
        return _host_s()

    def prepare(self, call: Call, turns: int) -> Call:  # noqa: ARG002  # what a clock is asked
        """Return the call as it is."""
        return call

    def visit(self, call: Call, calls: int) -> Visit:
        """Let the timer time so many calls."""
        return Visit({"latency_ns": tuple(self.read(call, calls))})


def timers(device: str) -> tuple[list[Timer], dict[str, str]]:
    """Return the timers that can be asked on a device, and why each of the others cannot."""
    every = {
        TORCH: by_block,
        TORCH_CALLS: by_call,
        TIMEIT: by_timeit,
        DO_BENCH: by_do_bench,
        NVBENCH: by_nvbench,
        CUPTI: by_profiler,
    }
    reasons = _unavailable(device)
    return [Timer(name, read) for name, read in every.items() if name not in reasons], reasons


def _unavailable(device: str) -> dict[str, str]:
    if device != "cuda":
        return dict.fromkeys((DO_BENCH, NVBENCH, CUPTI), "it times a CUDA GPU, this is a CPU")
    reasons = {
        TORCH_CALLS: "a call at a time, the launch and the wait are in its figure",
        TIMEIT: "it does not wait for the device",
    }
    if importlib.util.find_spec("triton") is None:
        reasons[DO_BENCH] = "triton is not installed"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bench") is None:
        reasons[NVBENCH] = "cuda-bench is not installed"
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        reasons[CUPTI] = "this torch was built without CUPTI"
    return reasons


def by_block(call: Call, calls: int) -> list[float]:
    """One block of so many calls, with as many threads as the harness uses: the mean of a call."""
    return [_torch_timer(call).timeit(calls).mean * 1e9]


def by_call(call: Call, calls: int) -> list[float]:
    """So many blocks of one call: what to compare a median of calls with."""
    timer = _torch_timer(call)
    return [timer.timeit(1).mean * 1e9 for _ in range(calls)]


def by_timeit(call: Call, calls: int) -> list[float]:
    """One block of so many calls by Python's own timer: the mean of a call."""
    return [timeit.timeit(call, number=calls) / calls * 1e9]


def by_do_bench(call: Call, calls: int) -> list[float]:
    """Events around each call after a flush of the cache, about so many of them."""
    start_s = _host_s()
    call()
    torch.cuda.synchronize()
    milliseconds = calls * (_host_s() - start_s) * 1e3
    testing = importlib.import_module("triton.testing")  # by its name: it is only there with CUDA
    found: list[float] = testing.do_bench(call, warmup=1, rep=max(1, milliseconds), return_mode="all")
    return [value * 1e6 for value in found]


def by_nvbench(call: Call, calls: int) -> list[float]:
    """Cold measurements of NVBench, at least so many, and not its usual half a second of them."""
    bench = importlib.import_module("cuda.bench")  # by its name: it is only there with CUDA
    results = importlib.import_module("cuda.bench.results")
    _register_with(bench)
    _in_nvbench[:] = [call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.json"
        command = ["esbench", "--quiet", "--devices", "0", "--jsonbin", os.fspath(path)]
        wanted = ["--min-samples", str(calls), "--min-time", "0.001", "--max-noise", "100", "--timeout", "1"]
        bench.run_all_benchmarks([*command, *wanted])
        (result,) = results.BenchmarkResult.from_json(path).values()
        return [seconds * 1e9 for seconds in result[0].samples]


_in_nvbench: list[Call] = []
"""The call that NVBench times now: what it was told to run once, it runs each time."""


@cache
def _register_with(bench: Any) -> None:  # noqa: ANN401  # cuda-bench is not installed where types are checked
    def study(state: Any) -> None:  # noqa: ANN401  # the same
        def launch(launched: Any) -> None:  # noqa: ANN401  # the same
            with torch.cuda.stream(torch.cuda.ExternalStream(launched.get_stream().addressof())):
                _in_nvbench[0]()

        state.exec(launch, batched=False)

    bench.register(study)


def by_profiler(call: Call, calls: int) -> list[float]:
    """Kernel times as CUPTI records them, summed over each call, after a flush of the cache."""
    activity = torch.profiler.ProfilerActivity.CUDA
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(calls):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    return split(((event.name, event.time_range.elapsed_us() * 1e3) for event in kernels), calls)


def split(kernels: Iterable[tuple[str, float]], calls: int) -> list[float]:
    """Sum the kernels of each call: what stands between one flush and the next.

    The flush is the first kernel of all, and of nothing else's name.

    Raises:
        RuntimeError: there are not as many flushes as calls: records were lost.

    """
    sums: list[float] = []
    flush = None
    for name, length_ns in kernels:
        flush = flush or name
        if name == flush:
            sums.append(0.0)
        else:
            sums[-1] += length_ns
    if len(sums) != calls:
        message = f"{len(sums)} of {calls} calls are in the profile"
        raise RuntimeError(message)
    return sums


def _torch_timer(call: Call) -> TorchTimer:
    return TorchTimer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
