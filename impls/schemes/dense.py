"""Dense Gaussian noise: every member has a perturbation of its own for every weight."""

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
"""Stored weights whose W is taken off at once: what fits a cache, or keeps a GPU busy."""


@dataclass(frozen=True, eq=False)
class DenseNoise(Noise):
    """E_m for every member, or the members' own weights W + sigma E_m.

    Attributes:
        values: [m, g, o, i, *taps].
        center: the W that values were stored around, None where they are E_m itself.
        sigma: the scale they were stored with.

    """

    SHARED = frozenset({"center", "sigma"})

    values: Tensor
    center: Tensor | None = None
    sigma: float = 1.0


class AbstractDenseScheme(AbstractScheme[DenseNoise]):
    """Independent standard normal entries for every member; how they are applied is left open."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return DenseNoise(stream.normal("dense", *weight.shape))

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        rows = noise.values.flatten(1)
        if noise.center is None:
            return torch.mv(rows.mT, utilities).view(noise.values.shape[1:])
        # W comes off before the sum: in a sum of whole weights the noise would be the low bits.
        center = noise.center.flatten()
        # A sum of many pieces needs more digits than the product that each of them is.
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
        # One product: W + sigma E_m can be formed as E_m is read.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)

    @override
    def read_bytes(self, weight: Tensor, noise: DenseNoise) -> int:
        # Stored weights stand for W; their copy of it is for the update.
        return noise.values.nbytes + (weight.nbytes if noise.center is None else 0)


@variant(stored="weights", source="NESgpu (direct)")
@variant(source="NESgpu; Salimans et al. 2017, arXiv:1703.03864")
@dataclass(frozen=True)
class Perturbed(AbstractDenseScheme):
    """Independent standard normal entries, stored.

    ``stored="noise"`` keeps E_m and adds its product to the shared one; ``stored="weights"``
    keeps W + sigma E_m and needs one product a member, at the price of the noise's low bits; it
    is of the step it was sampled in, and goes stale when W changes.

    Memory    n * g * o * i * taps numbers.
    Work      as much again as the forward, bound by reading the noise once.
    Quality   kappa = 0.
    """

    stored: Literal["noise", "weights"] = "noise"

    def __post_init__(self) -> None:
        """Refuse an unknown form."""
        check_choice("stored", self.stored, "noise", "weights")

    @override
    def prepare(self, noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
        """Store the members' weights in the noise's own memory, if that is the form."""
        return noise if self.stored == "noise" else stored_weights(noise, weight, sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_per_member(x, noise.values)
        if noise.center is None:
            return add(op.apply_shared(x, weight), y, sigma)
        if isinstance(sigma, Tensor):
            # Rows of the second half need W - sigma E = 2 W - (W + sigma E).
            return op.apply_shared(x, weight).lerp(y, (sigma / noise.sigma).to(y.dtype))
        return y


def stored_weights(noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
    """Turn E_m into W + sigma E_m, in place."""
    return DenseNoise(noise.values.mul_(sigma).add_(weight), weight.clone(), sigma)
