"""The CUDA clocks, on a fake device with known timelines."""

import contextlib
import gc
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esbench.errors import UserError
from esbench.measure import cuda
from esbench.measure.cuda import Streak
from esbench.measure.interleave import warm_up
from esbench.measure.timers import LONGEST_BLOCK_NS, Call, ClockError, CudaClock, clocks
from esbench.workload import UnavailableError
from tests.fake_cuda import FakeCuda

METHODS = ("eager", "graph")


def clock_of(device: FakeCuda, method: str = "eager") -> CudaClock:
    """Return a clock of a fake device."""
    return CudaClock(method, device, Streak())


def kernels(device: FakeCuda, count: int, device_ns: float, launch_ns: float = 5_000.0) -> Call:
    """Return a call that launches kernels of a given length."""

    def call() -> None:
        for _ in range(count):
            device.launch(device_ns, launch_ns=launch_ns)

    return call


@pytest.mark.parametrize("method", METHODS)
@given(device_ns=st.floats(2e3, 5e7), launch_ns=st.floats(500, 2e5), count=st.integers(1, 20))
def test_a_kernel_of_known_duration_is_timed_right(
    method: str, device_ns: float, launch_ns: float, count: int
) -> None:
    """Times from 2 us to 50 ms are right to 0.2 % whatever a launch costs the host, which is measured too."""
    device = FakeCuda()
    clock = clock_of(device, method)
    call = clock.prepare(kernels(device, count, device_ns / count, launch_ns), 2)
    clock.visit(call, 2)
    visit = clock.visit(call, 5)
    assert visit.samples["latency_ns"] == pytest.approx([device_ns] * 5, rel=0.002)
    assert visit.samples["warm_latency_ns"] == pytest.approx([device_ns] * 5, rel=0.002)
    issued_ns = device.verb_ns if method == "graph" else count * launch_ns
    assert visit.samples["host_latency_ns"] == pytest.approx([issued_ns] * 5, abs=1)
    assert visit.dispatch_bound == 0


def test_dispatch_bound_samples_are_counted() -> None:
    """Calls that issue longer than the longest block, fill the queue or wait inside are labelled."""
    device = FakeCuda()
    clock_of(device).visit(kernels(device, 3, 10_000, launch_ns=50_000), 4)
    assert min(device.spins) >= 1.5 * 150_000  # a block lasts longer than issuing takes
    device = FakeCuda()
    slow = clock_of(device).visit(kernels(device, 2, 10_000, launch_ns=3e7), 3)
    assert slow.dispatch_bound == 3
    assert max(device.spins) == LONGEST_BLOCK_NS

    device = FakeCuda()
    many = clock_of(device).visit(kernels(device, 2000, 1_000), 1)
    assert many.dispatch_bound == 1
    assert many.samples["host_latency_ns"] == pytest.approx([2000 * 5_000])  # timed before the queue was full
    device = FakeCuda()
    kernels(device, 1000, 1e6)()
    after = clock_of(device).visit(kernels(device, 600, 20_000), 3)  # the queue is empty before each call
    assert after.samples["host_latency_ns"] == pytest.approx([600 * 5_000] * 3)

    device = FakeCuda()

    def waiting() -> None:
        device.launch(10_000)
        device.synchronize()
        device.launch(10_000)

    waits = clock_of(device).visit(waiting, 3)
    assert waits.dispatch_bound == 3
    assert max(waits.samples["host_latency_ns"]) < 50_000  # the block is not included


def test_the_cache_is_flushed_and_new_memory_has_a_label() -> None:
    """The flush is not in the time; a label says when the allocator had to reserve memory."""
    device = FakeCuda()
    visit = clock_of(device).visit(partial(device.launch, 10_000, cold_ns=3_000), 6)
    assert visit.samples["latency_ns"] == pytest.approx([13_000] * 6)
    assert visit.samples["warm_latency_ns"] == pytest.approx([10_000] * 6)
    assert device.flushes == 6
    clock = clock_of(device)

    def call() -> None:
        device.launch(10_000)
        device.reserved = 2**21

    assert clock.visit(call, 2).grown
    assert not clock.visit(call, 2).grown


