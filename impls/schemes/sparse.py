"""Sparse noise: each member perturbs a few input columns."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.member_ops import (
    add_factor_products,
    add_to_channels,
    append_axes,
    count_signs,
    take_channels,
)
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator, TransposedLinear, has_equal_members
from impls.perturbation.scheme import AbstractAdditiveScheme, Flops, check_choice, check_count


@dataclass(frozen=True, eq=False)
class SparseNoise(Noise):
    """The input columns that each member perturbs, and their perturbations.

    Attributes:
        columns: column indices [m, g, k], distinct for each member.
        values: [m, g, k, o, *taps].
        inputs: number of columns of the weight.
    """

    columns: Tensor
    values: Tensor
    inputs: int


MAX_DENSE_INPUTS = 8
"""Up to this many input channels, a CPU convolves a batch that all members see faster with dense noise: the
members then share one product."""
MAX_SINGLE_DRAWS = 8
"""Up to this k, columns are drawn one by one from the remaining ones; above, by sorting random keys."""


@variant(k=(1, 2), values="sign", source="NESgpu's sparse noise, with signs")
@variant(k=(1, 2), source="NESgpu; the update is ours, it had none")
@dataclass(frozen=True)
class SparsePerturbed(AbstractAdditiveScheme[SparseNoise]):
    """Each member perturbs k distinct input columns, by Gaussian values or by signs.

    Values are scaled by sqrt(i / k), so that entries have unit variance over the draw of columns. Signs are
    stored in the weight's dtype, as the matrix product needs them.

    Memory    n * g * (o * k * taps + k) numbers.
    Work      2 * g * o * k * taps flops of a row and output position.
    Quality   kappa = 0: columns and values are independent between members. With Gaussian values d / n
              becomes (d + 2 i / k) / n; with signs it stays d / n. A changed weight moves by sqrt(i / k)
              sigma. If the fitness is curved over such changes, n_eff is below that of dense noise: see the
              cosines at sigma = 0.1 in ``reports/amd-epyc/digits/tables.md``.
    """

    k: int
    values: Literal["normal", "sign"] = "normal"

    def __post_init__(self) -> None:
        check_count("k", self.k)
        check_choice("values", self.values, "normal", "sign")

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        groups, outputs, inputs, *taps = weight.shape
        if self.k > inputs:
            raise UnsupportedError(
                f"k = {self.k} exceeds the layer's {inputs} input channels per group: use a smaller k"
            )
        draw = stream.signs if self.values == "sign" else stream.normal
        values = draw("values", groups, self.k, outputs, *taps)
        return SparseNoise(
            columns=_draw_distinct_columns(stream, groups, inputs, self.k),
            values=values.mul_(math.sqrt(inputs / self.k)),
            inputs=inputs,
        )

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: SparseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        if noise.values.dim() > 4:  # noqa: PLR2004  with taps
            return super().forward(op, weight, noise, x, sigma)
        y = op.apply_shared(x, weight)
        add_factor_products(y, take_channels(x, noise.columns) * sigma, noise.values)
        return y

    @override
    def correction(self, op: AbstractOperator, noise: SparseNoise, x: Tensor) -> Tensor:
        if x.is_cpu and x.dim() > 4 and has_equal_members(x) and noise.inputs <= MAX_DENSE_INPUTS:  # noqa: PLR2004  with space
            return op.apply_per_member(x, self.dense_noise(noise))
        return op.apply_per_member(take_channels(x, noise.columns), noise.values.transpose(2, 3))

    @override
    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: SparseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        changes = op.untransposed.apply_per_member(x, noise.values)
        return add_to_channels(op.apply_shared(x, weight), noise.columns, changes * sigma)

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        _, groups, _, *inner = noise.values.shape
        weighted = noise.values * append_axes(utilities, noise.values)
        offsets = torch.arange(groups, device=noise.columns.device).view(-1, 1) * noise.inputs
        columns = (noise.columns + offsets).flatten()
        # Several members may perturb the same column.
        total = weighted.new_zeros(groups * noise.inputs, *inner).index_add_(
            0, columns, weighted.flatten(0, 2)
        )
        return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)

    @override
    def dense_noise(self, noise: SparseNoise) -> Tensor:
        members, groups, _, *inner = noise.values.shape
        dense = noise.values.new_zeros(members, groups, noise.inputs, *inner)
        columns = append_axes(noise.columns, noise.values).expand_as(noise.values)
        return dense.scatter_(2, columns, noise.values).transpose(2, 3)

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return 0.0

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        if self.values == "normal":
            return math.inf
        groups, _, inputs = weight[:3]
        signs = count_signs(weight.numel() // inputs * self.k)
        return math.prod([float(math.comb(inputs, self.k))] * groups, start=signs)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        nonzero = weight.numel() // weight[2] * self.k
        return Flops(forward=2 * (weight.numel() + nonzero), update=2 * nonzero * members)


def _draw_distinct_columns(stream: NoiseStream, groups: int, width: int, size: int) -> Tensor:
    """Draw ``size`` distinct integers in [0, width), in random order: [m, groups, size]."""
    if size > MAX_SINGLE_DRAWS:
        return stream.subsets("columns", groups, width, size)
    columns = stream.integers("column 0", width, groups, 1)
    for index in range(1, size):
        pick = stream.integers(f"column {index}", width - index, groups, 1)
        # The pick counts the remaining integers only: skip the drawn ones, lowest first.
        for column in columns.sort(-1).values.split(1, -1):
            pick += pick >= column
        columns = torch.cat([columns, pick], -1)
    return columns
