"""Noise streams: random numbers as a pure function of (seed, step, layer, member).

A stream draws for one layer at one step. A member has the same noise however the population is split over
calls. No global generator is used.

:class:`BlockStream` uses torch's generators, seeded once for each block of :data:`BLOCK` members. It is fast
on every device, but its bits depend on the device, on the dtype and on the length of the population's last
block. :class:`PhiloxStream` is counter-based. It is slower in plain torch, but has the same values on every
device and, up to rounding, in every dtype, and any member and element can be drawn alone.
"""

import hashlib
import math
import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Self, SupportsIndex

import torch
from torch import Generator, Tensor
from typing_extensions import override

from impls.perturbation import philox

BLOCK = 256
"""Members in a block of a :class:`BlockStream`."""

PIECE_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Bytes of temporaries computed at a time: they fit a CPU's cache, or keep a GPU busy for a launch."""

SORTED_WIDTH = 256
"""The most channels that are permuted by sorting keys on a CPU; more are shuffled, member by member."""

FEW_NUMBERS = 2**22
"""Fewer numbers are drawn in one thread, which takes less than 20 ms."""


def piece_bytes(device: torch.device) -> int:
    """Return :data:`PIECE_BYTES` of a device."""
    return PIECE_BYTES.get(device.type, PIECE_BYTES["cpu"])


def pieces(members: int, member_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) chunks of members of at most ``max_bytes``, with at least one member each."""
    step = max(1, max_bytes // max(1, member_bytes))
    for start in range(0, members, step):
        yield start, min(start + step, members)


def is_overwritable(values: Tensor) -> bool:
    """Return whether a tensor is all of its storage, and torch lets it be written."""
    if torch.compiler.is_compiling():  # the compiler plans memory, and shapes may be symbols
        return False
    fills_memory = values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes
    return fills_memory and (torch.is_inference_mode_enabled() or not values.is_inference())


def to_nonnegative_int(name: str, value: SupportsIndex) -> int:
    """Convert an integer of any type to ``int``; noise must not depend on the type of a seed or step.

    Raises:
        ValueError: the value is not an integer of 0 or more.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer of 0 or more, got {value!r}")
    return number


