"""Which of several ways is fastest: interleaved readings, and a choice that is a pure function of them."""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

LEAST_GAIN = 0.01
"""The default stays unless something takes less time by more than this share."""


def interleaved(
    ways: Sequence[T], timer: Callable[[T], float], rounds: int, seed: int = 0
) -> dict[T, list[float]]:
    """Time each way once in each round, in a random order: what drifts, drifts for all of them."""
    rng = random.Random(seed)  # noqa: S311  an order, not a secret
    found: dict[T, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in rng.sample(ways, len(ways)):
            found[way].append(timer(way))
    return found


def fastest(times: Mapping[T, Sequence[float]], default: T) -> T:
    """Return the way whose median is the least, or the default where that gains next to nothing.

    Of two that are equally fast it is the one that comes first.
    """
    best = min(times, key=lambda way: median(times[way]))
    gains = median(times[best]) < (1 - LEAST_GAIN) * median(times[default])
    return best if gains else default


def survivors(times: Mapping[T, Sequence[float]], default: T, most: int) -> list[T]:
    """Return the default and the ``most`` fastest others, in the order of ``times``: who is timed again."""
    others = sorted((way for way in times if way != default), key=lambda way: median(times[way]))
    kept = {default, *others[:most]}
    return [way for way in times if way in kept]