def test_impossible_times_are_errors() -> None:
    """Work that the stream's events do not include and a clock that runs backwards are errors."""
    device = FakeCuda()
    with pytest.raises(ClockError, match=r"^the clock measured 0 ns for a call: "):
        clock_of(device).visit(partial(device.launch, 1e6, "other"), 3)
    device = FakeCuda(backwards_ns=500)
    with pytest.raises(ClockError, match=r"^the clock measured -400 ns for a call: "):
        clock_of(device).visit(partial(device.launch, 100), 2)


def test_a_graph_is_replayed_for_each_input_in_turn() -> None:
    """Each prepared call has one graph per turn, which returns what that call returned."""
    device = FakeCuda()
    clock = clock_of(device, "graph")
    turns, collecting = iter("abcdef"), set[bool]()

    def call() -> str:
        collecting.add(gc.isenabled())
        return next(turns)

    first, second = clock.prepare(call, 3), clock.prepare(lambda: "x", 2)
    assert [first(), second(), first(), first(), first()] == ["d", "x", "e", "f", "d"]
    assert device.replayed == [0, 0, 1, 2, 0]
    assert collecting == {False}  # memory freed by the collector could break the capture
    assert gc.isenabled()

    device = FakeCuda()
    plain = partial(device.launch, 10_000)
    assert clock_of(device).prepare(plain, 3) is plain
    assert device.host_ns == 0


