"""Flipped noise: one shared core, whose columns, rows or both each member multiplies by signs."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.axes import over_taps
from impls.noise import Noise, NoiseStream
from impls.operators import AbstractOperator
from impls.scheme import AbstractAdditiveScheme, Flops


@dataclass(frozen=True, eq=False)
class FlippedNoise(Noise):
    """The shared core [g, o, i, *taps] and each member's signs.

    Attributes:
        core: shared by all members.
        inputs: signs [m, g, i], or None: not flipped.
        outputs: signs [m, g, o], or None: not flipped.

    """

    SHARED = frozenset({"core"})

    core: Tensor
    inputs: Tensor | None
    outputs: Tensor | None


@variant(side=("in", "out", "both"), source="NESgpu; both sides: Wen et al. 2018 (Flipout), arXiv:1803.04386")
@dataclass(frozen=True)
class Flipped(AbstractAdditiveScheme[FlippedNoise]):
    """E_m is a shared Gaussian core with the signs of its columns, rows or both flipped at random.

    Memory    n * g * (i and/or o) signs, in the weight's dtype; the core once.
    Work      one more matrix product, and one pass over inputs and/or outputs.
    Quality   kappa = unflipped length + 1 (times taps for convolutions) on one side: most of a
              large population is lost. Both sides: 2, and taps + 1 for convolutions.
    """

    side: Literal["in", "out", "both"] = "in"

    def __post_init__(self) -> None:
        """Refuse an unknown side."""
        if self.side not in {"in", "out", "both"}:
            message = f"side must be 'in', 'out' or 'both', got {self.side!r}"
            raise ValueError(message)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> FlippedNoise:
        groups, outputs, inputs = weight.shape[:3]
        return FlippedNoise(
            core=stream.shared().normal("core", *weight.shape)[0],
            inputs=stream.signs("inputs", groups, inputs) if self.side != "out" else None,
            outputs=stream.signs("outputs", groups, outputs) if self.side != "in" else None,
        )

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        if noise.inputs is not None:
            x = x * over_taps(noise.inputs, x[0])
        y = op.shared(x, noise.core)
        return y if noise.outputs is None else y.mul_(over_taps(noise.outputs, y[0]))

    @override
    def combine(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        # The signs enter once each: sum_m c_m r_m s_m^T, never squared and never c_m twice.
        if noise.outputs is None:
            signs = torch.einsum("m,mgi->gi", utilities, noise.inputs).unsqueeze(1)
        elif noise.inputs is None:
            signs = torch.einsum("m,mgo->go", utilities, noise.outputs).unsqueeze(2)
        else:
            signs = torch.einsum("m,mgo,mgi->goi", utilities, noise.outputs, noise.inputs)
        return noise.core * over_taps(signs, noise.core)

    @override
    def perturbations(self, noise: FlippedNoise) -> Tensor:
        dense = noise.core.unsqueeze(0)
        if noise.inputs is not None:
            dense = dense * over_taps(noise.inputs.unsqueeze(2), dense)
        if noise.outputs is not None:
            dense = dense * over_taps(noise.outputs.unsqueeze(3), dense)
        return dense

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs = weight[:3]
        signs = groups * {"in": inputs, "out": outputs, "both": outputs * inputs}[self.side]
        # Flipping a sign is no arithmetic; summing signs is, and then one pass over the core.
        return Flops(forward=4 * weight.numel(), update=2 * signs * members + weight.numel())
