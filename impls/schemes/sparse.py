"""Sparse noise: each member perturbs a few input columns of its own."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.axes import over_taps, take
from impls.noise import Noise, NoiseStream
from impls.operators import AbstractOperator
from impls.scheme import AbstractAdditiveScheme, Flops


@dataclass(frozen=True, eq=False)
class SparseNoise(Noise):
    """Which input columns each member perturbs, and by what.

    Attributes:
        columns: [m, g, k], different ones for each member.
        values: [m, g, k, o, *taps].
        inputs: how many columns there are to choose from.

    """

    columns: Tensor
    values: Tensor
    inputs: int


@variant(k=(1, 2), source="NESgpu; the update is ours, it had none")
@dataclass(frozen=True)
class SparsePerturbed(AbstractAdditiveScheme[SparseNoise]):
    """k different input columns a member, Gaussian; every other column is unperturbed.

    Values are scaled by sqrt(i / k), so that entries have unit variance over the draw of columns.

    Memory    n * g * (o * k * taps + k) numbers.
    Work      2 * r * n * g * o * k * taps flops per output position.
    Quality   kappa = 0: columns are independent between members.
    """

    k: int

    def __post_init__(self) -> None:
        """Refuse a k that is no number of columns."""
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            message = f"k must be an int of at least 1, got {self.k!r}"
            raise ValueError(message)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        groups, outputs, inputs, *taps = weight.shape
        if self.k > inputs:
            message = f"k = {self.k} is above the width: the weight has {inputs} input columns"
            raise ValueError(message)
        values = stream.normal("values", groups, self.k, outputs, *taps)
        return SparseNoise(
            columns=stream.subsets("columns", groups, inputs, self.k),
            values=values.mul_(math.sqrt(inputs / self.k)),
            inputs=inputs,
        )

    @override
    def correction(self, op: AbstractOperator, noise: SparseNoise, x: Tensor) -> Tensor:
        return op.batched(take(x, noise.columns), noise.values.transpose(2, 3))

    @override
    def combine(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        _, groups, _, *rest = noise.values.shape
        weighted = noise.values * over_taps(utilities, noise.values)
        offsets = torch.arange(groups, device=noise.columns.device).view(-1, 1) * noise.inputs
        columns = (noise.columns + offsets).flatten()
        # Members share columns, so a column's contributions have to accumulate.
        total = weighted.new_zeros(groups * noise.inputs, *rest).index_add_(
            0, columns, weighted.flatten(0, 2)
        )
        return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)

    @override
    def perturbations(self, noise: SparseNoise) -> Tensor:
        members, groups, _, *rest = noise.values.shape
        dense = noise.values.new_zeros(members, groups, noise.inputs, *rest)
        columns = over_taps(noise.columns, noise.values).expand_as(noise.values)
        return dense.scatter_(2, columns, noise.values).transpose(2, 3)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        kept = weight.numel() // weight[2] * self.k
        return Flops(forward=2 * (weight.numel() + kept), update=2 * kept * members)
