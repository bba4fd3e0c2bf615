"""The search for the largest population that fits, on fakes; test_memory.py has it on real memory."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.measure.max_population import BLOCK, RESOLUTION, Capacity, Fits, find_largest, fit_test
from tests.fakes import CASE, FakeScheme, World, raising

HOUR_S = 3600.0


class Memory:
    """A fake memory with room for some members, in which each attempt takes a given time."""

    def __init__(self, most: int, attempt_s: float = 1.0) -> None:
        self.most = most
        self.attempt_s = attempt_s
        self.now_s = 0.0
        self.tried: list[int] = []

    def seconds(self) -> float:
        """Return the time of the fake clock."""
        return self.now_s

    def fits(self, members: int) -> bool:
        """Record an attempt and return whether it fits."""
        self.tried.append(members)
        self.now_s += self.attempt_s
        return members <= self.most


def checking_bounds(fits: Fits, too_many: int) -> Fits:
    """Return a function that checks that each attempt lies between the known bounds."""
    low, high = 0, too_many

    def checked(members: int) -> bool:
        nonlocal low, high
        assert low < members < high
        fitted = fits(members)
        low, high = (members, high) if fitted else (low, members)
        return fitted

    return checked


@given(most=st.integers(0, 2**22), beyond=st.floats(1.0, 1e4))
def test_the_largest_that_fits_is_found(most: int, beyond: float) -> None:
    """The result fits, is within a resolution or block of the largest, and no attempt was needless."""
    too_many = most + 1 + int(most * (beyond - 1))
    memory = Memory(most)
    result = find_largest(checking_bounds(memory.fits, too_many), too_many, HOUR_S, memory.seconds)
    assert result.stop == "resolution"
    assert result.members <= most < result.too_many <= too_many
    step = BLOCK if result.too_many > BLOCK else 1
    assert result.too_many - result.members <= max(step, RESOLUTION * result.members)
    assert all(members < BLOCK or members % BLOCK == 0 for members in memory.tried)
    assert len(memory.tried) <= 3 + math.log2(1 + math.log(too_many) / math.log1p(RESOLUTION))


def test_a_spent_budget_ends_the_search() -> None:
    """The bounds found so far are returned; an attempt in progress is completed."""
    memory = Memory(5000, attempt_s=10.0)
    assert find_largest(memory.fits, 2**20, 25.0, memory.seconds) == Capacity(1024, 5632, "budget")
    assert memory.tried == [1024, 32768, 5632]
    memory = Memory(5000)
    assert find_largest(memory.fits, 2**20, 0.0, memory.seconds) == Capacity(0, 2**20, "budget")
    assert find_largest(memory.fits, 1, HOUR_S, memory.seconds) == Capacity(0, 1, "resolution")
    assert memory.tried == []


def test_a_variant_is_tried_alone_and_freed() -> None:
    """An attempt sets the variant up with the requested members, enters its phase, calls it and frees it.

    Errors other than lack of memory are raised, and the attempt is freed as well.
    """
    world = World(room_bytes=1010)
    fits = fit_test(FakeScheme("A", world, bytes_per_member=1).entry(), CASE, "forward", "cpu", 0)
    assert [fits(members) for members in (1, 1000, 1001, 1000)] == [True, True, False, True]
    assert not world.resident
    for scheme in (FakeScheme("A", World(), entered_bytes=2000), FakeScheme("A", World(), call_bytes=2000)):
        assert not fit_test(scheme.entry(), CASE, "forward", "cpu", 0)(1)
    for error in (RuntimeError("no"), KeyError("no")):
        world = World()
        fits = fit_test(FakeScheme("A", world, act=raising(error)).entry(), CASE, "forward", "cpu", 0)
        with pytest.raises(type(error)):
            fits(5)
        error.__traceback__ = None
        assert not world.resident
