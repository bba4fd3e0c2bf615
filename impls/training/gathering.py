"""When gradients are used: one by one, a module's together, or in buckets of some bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

Granularity = Literal["parameter", "bucket", "module"]
Parameters = Sequence[nn.Parameter]


class AbstractGathering(ABC):
    """Collects parameters whose gradients are ready until they are to be updated."""

    @abstractmethod
    def add(self, parameter: nn.Parameter) -> Parameters:
        """Take one whose gradient is ready; return those that are to be updated now, if any."""

    @abstractmethod
    def rest(self) -> Parameters:
        """Return those that still wait, and wait for nothing any more."""


class Singly(AbstractGathering):
    """Nobody waits."""

    def add(self, parameter: nn.Parameter) -> Parameters:
        """Return the one that came."""
        return (parameter,)

    def rest(self) -> Parameters:
        """Return nobody."""
        return ()


class Modules(AbstractGathering):
    """Those that a module has of its own wait for each other; a tied one counts with the first module."""

    def __init__(self, layers: Mapping[nn.Parameter, int], learning: Parameters) -> None:
        """Take the number of each parameter's module."""
        self._layers = layers
        self._sizes: dict[int, int] = {}
        for parameter in learning:
            self._sizes[layers[parameter]] = self._sizes.get(layers[parameter], 0) + 1
        self._waiting: dict[int, list[nn.Parameter]] = {}

    def add(self, parameter: nn.Parameter) -> Parameters:
        """Return all of a module's when the last of them came."""
        layer = self._layers[parameter]
        waiting = self._waiting.setdefault(layer, [])
        waiting.append(parameter)
        return self._waiting.pop(layer) if len(waiting) == self._sizes[layer] else ()

    def rest(self) -> Parameters:
        """Return what waits for others that had no gradient."""
        waiting, self._waiting = self._waiting, {}
        return [parameter for layer in waiting.values() for parameter in layer]


class Buckets(AbstractGathering):
    """Those that come in a row wait until their gradients have so many bytes."""

    def __init__(self, full_bytes: int) -> None:
        """Start with an empty bucket."""
        self._full_bytes = full_bytes
        self._waiting: list[nn.Parameter] = []
        self._held_bytes = 0

    def add(self, parameter: nn.Parameter) -> Parameters:
        """Return the bucket when it is full."""
        self._waiting.append(parameter)
        self._held_bytes += parameter.nbytes
        return self.rest() if self._held_bytes >= self._full_bytes else ()

    def rest(self) -> Parameters:
        """Return the bucket as it is, and begin another."""
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        return waiting
