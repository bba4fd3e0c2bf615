"""Device peaks: the rates of a large copy and of a square matrix product in each dtype of a run.

The roofline bound of a variant is computed from them. They are measured like variants: by the run's clock, on
seeded N(0, 1) numbers, without allocations.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from esbench.measure.float32_precision import precision, tensor_dtype, unsupported_reason
from esbench.measure.memory import available_bytes, is_out_of_memory
from esbench.measure.timers import Call, Clock
from esbench.schema import OUT_OF_TIME, DevicePeak
from esbench.workload import UnavailableError

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""The folder in which Linux reports the sizes of the caches, such as ``32K``."""
SIZE = re.compile(r"(\d+)([KMG])")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

CACHE_MULTIPLE = 8
"""The size of a copied buffer in multiples of the last cache, within the bounds below."""
MIN_BUFFER = {"cpu": 64 * 2**20, "cuda": 2**30}
MAX_BUFFER = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
MAX_FREE_SHARE = 1 / 8
"""The largest size of a buffer as a share of the free memory."""

PRODUCT_NS = {"cpu": 8e6, "cuda": 1e6}
"""The least duration of the measured product."""
FIRST_SIDE, LAST_SIDE = 64, 16384
"""The bounds of the number of rows and columns of the matrices."""

PEAK_S = {"cpu": 2.0, "cuda": 1.0}
"""The expected seconds of one peak, with allocation and probes."""

PROBES = 3
"""The number of calls in a probe of the duration."""
BUDGET_NS = 0.12e9
"""The duration of the samples of a peak, within these bounds of the number of calls."""
MIN_CALLS, MAX_CALLS = 5, 50


def device_peaks(
    device: str, dtypes: Iterable[str], clock: Clock, end_s: float = math.inf
) -> Iterator[DevicePeak]:
    """Yield the peak of a copy, and of a matrix product in each dtype that the device supports.

    A peak is left out if it runs out of memory, or if torch has no product of its dtype on this device.

    Args:
        device: ``cpu`` or ``cuda``.
        dtypes: the dtypes of the products.
        clock: times the calls.
        end_s: the time of :func:`time.monotonic` by which the last peak must have ended.

    Raises:
        UnavailableError: not enough time is left for the next peak.
    """
    supported = (dtype for dtype in dict.fromkeys(dtypes) if not unsupported_reason(dtype, device))
    measures: list[Callable[[str, Clock], DevicePeak]] = [
        _measure_copy,
        *(partial(_measure_product, dtype) for dtype in supported),
    ]
    for measure in measures:
        if time.monotonic() + PEAK_S[device] > end_s:
            raise UnavailableError(OUT_OF_TIME)
        try:
            peak = measure(device, clock)
        except (RuntimeError, MemoryError) as error:
            has_no_product = "not implemented" in str(error)  # torch has no other sign of it
            if not (has_no_product or is_out_of_memory(error)):
                raise
        else:
            yield peak


def cache_bytes(device: str) -> int:
    """Return the size of the last-level cache, 0 if it is unknown."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes = [SIZE.match(path.read_text(encoding="ascii")) for path in CACHES.glob("index*/size")]
    return max((int(size[1]) * UNITS[size[2]] for size in sizes if size), default=0)


def buffer_bytes(device: str, cache: int, free: int) -> int:
    """Return the size of a copied buffer from the sizes of the last cache and of the free memory."""
    size = min(max(CACHE_MULTIPLE * cache, MIN_BUFFER[device]), MAX_BUFFER[device])
    return max(1, min(size, int(MAX_FREE_SHARE * free)))


def _measure_copy(device: str, clock: Clock) -> DevicePeak:
    """Measure a copy between two buffers; each byte is read and written."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    size = buffer_bytes(device, cache_bytes(device), free)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    samples = _samples(lambda: target.copy_(source), clock)
    return DevicePeak(kind="copy", dtype="uint8", amount=2.0 * size, samples=samples)


def _measure_product(dtype: str, device: str, clock: Clock) -> DevicePeak:
    """Measure the product of square matrices that are large enough for it to last PRODUCT_NS."""
    side = FIRST_SIDE
    with precision(dtype):
        call = _multiplication(side, device, dtype)
        while _fastest_ns(call, clock) < PRODUCT_NS[device] and side < LAST_SIDE:
            side *= 2
            call = _multiplication(side, device, dtype)
        return DevicePeak(kind="matmul", dtype=dtype, amount=2.0 * side**3, samples=_samples(call, clock))


def _multiplication(side: int, device: str, dtype: str) -> Call:
    """Return a call that multiplies two square matrices of seeded N(0, 1) numbers."""
    generator = torch.Generator(device)
    a, b = (
        torch.randn(side, side, device=device, generator=generator.manual_seed(side)).to(tensor_dtype(dtype))
        for _ in range(2)
    )
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def _samples(call: Call, clock: Clock) -> tuple[float, ...]:
    """Return the nanoseconds of as many calls as the budget allows, after warm-up calls."""
    calls = max(MIN_CALLS, min(MAX_CALLS, int(BUDGET_NS / max(_fastest_ns(call, clock), 1.0))))
    return clock.visit(call, calls).samples["latency_ns"]


def _fastest_ns(call: Call, clock: Clock) -> float:
    return min(clock.visit(call, PROBES).samples["latency_ns"])
