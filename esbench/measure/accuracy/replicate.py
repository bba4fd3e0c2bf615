"""A fresh process of the study: ``python -m esbench.measure.accuracy.replicate DEVICE SEED THREADS``.

It times a few kernels, each in rounds of its own, and prints their samples as JSON.
"""

import random
import sys

import msgspec
import torch

from esbench.measure.accuracy.kernels import kernels
from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.timers import clocks
from esbench.schema import Sample

Found = dict[str, tuple[tuple[Sample, ...], ...]]
"""Kernel -> one tuple of nanoseconds for each round."""

REPLICATED = {
    "cpu": ("add 2^20", "matmul 256", "matmul 512"),
    "cuda": ("spin 100 us", "add 2^26", "matmul 2048"),
}
BUDGET_S = 1.0


def replicate(device: str, seed: int, budget_s: float = BUDGET_S) -> Found:
    """Time the replicated kernels of a device."""
    clock = clocks(device)[0]
    rng = random.Random(seed)  # noqa: S311  # an order, not a secret
    found = {}
    for kernel in kernels(device, seed):
        if kernel.name in REPLICATED[device]:
            track = TimedCall(clock.prepare(kernel.call, 1), clock, budget_s)
            track.warm_up()
            interleave([track], rng)
            found[kernel.name] = tuple(track.rounds[LATENCY])
    return found


if __name__ == "__main__":
    asked_device, asked_seed, asked_threads = sys.argv[1:]
    torch.set_num_threads(int(asked_threads))
    sys.stdout.buffer.write(msgspec.json.encode(replicate(asked_device, int(asked_seed))))
