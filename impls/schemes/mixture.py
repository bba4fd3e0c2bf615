"""Bits that neighbouring members mix from two samples: nearly no weights are read for a member alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.binary.operators import AbstractPackedOperator, unpacked
from impls.perturbation.noise import NoiseStream
from impls.perturbation.options import check_count
from impls.schemes.binary import (
    OPERATORS,
    AbstractBitScheme,
    AbstractBitsNoise,
    drawn,
    planes_of,
    probabilities,
)

PIECE_BYTES = 8388608
"""Mixed weights that are written at a time: what caches hold."""


@dataclass(frozen=True, eq=False)
class MixtureNoise(AbstractBitsNoise):
    """Two samples of each group of members, and which of the two each member has for each input.

    Attributes:
        members: whose noise this is.
        first: the member that the first row of ``columns`` is of: the first of its group.
        samples: packed bits, [groups, 2, g, *taps, words, o].
        columns: packed, a bit for each input, [members of the groups, g, *taps, words, 1].

    """

    SHARED = frozenset({"p", "sigma", "first", "samples", "columns"})

    members: range
    first: int
    samples: Tensor
    columns: Tensor


@variant(operators=OPERATORS, source="ours")
@dataclass(frozen=True)
class BinaryMixture(AbstractBitScheme[MixtureNoise]):
    """Neighbouring members share two samples of bits, and each takes every column from one or the other.

    The update is a contrast of the two. With s_m the choices of a member, fair coins, and S members in a
    group its estimate is 2 sum_m c_m (s_m - mean s) / (S - 1) * (B_1 - B_0), and a population's the mean
    over its members' groups: without bias, and without what a group's utilities have in common. The sum of
    c_m (B_m - P), with utilities about the mean of their group, would be half of the gradient. A group of one
    member, as the last one may be, has s_m - 1/2 in place of s_m - mean s.

    Args:
        group: members that share two samples, of which populations are split at multiples.

    Memory    2 g * o * taps * 8 ceil(i / 64) bytes a group, and an o-th of that for each member.
    Work      as :class:`Binary`'s, without reading a weight for each member.
    Quality   of n members, with i inputs and taps, kappa is about o * group / n where bits are fair. They are
              worth about n / (1 + group / i): a group should have fewer members than a row has inputs.
    """

    group: int = 64

    def __post_init__(self) -> None:
        """Refuse groups of less than two."""
        check_count("group", self.group, 2)

    @property
    @override
    def shard_multiple(self) -> int:
        return self.group

    @property
    @override
    def contrasts(self) -> bool:
        return True

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> MixtureNoise:
        p, members = probabilities(weight), stream.members
        planes = planes_of(p)
        first = members.start // self.group * self.group
        groups = range(first // self.group, -(-members.stop // self.group))
        shape = (len(groups), 2, *planes.shape[1:])
        samples = torch.empty(shape, dtype=planes.dtype, device=planes.device)
        shared = stream.shared()
        for place, group in enumerate(groups):
            for each in range(2):
                samples[place, each] = drawn(shared, f"sample {each} of group {group}", planes)[0]
        choices = replace(stream, members=range(first, members.stop))
        columns = choices.words("columns", *planes.shape[1:-1], 1)
        return MixtureNoise(p, 1.0, members, first, samples, columns)

    @override
    def product(self, op: AbstractPackedOperator, noise: MixtureNoise, x: Tensor) -> Tensor:
        parts = [op.bits(x[:, start:stop], mixed) for start, stop, mixed in self._mixed(noise)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @override
    def written(self, noise: MixtureNoise) -> Tensor:
        return torch.cat([mixed for _, _, mixed in self._mixed(noise)])

    def _mixed(self, noise: MixtureNoise) -> Iterator[tuple[int, int, Tensor]]:
        """Yield members of one group at a time, counted from the first here, and their bits."""
        size = max(1, PIECE_BYTES // max(1, noise.samples[0, 0].nbytes))
        before, count = noise.members.start - noise.first, len(noise.members)
        for group, (zero, one) in enumerate(noise.samples):
            differing = zero ^ one
            end = min((group + 1) * self.group - before, count)
            for start in range(max(0, group * self.group - before), end, size):
                stop = min(start + size, end)
                columns = noise.columns[before + start : before + stop]
                yield start, stop, (columns & differing).bitwise_xor_(zero)

    @override
    def read_bytes(self, weight: Tensor, noise: MixtureNoise) -> int:
        return noise.samples.nbytes + noise.columns.nbytes

    @override
    def weighted_sum(self, noise: MixtureNoise, utilities: Tensor) -> Tensor:
        wide = torch.promote_types(torch.float32, utilities.dtype)
        start, total = noise.members.start - noise.first, torch.zeros_like(noise.p, dtype=wide)
        c, choices = utilities.to(wide), self._choices(noise)[start : start + len(noise.members)]
        for group in range(len(noise.samples)):
            mine = slice(max(0, group * self.group - start), max(0, (group + 1) * self.group - start))
            contrast = torch.tensordot(c[mine], choices[mine].to(wide), dims=1)
            total += contrast * self._difference(noise, group, group + 1)[0]
        return total * noise.sigma

    @override
    def directions(self, noise: MixtureNoise) -> Tensor:
        start = noise.members.start - noise.first
        place = torch.arange(start, start + len(noise.members), device=noise.samples.device)
        difference = self._difference(noise, 0, len(noise.samples))[place // self.group]
        return self._choices(noise)[place] * difference * noise.sigma

    def _choices(self, noise: MixtureNoise) -> Tensor:
        """Return 2 S / (S - 1) (s - mean s) of all members of the groups, [m, g, 1, i, *taps]."""
        s = unpacked(noise.columns, noise.p.shape[2]).to(noise.p.dtype)
        for start in range(0, len(s), self.group):
            mine = s[start : start + self.group]
            count = len(mine)
            mine -= mine.mean(0) if count > 1 else 0.5
            mine *= 2 * count / max(1, count - 1)
        return s

    def _difference(self, noise: MixtureNoise, start: int, stop: int) -> Tensor:
        """Return B_1 - B_0 of groups, [groups, g, o, i, *taps]."""
        zero, one = (
            unpacked(noise.samples[start:stop, each], noise.p.shape[2]).to(noise.p.dtype) for each in range(2)
        )
        return one - zero
