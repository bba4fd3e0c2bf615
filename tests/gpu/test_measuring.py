"""Tests of the measuring instruments that need a CUDA GPU."""

import time
from collections.abc import Iterator
from functools import partial
from statistics import fmean, median

import pytest
import torch

from esbench.measure.cuda import Cuda, Streak
from esbench.measure.environment import environment, resolve_device
from esbench.measure.gpu_monitor import monitor_call
from esbench.measure.interleave import warm_up
from esbench.measure.memory import is_out_of_memory
from esbench.measure.timers import Call, CudaClock, Visit
from esbench.workload import UnavailableError

pytestmark = pytest.mark.alone

MIB = 1024**2
METHODS = ("eager", "graph")


def spin(cycles: int) -> Call:
    """Return a call that launches a kernel which spins for this number of GPU clock cycles."""
    return partial(torch.cuda._sleep, cycles)  # noqa: SLF001  # the only kernel of a known length


@pytest.fixture(scope="module")
def device() -> Cuda:
    """The CUDA operations of the GPU under test."""
    return Cuda()


@pytest.fixture(scope="module")
def cycles_per_ns() -> float:
    """GPU clock cycles per nanosecond of the host; two lengths are compared, so launch overhead cancels."""

    def wall_ns(cycles: int) -> int:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        spin(cycles)()
        torch.cuda.synchronize()
        return time.perf_counter_ns() - start

    short, long = 10**8, 3 * 10**8  # about 50 and 150 ms
    for _ in range(5):  # until the GPU's clock has settled
        wall_ns(long)
    times = [median(wall_ns(cycles) for _ in range(5)) for cycles in (short, long)]
    return (long - short) / (times[1] - times[0])


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    """Free cached GPU memory after each test."""
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def visit(device: Cuda, call: Call, calls: int, method: str = "eager", turns: int = 1) -> Visit:
    """Warm up a call, then time it in one visit."""
    clock = CudaClock(method, device, Streak())
    prepared = clock.prepare(call, turns)
    warm_up(prepared, clock, 1.0)
    return clock.visit(prepared, calls)


@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_of_50_ms_reads_50_ms(device: Cuda, cycles_per_ns: float, method: str) -> None:
    """A kernel of 50 ms is measured within 0.2 %, although its launch returns in less than 1 ms."""
    taken = visit(device, spin(round(50e6 * cycles_per_ns)), 5, method)
    for metric in ("latency_ns", "warm_latency_ns"):
        assert median(taken.samples[metric]) == pytest.approx(50e6, rel=0.002)
    assert median(taken.samples["host_latency_ns"]) < 1e6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length_ns", [10_000, 100_000, 1_000_000, 10_000_000])
def test_twice_the_length_reads_twice_as_long(
    device: Cuda, cycles_per_ns: float, length_ns: int, method: str
) -> None:
    """Doubling a kernel's length adds that length to the measured time, within 0.2 % or 0.1 us."""
    calls = 64 if length_ns <= 1_000_000 else 8  # a long kernel hides the noise of a reading
    once, twice = (
        fmean(
            visit(device, spin(round(count * length_ns * cycles_per_ns)), calls, method).samples["latency_ns"]
        )
        for count in (1, 2)
    )
    assert twice - once == pytest.approx(length_ns, rel=0.002, abs=100)


def test_eager_and_replayed_kernels_take_the_same_time(device: Cuda) -> None:
    """A matrix product takes the same time in an eager call and in a graph replay, within 3 %."""
    a, b = torch.randn(2, 4096, 4096, device="cuda").unbind()
    eager, graph = (
        median(visit(device, partial(torch.mm, a, b), 32, method).samples["latency_ns"]) for method in METHODS
    )
    assert graph == pytest.approx(eager, rel=0.03)


def test_device_time_excludes_launching(device: Cuda) -> None:
    """The measured device time of twenty short kernels does not include the host's time to launch them."""
    x = torch.zeros(1, device="cuda")

    def call() -> None:
        for _ in range(20):
            x.add_(1.0)

    taken = visit(device, call, 40)
    assert taken.dispatch_bound <= 4
    assert median(taken.samples["latency_ns"]) < 20 * 5_000


def test_a_device_that_waits_for_the_host_is_labelled(device: Cuda) -> None:
    """A call in which the host sleeps between two kernels counts as dispatch-bound in every sample."""
    x = torch.zeros(1, device="cuda")

    def call() -> None:
        x.add_(1.0)
        time.sleep(0.03)
        x.add_(1.0)

    clock = CudaClock("eager", device, Streak())
    assert clock.visit(call, 3).dispatch_bound == 3


def test_a_blocking_kernel_is_not_shorter_than_requested(device: Cuda) -> None:
    """A blocking kernel of 1 ms lasts at least 1 ms at any clock rate of the GPU."""
    start, end = device.event(), device.event()
    for _ in range(10):
        device.record(start)
        device.spin(1e6)
        device.record(end)
        device.synchronize()
        assert device.elapsed_ns(start, end) >= 1e6


