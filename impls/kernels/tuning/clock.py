"""The time of a launch on a GPU: replays of a graph of many, between two events, with warm caches."""

import functools

import torch

from impls.kernels.rows import Tiling
from impls.kernels.tuning.contest import Timer
from impls.kernels.tuning.tunable import Launch

LAUNCHES = 20
"""In a graph: what a replay itself takes is shared by them."""


def clock(launch: Launch) -> Timer:
    """Return a clock of launches, which captures a graph for each way when it is first timed."""

    @functools.cache
    def graph(tiling: Tiling) -> torch.cuda.CUDAGraph:
        launch(tiling)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(LAUNCHES):
                launch(tiling)
        captured.replay()
        return captured

    def time(tiling: Tiling) -> float:
        one = graph(tiling)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        one.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e6 / LAUNCHES

    return time
