"""Permuted noise: one shared core, whose columns or rows each member shuffles."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.axes import over_taps, take
from impls.noise import Noise, NoiseStream
from impls.operators import AbstractOperator
from impls.scheme import AbstractAdditiveScheme, Flops

PIECE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""How much of the members' E_m is written out at a time where an update has no shortcut.

On a CPU what fits its cache: pieces of 64 MiB cost three times as much, in page faults. On a GPU
what is worth a launch.
"""


@dataclass(frozen=True, eq=False)
class PermutedNoise(Noise):
    """The shared core and each member's own picks.

    Attributes:
        core: [g, rows, k, *taps], shared; where outputs are sparse its last row is zero.
        inputs: [m, g, k], the input that each column of the core meets; None: column j meets j.
        outputs: [m, g, o], the row of the core that each output uses; None: output j uses row j.
        width: how many inputs there are.

    """

    SHARED = frozenset({"core"})

    core: Tensor
    inputs: Tensor | None
    outputs: Tensor | None
    width: int


@variant(side="both", source="NESgpu")
@variant(side="out", out_sparsity=(0.5, 0.1), source="NESgpu")
@variant(side="out", source="NESgpu")
@variant(in_sparsity=(0.5, 0.1), source="NESgpu")
@variant(source="NESgpu")
@dataclass(frozen=True)
class Permuted(AbstractAdditiveScheme[PermutedNoise]):
    """E_m is a shared Gaussian core with its columns, rows or both permuted by each member.

    A sparsity is the share of channels kept, or, as an int, their number; the rest of E_m is
    zero and the core is scaled so that entries have unit variance. ``replace`` draws picks with
    replacement, which needs no sort. Given the core, permuting inputs leaves a component common
    to all members, the mean of the core's columns: centre the utilities.

    Memory    n * g * k index numbers for inputs, n * g * o for outputs; the core once.
    Work      kept share of one more matrix product; the update of one side is one product too,
              that of both sides writes the members' perturbations out piece by piece.
    Quality   kappa = o * taps / k for inputs, 0 for both sides.
    """

    side: Literal["in", "out", "both"] = "in"
    in_sparsity: float = 1.0
    out_sparsity: float = 1.0
    replace: bool = False

    def __post_init__(self) -> None:
        """Refuse an unknown side, and a sparsity outside its range or for a side left in place."""
        if self.side not in {"in", "out", "both"}:
            message = f"side must be 'in', 'out' or 'both', got {self.side!r}"
            raise ValueError(message)
        for name, value, unused in (
            ("in_sparsity", self.in_sparsity, "out"),
            ("out_sparsity", self.out_sparsity, "in"),
        ):
            is_count = isinstance(value, int)
            if isinstance(value, bool) or (value < 1 if is_count else not 0 < value <= 1):
                message = (
                    f"{name} must be in (0, 1], or an int of at least 1 for a number of channels, got {value}"
                )
                raise ValueError(message)
            if (is_count or value != 1) and self.side == unused:
                message = f"{name}={value} has no effect with side={self.side!r}: that side is not permuted"
                raise ValueError(message)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> PermutedNoise:
        groups, outputs, inputs, *taps = weight.shape
        columns = _kept("in_sparsity", self.in_sparsity, inputs)
        rows = _kept("out_sparsity", self.out_sparsity, outputs)
        core = stream.shared().normal("core", groups, rows, columns, *taps)[0]
        core *= math.sqrt(inputs * outputs / (columns * rows))
        if rows < outputs:
            core = torch.cat([core, core.new_zeros(groups, 1, columns, *taps)], dim=1)
        picks_in = picks_out = None
        if self.side != "out":
            picks_in = self._picks(stream, "inputs", groups, inputs, columns)
        if self.side != "in":
            picks_out = self._picks(stream, "outputs", groups, outputs, outputs).clamp_(max=rows)
        return PermutedNoise(core, picks_in, picks_out, inputs)

    @override
    def correction(self, op: AbstractOperator, noise: PermutedNoise, x: Tensor) -> Tensor:
        if noise.inputs is not None:
            x = take(x, noise.inputs)
        y = op.shared(x, noise.core)
        return y if noise.outputs is None else take(y, noise.outputs)

    @override
    def combine(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        core = noise.core.reshape(*noise.core.shape[:3], -1)
        if noise.outputs is None:
            columns = _counted(noise.inputs, utilities, noise.width)
            total = torch.einsum("gokt,gki->goit", core, columns)
        elif noise.inputs is None:
            rows = _counted(noise.outputs, utilities, core.shape[1])
            total = torch.einsum("gok,gkit->goit", rows, core)
        else:
            total = self._combine_both(noise, utilities)
        return total.reshape(*total.shape[:3], *noise.core.shape[3:])

    @override
    def perturbations(self, noise: PermutedNoise) -> Tensor:
        members = next(picks.shape[0] for picks in (noise.inputs, noise.outputs) if picks is not None)
        dense = noise.core.expand(members, *noise.core.shape)
        if noise.outputs is not None:
            rows = over_taps(noise.outputs, dense)
            dense = dense.gather(2, rows.expand(*noise.outputs.shape, *dense.shape[3:]))
        if noise.inputs is not None:
            columns = over_taps(noise.inputs.unsqueeze(2), dense).expand_as(dense)
            wide = dense.new_zeros(*dense.shape[:3], noise.width, *dense.shape[4:])
            dense = wide.scatter_add_(3, columns, dense)
        return dense

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs, *_ = weight
        columns = _kept("in_sparsity", self.in_sparsity, inputs)
        rows = _kept("out_sparsity", self.out_sparsity, outputs)
        kept = weight.numel() // (outputs * inputs) * rows * columns
        written = 2 * kept * members
        if self.side != "both":
            # Either each member's E_m is added up, or its utility where it picks, and then one product.
            picks, width = (columns, inputs) if self.side == "in" else (rows, outputs)
            written = min(written, groups * picks * members + 2 * kept * width)
        return Flops(forward=2 * (weight.numel() + kept), update=written)

    def _picks(self, stream: NoiseStream, draw: str, groups: int, width: int, size: int) -> Tensor:
        if self.replace:
            return stream.integers(draw, width, groups, size)
        if size == width:
            return stream.permutations(draw, groups, width)
        return stream.subsets(draw, groups, width, size)

    def _combine_both(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        """Sum over pieces of the population: with both sides shuffled no smaller sum exists."""
        total = torch.zeros_like(self.perturbations(noise.narrow(0, 1))[0])
        step = max(1, PIECE_BYTES.get(total.device.type, 2**23) // total.nbytes)
        for start in range(0, utilities.shape[0], step):
            part = self.perturbations(noise.narrow(start, start + step))
            total += torch.tensordot(utilities[start : start + step], part, dims=1)
        return total


def _kept(name: str, sparsity: float, width: int) -> int:
    """How many of ``width`` channels a sparsity keeps."""
    if not isinstance(sparsity, int):
        return max(1, round(sparsity * width))
    if sparsity > width:
        message = f"{name} = {sparsity} is above the width: the weight has {width} channels there"
        raise ValueError(message)
    return sparsity


def _counted(picks: Tensor | None, utilities: Tensor, width: int) -> Tensor:
    """Sum the utilities of the members that pick channel c at place p: [m, g, p] -> [g, p, c]."""
    assert picks is not None  # noqa: S101  one side is always permuted
    places = picks.permute(1, 2, 0)
    return utilities.new_zeros(*places.shape[:2], width).scatter_add_(
        2, places, utilities.expand(places.shape)
    )
