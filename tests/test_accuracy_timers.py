"""What a study of the harness compares: other timers, kernels and a sampler beside them."""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.benchmark import Timer as TorchTimer

from esbench.measure.accuracy import kernels, replicate, sampling, timers
from esbench.registry import load_installed
from tests.accuracy_cases import BY_CALL, TORCH, FakeClock


def test_the_kernels_of_a_cpu_have_names_of_their_own_and_run() -> None:
    """The three of the fresh processes are among them."""
    found = kernels.kernels("cpu", 0)
    names = [kernel.name for kernel in found]
    assert len(names) == len(set(names)) >= 12
    assert set(replicate.REPLICATED["cpu"]) <= set(names)
    assert all(isinstance(kernel.call(), torch.Tensor) for kernel in found[:6])


def test_a_registered_scheme_is_one_of_the_kernels() -> None:
    """Its forward, on a case of the suite quick."""
    load_installed()
    (kernel,) = kernels.scheme("cpu", 0)
    assert isinstance(kernel.call(), torch.Tensor)


def test_a_block_of_calls_runs_with_as_many_threads_as_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch's timer takes one."""
    made = Mock(wraps=TorchTimer)
    monkeypatch.setattr(timers, "TorchTimer", made)
    call = Mock()
    (mean,) = timers.by_block(call, 5)
    assert mean > 0
    assert made.call_args.kwargs["num_threads"] == torch.get_num_threads()
    assert len(timers.by_call(call, 3)) == 3
    assert len(timers.by_timeit(call, 3)) == 1


def test_kernels_are_summed_from_flush_to_flush() -> None:
    """A call may launch none, one or several."""
    records = [("fill", 9.0), ("a", 1.0), ("b", 2.0), ("fill", 9.0), ("fill", 9.0), ("a", 4.0)]
    assert timers.split(records, 3) == [3.0, 0.0, 4.0]


def test_a_lost_record_is_an_error() -> None:
    """It would be a call that took no time."""
    with pytest.raises(RuntimeError, match="1 of 2 calls"):
        timers.split([("fill", 9.0), ("a", 1.0)], 2)


def test_triton_is_asked_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its milliseconds become nanoseconds."""
    testing = types.ModuleType("triton.testing")
    testing.do_bench = Mock(return_value=[1.0, 2.0])  # type: ignore[attr-defined]  # a stand-in for a module
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    assert timers.by_do_bench(Mock(), 2) == [1e6, 2e6]
    assert testing.do_bench.call_args.kwargs["return_mode"] == "all"


def test_nvbench_registers_once_and_times_the_call_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds become nanoseconds; what it was told to run, it runs each time."""
    bench, results = types.ModuleType("cuda.bench"), types.ModuleType("cuda.bench.results")
    registered: list[Callable[[Any], None]] = []
    state = Mock()
    state.exec = lambda launch, **_: launch(Mock())
    run_all = Mock(side_effect=lambda _: [one(state) for one in registered])
    answer = Mock()
    answer.from_json.return_value.values.return_value = [[Mock(samples=[1e-6, 2e-6])]]
    vars(bench).update(register=registered.append, run_all_benchmarks=run_all)
    vars(results).update(BenchmarkResult=answer)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bench", bench)
    monkeypatch.setitem(sys.modules, "cuda.bench.results", results)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    calls = [Mock(), Mock()]
    for call in calls:
        assert timers.by_nvbench(call, 2) == [pytest.approx(1e3), pytest.approx(2e3)]
    assert len(registered) == 1
    assert [call.call_count for call in calls] == [1, 1]


def test_what_a_device_cannot_be_timed_with_is_said() -> None:
    """On a CPU nothing that times a GPU; on a GPU nothing that does not wait for it."""
    found, reasons = timers.timers("cpu")
    assert [timer.method for timer in found] == [TORCH, BY_CALL, "timeit"]
    assert len(reasons) == 3
    assert "timeit" in timers.timers("cuda")[1]


def test_the_sampler_runs_beside_each_visit_and_only_then() -> None:
    """It is started before the first call and stopped after the last."""
    log: list[str] = []

    @contextlib.contextmanager
    def sampling_thread() -> Iterator[None]:
        log.append("start")
        yield
        log.append("stop")

    clock = FakeClock()

    def call() -> None:
        log.append("call")
        clock.now_s += 1e-6

    sampling.Sampled(clock, sampling_thread).visit(call, 2)
    assert log == ["start", "call", "call", "stop"]
    assert sampling.sampled(FakeClock(), "cpu")[0] is None
