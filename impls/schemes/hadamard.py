"""Hadamard noise: a fast Walsh-Hadamard transform between two passes of each member's signs.

The transform is computed in plain torch as products with small Hadamard matrices. Sylvester's matrix of A B
rows is the Kronecker product of those of A and B rows. Multiplying by it is one product with each factor,
along one axis each: for 1024 = 32 * 32 that is 64 multiplications per channel instead of 1024, in two passes
over memory instead of the ten passes of additions only. On a CPU two factors of 32 take a ninth of the time
of the whole product. One factor is fastest up to 64; above, factors as equal as possible are. Smaller
Sylvester matrices are the top left corners of larger ones, so only the largest is stored. Rows and columns
beyond the outputs and inputs are not computed.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import (
    add_with_signs,
    append_axes,
    count_signs,
    draw_signs,
    flip_signs,
    sum_outer_products,
)
from impls.perturbation.noise import Noise, NoiseStream, pieces
from impls.perturbation.operators import AbstractOperator, TransposedLinear
from impls.perturbation.scheme import AbstractScheme, Flops

PIECE_BYTES = 2**21
"""Bytes of activations that are multiplied by signs and transformed at a time on a CPU; they fit its cache.

Temporaries of all rows at once would cause page faults in every call. These take up to 15 % of the time of a
Linear layer's product, and up to the time of a whole convolution.
"""


@dataclass(frozen=True, eq=False)
class HadamardNoise(Noise):
    """Each member's signs, as int8.

    Attributes:
        factor: the largest factor of the Hadamard matrix, [f, f], shared by all members.
        inputs: [m, g, i].
        outputs: [m, g, o].
        taps: [m, *taps]; None: the weight has no taps.
    """

    SHARED = frozenset({"factor"})

    factor: Tensor
    inputs: Tensor
    outputs: Tensor
    taps: Tensor | None


@variant(source="ours; Ailon and Chazelle 2009, doi:10.1137/060673096, have the transform between signs")
@dataclass(frozen=True)
class Hadamard(AbstractScheme[HadamardNoise]):
    """E_m is a Hadamard matrix with its columns, rows and taps flipped: r_o s_i u_t H[o, i], all signs.

    H is the top left corner of the smallest Sylvester matrix with enough rows and columns.

    Memory    n * (g * (i + o) + taps) signs of one byte.
    Work      two sign passes and a transform of (i + o) * 32 multiplications per row at a width of 1024; no
              second matrix product. Convolutions: a depthwise convolution with the members' taps, then the
              transform over channels.
    Quality   kappa = 0: two different entries never have the same product of signs. Signs for channels only
              would have kappa = taps - 1, which the taps' signs remove.
    """

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> HadamardNoise:
        groups, outputs, inputs, *taps = weight.shape
        largest = hadamard_factors(hadamard_width(outputs, inputs))[0]
        return HadamardNoise(
            factor=sylvester(largest, device=weight.device, dtype=weight.dtype),
            inputs=draw_signs(stream, "inputs", groups, inputs),
            outputs=draw_signs(stream, "outputs", groups, outputs),
            taps=draw_signs(stream, "taps", *taps) if taps else None,
        )

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: HadamardNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y, members = op.apply_shared(x, weight), x.shape[1]
        all_bytes = max(x.nbytes, y.nbytes)
        piece_bytes = PIECE_BYTES if x.device.type == "cpu" else all_bytes
        for start, stop in pieces(members, all_bytes // max(1, members), piece_bytes):
            self._add_corrections(op, noise.narrow(start, stop), x[:, start:stop], y[:, start:stop], sigma)
        return y

    @override
    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: HadamardNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        # H is symmetric: the signs of rows are those of the transpose's columns.
        swapped = replace(noise, inputs=noise.outputs, outputs=noise.inputs)
        return self.forward(op.untransposed, weight.mT, swapped, x, sigma)

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        # H is common to all members: their signs are summed first, inputs and taps as one axis.
        inputs, taps = noise.inputs, () if noise.taps is None else noise.taps.shape[1:]
        if noise.taps is not None:
            inputs = (inputs.unsqueeze(3) * noise.taps.view(len(inputs), 1, 1, -1)).flatten(2)
        total = sum_outer_products(utilities, noise.outputs, inputs).unflatten(2, (noise.inputs.shape[2], -1))
        return total.mul_(_core_matrix(noise).unsqueeze(-1)).view(*total.shape[:3], *taps)

    @override
    def dense_noise(self, noise: HadamardNoise) -> Tensor:
        dense = _core_matrix(noise) * noise.outputs.unsqueeze(3) * noise.inputs.unsqueeze(2)
        if noise.taps is None:
            return dense
        taps = noise.taps.view(-1, 1, 1, 1, *noise.taps.shape[1:])
        return append_axes(dense, taps) * taps

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return 0.0

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        # Negating the signs of two axes together leaves E_m as it is.
        groups, outputs, inputs, *taps = weight
        return count_signs(groups * (outputs + inputs - 1) + math.prod(taps) - 1)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs = weight[:3]
        positions = weight.numel() // (groups * outputs * inputs)
        # Flipping signs counts as 0; the additions of the taps and of the smallest transform count.
        stages = (min(outputs, inputs) - 1).bit_length()
        added = groups * (inputs * (positions - 1) + max(outputs, inputs) * stages)
        return Flops(forward=2 * weight.numel() + added, update=weight.numel() * (2 * members + 1))

    def _add_corrections(
        self, op: AbstractOperator, noise: HadamardNoise, x: Tensor, y: Tensor, sigma: float | Tensor
    ) -> None:
        """Add the members' corrections to their outputs."""
        if noise.taps is not None:
            x = self._convolve_taps(op, noise, x)
        elif x.dim() > 4:  # noqa: PLR2004  tokens count as rows: their channels are contiguous
            x, y = x.mT.flatten(2, 3), y.mT.flatten(2, 3)
            sigma = sigma[..., 0] if isinstance(sigma, Tensor) else sigma
        if noise.taps is None:
            x = flip_signs(x, noise.inputs)
        channels = x.reshape(-1, x.shape[3], x.shape[4:].numel())
        values = walsh_hadamard_transform(channels, y.shape[3], noise.factor)
        add_with_signs(y, values.reshape(y.shape), noise.outputs, sigma)

    def _convolve_taps(self, op: AbstractOperator, noise: HadamardNoise, x: Tensor) -> Tensor:
        """Convolve each channel with its member's taps and its sign, as a depthwise convolution."""
        assert noise.taps is not None  # noqa: S101  the caller checks for taps
        members, groups, inputs = noise.inputs.shape
        signs = noise.inputs.view(members, groups * inputs, *[1] * (noise.taps.dim() + 1))
        kernels = (signs * noise.taps.view(members, 1, 1, 1, *noise.taps.shape[1:])).to(x.dtype)
        return (
            op.apply_per_member(x.flatten(2, 3).unsqueeze(3), kernels)
            .flatten(2, 3)
            .unflatten(2, (groups, inputs))
        )