def test_a_call_that_cannot_be_captured_is_unavailable() -> None:
    """The reason is one line, never empty, and the device still works."""
    device = FakeCuda(refuses="no such luck\nand more about it")
    launch = partial(device.launch, 10_000)
    with pytest.raises(UnavailableError, match=r"^graph capture failed: no such luck$"):
        clock_of(device, "graph").prepare(launch, 2)
    assert device.replayed == []
    assert clock_of(device).visit(launch, 2).samples["latency_ns"] == pytest.approx([10_000] * 2)
    device = FakeCuda()
    with pytest.raises(UnavailableError, match=r"^graph capture failed: operation not permitted when stream"):
        clock_of(device, "graph").prepare(device.synchronize, 2)
    for error in (SystemExit(), KeyError()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(UnavailableError, match=f"^graph capture failed: {type(error).__name__}$"):
            clock_of(FakeCuda(), "graph").prepare(fail, 1)


def test_a_busy_device_has_a_short_warm_up() -> None:
    """The first call warms up for 0.3 s; the next one only until its times are flat, by either clock."""
    device, streak = FakeCuda(), Streak()
    eager, graph = (CudaClock(method, device, streak) for method in METHODS)
    took_s = []
    for clock, pause_ns in ((eager, 0.0), (eager, 0.0), (graph, 0.0), (eager, 1e9)):
        device.host_ns += pause_ns
        start_ns = device.host_ns
        warm_up(partial(device.launch, 100_000), clock, 1.0)
        took_s.append((device.host_ns - start_ns) / 1e9)
    assert min(took_s[0], took_s[3]) >= 0.3
    assert max(took_s[1:3]) < 0.05


def test_a_device_has_a_clock_for_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device returns all its clocks, or one for each requested method; an unknown method is refused."""
    monkeypatch.setattr(cuda, "Cuda", FakeCuda)
    assert [clock.method for clock in clocks("cuda")] == ["eager", "graph"]
    assert [clock.method for clock in clocks("cuda", ("graph", "graph"))] == ["graph"]
    assert [clock.method for clock in clocks("cpu")] == ["host"]
    for device, method, known in (("cpu", "graph", "host"), ("cuda", "host", "eager, graph")):
        with pytest.raises(UserError, match=f"^no method '{method}' on {device}; available: {known}$"):
            clocks(device, (method,))


class FakeGraph:
    """A fake of torch's CUDAGraph; captures whose number is in ``broken`` raise when they end."""

    log: list[str]
    broken: set[int]

    def capture_begin(self, **options: object) -> None:
        """Store the pool that the capture uses."""
        self.number = sum(line.startswith("begin") for line in self.log)
        self.log.append(f"begin {options.get('pool')}")

    def capture_end(self) -> None:
        """End the capture, or raise if it is broken."""
        if self.number in self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.log.append("end")

    def reset(self) -> None:
        """Do nothing."""
        self.log.append("reset")


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> cuda.Cuda:
    """Return the real facade over a fake torch that records its calls."""
    log: list[str] = []
    monkeypatch.setattr(FakeGraph, "log", log, raising=False)
    monkeypatch.setattr(FakeGraph, "broken", set(), raising=False)
    monkeypatch.setattr(cuda, "CUDAGraph", FakeGraph)
    for name in ("_synchronize", "_empty_cache"):
        monkeypatch.setattr(cuda, name, lambda: None)
    monkeypatch.setattr(torch.Tensor, "random_", lambda _: log.append("random"))
    monkeypatch.setattr(cuda, "_end_allocating", lambda _, pool: log.append(f"end allocating {pool}"))
    monkeypatch.setattr(cuda, "_release_pool", lambda _, pool: log.append(f"release {pool}"))

    def entered(stream: str) -> contextlib.nullcontext[None]:
        assert stream == "side"
        return contextlib.nullcontext()

    for name, value in {
        "current_stream": lambda: "default",
        "default_stream": lambda: "default",
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda: "side",
        "stream": entered,
        "get_device_properties": lambda _: type("", (), {"L2_cache_size": 1000, "clock_rate": 2_000_000}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *size, **_: torch.zeros(*size))
    return cuda.Cuda()


def test_the_allocator_is_restored_after_a_failed_capture(facade: cuda.Cuda) -> None:
    """After a broken capture its pool is released, and a later capture that draws noise succeeds.

    If the call itself raised an error, that error is raised, not the one from ending the capture.
    """
    mended = ["reset", "end allocating pool", "release pool", "begin None", "random", "end"]
    FakeGraph.broken = {0}
    numbers = iter(range(10))

    def call() -> None:
        if next(numbers) == 1:
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match=r"^not permitted$"):
        facade.capture(call, 1)
    assert FakeGraph.log == ["begin pool", *mended]
    FakeGraph.log.clear()
    FakeGraph.broken = {1}
    with pytest.raises(RuntimeError, match="previous error during capture"):
        facade.capture(lambda: None, 2)
    assert FakeGraph.log == ["begin pool", "end", "begin pool", *mended]


def test_the_operations_of_a_device(facade: cuda.Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are never too short, a flush covers twice the cache, and times are whole nanoseconds."""
    cycles: list[int] = []
    monkeypatch.setattr(cuda, "_spin", cycles.append)
    facade.spin(1000.2)
    assert cycles == [2001]  # 2 GHz, rounded up

    assert facade.cache.rows.nbytes >= 2000
    facade.cache.rows.fill_(1)
    facade.cache.sums.fill_(1)
    facade.flush()
    assert not facade.cache.rows.any()
    assert not facade.cache.sums.any()  # each row was read after the write, so its cache lines are clean

    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: 1e-9)
    assert cuda._elapsed_ms is not torch.cuda.Event.elapsed_time  # noqa: SLF001  # bound before any variant
    # Events measure milliseconds in single precision; more digits are noise and make run files larger.
    monkeypatch.setattr(cuda, "_elapsed_ms", lambda *_: 0.02457599900662899)
    assert repr(facade.elapsed_ns(None, None)) == "24576"
    monkeypatch.setattr("time.perf_counter_ns", lambda: 0)
    assert facade.now_ns() > 0
