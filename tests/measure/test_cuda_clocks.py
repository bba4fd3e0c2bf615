"""The clocks of CUDA, on a fake device whose timelines are known."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esbench.errors import UserError
from esbench.measure import cuda, timers
from esbench.measure.cuda import Streak
from esbench.measure.interleave import warm_up
from esbench.measure.timers import LONGEST_BLOCK_NS, Call, ClockError, CudaClock, clocks
from esbench.registry import UnavailableError
from tests.fake_cuda import FakeCuda

METHODS = ("eager", "graph")


def clock_of(device: FakeCuda, method: str = "eager") -> CudaClock:
    """A clock of one device."""
    return CudaClock(method, device, Streak())


def kernels(device: FakeCuda, count: int, device_ns: float, launch_ns: float = 5_000.0) -> Call:
    """A call that launches a number of kernels of a length."""

    def call() -> None:
        for _ in range(count):
            device.launch(device_ns, launch_ns=launch_ns)

    return call


@pytest.mark.parametrize("method", METHODS)
@given(device_ns=st.floats(2e3, 5e7), launch_ns=st.floats(500, 2e5), count=st.integers(1, 20))
def test_a_kernel_of_known_length_reads_right(
    method: str, device_ns: float, launch_ns: float, count: int
) -> None:
    """To 0.2 %, from 2 us to 50 ms, whatever its launches cost the host, which is told beside it."""
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


def test_the_block_lasts_as_long_as_issuing_takes_with_a_margin() -> None:
    """It is learnt: from the pass that times the host, and from what was issued around earlier calls."""
    device = FakeCuda()
    clock, call = clock_of(device), kernels(device, 3, 10_000, launch_ns=50_000)
    clock.visit(call, 4)
    device.spins.clear()
    clock.visit(call, 4)
    around_ns = 3 * device.verb_ns  # flush and two events
    assert device.spins == pytest.approx([1.5 * (150_000 + around_ns)] * 8)


def test_what_takes_too_long_to_issue_is_labelled() -> None:
    """Beyond the longest block the host's time is in the figure, and the visit says so."""
    device = FakeCuda()
    visit = clock_of(device).visit(kernels(device, 2, 10_000, launch_ns=3e7), 3)
    assert min(visit.samples["latency_ns"]) > 3e7
    assert visit.dispatch_bound == 3
    assert max(device.spins) == LONGEST_BLOCK_NS


def test_more_launches_than_the_device_queues_are_labelled() -> None:
    """The host stands before a full queue until the block ends; its own time was taken before that."""
    device = FakeCuda()
    visit = clock_of(device).visit(kernels(device, 2000, 1_000), 1)
    assert visit.dispatch_bound == 1
    assert visit.samples["host_latency_ns"] == pytest.approx([2000 * 5_000])


def test_a_call_that_waits_inside_is_labelled() -> None:
    """It waits for the block, too, which is not in what the host is said to take."""
    device = FakeCuda()

    def call() -> None:
        device.launch(10_000)
        device.synchronize()
        device.launch(10_000)

    visit = clock_of(device).visit(call, 3)
    assert visit.dispatch_bound == 3
    assert max(visit.samples["host_latency_ns"]) < 50_000


def test_one_late_launch_is_counted_once() -> None:
    """The other samples of the visit are what they were."""
    device = FakeCuda()
    numbers = iter(range(100))

    def call() -> None:
        device.launch(10_000)
        device.launch(10_000, launch_ns=5e7 if next(numbers) == 12 else 5_000)

    visit = clock_of(device).visit(call, 5)
    assert visit.dispatch_bound == 1
    cold = visit.samples["latency_ns"]
    assert cold[2] > 1e6
    assert [*cold[:2], *cold[3:]] == pytest.approx([20_000] * 4)


def test_cold_calls_find_the_cache_overwritten_and_warm_ones_do_not() -> None:
    """Twice the cache between two uses, by what was done; the flush itself is in no figure."""
    device = FakeCuda()
    clock = clock_of(device)
    visit = clock.visit(partial(device.launch, 10_000, cold_ns=3_000), 6)
    assert visit.samples["latency_ns"] == pytest.approx([13_000] * 6)
    assert visit.samples["warm_latency_ns"] == pytest.approx([10_000] * 6)
    assert len(device.flushed) == 6
    assert min(device.flushed) >= 2 * device.l2_bytes


def test_work_on_another_stream_is_in_no_event() -> None:
    """What events read is nothing at all, and no time; beside other work a little: so traces are held too."""
    device = FakeCuda()
    with pytest.raises(ClockError, match=r"^the clock read 0 ns: "):
        clock_of(device).visit(partial(device.launch, 1e6, "other"), 3)


def test_memory_that_the_allocator_takes_while_timed_is_told() -> None:
    """Once it holds enough, it no longer is."""
    device = FakeCuda()
    clock = clock_of(device)

    def call() -> None:
        device.launch(10_000)
        device.reserved = 2**21

    assert clock.visit(call, 2).grown
    assert not clock.visit(call, 2).grown


