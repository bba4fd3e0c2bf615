"""Peak memory of calls, the memory limit, and errors that mean out of memory."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from esbench.measure import memory
from esbench.measure.failure import Failure, classify
from esbench.measure.memory import footprint, is_out_of_memory, peak_bytes
from esbench.registry import load
from esbench.workload import UnavailableError, WrongResultError, build
from tests.workload_cases import BITS, CHECKS, ENTRIES, LINEAR, suits

load("impls")

MIB = 1024**2


def empty(size: int) -> torch.Tensor:
    """Allocate a tensor of this many bytes."""
    return torch.empty(size, dtype=torch.uint8)


def test_the_peak_of_a_call_is_exact() -> None:
    """Peaks repeat exactly, and leave out bytes freed within the call or held before it."""
    for numbers in (1, 1000, 1001, 3 * MIB):
        peaks = {peak_bytes(partial(torch.empty, numbers, dtype=torch.float32), "cpu") for _ in range(20)}
        assert peaks == {4 * numbers}

    def call() -> torch.Tensor:
        first = empty(1000)
        del first
        second = empty(700)
        third = empty(600)
        del second
        return third

    assert peak_bytes(call, "cpu") == 1300
    buffers = [empty(1000)]

    def replace() -> None:
        buffers.clear()
        buffers.append(empty(300))

    assert peak_bytes(replace, "cpu") == 0
    assert peak_bytes(lambda: buffers[0], "cpu") == 0


def test_no_variant_keeps_memory() -> None:
    """In each phase every call has the same peak, and allocates no memory that stays."""
    conv = msgspec.structs.replace(CHECKS[1], repeats=2, antithetic=True, dtype="float32")
    for number, entry in enumerate(ENTRIES):
        cases = (conv, LINEAR, BITS) if number % 2 else (LINEAR, conv, BITS)
        case = next(case for case in cases if suits(entry, case))
        workload = build(entry.scheme, case, "cpu", 0)
        for phase, call in workload.phases.items():
            workload.enter(phase)
            call()
            first, second = footprint(call, "cpu"), footprint(call, "cpu")
            cell = (entry.variant.name, case.label, phase)
            assert first.kept_bytes == second.kept_bytes == 0, cell
            assert first.peak_bytes == second.peak_bytes, cell


def test_memory_that_a_call_keeps_is_exact() -> None:
    """Only bytes that each call adds count, not results, replaced tensors or uncollected garbage.

    The bytes of the process are read from the given source; on the CPU they are the resident set.
    """
    hoard: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        hoard.append(empty(300))
        return empty(5000)

    assert footprint(call, "cpu")[:3] == (5300, 300, None)
    for depth in (1, 2, 5):  # one buffer, like a gradient, or a ring of buffers
        ring, calls = [empty(0)] * depth, itertools.count()

        def replace(ring: list[torch.Tensor] = ring, calls: Iterator[int] = calls) -> None:
            ring[next(calls) % len(ring)] = empty(300)

        assert footprint(replace, "cpu")[:2] == (300, 0), depth

    def cycle() -> list[object]:
        result: list[object] = [empty(300)]
        result.append(result)
        return result

    assert footprint(cycle, "cpu")[:2] == (300, 0)
    buffer = torch.ones(64 * MIB, dtype=torch.uint8)
    assert (footprint(lambda: buffer[:1], "cpu").process_bytes or 0) > buffer.numel()


PROGRAM = '''
import resource, time
import torch
from esbench.measure.max_population import fit_test, find_largest
from esbench.measure.memory import limit_memory, is_out_of_memory, peak_bytes
from esbench.registry import Entry
from esbench.workload import build
from esbench.schema import Case, Variant

MIB = 1024 * 1024
before = resource.getrlimit(resource.RLIMIT_DATA)

def refused(call):
    try:
        call()
    except BaseException as error:  # each error is named and printed
        return f"{type(error).__name__} {is_out_of_memory(error)}"
    return "fits"

def tensor(mib):
    return lambda: torch.ones(mib * MIB, dtype=torch.uint8)

held = []
def call():
    held.clear()
    held.append(torch.ones(3))
peak_bytes(call, "cpu")  # a warning of the profiler would be in the output

with limit_memory(256 * MIB):
    print(refused(tensor(64)))
    print(refused(tensor(1024)))
    print(refused(lambda: bytearray(1024 * MIB)))
    with limit_memory(4096 * MIB):
        print(refused(tensor(1024)))
    print(refused(tensor(64)))
print(resource.getrlimit(resource.RLIMIT_DATA) == before, refused(tensor(512)))
try:
    with limit_memory(256 * MIB):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(resource.getrlimit(resource.RLIMIT_DATA) == before)

class Noise:
    """A scheme with 64 KiB of noise for each member."""

class Drawn:
    def __init__(self, members):
        self.noise = torch.ones(members, 2**14)
        self.phases = {"forward": self.noise.sum}
    def enter(self, phase):
        pass

@build.register
def _(scheme: Noise, case: Case, device: str, seed: int):
    return Drawn(case.members)

entry = Entry(variant=Variant(scheme="Noise"), scheme=Noise(), source="", package="here")
fits = fit_test(entry, Case(operator="Linear", out_channels=1, in_channels=1), "forward", "cpu", 0)
with limit_memory(160 * MIB):
    found = find_largest(fits, 2**14, 3600.0, time.perf_counter)
    print(found.members, found.stop, fits(int(0.9 * found.members)), fits(int(1.1 * found.too_many)))
'''


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux limits the data of a process")
def test_an_allocation_above_the_limit_is_an_out_of_memory_error() -> None:
    """Torch's and Python's errors are recognized; the limit is removed at the end.

    A smaller allocation fits, and an inner limit cannot raise the outer one. The memory pass prints
    nothing. The largest population is limited by the memory.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    *lines, population = done.stdout.splitlines()
    members, *facts = population.split()
    assert 1024 <= int(members) <= 2560
    assert facts == ["resolution", "True", "False"]
    assert lines == [
        "fits",
        "RuntimeError True",
        "MemoryError True",
        "RuntimeError True",
        "fits",
        "True fits",
        "True",
    ]
    assert not done.stderr


