"""Dense Gaussian noise: an independent perturbation of every weight for every member."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import sum_pieces
from impls.perturbation.noise import Noise, NoiseStream, piece_bytes, pieces
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractDenseScheme, check_choice


@dataclass(frozen=True, eq=False)
class DenseNoise(Noise):
    """E_m for every member, or the perturbed weights W + sigma E_m.

    Attributes:
        values: [m, g, o, i, *taps].
        center: W, if the values are perturbed weights; None if they are E_m.
        sigma: the scale of perturbed weights.
    """

    SHARED = frozenset({"center", "sigma"})

    values: Tensor
    center: Tensor | None = None
    sigma: float = 1.0


class AbstractStoredScheme(AbstractDenseScheme[DenseNoise]):
    """Standard normal entries that are stored, as they are or as perturbed weights."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return DenseNoise(stream.normal("dense", *weight.shape))

    @override
    def is_up_to_date(self, noise: DenseNoise, weight: Tensor) -> bool:
        return noise.center is None or torch.equal(noise.center, weight)

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        rows = noise.values.flatten(1)
        if noise.center is None:
            return torch.mv(rows.mT, utilities).view(noise.values.shape[1:])
        # W is subtracted before the sum: in a sum of perturbed weights the noise would be in the low bits.
        center = noise.center.flatten()
        # One buffer serves all pieces, of which the first is the longest.
        _, count = next(pieces(len(rows), center.nbytes, piece_bytes(rows.device)))
        buffer = rows.new_empty(count, rows.shape[1])
        wide = torch.promote_types(torch.float32, center.dtype)
        total = sum_pieces(
            torch.mv(torch.sub(piece, center, out=buffer[: len(piece)]).mT, piece_utilities).to(wide)
            for piece, piece_utilities in zip(rows.split(count), utilities.split(count), strict=True)
        )
        return total.div_(noise.sigma).to(center.dtype).view(noise.center.shape)

    @override
    def dense_noise(self, noise: DenseNoise) -> Tensor:
        return noise.values if noise.center is None else (noise.values - noise.center) / noise.sigma

    @override
    def read_bytes(self, weight: Tensor, noise: DenseNoise) -> int:
        # Stored weights include W; the copy of W is for the update only.
        return noise.values.nbytes + (weight.nbytes if noise.center is None else 0)


@variant(stored="weights", source="NESgpu (direct)")
@variant(source="NESgpu; Salimans et al. 2017, arXiv:1703.03864")
@dataclass(frozen=True)
class Perturbed(AbstractStoredScheme):
    """Independent standard normal entries, stored.

    ``stored="noise"`` stores E_m and adds its product to the shared one. ``stored="weights"`` stores
    W + sigma E_m and needs one product per member, but loses the noise's low bits. Noise has to be sampled
    again after W changes.

    Memory    n * g * o * i * taps numbers.
    Work      a second forward, bound by reading the noise once.
    Quality   kappa = 0.
    """

    stored: Literal["noise", "weights"] = "noise"

    def __post_init__(self) -> None:
        check_choice("stored", self.stored, "noise", "weights")

    @property
    @override
    def stores_weight(self) -> bool:
        return self.stored == "weights"

    @override
    def prepare(self, noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
        """Convert the noise to perturbed weights in place, with ``stored="weights"``."""
        return noise if self.stored == "noise" else store_weights(noise, weight, sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        if noise.center is None:
            return super().forward(op, weight, noise, x, sigma)
        y = op.apply_per_member(x, noise.values)
        if isinstance(sigma, Tensor):
            # The second half needs W - sigma E = 2 W - (W + sigma E): lerp with a weight of 1, or of -1.
            return op.apply_shared(x, weight).lerp(y, (sigma / noise.sigma).to(y.dtype))
        return y


def store_weights(noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
    """Convert E_m to W + sigma E_m, in place."""
    return DenseNoise(noise.values.mul_(sigma).add_(weight), weight.clone(), sigma)
