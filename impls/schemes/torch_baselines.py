"""Baselines in plain torch: a loop over members, and ``torch.func.vmap``."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.decompositions import as_autocast
from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractDenseScheme
from impls.schemes.dense import AbstractStoredScheme, DenseNoise, store_weights
from impls.schemes.regenerated import StreamNoise


@variant(baseline=True)
@dataclass(frozen=True)
class Vmap(AbstractStoredScheme):
    """``torch.func.vmap`` of the plain layer over stacked weights W + sigma E_m.

    Memory    n * g * o * i * taps numbers.
    Work      one matrix product per member, bound by reading its weights.
    Quality   kappa = 0.
    """

    @property
    @override
    def stores_weight(self) -> bool:
        return True

    @override
    def prepare(self, noise: DenseNoise, weight: Tensor, sigma: float) -> DenseNoise:
        return store_weights(noise, weight, sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        def apply_member(x: Tensor, weights: Tensor) -> Tensor:
            # vmap has a rule for convolutions that autocast does not reach.
            x, weights = as_autocast(x, weights)
            return op.apply_shared(x.unsqueeze(1), weights).squeeze(1)

        apply_members = torch.func.vmap(apply_member, in_dims=(1, 0), out_dims=1)
        if not isinstance(sigma, Tensor):
            return apply_members(x, noise.values)
        half = x.shape[0] // 2
        # The second half needs W - sigma E = 2 W - (W + sigma E).
        negated = 2 * weight - noise.values
        return torch.cat([apply_members(x[:half], noise.values), apply_members(x[half:], negated)])


def draw_member_noise(noise: StreamNoise, member: int) -> Tensor:
    """Draw E_m of one member; 0 is the first member of the noise."""
    if noise.stream.SHARD_MULTIPLE == 1:
        return noise.stream.narrow(member, member + 1).normal("dense", *noise.shape)[0]
    # A stream of blocks would draw the whole block: a shared draw, named by the member, has its numbers only.
    return noise.stream.shared().normal(f"member {noise.stream.members[member]}", *noise.shape)[0]


@variant(baseline=True)
@dataclass(frozen=True)
class Loop(AbstractDenseScheme[StreamNoise]):
    """Perturb the weight, evaluate and restore it, one member after another.

    Noise is drawn in the forward and again in the update, as sequential implementations do to save memory.
    The weight is restored from a copy, because subtracting the noise would accumulate rounding errors.

    Memory    one copy of the weight.
    Work      n times (one draw, two passes over the weight, one small product).
    Quality   kappa = 0.
    """

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> StreamNoise:
        return StreamNoise(stream, weight.shape)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: StreamNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        # With antithetic sampling, the first half of the repeats sees sigma and the second half -sigma.
        sigmas = [sigma[0].item(), sigma[-1].item()] if isinstance(sigma, Tensor) else [sigma]
        halves = x.chunk(len(sigmas))
        saved = weight.clone()
        outputs = []
        try:
            for member in range(x.shape[1]):
                dense = draw_member_noise(noise, member)
                rows = []
                for scale, half in zip(sigmas, halves, strict=True):
                    torch.add(saved, dense, alpha=scale, out=weight)
                    rows.append(op.apply_shared(half[:, member : member + 1], weight))
                outputs.append(torch.cat(rows) if len(rows) > 1 else rows[0])
        finally:
            weight.copy_(saved)
        return torch.cat(outputs, dim=1)

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        total = utilities.new_zeros(noise.shape)
        for member, utility in enumerate(utilities.tolist()):
            total.add_(draw_member_noise(noise, member), alpha=utility)
        return total

    @override
    def dense_noise(self, noise: StreamNoise) -> Tensor:
        return torch.stack([draw_member_noise(noise, member) for member in range(len(noise.stream.members))])
