"""Compare ways of flushing the L2 cache: ``python -m esbench.studies.cache_flush [--device cpu]``.

A buffer that is only written leaves the cache full of dirty lines, which are written back while the next
call runs, so that its cold time is too long. The timers therefore write the buffer and then read it. This
experiment times three calls after each way of flushing, in the same rounds, and compares the cold times. On a
CPU it is a dry run, whose times say nothing about a GPU.

Example: python -m esbench.studies.cache_flush --device cuda --seconds 2
"""

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter_ns as _host_ns

import torch

from esbench.measure.cuda import CacheBuffer, Cuda, Streak
from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.timers import Call, Clock, CudaClock, HostClock, Visit

WAYS: Mapping[str, Sequence[Callable[[CacheBuffer], None]]] = {
    "write": (CacheBuffer.write,),
    "write, read": (CacheBuffer.write, CacheBuffer.read),
    "read": (CacheBuffer.read,),
}
"""Name -> what is done with the buffer before each call. Ratios are relative to the first."""
CPU_CACHE_BYTES = 2**20
"""Size of the cache in a dry run."""


class _Cuda(Cuda):
    """The current CUDA device with another way of flushing its cache."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = WAYS[way]

    def flush(self) -> None:
        for step in self._way:
            step(self.cache)


class _FlushedHostClock(HostClock):
    """A host timer that flushes before each call."""

    def __init__(self, way: str) -> None:
        self._way = WAYS[way]
        self._cache = CacheBuffer(2 * CPU_CACHE_BYTES, "cpu")

    def visit(self, call: Call, calls: int) -> Visit:
        samples = []
        for _ in range(calls):
            for step in self._way:
                step(self._cache)
            start = _host_ns()
            call()
            samples.append(_host_ns() - start)
        return Visit({LATENCY: tuple(samples)})


def calls_of(device: str, cache_bytes: int) -> dict[str, Call]:
    """Return calls that read, copy and multiply tensors that fit into the cache, without allocations."""
    rows = torch.ones(cache_bytes // 2**14, 1024, device=device)  # a quarter of the cache, in float32
    copied, sums = torch.empty_like(rows), torch.empty(len(rows), device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    width = 1024 if device == "cuda" else 128
    a, b, product = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(3))
    quarter = f"{rows.nbytes / 2**20:.2g} MiB"
    return {
        f"read {quarter}": partial(torch.sum, rows, dim=1, out=sums),
        f"copy {quarter}": partial(torch.Tensor.copy_, copied, rows),
        f"multiply {width} x {width}": partial(torch.mm, a, b, out=product),
    }


def compare(device: str, budget_s: float) -> list[str]:
    """Time the calls after each way of flushing; return the lines of a table.

    Raises:
        RuntimeError: a call could not be timed.

    """
    clocks: dict[str, Clock]
    if device == "cuda":
        streak = Streak()
        clocks = {way: CudaClock("eager", _Cuda(way), streak) for way in WAYS}
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        name = torch.cuda.get_device_name()
    else:
        clocks = {way: _FlushedHostClock(way) for way in WAYS}
        cache_bytes, name = CPU_CACHE_BYTES, "CPU, a dry run"
    lines = [f"{name}: cold times after a flush of {2 * cache_bytes / 2**20:g} MiB, twice the cache"]
    rng = random.Random(0)  # noqa: S311  # an order, not a secret
    for what, call in calls_of(device, cache_bytes).items():
        tracks = {way: TimedCall(call, clock, budget_s, is_baseline=True) for way, clock in clocks.items()}
        for track in tracks.values():
            track.warm_up()
        interleave(list(tracks.values()), rng)
        if faults := [track.failure for track in tracks.values() if track.failure]:
            raise RuntimeError(faults[0].reason)
        medians = {way: [median(visits) for visits in track.rounds[LATENCY]] for way, track in tracks.items()}
        first = next(iter(medians.values()))
        for way, mine in medians.items():
            ratio = median(a / b for a, b in zip(mine, first, strict=False))
            figures = f"{median(mine) / 1e3:10.2f} us  ratio {ratio:.3f}  {len(mine)} rounds"
            lines.append(f"{what:22}{way:12}{figures}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per call and way of flushing")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU: --device cpu is a dry run")
    sys.stdout.write("\n".join(compare(asked.device, asked.seconds)) + "\n")


if __name__ == "__main__":
    main()
