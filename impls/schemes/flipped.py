"""Flipped noise: shared cores whose columns, rows or both each member multiplies by random signs."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import (
    append_axes,
    apply_cores,
    count_signs,
    draw_signs,
    flip_signs,
    member_cores,
    members_of_core,
    same_core_fraction,
    sum_outer_products,
    unused_core_bytes,
    view_per_channel,
)
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator, TransposedLinear
from impls.perturbation.scheme import AbstractAdditiveScheme, Flops, check_choice, check_count


@dataclass(frozen=True, eq=False)
class FlippedNoise(Noise):
    """The shared cores and each member's signs.

    Attributes:
        core: [cores, g, o, i, *taps], shared; member j has core j modulo their number.
        inputs: signs [m, g, i] as int8; None: inputs are not flipped.
        outputs: signs [m, g, o] as int8; None: outputs are not flipped.
        members: the members of the signs.
    """

    SHARED = OWNED = frozenset({"core"})

    core: Tensor
    inputs: Tensor | None
    outputs: Tensor | None
    members: range


class AbstractFlippedScheme(AbstractAdditiveScheme[FlippedNoise]):
    """Shared cores whose columns and rows each member multiplies by signs; subclasses draw the cores."""

    FOURTH_MOMENT: ClassVar[int]
    """Fourth moment of a core's entries, which have unit variance."""

    side: Literal["in", "out", "both"]
    cores: int

    def __post_init__(self) -> None:
        check_choice("side", self.side, "in", "out", "both")
        check_count("cores", self.cores)

    @abstractmethod
    def draw_cores(self, stream: NoiseStream, *shape: int) -> Tensor:
        """Draw the cores [cores, *shape] from the shared stream."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> FlippedNoise:
        groups, outputs, inputs = weight.shape[:3]
        return FlippedNoise(
            core=self.draw_cores(stream.shared(), *weight.shape),
            inputs=draw_signs(stream, "inputs", groups, inputs) if self.side != "out" else None,
            outputs=draw_signs(stream, "outputs", groups, outputs) if self.side != "in" else None,
            members=stream.members,
        )

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        if noise.inputs is not None:
            x = flip_signs(x, noise.inputs)
        y = apply_cores(op, x, noise.core, noise.members)
        return y if noise.outputs is None else y.mul_(view_per_channel(noise.outputs, y))

    @override
    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: FlippedNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        # The signs of rows are those of the transpose's columns.
        swapped = replace(noise, core=noise.core.mT, inputs=noise.outputs, outputs=noise.inputs)
        return self.forward(op.untransposed, weight.mT, swapped, x, sigma)

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        # One core at a time: the sums of signs for all of them would take as much memory as the cores.
        count = noise.core.shape[0]
        if count == 1:
            return noise.core[0] * _sum_signs(noise, utilities)
        total = torch.zeros_like(noise.core[0])
        for index, core in enumerate(noise.core):
            members = members_of_core(index, count, noise.members)
            inputs, outputs = (None if s is None else s[members] for s in (noise.inputs, noise.outputs))
            of_core = replace(noise, inputs=inputs, outputs=outputs)
            total.addcmul_(core, _sum_signs(of_core, utilities[members]))
        return total

    @override
    def dense_noise(self, noise: FlippedNoise) -> Tensor:
        dense = member_cores(noise.core, noise.members)
        if noise.inputs is not None:
            dense = dense * append_axes(noise.inputs.unsqueeze(2), dense)
        if noise.outputs is not None:
            dense = dense * append_axes(noise.outputs.unsqueeze(3), dense)
        return dense

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        # E[E E^T | core] has a block v v^T for each set of L entries that share their signs. Its mean squared
        # norm is E|v|^4 = L^2 + (FOURTH_MOMENT - 1) L; for independent entries it would be L.
        _, outputs, inputs, *taps = weight.shape
        same_sign = {"in": outputs, "out": inputs, "both": 1}[self.side] * math.prod(taps)
        return (same_sign + self.FOURTH_MOMENT - 2) * same_core_fraction(members, self.cores)

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        # With both sides, negating all signs of a group leaves E_m as it is.
        groups, outputs, inputs = weight[:3]
        signs = {"in": inputs, "out": outputs, "both": outputs + inputs - 1}[self.side]
        return self.cores * count_signs(groups * signs)

    @override
    def read_bytes(self, weight: Tensor, noise: FlippedNoise) -> int:
        return super().read_bytes(weight, noise) - unused_core_bytes(noise.core, noise.members)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs = weight[:3]
        signs = groups * {"in": inputs, "out": outputs, "both": outputs * inputs}[self.side]
        # Flipping signs counts as 0. The update sums the members' signs, and multiplies and adds the cores.
        passes = weight.numel() * (2 * min(self.cores, members) - 1)
        return Flops(forward=4 * weight.numel(), update=2 * signs * members + passes)


def _sum_signs(noise: FlippedNoise, utilities: Tensor) -> Tensor:
    """Return sum_m c_m r_m s_m^T, [g, o, i, *ones]; an axis without signs has length 1."""
    ones = [1] * (noise.core.dim() - 4)
    if noise.inputs is not None and noise.outputs is not None:
        return append_axes(sum_outer_products(utilities, noise.outputs, noise.inputs), noise.core[0])
    signs = noise.outputs if noise.inputs is None else noise.inputs
    assert signs is not None  # noqa: S101  one side is always flipped
    total = torch.mv(signs.to(utilities.dtype).flatten(1).mT, utilities)
    groups, width = signs.shape[1:]
    return total.view(groups, *((width, 1) if noise.inputs is None else (1, width)), *ones)


@variant(side="both", cores=8, source="ours")
@variant(side="in", cores=32, source="ours")
@variant(side=("in", "out", "both"), source="NESgpu; both sides: Wen et al. 2018 (Flipout), arXiv:1803.04386")
@dataclass(frozen=True)
class Flipped(AbstractFlippedScheme):
    """E_m is a shared Gaussian core with the signs of its columns, rows or both flipped at random.

    Memory    n * g * (i and/or o) signs of one byte; the cores, each as large as the weight.
    Work      one more matrix product for any number of cores, and one pass over inputs and/or outputs; cores
              are drawn and read once each.
    Quality   kappa = (unflipped length) * taps + 1 on one side: n_eff is a small part of a large population.
              Both sides: taps + 1, so 2 for Linear. g cores divide it by g.
    """

    FOURTH_MOMENT = 3

    side: Literal["in", "out", "both"] = "in"
    cores: int = 1

    @override
    def draw_cores(self, stream: NoiseStream, *shape: int) -> Tensor:
        return stream.normal("core", self.cores, *shape)[0]


@variant(source="ours; Wen et al. 2018 (Flipout), arXiv:1803.04386, have the signs")
@dataclass(frozen=True)
class FlippedSign(AbstractFlippedScheme):
    """E_m is a shared core of fair signs with the signs of its columns, rows or both flipped at random.

    Memory    n * g * (i and/or o) signs of one byte; the cores, each as large as the weight.
    Work      one more matrix product for any number of cores, and one pass over inputs and/or outputs.
    Quality   kappa = (unflipped length) * taps - 1 on one side. Both sides: taps - 1, so 0 for Linear, as for
              independent entries. g cores divide it by g.
    """

    FOURTH_MOMENT = 1

    side: Literal["in", "out", "both"] = "both"
    cores: int = 1

    @override
    def draw_cores(self, stream: NoiseStream, *shape: int) -> Tensor:
        return stream.signs("core", self.cores, *shape)[0]