def test_available_memory_is_bounded_by_machine_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine and container both limit it; a system that cannot limit a process leaves it unlimited."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    for most, used, available in (
        ("1000", "400", 600),
        (str(2**60), "400", machine.available),
        ("max", "400", machine.available),
        ("none", "", machine.available),
    ):
        (tmp_path / "memory.max").write_text(most, encoding="ascii")
        (tmp_path / "memory.current").write_text(used, encoding="ascii")
        assert memory.available_bytes() == available
    monkeypatch.setattr(memory, "resource", None)
    with memory.limit_memory(0):
        assert torch.ones(MIB).sum() == MIB


ASKED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
CUDA_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")


def test_an_error_becomes_a_status_and_a_line() -> None:
    """Lack of memory is recognized by type or message, with the bytes if they are known."""
    short = "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
    for error in (CUDA_FULL, MemoryError(), *map(RuntimeError, (ASKED, short, "std::bad_alloc"))):
        assert is_out_of_memory(error), error
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(ASKED)):
        assert not is_out_of_memory(error), error
    for error, failure in (
        (RuntimeError(ASKED), Failure("unavailable", "out of memory: tried to allocate 4096 bytes")),
        (CUDA_FULL, Failure("unavailable", "out of memory: Tried to allocate 20.00 GiB")),
        (MemoryError(), Failure("unavailable", "out of memory: no details")),
        (UnavailableError("needs a GPU"), Failure("unavailable", "needs a GPU")),
        (WrongResultError("off by 3"), Failure("failed", "wrong result: off by 3")),
        (IndexError("a\n  b"), Failure("failed", "IndexError: a b")),
        (AssertionError(), Failure("failed", "AssertionError")),
    ):
        assert classify(error) == failure
