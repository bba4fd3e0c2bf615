"""Noise table: every member's perturbation is a slice of one shared table."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractScheme, Flops, add, check_count

PIECE_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Bytes of slices copied at a time: they stay in a CPU's cache, or are worth a GPU's launch."""


@dataclass(frozen=True, eq=False)
class TableNoise(Noise):
    """The table and each member's offset.

    Attributes:
        table: [ratio * d], shared by all members.
        offsets: [m], where each member's slice begins.
        shape: shape of the weight, [g, o, i, *taps].

    """

    SHARED = frozenset({"table"})

    table: Tensor
    offsets: Tensor
    shape: torch.Size

    def slices(self, start: int, stop: int) -> Tensor:
        """Copy the slices of members ``start`` to ``stop``, counted from the first one here."""
        # All slices, as overlapping rows of a view.
        rows = self.table.unfold(0, self.shape.numel(), 1)
        return rows.index_select(0, self.offsets[start:stop]).view(-1, *self.shape)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of members whose slices are copied at a time."""
        most = PIECE_BYTES.get(self.table.device.type, PIECE_BYTES["cpu"])
        step = max(1, most // max(1, self.shape.numel() * self.table.itemsize))
        for start in range(0, len(self.offsets), step):
            yield start, min(start + step, len(self.offsets))


@variant(source="Salimans et al. 2017, arXiv:1703.03864")
@dataclass(frozen=True)
class NoiseTable(AbstractScheme[TableNoise]):
    """E_m is a slice, at a random offset, of one table of ``ratio`` Gaussian numbers for each weight.

    The table is drawn again at every step. A table for all steps, as implementations use that share noise
    between machines, would correlate the steps. Slices overlap, so members of one step are uncorrelated but
    not independent.

    Memory    8 bytes per member; ratio * d numbers for d weights, and temporarily a piece of slices.
    Work      that of stored noise, plus a copy of each slice; ratio * d numbers are drawn.
    Quality   kappa = d / offsets = d / ((ratio - 1) d + 1): the members' second moment is a Toeplitz matrix
              with 1 on the diagonal and the table's autocorrelations, of variance 1 / offsets, beside it;
              each of its d rows adds that much to |g|^2. For large d, kappa is 1 / (ratio - 1).
    """

    ratio: int = 16

    def __post_init__(self) -> None:
        """Check the options; a table of ratio 1 has one slice only."""
        check_count("ratio", self.ratio, 2)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> TableNoise:
        return TableNoise(
            table=stream.shared().normal("table", self.ratio * weight.numel())[0],
            offsets=stream.integers("offsets", self.offsets(weight.shape)),
            shape=weight.shape,
        )

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: TableNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        for start, stop in noise.pieces():
            add(y[:, start:stop], op.apply_per_member(x[:, start:stop], noise.slices(start, stop)), sigma)
        return y

    @override
    def weighted_sum(self, noise: TableNoise, utilities: Tensor) -> Tensor:
        # Pieces are summed in a wider type than each is computed in.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        total = torch.zeros(noise.shape.numel(), device=utilities.device, dtype=wide)
        for start, stop in noise.pieces():
            total += torch.mv(noise.slices(start, stop).flatten(1).mT, utilities[start:stop])
        return total.view(noise.shape).to(utilities.dtype)

    @override
    def dense_noise(self, noise: TableNoise) -> Tensor:
        return noise.slices(0, len(noise.offsets))

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        return weight.numel() / self.offsets(weight)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # One product: W + sigma E_m can be formed while the slice is read.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)

    @override
    def read_bytes(self, weight: Tensor, noise: TableNoise) -> int:
        # The table is read at most once, however many slices overlap.
        slices = len(noise.offsets) * weight.numel() * noise.table.itemsize
        return weight.nbytes + min(noise.table.nbytes, slices) + noise.offsets.nbytes

    def offsets(self, weight: torch.Size) -> int:
        """Return the number of offsets at which a slice may begin."""
        return (self.ratio - 1) * weight.numel() + 1
