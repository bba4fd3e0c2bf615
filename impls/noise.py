"""Noise as a pure function of (seed, step, layer, block of members).

The stream here is the one named ``block``: torch's own generators, seeded once for every block of
:data:`BLOCK` members. A member therefore has the same noise in one call for the whole population,
in several calls split at block boundaries, in any order, in the forward and in the update; and no
global generator is touched. The last block of a population may be shorter; its noise is its own.
Devices and dtypes draw different bits.
"""

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self, SupportsIndex

import torch
from torch import Generator, Tensor

BLOCK = 256
"""Members that share one seeding. Populations may be split at multiples of it."""


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return an integer of any type as Python's own: noise must not depend on the type.

    Raises:
        ValueError: it is no integer, or below 0.

    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        message = f"{name} must be an integer of 0 or more, got {value!r}"
        raise ValueError(message)
    return number


@dataclass(frozen=True)
class NoiseStream:
    """Draws for one layer at one step, for a range of members.

    Each method takes ``draw``, the name of what is drawn: different names are independent, the
    same name gives the same bits again. Shapes are a member's own; the result has the member
    axis in front.

    Attributes:
        seed: the population's seed.
        step: the training step.
        layer: the layer's name in its model.
        members: the members to draw for; starts at a multiple of :data:`BLOCK`.
        device: where to draw; on ``meta`` shapes are made and nothing is drawn.
        dtype: floating type of the values.

    """

    seed: int
    step: int
    layer: str
    members: range
    device: torch.device
    dtype: torch.dtype

    def normal(self, draw: str, *shape: int) -> Tensor:
        """Independent standard normal values, [m, *shape]."""
        return self._blocks(draw, shape, self.dtype, Tensor.normal_)

    def uniform(self, draw: str, *shape: int) -> Tensor:
        """Uniform values in [0, 1) in float32, [m, *shape]."""
        return self._blocks(draw, shape, torch.float32, Tensor.uniform_)

    def signs(self, draw: str, *shape: int) -> Tensor:
        """Fair signs, +1 or -1, [m, *shape]."""
        bits = self._blocks(
            draw, shape, self.dtype, lambda block, generator: block.random_(0, 2, generator=generator)
        )
        return bits.mul_(2).sub_(1)

    def integers(self, draw: str, high: int, *shape: int) -> Tensor:
        """Uniform integers in [0, high) as int64, [m, *shape]."""
        return self._blocks(
            draw, shape, torch.int64, lambda block, generator: block.random_(0, high, generator=generator)
        )

    def permutations(self, draw: str, groups: int, width: int) -> Tensor:
        """Independent permutations of ``range(width)`` as int64, [m, groups, width].

        All are drawn at once as the order of random keys. Equal keys (one pair in 2^24) are
        ordered by the sort, which still gives a permutation.
        """
        return self.uniform(draw, groups, width).argsort(dim=-1)

    def subsets(self, draw: str, groups: int, width: int, size: int) -> Tensor:
        """``size`` different integers in [0, width) as int64, in random order, [m, groups, size]."""
        return self.uniform(draw, groups, width).topk(size, dim=-1).indices

    def shared_normal(self, draw: str, *shape: int) -> Tensor:
        """Standard normal values that all members share, of the given shape and no member axis."""
        values = torch.empty(shape, device=self.device, dtype=self.dtype)
        if self.device.type != "meta":
            values.normal_(generator=self._generator().manual_seed(self._key(draw, None)))
        return values

    def narrow(self, start: int, stop: int) -> Self:
        """Return the stream of members ``start`` to ``stop``, counted from this stream's first."""
        return replace(self, members=self.members[start:stop])

    def _blocks(
        self, draw: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[..., Tensor]
    ) -> Tensor:
        values = torch.empty((len(self.members), *shape), device=self.device, dtype=dtype)
        if self.device.type == "meta":
            return values
        first, generator = self.members.start, self._generator()
        for start in range(first, self.members.stop, BLOCK):
            generator.manual_seed(self._key(draw, start // BLOCK))
            fill(values[start - first : start - first + BLOCK], generator=generator)
        return values

    def _generator(self) -> Generator:
        return Generator(self.device)

    def _key(self, draw: str, block: int | None) -> int:
        name = repr((self.seed, self.step, self.layer, draw, block)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, eq=False)
class Noise:
    """What a scheme drew for a range of members: a value, passed to forward and update.

    Subclasses are frozen dataclasses of tensors with the member axis in front, of tensors that
    all members share (named in ``SHARED``), of streams that draw again, or of None.
    """

    SHARED = frozenset[str]()

    @property
    def nbytes(self) -> int:
        """Bytes that the noise holds."""
        return sum(value.nbytes for value in self._values().values() if isinstance(value, Tensor))

    def narrow(self, start: int, stop: int) -> Self:
        """Return the noise of members ``start`` to ``stop``, counted from the first one here."""
        return replace(
            self, **{name: self._narrowed(name, v, start, stop) for name, v in self._values().items()}
        )

    def _values(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _narrowed(self, name: str, value: object, start: int, stop: int) -> object:
        if name in self.SHARED:
            return value
        if isinstance(value, NoiseStream):
            return value.narrow(start, stop)
        return value[start:stop] if isinstance(value, Tensor) else value
