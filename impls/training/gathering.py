"""When gradients are used: one by one, a layer's together, or in buckets of some bytes.

Parameters go by their place among those that learn.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from torch import nn
from torch.nn.utils import parametrize

Granularity = Literal["parameter", "bucket", "module"]
Places = Sequence[int]


class AbstractGathering(ABC):
    """Collects parameters whose gradients are ready until they are to be updated."""

    @abstractmethod
    def add(self, place: int) -> Places:
        """Take one whose gradient is ready; return those that are to be updated now, if any."""

    @abstractmethod
    def rest(self) -> Places:
        """Return those that still wait, and wait for nothing any more."""


class Singly(AbstractGathering):
    """Nobody waits."""

    def add(self, place: int) -> Places:
        """Return the one that came."""
        return (place,)

    def rest(self) -> Places:
        """Return nobody."""
        return ()


class Layers(AbstractGathering):
    """Those of a layer wait for each other.

    Args:
        layers: the number of each parameter's layer, from :func:`layers_of`.

    """

    def __init__(self, layers: Sequence[int]) -> None:
        """Wait for nobody yet."""
        self._layers = layers
        self._sizes = Counter(layers)
        self._waiting: dict[int, list[int]] = {}

    def add(self, place: int) -> Places:
        """Return all of a layer's when the last of them came."""
        layer = self._layers[place]
        size = self._sizes[layer]
        if size == 1:
            return (place,)
        waiting = self._waiting.setdefault(layer, [])
        waiting.append(place)
        return self._waiting.pop(layer) if len(waiting) == size else ()

    def rest(self) -> Places:
        """Return what waits for others that had no gradient."""
        waiting, self._waiting = self._waiting, {}
        return [place for layer in waiting.values() for place in layer]


class Buckets(AbstractGathering):
    """Those that come in a row wait until their gradients have so many bytes.

    Args:
        full_bytes: what makes a bucket full.
        held_bytes: those of each parameter's gradient.
        parts: what hands them on: singly, or a layer's together, so that no bucket ends inside a layer.

    """

    def __init__(self, full_bytes: int, held_bytes: Sequence[int], parts: AbstractGathering) -> None:
        """Start with an empty bucket."""
        self._full_bytes, self._bytes, self._parts = full_bytes, held_bytes, parts
        self._waiting: list[int] = []
        self._held_bytes = 0

    def add(self, place: int) -> Places:
        """Return the bucket when it is full."""
        for one in self._parts.add(place):
            self._waiting.append(one)
            self._held_bytes += self._bytes[one]
        return self._emptied() if self._held_bytes >= self._full_bytes else ()

    def rest(self) -> Places:
        """Return the bucket as it is, with what waits to get into it, and begin another."""
        return [*self._emptied(), *self._parts.rest()]

    def _emptied(self) -> list[int]:
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        return waiting


def layers_of(model: nn.Module, learning: Sequence[nn.Parameter]) -> list[int]:
    """Return a number for each parameter's layer.

    A layer is what a module has of its own and its parametrizations have; layers that share one are one.
    """
    found: dict[nn.Parameter, int] = {}
    for number, module in enumerate(model.modules()):
        own = list(module.parameters(recurse=False))
        if parametrize.is_parametrized(module):
            own += module.get_submodule("parametrizations").parameters()
        joined = {found[one] for one in own if one in found}
        if joined:
            own += [one for one, layer in found.items() if layer in joined]
        found.update(dict.fromkeys(own, number))
    return [found[parameter] for parameter in learning]