def test_a_clock_of_the_device_that_goes_backwards_is_an_error() -> None:
    """No figure comes of it."""
    device = FakeCuda(backwards_ns=500)
    with pytest.raises(ClockError, match=r"^the clock went backwards by 400 ns$"):
        clock_of(device).visit(partial(device.launch, 100), 2)


def test_graphs_replay_the_calls_in_turn() -> None:
    """One for each turn, with what that call returned; the calls ran as often before."""
    device = FakeCuda()
    turns = iter("abcdef")

    def call() -> str:
        device.launch(10_000)
        return next(turns)

    replay = clock_of(device, "graph").prepare(call, 3)
    assert [replay() for _ in range(4)] == ["d", "e", "f", "d"]
    assert device.replayed == [0, 1, 2, 0]


def test_calls_do_not_share_their_graphs() -> None:
    """Each call that is prepared has its own turns."""
    device = FakeCuda()
    clock = clock_of(device, "graph")
    first, second = (clock.prepare(lambda name=name: name, 2) for name in "ab")  # type: ignore[misc]  # mypy wants no default
    assert [first(), second(), first()] == ["a", "b", "a"]
    assert device.replayed == [0, 0, 1]


def test_eager_is_the_call_itself() -> None:
    """Nothing is called before it is timed."""
    device = FakeCuda()
    call = partial(device.launch, 10_000)
    assert clock_of(device).prepare(call, 3) is call
    assert device.host_ns == 0


def test_what_cannot_be_captured_is_unavailable_and_never_timed_otherwise() -> None:
    """The reason is one line, and the device works as before."""
    device = FakeCuda(refuses="no such luck\nand more about it")
    with pytest.raises(UnavailableError, match=r"^graph capture failed: no such luck$"):
        clock_of(device, "graph").prepare(partial(device.launch, 10_000), 2)
    assert device.replayed == []
    visit = clock_of(device).visit(partial(device.launch, 10_000), 2)
    assert visit.samples["latency_ns"] == pytest.approx([10_000] * 2)


def test_a_call_that_waits_for_the_device_cannot_be_captured() -> None:
    """It was fine while it was called, and still is afterwards."""
    device = FakeCuda()

    def call() -> None:
        device.launch(10_000)
        device.synchronize()

    with pytest.raises(UnavailableError, match=r"^graph capture failed: operation not permitted when stream"):
        clock_of(device, "graph").prepare(call, 2)
    clock_of(device).visit(call, 2)


@pytest.mark.parametrize("error", [SystemExit(), KeyError()])
def test_an_error_without_words_is_named(error: BaseException) -> None:
    """A reason is never empty."""

    def call() -> None:
        raise error

    with pytest.raises(UnavailableError, match=f"^graph capture failed: {type(error).__name__}$"):
        clock_of(FakeCuda(), "graph").prepare(call, 1)


def test_nothing_is_collected_while_capturing() -> None:
    """What the collector frees then could break the capture."""
    seen: list[bool] = []
    clock_of(FakeCuda(), "graph").prepare(lambda: seen.append(gc.isenabled()), 1)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_device_that_is_busy_already_is_warmed_up_no_longer_than_needed() -> None:
    """0.3 s for the first call; only until it is flat for one right after it, by either clock."""
    device = FakeCuda()
    streak = Streak()
    eager, graph = (CudaClock(method, device, streak) for method in METHODS)
    call = partial(device.launch, 100_000)
    took_s = [_seconds(device, partial(warm_up, call, clock, 1.0)) for clock in (eager, eager, graph)]
    assert took_s[0] >= 0.3
    assert max(took_s[1:]) < 0.05
    device.host_ns += 1e9
    assert _seconds(device, partial(warm_up, call, eager, 1.0)) >= 0.3


def _seconds(device: FakeCuda, action: Callable[[], object]) -> float:
    start_ns = device.host_ns
    action()
    return (device.host_ns - start_ns) / 1e9


def test_a_visit_counts_what_is_done_around_its_calls() -> None:
    """A call of 1 us costs a hundred times as much to time: a visit still lasts but some milliseconds."""
    device = FakeCuda()
    clock = clock_of(device)
    call = partial(device.launch, 1_000)
    warm = warm_up(call, clock, 1.0)
    assert warm.call_ns == pytest.approx(1_000)
    assert 1 < warm.calls < 64
    assert 0.001 < _seconds(device, lambda: clock.visit(call, warm.calls)) < 0.004