def test_the_flush_overwrites_twice_the_cache_and_is_not_timed(device: Cuda) -> None:
    """A flush zeroes a buffer of twice the L2 cache, allocates nothing, and is not part of the time."""
    assert device.cache.rows.nbytes >= 2 * torch.cuda.get_device_properties(0).L2_cache_size > 0
    device.cache.rows.fill_(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    device.flush()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert not device.cache.rows.any()
    assert median(CudaClock("eager", device, Streak()).visit(lambda: None, 20).samples["latency_ns"]) < 1e4


def test_data_that_fit_the_cache_are_slower_to_read_when_cold(device: Cuda) -> None:
    """Summing a quarter of the L2 cache takes over 10 % longer after a flush than with a warm cache."""
    size = torch.cuda.get_device_properties(0).L2_cache_size // 4
    x = torch.randn(size // 4, device="cuda")
    taken = visit(device, partial(torch.sum, x), 40)
    assert median(taken.samples["latency_ns"]) > 1.1 * median(taken.samples["warm_latency_ns"])


def test_a_replay_reads_the_current_values_of_its_inputs(device: Cuda) -> None:
    """Replays use the captured inputs in turn and read their current values."""
    inputs = [torch.full((4,), float(value), device="cuda") for value in (1, 2)]
    numbers = iter(range(100))
    replay = CudaClock("graph", device, Streak()).prepare(lambda: inputs[next(numbers) % 2] * 2, 2)
    for x in inputs:
        x.add_(10)
    results = [replay() for _ in range(3)]
    values = [result.tolist() for result in results if isinstance(result, torch.Tensor)]
    assert values == [[22.0] * 4, [24.0] * 4, [22.0] * 4]


def test_a_failed_capture_leaves_the_device_usable(device: Cuda) -> None:
    """After a failed capture, eager calls, random numbers, new captures and the allocator still work."""
    x = torch.randn(1000, device="cuda")
    clock = CudaClock("graph", device, Streak())
    for _ in range(3):
        with pytest.raises(UnavailableError, match=r"^graph capture failed: .*captur[^\n]*$"):
            clock.prepare(lambda: (x * x).sum().item(), 2)
    assert torch.randn(1000, device="cuda").isfinite().all()
    assert torch.rand(1000, device="cuda").add_(x).isfinite().all()
    assert min(visit(device, partial(torch.sum, x), 5, "graph").samples["latency_ns"]) > 0
    before = device.reserved_bytes()
    buffer = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    assert device.reserved_bytes() >= before + 256 * MIB
    del buffer
    torch.cuda.empty_cache()
    assert device.reserved_bytes() <= before


def test_a_call_that_seeds_a_generator_is_refused(device: Cuda) -> None:
    """A call that seeds a generator cannot be captured, since each replay would draw the same numbers."""

    def call() -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(1)
        return torch.randn(8, device="cuda", generator=generator)

    with pytest.raises(UnavailableError, match=r"^graph capture failed: [^\n]+$"):
        CudaClock("graph", device, Streak()).prepare(call, 1)
    assert torch.randn(8, device="cuda").isfinite().all()


def test_the_memory_of_a_graph_is_freed_with_it(device: Cuda) -> None:
    """The memory of a graph is freed once nothing refers to its replay."""
    torch.cuda.empty_cache()
    before = device.reserved_bytes()
    replay = CudaClock("graph", device, Streak()).prepare(
        partial(torch.zeros, 64 * MIB, dtype=torch.uint8, device="cuda"), 2
    )
    assert device.reserved_bytes() >= before + 128 * MIB
    del replay
    torch.cuda.empty_cache()
    assert device.reserved_bytes() <= before


def test_memory_that_is_reserved_while_timed_is_marked(device: Cuda) -> None:
    """A visit in which the allocator reserves new memory is marked as grown; a second visit is not."""
    torch.cuda.empty_cache()
    call = partial(torch.empty, 64 * MIB, dtype=torch.uint8, device="cuda")
    clock = CudaClock("eager", device, Streak())
    assert clock.visit(call, 2).grown
    assert not clock.visit(call, 2).grown


def test_out_of_memory_errors_are_recognized() -> None:
    """The allocator's out-of-memory error is recognized by its type, not by its message."""
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(error.value)


def test_the_environment_names_the_gpu() -> None:
    """The environment has the GPU's name, memory and CUDA version, and ``auto`` selects the GPU."""
    here = environment(resolve_device("auto"))
    assert here.device == "cuda"
    assert here.device_name == torch.cuda.get_device_name()
    assert here.cuda == torch.version.cuda
    assert (here.device_memory_bytes or 0) > 2**30


def test_a_busy_gpu_has_a_high_utilization() -> None:
    """NVML reports a busy GPU as more than half utilized; without readings the test is skipped."""
    readings = monitor_call(spin(10**8))
    if "utilization_percent" not in readings.samples:
        pytest.skip(readings.reason)
    assert min(readings.samples["utilization_percent"]) > 50
