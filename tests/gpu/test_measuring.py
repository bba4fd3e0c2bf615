"""What only a CUDA GPU can show of the instruments."""

from functools import partial

import pytest
import torch

from esbench.measure.environment import environment, resolve_device
from esbench.measure.memory import is_out_of_memory, peak_bytes
from esbench.measure.nvml import Nvml
from esbench.measure.timing import CudaClock
from esbench.measure.utilization import Pace, of_call, watch

MIB = 1024**2


def cycles_per_ns() -> float:
    """Return how fast ``torch.cuda._sleep`` counts here, from the difference of two lengths."""
    clock = CudaClock()
    short, long = 10**7, 10**8
    times = [min(clock.visit(partial(torch.cuda._sleep, cycles), 5)) for cycles in (short, long)]  # noqa: SLF001  # the only kernel of a known length
    return (long - short) / (times[1] - times[0])


def test_a_kernel_of_50_ms_reads_50_ms() -> None:
    """To 1 %, though the launch returns at once: the figure is the device's."""
    cycles = round(50e6 * cycles_per_ns())
    samples = CudaClock().visit(lambda: torch.cuda._sleep(cycles), 5)  # noqa: SLF001  # the only kernel of a known length
    assert samples == pytest.approx([50e6] * 5, rel=0.01)


def test_the_flush_covers_the_cache_twice_and_is_not_in_the_figure() -> None:
    """An empty call reads a few microseconds; overwriting the buffer takes many."""
    clock = CudaClock()
    assert clock.flush_bytes >= 2 * torch.cuda.get_device_properties(0).L2_cache_size > 0
    assert min(clock.visit(lambda: None, 20)) < 2e4


def test_the_peak_on_cuda_is_exact_and_equal_over_repeats() -> None:
    """To the byte, where the sizes are those in which the allocator hands out."""

    def call() -> torch.Tensor:
        first = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return second

    assert {peak_bytes(call, "cuda") for _ in range(20)} == {6 * MIB}


def test_what_does_not_fit_on_the_gpu_is_recognised() -> None:
    """The allocator's error, whatever it says."""
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(error.value)


def test_the_environment_names_the_gpu() -> None:
    """Name, memory and CUDA, and what auto stands for."""
    here = environment(resolve_device("auto"))
    assert here.device == "cuda"
    assert here.device_name == torch.cuda.get_device_name()
    assert here.cuda == torch.version.cuda
    assert (here.device_memory_bytes or 0) > 2**30


def test_a_gpu_that_is_kept_busy_is_seen_to_be() -> None:
    """NVML's readings, or its reason for none."""
    found = of_call(lambda: torch.cuda._sleep(10**8))  # noqa: SLF001  # the only kernel of a known length
    if found.reason:
        pytest.skip(found.reason)
    assert min(found.samples) > 50
    with Nvml() as nvml:
        assert watch(lambda: None, nvml, torch.cuda.synchronize, Pace(0.0, 0.2)).samples
