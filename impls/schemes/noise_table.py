"""Noise table: every member's perturbation is a slice of one shared table."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.noise import Noise, NoiseStream, piece_bytes, pieces
from impls.perturbation.scheme import AbstractDenseScheme, check_count


@dataclass(frozen=True, eq=False)
class TableNoise(Noise):
    """The table and each member's offset.

    Attributes:
        table: [ratio * d], shared by all members.
        offsets: [m], where each member's slice begins.
        shape: shape of the weight, [g, o, i, *taps].
    """

    SHARED = OWNED = frozenset({"table"})

    table: Tensor
    offsets: Tensor
    shape: torch.Size


@variant(source="Salimans et al. 2017, arXiv:1703.03864")
@dataclass(frozen=True)
class NoiseTable(AbstractDenseScheme[TableNoise]):
    """E_m is a slice, at a random offset, of a shared Gaussian table ``ratio`` times as long as the weight.

    The table is drawn again at every step. Keeping one table for all steps, as implementations that share
    noise between machines do, would correlate the steps. Slices overlap, so members of one step are
    uncorrelated but not independent.

    Memory    8 bytes per member; ratio * d numbers for d weights, and temporarily a piece of slices.
    Work      that of stored noise, plus a copy of each slice; ratio * d numbers are drawn.
    Quality   kappa = d / offsets = d / ((ratio - 1) d + 1): the members' second moment is a Toeplitz matrix
              with 1 on the diagonal and the table's autocorrelations, of variance 1 / offsets, off it;
              each of its d rows adds that much to |g|^2. For large d, kappa is 1 / (ratio - 1).
    """

    ratio: int = 16

    def __post_init__(self) -> None:
        check_count("ratio", self.ratio, 2)  # with ratio 1 the table has one slice

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> TableNoise:
        return TableNoise(
            table=stream.shared().normal("table", self.ratio * weight.numel())[0],
            offsets=stream.integers("offsets", self.offset_count(weight.shape)),
            shape=weight.shape,
        )

    @override
    def pieces(self, noise: TableNoise, members: int) -> Iterable[tuple[int, int, TableNoise]]:
        slice_bytes = noise.shape.numel() * noise.table.itemsize
        for start, stop in pieces(members, slice_bytes, piece_bytes(noise.table.device)):
            yield start, stop, noise.narrow(start, stop)

    @override
    def dense_noise(self, noise: TableNoise) -> Tensor:
        slices = noise.table.unfold(0, noise.shape.numel(), 1)  # a view with overlapping rows
        return slices.index_select(0, noise.offsets).view(-1, *noise.shape)

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return weight.numel() / self.offset_count(weight.shape)

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return self.offset_count(weight)

    @override
    def read_bytes(self, weight: Tensor, noise: TableNoise) -> int:
        # The table is read at most once, however many slices overlap.
        slice_bytes = len(noise.offsets) * weight.numel() * noise.table.itemsize
        return weight.nbytes + min(noise.table.nbytes, slice_bytes) + noise.offsets.nbytes

    def offset_count(self, weight: torch.Size) -> int:
        """Return the number of offsets at which a slice may begin."""
        return (self.ratio - 1) * weight.numel() + 1
