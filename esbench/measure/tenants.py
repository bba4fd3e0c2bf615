"""Who computes on the GPU: this process, and others that disturb it."""

import functools
import os
from collections.abc import Callable, Collection

import torch

from esbench.measure.nvml import Nvml, NvmlError


@functools.cache
def own_pids() -> frozenset[int]:
    """Return the ids by which NVML knows this process, none where it does not tell. Never fails.

    In a container they are the host's, not those that the process has itself; so who is new in NVML's list
    once torch has made its CUDA context is this process. Call it before anything else uses the GPU; later
    calls return the same.
    """
    try:
        with Nvml() as nvml:
            return newcomers(nvml, torch.cuda.synchronize)
    except (NvmlError, RuntimeError):  # the latter from a GPU that is broken or full
        return frozenset()


def newcomers(nvml: Nvml, enter: Callable[[], object]) -> frozenset[int]:
    """Return who is on the GPU since this process entered; itself if it was there before.

    Raises:
        NvmlError: NVML does not list processes.

    """
    before = {process.pid for process in nvml.processes()}
    enter()
    after = {process.pid for process in nvml.processes()}
    itself = {os.getpid()}
    new = after - before
    return frozenset((new & itself) or new or (after & itself))


def foreign_processes() -> tuple[str, ...]:
    """Return in words who else computes on the GPU now, nobody where NVML does not tell. Never fails."""
    own = own_pids()
    try:
        with Nvml() as nvml:
            return strangers(nvml, own)
    except NvmlError:
        return ()


def strangers(nvml: Nvml, own: Collection[int]) -> tuple[str, ...]:
    """Return in words who computes on the GPU beside the processes ``own``; nobody if those are not known.

    Raises:
        NvmlError: NVML does not list processes.

    """
    return tuple(str(process) for process in sorted(nvml.processes()) if own and process.pid not in own)