def test_a_device_has_a_clock_for_each_of_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, or those that were asked for, each once."""
    monkeypatch.setattr(cuda, "Cuda", FakeCuda)
    assert [clock.method for clock in clocks("cuda")] == ["eager", "graph"]
    assert [clock.method for clock in clocks("cuda", ("graph", "graph"))] == ["graph"]
    assert [clock.method for clock in clocks("cpu")] == ["host"]


def test_a_method_that_a_device_does_not_have_is_refused() -> None:
    """In a line that lists those it has."""
    cases: list[tuple[str, str, str]] = [
        ("cpu", "graph", "host"),
        ("cuda", "host", "eager, graph"),
    ]
    for device, method, known in cases:
        with pytest.raises(UserError, match=f"^no method '{method}' on {device}; there are: {known}$"):
            clocks(device, (method,))


class FakeGraph:
    """Stands for torch's graph; ``broken`` refuses to end the captures whose number is in it."""

    log: list[str]
    broken: set[int]

    def capture_begin(self, **options: object) -> None:
        """Note the pool that the capture is to use."""
        self.number = sum(line.startswith("begin") for line in self.log)
        self.log.append(f"begin {options.get('pool')}")

    def capture_end(self) -> None:
        """End the capture unless it is broken."""
        if self.number in self.broken:
            message = "operation failed due to a previous error during capture"
            raise RuntimeError(message)
        self.log.append("end")

    def reset(self) -> None:
        """Let go of everything."""
        self.log.append("reset")


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> cuda.Cuda:
    """The real facade over a torch that does nothing but note what it is asked."""
    log: list[str] = []
    monkeypatch.setattr(FakeGraph, "log", log, raising=False)
    monkeypatch.setattr(FakeGraph, "broken", set(), raising=False)
    monkeypatch.setattr(cuda, "CUDAGraph", FakeGraph)
    for name in ("_synchronize", "_empty_cache"):
        monkeypatch.setattr(cuda, name, lambda: None)
    monkeypatch.setattr(torch.Tensor, "random_", lambda _: log.append("random"))
    monkeypatch.setattr(cuda, "_end_allocating", lambda _, pool: log.append(f"end allocating {pool}"))
    monkeypatch.setattr(cuda, "_release_pool", lambda _, pool: log.append(f"release {pool}"))
    for name, value in {
        "current_stream": "default",
        "default_stream": "default",
        "current_device": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "side")
    monkeypatch.setattr(torch.cuda, "stream", _Entered)
    properties = type("Properties", (), {"L2_cache_size": 1000, "clock_rate": 2_000_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "empty", lambda *size, **_: torch.zeros(*size))
    return cuda.Cuda()


class _Entered:
    """Stands for ``torch.cuda.stream``, which must be given the side stream."""

    def __init__(self, stream: str) -> None:
        assert stream == "side"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_broken_capture_is_mended(facade: cuda.Cuda) -> None:
    """The allocator stops allocating for it, its pool is released, and a capture succeeds that draws.

    The error is the call's own, not that of ending the capture.
    """
    FakeGraph.broken = {0}
    numbers = iter(range(10))

    def call() -> None:
        if next(numbers) == 1:
            message = "not permitted"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=r"^not permitted$"):
        facade.capture(call, 1)
    mended = ["reset", "end allocating pool", "release pool", "begin None", "random", "end"]
    assert FakeGraph.log == ["begin pool", *mended]


def test_a_capture_that_cannot_be_ended_is_mended(facade: cuda.Cuda) -> None:
    """Even where the call itself raised nothing."""
    FakeGraph.broken = {1}
    with pytest.raises(RuntimeError, match="previous error during capture"):
        facade.capture(lambda: None, 2)
    assert FakeGraph.log[:4] == ["begin pool", "end", "begin pool", "reset"]
    assert FakeGraph.log[-1] == "end"


def test_a_block_lasts_at_the_highest_clock_rate(facade: cuda.Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is never shorter than asked for: 2 GHz are 2 cycles a nanosecond."""
    asked: list[int] = []
    monkeypatch.setattr(cuda, "_spin", asked.append)
    facade.spin(1000.2)
    assert asked == [2001]


def test_a_flush_leaves_clean_lines_of_a_buffer_of_twice_the_cache(facade: cuda.Cuda) -> None:
    """All of the buffer is zeroed and then read: what is only written has to be evicted during the call."""
    assert 2000 <= facade.flush_bytes == facade._buffer.nbytes  # noqa: SLF001  # what is flushed with
    facade._buffer.fill_(1)  # noqa: SLF001  # what is to be overwritten
    facade._cache.sums.fill_(1)  # noqa: SLF001  # what reading it overwrites
    facade.flush()
    assert not facade._buffer.any()  # noqa: SLF001  # what has been overwritten
    assert not facade._cache.sums.any()  # noqa: SLF001  # each row was read after it was written


def test_times_of_the_device_are_whole_nanoseconds(
    facade: cuda.Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events tell milliseconds in single precision: more digits are noise, and fill the files of runs."""
    monkeypatch.setattr(cuda, "_elapsed_ms", lambda *_: 0.02457599900662899)
    assert repr(facade.elapsed_ns(None, None)) == "24576"


def test_nothing_loaded_later_can_put_another_timer_under_a_measurement(
    facade: cuda.Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events' methods were bound before any variant was loaded."""
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: 1e-9)
    assert cuda._elapsed_ms is not torch.cuda.Event.elapsed_time  # noqa: SLF001  # what the facade calls
    monkeypatch.setattr("time.perf_counter_ns", lambda: 0)
    assert facade.now_ns() > 0
    assert timers.HostClock().seconds() > 0
