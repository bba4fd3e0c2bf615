"""The largest population that fits: the search, and attempts on real memory."""

import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esbench.measure.max_population import BLOCK, RESOLUTION, Capacity, fitting, largest
from esbench.registry import Entry, Figure, build
from esbench.schema import Case, Phase, Variant, Work

HOUR_S = 3600.0


class Memory:
    """A workload that this number of members fits into; each attempt takes this long."""

    def __init__(self, most: int, attempt_s: float = 1.0) -> None:
        """Start at no time, with no attempt made."""
        self.most = most
        self.attempt_s = attempt_s
        self.now_s = 0.0
        self.tried: list[int] = []

    def seconds(self) -> float:
        """Return the time."""
        return self.now_s

    def fits(self, members: int) -> bool:
        """Try, and remember it."""
        self.tried.append(members)
        self.now_s += self.attempt_s
        return members <= self.most


@given(most=st.integers(0, 2**22), beyond=st.floats(1.0, 1e4))
def test_the_largest_that_fits_is_found(most: int, beyond: float) -> None:
    """Never more than fits, and no less than the resolution or a block; without a needless attempt."""
    too_many = most + 1 + int(most * (beyond - 1))
    memory = Memory(most)
    found = largest(memory.fits, too_many, HOUR_S, memory.seconds)
    assert found.stop == "resolution"
    assert found.members <= most < found.too_many <= too_many
    step = BLOCK if found.too_many > BLOCK else 1
    assert found.too_many - found.members <= max(step, RESOLUTION * found.members)
    assert all(members < BLOCK or members % BLOCK == 0 for members in memory.tried)
    assert len(set(memory.tried)) == len(memory.tried)
    assert len(memory.tried) <= 3 + math.log2(1 + math.log(too_many) / math.log1p(RESOLUTION))


@given(most=st.integers(0, 10**6), too_many=st.integers(1, 10**7))
def test_each_attempt_lies_between_what_fits_and_what_does_not(most: int, too_many: int) -> None:
    """What was tried is never doubted."""
    memory = Memory(most)
    low, high = 0, too_many

    def fits(members: int) -> bool:
        nonlocal low, high
        assert low < members < high
        fitted = memory.fits(members)
        low, high = (members, high) if fitted else (low, members)
        return fitted

    assert largest(fits, too_many, HOUR_S, memory.seconds)[:2] == (low, high)


def test_a_spent_budget_ends_the_search_and_says_so() -> None:
    """With the bounds that were found until then; the attempt that was begun is not cut off."""
    memory = Memory(5000, attempt_s=10.0)
    assert largest(memory.fits, 2**20, 25.0, memory.seconds) == Capacity(1024, 5632, "budget")
    assert memory.tried == [1024, 32768, 5632]


def test_without_a_budget_nothing_is_tried() -> None:
    """Nor where a single member is known not to fit."""
    memory = Memory(5000)
    assert largest(memory.fits, 2**20, 0.0, memory.seconds) == Capacity(0, 2**20, "budget")
    assert largest(memory.fits, 1, HOUR_S, memory.seconds) == Capacity(0, 1, "resolution")
    assert memory.tried == []


@dataclass(frozen=True)
class Held:
    """A variant whose members hold a byte each; a call raises an ``error`` beyond ``most`` of them."""

    most: int = 1000
    error: Callable[[], Exception] = lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory")
    alive: "weakref.WeakSet[HeldWorkload]" = field(default_factory=weakref.WeakSet)


class HeldWorkload:
    """A scheme set up on a case."""

    unavailable: Mapping[Phase, str] = {}
    inputs: Sequence[torch.Tensor] = ()
    noise_bytes = 0

    def __init__(self, scheme: Held, case: Case) -> None:
        """Hold a byte for each member."""
        self.scheme = scheme
        self.held = torch.ones(case.members, dtype=torch.uint8)
        self.entered = ""
        self.me = self
        scheme.alive.add(self)

    @property
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        """Only a forward."""
        return {"forward": self._forward}

    def enter(self, phase: Phase) -> None:
        """Remember the phase."""
        self.entered = phase

    def work(self, phase: Phase) -> Work | None:
        """Say nothing."""

    def verify(self) -> None:
        """Hold."""

    def confirm(self, phase: Phase) -> None:
        """Hold."""

    def quality(self) -> Iterable[Figure]:
        """Say nothing of it."""
        return ()

    def _forward(self) -> torch.Tensor:
        assert self.entered == "forward"
        assert len(self.scheme.alive) == 1
        if len(self.held) > self.scheme.most:
            raise self.scheme.error()
        return self.held


@build.register
def _(scheme: Held, case: Case, device: str, seed: int) -> HeldWorkload:  # noqa: ARG001  # the signature of build
    return HeldWorkload(scheme, case)


CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)


def entry(scheme: Held) -> Entry:
    """Return the entry that a registry would hold."""
    return Entry(variant=Variant(scheme="Held"), scheme=scheme, source="", package="tests")


def test_a_variant_is_tried_alone_and_let_go_of() -> None:
    """In its phase, with as many members as asked for; nothing of an attempt is left in the next."""
    scheme = Held()
    fits = fitting(entry(scheme), CASE, "forward", "cpu", 0)
    assert [fits(members) for members in (1, 1000, 1001, 1000)] == [True, True, False, True]
    assert not scheme.alive


def test_other_errors_than_want_of_memory_pass_through() -> None:
    """They say nothing about what fits; the attempt is let go of all the same."""
    cases: list[type[Exception]] = [
        RuntimeError,
        KeyError,
    ]
    for error in cases:
        scheme = Held(most=0, error=error)
        with pytest.raises(error):
            fitting(entry(scheme), CASE, "forward", "cpu", 0)(5)


REAL = """
import time
from esbench.measure import memory
from esbench.measure.max_population import fitting, largest
from esbench.registry import load
from esbench.schema import Case
from esbench.registry import REGISTRY

load("impls")
(perturbed,) = REGISTRY.select(["Perturbed"])
case = Case(operator="Linear", out_channels=128, in_channels=128)
fits = fitting(perturbed, case, "forward", "cpu", 0)
fits(256)
with memory.ceiling(160 * 1024 * 1024):
    found = largest(fits, 2**14, 3600.0, time.perf_counter)
    print(found.members, found.stop, fits(int(0.9 * found.members)), fits(int(1.1 * found.too_many)))
"""


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux limits the data of a process")
def test_under_a_ceiling_the_capacity_is_what_its_memory_allows() -> None:
    """At 64 KiB of noise for each member; a tenth less fits, a tenth more does not."""
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    members, stop, fewer, more = done.stdout.split()
    assert 1024 <= int(members) <= 2560
    assert (stop, fewer, more) == ("resolution", "True", "False")
