"""Who computes on a GPU, with a fake of NVML."""

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from esbench.measure.gpu_monitor import (
    ConditionsReader,
    foreign_processes,
    newcomers,
    other_processes,
    own_pids,
)
from esbench.measure.nvml import Nvml
from tests.fake_nvml import MIB, UUID, answering, bindings, install, processes, refusing

HERE = os.getpid()
HOST, ALIEN = 2**30, 2**30 + 1
"""Ids that no process of this machine has: ours as a host may know it, and those of another process."""


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Know nothing of the GPU from another test."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    own_pids.cache_clear()
    yield
    own_pids.cache_clear()


def listing(module: ModuleType, *pids: int) -> None:
    """Have NVML list these processes from now on."""
    module.nvmlDeviceGetComputeRunningProcesses = answering(processes(*pids))  # type: ignore[attr-defined]  # a module made up


@pytest.mark.parametrize(
    ("before", "after", "own"),
    [
        ((), (HERE,), {HERE}),
        ((ALIEN,), (ALIEN, HERE), {HERE}),
        ((), (HERE, ALIEN), {HERE}),
        ((HERE, ALIEN), (HERE, ALIEN), {HERE}),
        ((ALIEN,), (ALIEN, HOST), {HOST}),
        ((HERE,), (HERE, HOST), {HOST}),
        ((), (), set()),
        ((ALIEN,), (ALIEN,), set()),
    ],
)
def test_who_comes_with_the_cuda_context_is_this_process(
    before: tuple[int, ...], after: tuple[int, ...], own: set[int]
) -> None:
    """By its id in this process or on the host; none if it is not listed."""
    module = bindings()
    listing(module, *before)
    assert newcomers(Nvml(UUID, module), lambda: listing(module, *after)) == own


def test_all_other_processes_are_foreign() -> None:
    """By name and id; none if this process is not known."""
    nvml = Nvml(UUID, bindings(nvmlDeviceGetComputeRunningProcesses=answering(processes(ALIEN, HOST, 3))))
    assert other_processes(nvml, {HOST}) == ("python3 (pid 3)", f"python3 (pid {ALIEN})")
    assert other_processes(nvml, ()) == ()


def test_a_process_that_comes_later_is_found_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is recognised once, before."""
    listed = [[], processes(HOST), processes(HOST), processes(HOST, ALIEN), processes(HOST, ALIEN)]
    install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0))
    assert foreign_processes() == ()
    assert foreign_processes() == (f"python3 (pid {ALIEN})",)
    assert own_pids() == {HOST}


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetComputeRunningProcesses"])
def test_without_nvml_no_process_is_foreign(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """And nothing is raised, then or later."""
    install(monkeypatch, **{function: refusing})
    assert own_pids() == set()
    assert foreign_processes() == ()


def test_a_gpu_without_room_for_a_context_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took the room cannot be told from this process, which is not on it."""

    def full() -> None:
        message = "CUDA error: out of memory"
        raise RuntimeError(message)

    install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=answering(processes(ALIEN)))
    monkeypatch.setattr(torch.cuda, "synchronize", full)
    assert own_pids() == set()


def test_the_bytes_of_this_process_are_found_under_the_hosts_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where NVML does not list it, refuses, or is closed."""
    answers: list[Any] = [[], processes(HOST), processes(HOST, used=5 * MIB), [], None]
    install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _: answers.pop(0))
    read = ConditionsReader()
    assert [read.process_bytes() for _ in range(3)] == [5 * MIB, None, None]
    read.close()
    assert read.process_bytes() is None