def _core_matrix(noise: HadamardNoise) -> Tensor:
    """Return H, the matrix that all members' signs multiply, [o, i]."""
    return hadamard_matrix(noise.outputs.shape[2], noise.inputs.shape[2], noise.factor)


FACTOR = 64
"""Rows of the largest factor."""

IMAGE_FACTOR = 16
"""Rows of the largest factor for images on a CPU: smaller products stay in its cache."""


def hadamard_width(outputs: int, inputs: int) -> int:
    """Return the size of the smallest Sylvester matrix with these rows and columns, a power of two."""
    return 1 << (max(outputs, inputs) - 1).bit_length()


def hadamard_factors(size: int, largest: int = FACTOR) -> list[int]:
    """Split a power of two into powers of two up to ``largest``, as equal as possible, largest first."""
    bits = size.bit_length() - 1
    count = max(1, -(-bits // (largest.bit_length() - 1)))
    # The exponents (bits + index) // count add up to ``bits``, and differ by 1 at most.
    return [1 << (bits + index) // count for index in reversed(range(count))]


def sylvester(size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return Sylvester's Hadamard matrix of size up to 256: +1 where i & j has an even number of set bits."""
    indices = torch.arange(size, device=device)
    parity = indices.unsqueeze(1) & indices
    for shift in (4, 2, 1):  # the exclusive or of all eight bits reaches the lowest one
        parity = parity ^ (parity >> shift)
    return (1 - 2 * (parity & 1)).to(dtype)


def hadamard_matrix(outputs: int, inputs: int, factor: Tensor) -> Tensor:
    """Return the first rows and columns of the smallest Sylvester matrix that has them, [outputs, inputs].

    ``factor`` is a Sylvester matrix at least as large as the largest factor.
    """
    matrix, width = factor[:1, :1], hadamard_width(outputs, inputs)
    for size in reversed(hadamard_factors(width)):
        matrix = torch.kron(factor[:size, :size], matrix)[:outputs, :inputs]
    return matrix


def walsh_hadamard_transform(x: Tensor, outputs: int, factor: Tensor) -> Tensor:
    """Multiply channels by the first rows of a Hadamard matrix: [b, i, s] -> [b, outputs, s].

    Args:
        x: batch, channels and positions.
        outputs: number of output channels.
        factor: a Sylvester matrix at least as large as the largest factor.
    """
    largest = IMAGE_FACTOR if x.shape[2] > 1 and x.device.type == "cpu" else FACTOR
    *outer, inner = hadamard_factors(hadamard_width(outputs, x.shape[1]), largest)
    return _transform(x, outputs, outer, inner, factor)


def _transform(x: Tensor, outputs: int, outer: list[int], inner: int, factor: Tensor) -> Tensor:
    """Multiply by the Kronecker product of the outer factors and the inner one, [b, i, s] -> [b, o, s]."""
    batch, inputs, space = x.shape
    if not outer or max(outputs, inputs) <= inner:
        return _multiply_by_factor(x, outputs, factor)
    # Channels are a matrix [columns, inner]: one factor multiplies its second axis, the others its first.
    padding = -inputs % inner
    if padding:
        x = functional.pad(x, (0, 0, 0, padding))
    rows, columns = -(-outputs // inner), x.shape[1] // inner
    if rows < columns:
        # The outer product shrinks its axis, so it comes first.
        x = _transform(x.reshape(batch, columns, inner * space), rows, outer[:-1], outer[-1], factor)
        x = _multiply_by_factor(x.reshape(batch * rows, inner, space), inner, factor)
    else:
        x = _multiply_by_factor(x.reshape(batch * columns, inner, space), inner, factor)
        x = _transform(x.reshape(batch, columns, inner * space), rows, outer[:-1], outer[-1], factor)
    return x.reshape(batch, rows * inner, space)[:, :outputs]


def _multiply_by_factor(x: Tensor, outputs: int, factor: Tensor) -> Tensor:
    """Multiply channels by the top left corner of one factor, [b, i, s] -> [b, outputs, s]."""
    corner = factor[:outputs, : x.shape[1]]
    if x.shape[2] == 1:
        return (x.squeeze(2) @ corner.mT).unsqueeze(2)
    return torch.matmul(corner, x)