@dataclass(frozen=True)
class NoiseStream(ABC):
    """Random numbers for one layer at one step, for a range of members.

    Each method takes ``draw``, a name. Draws with different names are independent; a draw with the same name
    has the same bits. ``shape`` is the shape of one member; the result is [m, *shape].

    Attributes:
        seed: the population's seed.
        step: the training step, or the keys that :func:`keys_of_step` makes of a step on the device.
        layer: the layer's name in its model.
        members: the members to draw for.
        device: where to draw; on ``meta`` only shapes are made.
        dtype: dtype of normal values, signs and levels.
        is_shared: whether all members share the draws, see :meth:`shared`.
        memory: tensors to draw into, where device, dtype and number of values fit; each is used once.
    """

    SHARD_MULTIPLE: ClassVar[int] = 1
    """Populations may be split at multiples of this number."""

    seed: int
    step: int | Tensor
    layer: str
    members: range
    device: torch.device
    dtype: torch.dtype
    is_shared: bool = False
    memory: list[Tensor] = field(default_factory=list, compare=False)

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
    def pieces(self, member_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) of pieces to draw noise in; 0 is the stream's first member.

        Args:
            member_bytes: bytes of one member's noise.
            max_bytes: most bytes of a piece. The stream ``block`` ignores it: its pieces are its blocks.
        """

    def split(self, numbers: int, max_bytes: int) -> Iterator[tuple[int, int, Self]]:
        """Yield (start, stop) of each piece to draw noise in, and its stream; 0 is the first member.

        Each stream draws once, in this order; drawing may overwrite the values of the previous piece.

        Args:
            numbers: how many values of the stream's dtype a member draws.
            max_bytes: most bytes of a piece, see :meth:`pieces`.
        """
        for start, stop in self.pieces(numbers * self.dtype.itemsize, max_bytes):
            yield start, stop, self.narrow(start, stop)

    def signs(self, draw: str, *shape: int) -> Tensor:
        """Fair signs, [m, *shape]: element e is +1 where bit e % 64 of word e // 64 is set, else -1."""
        count = math.prod(shape)
        signs = self._empty((len(self.members), count), self.dtype)
        philox.fill_signs(signs, self.words(draw, -(-count // 64)))
        return signs.view(len(signs), *shape)

    def levels(self, draw: str, *shape: int) -> Tensor:
        """Independent values that are uniform over 256 equally spaced levels, [m, *shape].

        Element e is made of byte e % 8 of word e // 8, see :func:`philox.fill_levels`. For L = 256 levels
        with the step s = 14189 / 2^20 the mean and the third moment are 0, the variance is
        s^2 (L^2 - 1) / 12 = 0.99999, the fourth moment s^4 (L^2 - 1) (3 L^2 - 7) / 240 = 1.79993 (of normal
        values it is 3), and the largest value s (L - 1) / 2 = 1.7253.
        """
        count = math.prod(shape)
        levels = self._empty((len(self.members), count), torch.float32)
        philox.fill_levels(levels, self.words(draw, -(-count // 8)))
        return levels.to(self.dtype).view(len(levels), *shape)

    def permutations(self, draw: str, groups: int, width: int) -> Tensor:
        """Independent permutations of ``range(width)`` as int64, [m, groups, width].

        They sort random keys; two keys are equal with probability 2^-24, and then keep their order.
        """
        keys = self.uniform(draw, groups, width)
        if keys.device.type != "cpu" or torch.compiler.is_compiling():
            return keys.argsort(dim=-1, stable=True)
        # The same order, five times faster on a CPU: NumPy sorts integers of a key's 24 bits and its index.
        index_bits = width.bit_length()
        packed = (keys * 2**24).long() << index_bits | torch.arange(width)
        packed.numpy().sort(axis=-1)
        return packed.bitwise_and_((1 << index_bits) - 1)

    def subsets(self, draw: str, groups: int, width: int, size: int) -> Tensor:
        """Distinct integers in [0, width) as int64, in random order, [m, groups, size]."""
        if (
            self.device.type == "cpu" and width <= SORTED_WIDTH
        ):  # the last of a permutation, several times faster
            return self.permutations(draw, groups, width)[..., width - size :].flip(-1)
        return self.uniform(draw, groups, width).topk(size, dim=-1).indices

    def shared(self) -> Self:
        """Return a stream of draws that all members share; their shape is [1, *shape]."""
        return replace(self, members=range(1), is_shared=True)

    def narrow(self, start: int, stop: int) -> Self:
        """Return the stream of members ``start`` to ``stop``; 0 is the first member of this stream."""
        return replace(self, members=self.members[start:stop])

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, which is taken from ``memory`` if one there fits."""
        for index, values in enumerate(self.memory):
            is_alike = values.dtype is dtype and values.device == self.device
            if is_alike and values.numel() == math.prod(shape):
                return self.memory.pop(index).view(shape)
        return torch.empty(shape, device=self.device, dtype=dtype)


class _Parts:
    """Generators and memory that the streams of a block's parts share, and use one after another.

    If each part allocated its own megabytes, and the C library returned them to the system each time, drawing
    would take twice as long.
    """

    def __init__(self) -> None:
        self.generators: dict[str, Generator] = {}  # by draw
        self.memory: dict[torch.dtype, Tensor] = {}


@dataclass(frozen=True)
class BlockStream(NoiseStream):
    """The stream ``block``: torch's generators, seeded once for each block of members.

    Attributes:
        end: end of the last block; None: the end of ``members``. The bits of a block depend on its length, so
            a narrowed stream keeps the end of the stream that it was made from.
        parts: what it shares with the streams of the other parts of its block; None for a stream that is not
            a part.
    """

    SHARD_MULTIPLE = BLOCK

    end: int | None = None
    parts: _Parts | None = field(default=None, compare=False)

    @override
    def normal(self, draw: str, *shape: int) -> Tensor:
        return self._draw(draw, shape, self.dtype, Tensor.normal_)

    @override
    def uniform(self, draw: str, *shape: int) -> Tensor:
        return self._draw(draw, shape, torch.float32, Tensor.uniform_)

    @override
    def words(self, draw: str, *shape: int) -> Tensor:
        # From -2^63 without an upper limit: all 64 bits are random.
        return self._draw(draw, shape, torch.int64, Tensor.random_, -(2**63), None)

    @override
    def integers(self, draw: str, high: int, *shape: int) -> Tensor:
        return self._draw(draw, shape, torch.int64, Tensor.random_, 0, high)

    @override
    def permutations(self, draw: str, groups: int, width: int) -> Tensor:
        if self.device.type != "cpu" or width <= SORTED_WIDTH:
            return super().permutations(draw, groups, width)
        return self._draw(draw, (groups, width), torch.int64, _fill_permutations, width)

    @override
    def subsets(self, draw: str, groups: int, width: int, size: int) -> Tensor:
        if self.device.type != "cpu" or width <= SORTED_WIDTH:
            return super().subsets(draw, groups, width, size)
        return self._draw(draw, (groups, size), torch.int64, _fill_permutations, width)

    @override
    def pieces(self, member_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
        # One block at a time, whatever its bytes: a part of a block costs as much as the whole.
        first, stop = self.members.start, self.members.stop
        for block in self._blocks():
            yield max(block.start, first) - first, min(block.stop, stop) - first

    @override
    def split(self, numbers: int, max_bytes: int) -> Iterator[tuple[int, int, Self]]:
        # On a CPU the values of a block can be drawn in parts: torch fills tensors in steps of 16 normals.
        if self.device.type != "cpu" or numbers % 16 or torch.compiler.is_compiling():
            yield from super().split(numbers, max_bytes)
            return
        member_bytes = numbers * self.dtype.itemsize
        for start, stop in self.pieces(member_bytes, max_bytes):
            block = self.narrow(start, stop)
            if block.members.start % BLOCK:
                yield start, stop, block
                continue
            block = replace(block, parts=_Parts())
            for first, last in pieces(stop - start, member_bytes, max_bytes):
                yield start + first, start + last, block.narrow(first, last)

    @override
    def shared(self) -> Self:
        return replace(super().shared(), end=None)

    @override
    def narrow(self, start: int, stop: int) -> Self:
        return replace(super().narrow(start, stop), end=self._end)

    @override
    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.parts is None:
            return super()._empty(shape, dtype)
        count, memory = math.prod(shape), self.parts.memory
        if dtype not in memory:  # the first part is the largest
            memory[dtype] = super()._empty((count,), dtype)
        return memory[dtype][:count].view(shape)

    @property
    def _end(self) -> int:
        return self.members.stop if self.end is None else self.end

    def _blocks(self) -> Iterator[range]:
        """Yield the members of each block that has at least one member of the stream."""
        first = self.members.start // BLOCK * BLOCK
        for start in range(first, self.members.stop, BLOCK):
            yield range(start, min(start + BLOCK, self._end))

    def _draw(
        self,
        draw: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        fill: Callable[..., Tensor],
        *limits: object,
    ) -> Tensor:
        """Draw [m, *shape] with ``fill(tensor, *limits, generator=...)``, which returns the tensor."""
        values = self._empty((len(self.members), *shape), dtype)
        if self.device.type == "meta":
            return values
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot capture noise of the stream 'block', which the host seeds: use "
                "stream='philox'"
            )
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._draw)(draw, shape, dtype, fill, *limits)
        if self.parts is not None:  # continue after the previous part of this block
            generators = self.parts.generators
            if draw not in generators:
                generators[draw] = self._generator(draw, self.members.start // BLOCK)
            return fill(values, *limits, generator=generators[draw])
        first, stop = self.members.start, self.members.stop

        def draw_block(block: range) -> None:
            generator = self._generator(draw, block.start // BLOCK)
            members = range(max(block.start, first), min(block.stop, stop))
            block_values = values[members.start - first : members.stop - first]
            if members == block:
                fill(block_values, *limits, generator=generator)
            else:
                complete = fill(values.new_empty(len(block), *shape), *limits, generator=generator)
                block_values.copy_(complete[members.start - block.start : members.stop - block.start])

        # On a CPU torch fills a tensor in one thread.
        _for_each(self._blocks(), draw_block, parallel=values.is_cpu and values.numel() >= FEW_NUMBERS)
        return values

    def _generator(self, draw: str, block: int) -> Generator:
        return Generator(self.device).manual_seed(self._block_seed(draw, block))

    def _block_seed(self, draw: str, block: int) -> int:
        """Hash all that the noise of a block depends on to a seed of 63 bits."""
        name = repr((self.seed, self.step, self.layer, draw, None if self.is_shared else block)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class PhiloxStream(NoiseStream):
    """The stream ``philox``: Philox4x32-10 with the counters element, member, layer and draw.

    :mod:`impls.perturbation.philox` defines how words become values; kernels draw the same bits.
    """

    @override
    def normal(self, draw: str, *shape: int) -> Tensor:
        return self._fill(philox.NORMAL, draw, shape, self.dtype)

    @override
    def uniform(self, draw: str, *shape: int) -> Tensor:
        return self._fill(philox.UNIFORM, draw, shape, torch.float32)

    @override
    def words(self, draw: str, *shape: int) -> Tensor:
        return self._fill(philox.BITS, draw, shape, torch.int64)

    @override
    def integers(self, draw: str, high: int, *shape: int) -> Tensor:
        return self._fill(philox.integers_below(high), draw, shape, torch.int64)

    @override
    def pieces(self, member_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
        return pieces(len(self.members), member_bytes, max_bytes)

    def _fill(
        self, distribution: philox.Distribution, draw: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        if self.members.stop > philox.SHARED:
            raise ValueError(
                f"members up to {self.members.stop} are too many: the stream 'philox' has 2^32 - 1 members"
            )
        if isinstance(self.step, Tensor) and self.device not in {self.step.device, torch.device("meta")}:
            raise ValueError(
                f"the step is a tensor on {self.step.device}, but a layer is on {self.device}: pass the step "
                "as an int"
            )
        elements = range(math.prod(shape))
        values = self._empty((len(self.members), len(elements)), dtype)
        key = philox.DrawKey.of(self.seed, self.step, self.layer, draw)
        members = range(philox.SHARED, philox.SHARED + 1) if self.is_shared else self.members
        return philox.fill(values, distribution, key, members, elements).view(len(values), *shape)


def _for_each(blocks: Iterable[range], draw_block: Callable[[range], None], *, parallel: bool) -> None:
    """Draw blocks one after the other, or if ``parallel`` in as many threads as torch uses."""
    items = list(blocks)
    count = min(torch.get_num_threads(), len(items)) if parallel else 1
    if count == 1:
        for block in items:
            draw_block(block)
        return
    is_inference = torch.is_inference_mode_enabled()  # a mode of this thread

    def draw(first: int) -> None:
        with torch.inference_mode(is_inference):
            for block in items[first::count]:
                draw_block(block)

    def use_all_cpus() -> None:
        """Free a new thread that has too few CPUs: OpenMP may have bound the main thread to one."""
        if sys.platform == "linux" and len(os.sched_getaffinity(0)) < count:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))

    with ThreadPoolExecutor(count, initializer=use_all_cpus) as pool:
        for _ in pool.map(draw, range(count)):  # raises a thread's error
            pass


def _fill_permutations(values: Tensor, width: int, *, generator: Generator) -> Tensor:
    """Fill the last axis with random permutations of ``range(width)``, cut off at its length."""
    # A few rows are used again and again: making a view of every row of ``values`` would take 10 % longer.
    permutations = values.flatten(0, -2)
    buffer = values.new_empty(min(16, len(permutations)), width)
    rows = buffer.unbind()
    for part in permutations.split(len(rows)):
        for row in rows[: len(part)]:
            torch.randperm(width, generator=generator, out=row)
        part.copy_(buffer[: len(part), : part.shape[-1]])
    return values


STREAMS: dict[str, type[NoiseStream]] = {"block": BlockStream, "philox": PhiloxStream}
"""Streams by name."""


def keys_of_step(stream: type[NoiseStream], seed: int, step: Tensor, device: torch.device) -> Tensor:
    """Return the keys of a step that is a tensor on the layers' device, see :func:`philox.device_keys`.

    Raises:
        ValueError: the stream is not ``philox``, or the step is not a 0-d int64 tensor on the device.
    """
    if not issubclass(stream, PhiloxStream):
        raise ValueError(  # noqa: TRY004  the stream is wrong, not the type of an argument
            f"the stream 'block' cannot read a step on {step.device}: pass the step as an int, or use "
            "stream='philox'"
        )
    if step.dim() or step.dtype is not torch.int64 or step.device != device:
        raise ValueError(
            f"a step that is a tensor must be 0-d, int64 and on {device}, got {step.dtype} of shape "
            f"{list(step.shape)} on {step.device}: pass an int, or convert the tensor"
        )
    return philox.device_keys(seed, step)


def check_layer_names(stream: type[NoiseStream], layers: Iterable[str]) -> None:
    """Check that a stream gives different noise to layers of different names.

    Raises:
        ValueError: two names have the same 32-bit hash, which would give their layers the same noise.
    """
    if not issubclass(stream, PhiloxStream):
        return
    counters: dict[int, str] = {}
    for layer in layers:
        first = counters.setdefault(philox.hash_name(layer, 32), layer)
        if first != layer:
            raise ValueError(
                f"{first!r} and {layer!r} have the same hash, and so the same noise with stream='philox': "
                "rename one of them, or use stream='block'"
            )


@dataclass(frozen=True, eq=False)
class Noise:
    """A scheme's noise for a range of members, passed to ``forward`` and ``weighted_sum``.

    Subclasses are frozen dataclasses. A field is a tensor [m, ...], a tensor that all members share, a stream
    to draw again from, the range of the members, or another value.
    """

    SHARED = frozenset[str]()
    """Fields that all members share: :meth:`narrow` keeps them as they are."""

    OWNED = frozenset[str]()
    """Those of ``SHARED`` that new noise may overwrite: neither the model nor a cache refers to them."""

    @property
    def nbytes(self) -> int:
        """Memory of the tensors, in bytes."""
        return sum(value.nbytes for value in self._values().values() if isinstance(value, Tensor))

    def narrow(self, start: int, stop: int) -> Self:
        """Return the noise of members ``start`` to ``stop``; 0 is the first member of this noise."""
        narrowed: dict[str, object] = {}
        for name, value in self._values().items():
            if isinstance(value, NoiseStream):
                narrowed[name] = value.narrow(start, stop)
            elif isinstance(value, Tensor | range) and name not in self.SHARED:
                narrowed[name] = value[start:stop]
        return replace(self, **narrowed)

    def reusable_tensors(self) -> list[Tensor]:
        """Return the tensors that new noise may overwrite."""
        borrowed = self.SHARED - self.OWNED
        values = (value for name, value in self._values().items() if name not in borrowed)
        return [value for value in values if isinstance(value, Tensor) and is_overwritable(value)]

    def _values(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
