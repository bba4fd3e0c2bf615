"""Hadamard noise: a fast orthogonal transform between two passes of each member's own signs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.axes import take
from impls.perturbation.cores import by_core, own_cores
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.options import check_count
from impls.perturbation.scheme import AbstractScheme, Flops
from impls.perturbation.signs import add_flipped, crossed, drawn, flipped
from impls.schemes import walsh_hadamard

PIECE_BYTES = 2**21
"""How much of the rows goes through signs and transform at a time on a CPU, where it stays in the cache.

Intermediate values of all rows at once would be fresh memory in every call, and cost page faults: up to
15 % of a Linear layer's product, up to as much as a convolution itself.
"""


@dataclass(frozen=True, eq=False)
class HadamardNoise(Noise):
    """Each member's signs, as int8.

    Attributes:
        seed: the largest factor of the Hadamard matrix, [f, f], shared.
        order: [cores, g, i], shared: the input that each column of the matrix meets; None: column j meets j.
        inputs: [m, g, i].
        outputs: [m, g, o].
        taps: [m, *taps], or None where the weight has no taps.
        members: whose signs these are.

    """

    SHARED = frozenset({"seed", "order"})

    seed: Tensor
    order: Tensor | None
    inputs: Tensor
    outputs: Tensor
    taps: Tensor | None
    members: range


@variant(source="ours; Ailon and Chazelle 2009, doi:10.1137/060673096, have the transform between signs")
@dataclass(frozen=True)
class Hadamard(AbstractScheme[HadamardNoise]):
    """E_m is a Hadamard matrix with its columns, rows and taps flipped: r_o s_i u_t H[o, i], signs only.

    The matrix is cut out of the smallest one of a power of two that has as many rows and columns. With
    several cores, each has its columns in a random order of its own: kappa is 0 as it is, and higher moments
    of the members' inner products come closer to those of independent entries.

    Memory    n * (g * (i + o) + taps) signs of one byte.
    Work      two sign passes and a transform of (i + o) * 32 multiplications a row at a width of 1024; no
              second matrix product. Convolutions: a depthwise one with the members' own taps, and the
              transform over channels.
    Quality   kappa = 0: r r', s s' and u u' of two entries meet only in the same entry. Signs for channels
              alone, which the taps share, have kappa = taps - 1; the taps' own signs take that away.
    """

    cores: int = 1

    def __post_init__(self) -> None:
        """Refuse a number of cores that is none."""
        check_count("cores", self.cores)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> HadamardNoise:
        groups, outputs, inputs, *taps = weight.shape
        largest = max(walsh_hadamard.factors(walsh_hadamard.width(outputs, inputs)))
        order = None
        if self.cores > 1:
            order = stream.shared().permutations("order", self.cores * groups, inputs)[0]
            order = order.unflatten(0, (self.cores, groups))
        return HadamardNoise(
            seed=walsh_hadamard.sylvester(largest, device=weight.device, dtype=weight.dtype),
            order=order,
            inputs=drawn(stream, "inputs", groups, inputs),
            outputs=drawn(stream, "outputs", groups, outputs),
            taps=drawn(stream, "taps", *taps) if taps else None,
            members=stream.members,
        )

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: HadamardNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y, members = op.shared(x, weight), x.shape[1]
        row_bytes = max(x.nbytes, y.nbytes) // max(1, members)
        step = max(1, PIECE_BYTES // max(1, row_bytes)) if x.device.type == "cpu" else max(1, members)
        for start in range(0, members, step):
            stop = min(start + step, members)
            self._add(op, noise.narrow(start, stop), x[:, start:stop], y[:, start:stop], sigma)
        return y

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        inputs, groups = noise.inputs, noise.inputs.shape[1]
        if noise.taps is not None:
            inputs = (inputs.unsqueeze(3) * noise.taps.view(len(inputs), 1, 1, -1)).flatten(2)
        total = None
        for core in range(self.cores):
            c, r, s = (
                by_core(values, self.cores, noise.members)[core]
                for values in (utilities, noise.outputs, inputs)
            )
            signs = crossed(c, r, s).unflatten(2, (noise.inputs.shape[2], -1))
            part = signs.mul_(self._columns(noise, core).unsqueeze(-1))
            total = part if total is None else total.add_(part)
        assert total is not None  # noqa: S101  there is a core
        return total.view(groups, *total.shape[1:3], *(() if noise.taps is None else noise.taps.shape[1:]))

    @override
    def dense_noise(self, noise: HadamardNoise) -> Tensor:
        cores = torch.stack([self._columns(noise, core) for core in range(self.cores)])
        dense = own_cores(cores, noise.members) * noise.outputs.unsqueeze(3) * noise.inputs.unsqueeze(2)
        if noise.taps is None:
            return dense
        taps = noise.taps.view(-1, 1, 1, 1, *noise.taps.shape[1:])
        return dense.view(*dense.shape, *[1] * (taps.dim() - 4)) * taps

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs = weight[:3]
        positions = weight.numel() // (groups * outputs * inputs)
        # Flipping a sign is no arithmetic: additions of the taps, and of a transform cut to what is needed.
        rounds = (min(outputs, inputs) - 1).bit_length()
        added = groups * (inputs * (positions - 1) + max(outputs, inputs) * rounds)
        summed = 2 * weight.numel() * members + weight.numel() * (2 * min(self.cores, members) - 1)
        return Flops(forward=2 * weight.numel() + added, update=summed)

    def _add(
        self, op: AbstractOperator, noise: HadamardNoise, x: Tensor, y: Tensor, sigma: float | Tensor
    ) -> None:
        """Add the members' corrections to their outputs."""
        x = flipped(x, noise.inputs) if noise.taps is None else self._filtered(op, noise, x)
        if noise.order is not None:
            x = take(x, own_cores(noise.order, noise.members))
        channels = x.reshape(-1, x.shape[3], x.shape[4:].numel())
        values = walsh_hadamard.transform(channels, y.shape[3], noise.seed)
        add_flipped(y, values.reshape(y.shape), noise.outputs, sigma)

    def _filtered(self, op: AbstractOperator, noise: HadamardNoise, x: Tensor) -> Tensor:
        """Convolve each channel with its member's taps and its own sign: channels stand as groups."""
        assert noise.taps is not None  # noqa: S101  the caller has asked
        members, groups, inputs = noise.inputs.shape
        signs = noise.inputs.view(members, groups * inputs, *[1] * (noise.taps.dim() + 1))
        own = (signs * noise.taps.view(members, 1, 1, 1, *noise.taps.shape[1:])).to(x.dtype)
        return op.batched(x.flatten(2, 3).unsqueeze(3), own).flatten(2, 3).unflatten(2, (groups, inputs))

    def _columns(self, noise: HadamardNoise, core: int) -> Tensor:
        """Write out a core, [g, o, i]."""
        groups, outputs, inputs = noise.outputs.shape[1], noise.outputs.shape[2], noise.inputs.shape[2]
        written = walsh_hadamard.matrix(outputs, inputs, noise.seed).expand(groups, outputs, inputs)
        if noise.order is None:
            return written
        places = noise.order[core].unsqueeze(1).expand_as(written)
        return torch.empty_like(written, memory_format=torch.contiguous_format).scatter_(2, places, written)
