"""Sparse noise: each member perturbs a few input columns of its own."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import append_axes, take_channels
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractAdditiveScheme, Flops, check_choice, check_count


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


FEW = 8
"""Columns up to it are drawn one after another, each from those that are left; more as the order of keys."""


@variant(k=(1, 2), values="sign", source="NESgpu's sparse noise, with signs")
@variant(k=(1, 2), source="NESgpu; the update is ours, it had none")
@dataclass(frozen=True)
class SparsePerturbed(AbstractAdditiveScheme[SparseNoise]):
    """k different input columns a member, Gaussian or signs; every other column is unperturbed.

    Values are scaled by sqrt(i / k), so that entries have unit variance over the draw of columns. Signs are
    kept in the weight's type: the product that reads them knows no narrower one, and widening them first
    costs a CPU a pass over as many numbers as the correction has.

    Memory    n * g * (o * k * taps + k) numbers.
    Work      2 * g * o * k * taps flops of a row and output position.
    Quality   kappa = 0: columns and values are independent between members. Which columns a member has takes
              no share of its own with signs; Gaussian values make d / n into (d + 2 i / k) / n.
    """

    k: int
    values: Literal["normal", "sign"] = "normal"

    def __post_init__(self) -> None:
        """Refuse a k that is no number of columns, and unknown values."""
        check_count("k", self.k)
        check_choice("values", self.values, "normal", "sign")

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        groups, outputs, inputs, *taps = weight.shape
        if self.k > inputs:
            message = f"k = {self.k} is above the width: the weight has {inputs} input columns"
            raise ValueError(message)
        draw = stream.signs if self.values == "sign" else stream.normal
        values = draw("values", groups, self.k, outputs, *taps)
        return SparseNoise(
            columns=_different(stream, groups, inputs, self.k),
            values=values.mul_(math.sqrt(inputs / self.k)),
            inputs=inputs,
        )

    @override
    def correction(self, op: AbstractOperator, noise: SparseNoise, x: Tensor) -> Tensor:
        return op.apply_per_member(take_channels(x, noise.columns), noise.values.transpose(2, 3))

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        _, groups, _, *rest = noise.values.shape
        weighted = noise.values * append_axes(utilities, noise.values)
        offsets = torch.arange(groups, device=noise.columns.device).view(-1, 1) * noise.inputs
        columns = (noise.columns + offsets).flatten()
        # Members share columns, so a column's contributions have to accumulate.
        total = weighted.new_zeros(groups * noise.inputs, *rest).index_add_(
            0, columns, weighted.flatten(0, 2)
        )
        return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)

    @override
    def dense_noise(self, noise: SparseNoise) -> Tensor:
        members, groups, _, *rest = noise.values.shape
        dense = noise.values.new_zeros(members, groups, noise.inputs, *rest)
        columns = append_axes(noise.columns, noise.values).expand_as(noise.values)
        return dense.scatter_(2, columns, noise.values).transpose(2, 3)

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        kept = weight.numel() // weight[2] * self.k
        return Flops(forward=2 * (weight.numel() + kept), update=2 * kept * members)


def _different(stream: NoiseStream, groups: int, width: int, size: int) -> Tensor:
    """Draw ``size`` different integers in [0, width), in random order: [m, groups, size]."""
    if size > FEW:
        return stream.subsets("columns", groups, width, size)
    chosen = stream.integers("column 0", width, groups, 1)
    for already in range(1, size):
        pick = stream.integers(f"column {already}", width - already, groups, 1)
        # The pick counts what is left: step over what is taken, from the lowest on.
        for taken in chosen.sort(-1).values.split(1, -1):
            pick += pick >= taken
        chosen = torch.cat([chosen, pick], -1)
    return chosen
