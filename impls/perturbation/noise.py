"""Noise as a pure function of (seed, step, layer, member).

A stream draws for one layer at one step. A member has the same noise in one call for the whole population,
in several calls split at the stream's boundaries, in any order, in the forward and in the update; and no
global generator is touched.

:class:`BlockStream` is torch's own generators, seeded once for every block of :data:`BLOCK` members: fast
everywhere. The last block of a population may be shorter; its noise is its own. Devices and dtypes draw
different bits. :class:`PhiloxStream` counts instead: slower in plain torch, the same on every device and in
every dtype up to rounding, and any member and element can be drawn alone.
"""

import hashlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self, SupportsIndex

import torch
from torch import Generator, Tensor
from typing_extensions import override

from impls.perturbation import philox

BLOCK = 256
"""Members that share one seeding of a :class:`BlockStream`."""


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
class NoiseStream(ABC):
    """Draws for one layer at one step, for a range of members.

    Each method takes ``draw``, the name of what is drawn: different names are independent, the
    same name gives the same bits again. Shapes are a member's own; the result has the member
    axis in front.

    Attributes:
        seed: the population's seed.
        step: the training step; of one on the device the keys made of it, see :func:`step_on_device`.
        layer: the layer's name in its model.
        members: the members to draw for.
        device: where to draw; on ``meta`` shapes are made and nothing is drawn.
        dtype: floating type of the values.
        common: whether this draws what all members share, see :meth:`shared`.

    """

    SHARD_MULTIPLE: ClassVar[int] = 1
    """Populations may be split at multiples of it."""

    seed: int
    step: int | Tensor
    layer: str
    members: range
    device: torch.device
    dtype: torch.dtype
    common: bool = False

    @abstractmethod
    def normal(self, draw: str, *shape: int) -> Tensor:
        """Independent standard normal values, [m, *shape]."""

    @abstractmethod
    def uniform(self, draw: str, *shape: int) -> Tensor:
        """Uniform values in [0, 1) in float32, [m, *shape]."""

    @abstractmethod
    def words(self, draw: str, *shape: int) -> Tensor:
        """Independent random 64-bit words as int64, [m, *shape]."""

    @abstractmethod
    def integers(self, draw: str, high: int, *shape: int) -> Tensor:
        """Uniform integers in [0, high) as int64, [m, *shape]."""

    @abstractmethod
    def pieces(self, member_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, stop), counted from the first member, that are cheap to draw apart.

        Noise of ``member_bytes`` a member then holds ``most_bytes`` at a time where the stream allows it.
        """

    def signs(self, draw: str, *shape: int) -> Tensor:
        """Fair signs, [m, *shape]: element e is +1 where bit e % 64 of word e // 64 is set, else -1."""
        count = math.prod(shape)
        signs = philox.signs(self.words(draw, -(-count // 64)), count, self.dtype)
        return signs.view(len(signs), *shape)

    def permutations(self, draw: str, groups: int, width: int) -> Tensor:
        """Independent permutations of ``range(width)`` as int64, [m, groups, width].

        They are the order of random keys. Equal keys (one pair in 2^24) stay as they are.
        """
        return self.uniform(draw, groups, width).argsort(dim=-1, stable=True)

    def subsets(self, draw: str, groups: int, width: int, size: int) -> Tensor:
        """``size`` different integers in [0, width) as int64, in random order, [m, groups, size]."""
        return self.uniform(draw, groups, width).topk(size, dim=-1).indices

    def shared(self) -> Self:
        """Return the stream of what all members share: its draws have a member axis of length 1."""
        return replace(self, members=range(1), common=True)

    def narrow(self, start: int, stop: int) -> Self:
        """Return the stream of members ``start`` to ``stop``, counted from this stream's first."""
        return replace(self, members=self.members[start:stop])


@dataclass(frozen=True)
class BlockStream(NoiseStream):
    """The stream ``block``: torch's generators, seeded once for each block of members.

    Attributes:
        end: where the last block ends, if not with the last member: the bits of a short block
            are its own, so a narrowed stream has to know it.

    """

    SHARD_MULTIPLE = BLOCK

    end: int | None = None

    @override
    def normal(self, draw: str, *shape: int) -> Tensor:
        return self._blocks(draw, shape, self.dtype, Tensor.normal_)

    @override
    def uniform(self, draw: str, *shape: int) -> Tensor:
        return self._blocks(draw, shape, torch.float32, Tensor.uniform_)

    @override
    def words(self, draw: str, *shape: int) -> Tensor:
        return self._blocks(draw, shape, torch.int64, Tensor.random_, -(2**63), None)

    @override
    def integers(self, draw: str, high: int, *shape: int) -> Tensor:
        return self._blocks(draw, shape, torch.int64, Tensor.random_, 0, high)

    @override
    def pieces(self, member_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        first, stop = self.members.start, self.members.stop
        for block in self._blocks_of_members():
            yield max(block.start, first) - first, min(block.stop, stop) - first

    @override
    def shared(self) -> Self:
        return replace(super().shared(), end=None)

    @override
    def narrow(self, start: int, stop: int) -> Self:
        return replace(super().narrow(start, stop), end=self._end)

    @property
    def _end(self) -> int:
        return self.members.stop if self.end is None else self.end

    def _blocks_of_members(self) -> Iterator[range]:
        """Yield the blocks that the members are in, whole."""
        first = self.members.start // BLOCK * BLOCK
        for start in range(first, self.members.stop, BLOCK):
            yield range(start, min(start + BLOCK, self._end))

    def _blocks(
        self, draw: str, shape: Sequence[int], dtype: torch.dtype, fill: Callable[..., Tensor], *ends: object
    ) -> Tensor:
        values = torch.empty((len(self.members), *shape), device=self.device, dtype=dtype)
        if self.device.type == "meta":
            return values
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            message = (
                "the stream block draws with torch's generators, which the host seeds: a CUDA graph cannot "
                "capture it. Use stream='philox'"
            )
            raise RuntimeError(message)
        first, stop, generator = self.members.start, self.members.stop, Generator(self.device)
        for block in self._blocks_of_members():
            generator.manual_seed(self._key(draw, block.start // BLOCK))
            inside = range(max(block.start, first), min(block.stop, stop))
            wanted = values[inside.start - first : inside.stop - first]
            if inside == block:
                fill(wanted, *ends, generator=generator)
            else:
                drawn = fill(values.new_empty(len(block), *shape), *ends, generator=generator)
                wanted.copy_(drawn[inside.start - block.start : inside.stop - block.start])
        return values

    def _key(self, draw: str, block: int) -> int:
        name = repr((self.seed, self.step, self.layer, draw, None if self.common else block)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class PhiloxStream(NoiseStream):
    """The stream ``philox``: Philox4x32-10 with the counters element, member, layer and draw.

    See :mod:`impls.perturbation.philox` for which word makes which value, and who may draw with the same
    bits.
    """

    @override
    def normal(self, draw: str, *shape: int) -> Tensor:
        return self._filled(philox.NORMAL, draw, shape, self.dtype)

    @override
    def uniform(self, draw: str, *shape: int) -> Tensor:
        return self._filled(philox.UNIFORM, draw, shape, torch.float32)

    @override
    def words(self, draw: str, *shape: int) -> Tensor:
        return self._filled(philox.BITS, draw, shape, torch.int64)

    @override
    def integers(self, draw: str, high: int, *shape: int) -> Tensor:
        return self._filled(philox.integer(high), draw, shape, torch.int64)

    @override
    def pieces(self, member_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        step, members = max(1, most_bytes // max(1, member_bytes)), len(self.members)
        for start in range(0, members, step):
            yield start, min(start + step, members)

    def _filled(self, kind: philox.Kind, draw: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.members.stop > philox.SHARED:
            message = f"members {self.members} are too many: the stream philox counts 2^32 - 1 of them"
            raise ValueError(message)
        if isinstance(self.step, Tensor) and self.device not in {self.step.device, torch.device("meta")}:
            message = (
                f"a step on {self.step.device} cannot decide what is drawn on {self.device}: pass the step "
                "as an int"
            )
            raise ValueError(message)
        elements = range(math.prod(shape))
        values = torch.empty(len(self.members), len(elements), device=self.device, dtype=dtype)
        place = philox.Place.of(self.seed, self.step, self.layer, draw)
        members = range(philox.SHARED, philox.SHARED + 1) if self.common else self.members
        return philox.fill(values, kind, place, members, elements).view(len(values), *shape)


STREAMS: dict[str, type[NoiseStream]] = {"block": BlockStream, "philox": PhiloxStream}
"""Streams by name."""


def step_on_device(stream: type[NoiseStream], seed: int, step: Tensor, device: torch.device) -> Tensor:
    """Return what a stream takes for a step that is a tensor on the layers' device.

    Raises:
        ValueError: the stream cannot read a step there, or the tensor is no step.

    """
    if not issubclass(stream, PhiloxStream):
        message = (
            "the stream block draws with torch's generators, which the host seeds: it cannot read a step on "
            f"{step.device}. Pass an int, or use stream='philox'"
        )
        raise ValueError(message)  # noqa: TRY004  a choice of the user's, by name
    if step.dim() or step.dtype is not torch.int64 or step.device != device:
        message = (
            f"a step on the device must be a 0-d int64 tensor on {device}, got {step.dtype} "
            f"{list(step.shape)} on {step.device}"
        )
        raise ValueError(message)
    return philox.device_keys(seed, step)


def check_layers(stream: type[NoiseStream], layers: Iterable[str]) -> None:
    """Hold the names of a model's layers to what the stream tells apart.

    Raises:
        ValueError: two names have the same counter, so that their layers would have the same noise.

    """
    if not issubclass(stream, PhiloxStream):
        return
    counters: dict[int, str] = {}
    for layer in layers:
        first = counters.setdefault(philox.digest(layer, 32), layer)
        if first != layer:
            message = (
                f"{first!r} and {layer!r} have the same hash of 32 bits, and with the stream philox the same "
                "noise: rename one, or use the stream block"
            )
            raise ValueError(message)


@dataclass(frozen=True, eq=False)
class Noise:
    """What a scheme drew for a range of members: a value, passed to forward and update.

    Subclasses are frozen dataclasses of tensors with the member axis in front, of tensors that
    all members share (named in ``SHARED``), of streams that draw again, of the range of the
    members, or of None.
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
        return value[start:stop] if isinstance(value, Tensor | range) else value
