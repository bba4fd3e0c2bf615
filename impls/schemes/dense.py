"""Dense Gaussian noise: an independent perturbation of every weight for every member."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractScheme, Flops, add, check_choice

PIECE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of stored weights that W is subtracted from at a time: they fit a CPU's cache, or keep a GPU busy."""


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


class AbstractDenseScheme(AbstractScheme[DenseNoise]):
    """Independent standard normal entries for every member; subclasses define the forward."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return DenseNoise(stream.normal("dense", *weight.shape))

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        rows = noise.values.flatten(1)
        if noise.center is None:
            return torch.mv(rows.mT, utilities).view(noise.values.shape[1:])
        # W is subtracted before the sum: in a sum of whole weights the noise would be in the low bits.
        center = noise.center.flatten()
        # Pieces are summed in a wider type than each is computed in.
        total = torch.zeros_like(center, dtype=torch.promote_types(torch.float32, center.dtype))
        count = max(1, PIECE_BYTES.get(rows.device.type, PIECE_BYTES["cpu"]) // max(1, center.nbytes))
        piece = rows.new_empty(min(count, len(rows)), rows.shape[1])
        for part, share in zip(rows.split(count), utilities.split(count), strict=True):
            total += torch.mv(torch.sub(part, center, out=piece[: len(part)]).mT, share)
        return total.div_(noise.sigma).to(center.dtype).view(noise.values.shape[1:])

    @override
    def dense_noise(self, noise: DenseNoise) -> Tensor:
        return noise.values if noise.center is None else (noise.values - noise.center) / noise.sigma

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # One product: W + sigma E_m can be formed while E_m is read.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)

    @override
    def read_bytes(self, weight: Tensor, noise: DenseNoise) -> int:
        # Stored weights include W; the copy of W is for the update only.
        return noise.values.nbytes + (weight.nbytes if noise.center is None else 0)


@variant(stored="weights", source="NESgpu (direct)")
@variant(source="NESgpu; Salimans et al. 2017, arXiv:1703.03864")
@dataclass(frozen=True)
class Perturbed(AbstractDenseScheme):
    """Independent standard normal entries, stored.

    ``stored="noise"`` stores E_m and adds its product to the shared one. ``stored="weights"`` stores
    W + sigma E_m and needs one product per member, but loses the noise's low bits; sample it again after W
    changes.

    Memory    n * g * o * i * taps numbers.
    Work      a second forward, bound by reading the noise once.
    Quality   kappa = 0.
    """

    stored: Literal["noise", "weights"] = "noise"

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("stored", self.stored, "noise", "weights")

    @override
    def prepare(self, noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
        """Convert the noise to perturbed weights in place, with ``stored="weights"``."""
        return noise if self.stored == "noise" else stored_weights(noise, weight, sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_per_member(x, noise.values)
        if noise.center is None:
            return add(op.apply_shared(x, weight), y, sigma)
        if isinstance(sigma, Tensor):
            # The second half needs W - sigma E = 2 W - (W + sigma E).
            return op.apply_shared(x, weight).lerp(y, (sigma / noise.sigma).to(y.dtype))
        return y


def stored_weights(noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
    """Convert E_m to W + sigma E_m, in place."""
    return DenseNoise(noise.values.mul_(sigma).add_(weight), weight.clone(), sigma)
