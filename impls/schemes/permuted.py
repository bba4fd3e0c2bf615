"""Permuted noise: shared cores whose columns, rows or both each member permutes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import (
    add_to_channels,
    append_axes,
    apply_cores,
    group_by_core,
    member_cores,
    same_core_fraction,
    sum_pieces,
    take_channels,
    unused_core_bytes,
)
from impls.perturbation.noise import Noise, NoiseStream, piece_bytes, pieces
from impls.perturbation.operators import AbstractOperator, TransposedLinear
from impls.perturbation.scheme import AbstractAdditiveScheme, Flops, check_choice, check_count, check_fraction


@dataclass(frozen=True, eq=False)
class PermutedNoise(Noise):
    """The shared cores and each member's indices.

    Attributes:
        core: [cores, g, rows, k, *taps], shared; member j has core j modulo the number of cores. With sparse
            outputs the last row is zero.
        inputs: [m, g, k], the input that each column of the core multiplies; None: input j for column j.
        outputs: [m, g, o], the row of the core that each output uses; None: row j for output j.
        width: number of inputs.
        members: the members of the indices.
    """

    SHARED = OWNED = frozenset({"core"})

    core: Tensor
    inputs: Tensor | None
    outputs: Tensor | None
    width: int
    members: range


@variant(in_sparsity=0.1, cores=8, source="ours")
@variant(side="both", source="NESgpu")
@variant(side="out", out_sparsity=(0.5, 0.1), source="NESgpu")
@variant(side="out", source="NESgpu")
@variant(in_sparsity=(0.5, 0.1), source="NESgpu")
@variant(source="NESgpu")
@dataclass(frozen=True)
class Permuted(AbstractAdditiveScheme[PermutedNoise]):
    """E_m is a shared Gaussian core with its columns, rows or both permuted by each member.

    A sparsity is the share of selected channels, rounded down to a whole number of at least 1. E_m is zero
    in all others, and the core is scaled to give entries unit variance. Permuting inputs leaves a component
    common to all members, the mean of the core's columns: center the utilities.

    Memory    n * g * k indices for inputs, n * g * o for outputs; the cores once each.
    Work      the selected share of one more matrix product, for any number of cores; the update of one side
              is one product for each core. That of both sides sums the members' noise in pieces.
    Quality   kappa = (o * taps + 1) / k + 1 / i for inputs, of which k are selected, likewise for outputs:
              all members share the core's second moments, and its mean is lost to centering. Both sides:
              (3 taps + 4) / (o * i), about 0. These hold up to factors of 1 + 1 / width; the method ``kappa``
              is exact. g cores divide kappa by g only if k is well below i: the means of cores differ, which
              centering over all members does not remove, and which nearly doubles kappa / g at k = i.
    """

    side: Literal["in", "out", "both"] = "in"
    in_sparsity: float = 1.0
    out_sparsity: float = 1.0
    cores: int = 1

    def __post_init__(self) -> None:
        """Check the options; the sparsity of a side that is not permuted must be 1."""
        check_count("cores", self.cores)
        check_choice("side", self.side, "in", "out", "both")
        for name, value, unused in (
            ("in_sparsity", self.in_sparsity, "out"),
            ("out_sparsity", self.out_sparsity, "in"),
        ):
            check_fraction(name, value)
            if value != 1 and self.side == unused:
                raise ValueError(
                    f"{name}={value} has no effect with side={self.side!r}: omit it or set side='both'"
                )

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> PermutedNoise:
        groups, outputs, inputs, *taps = weight.shape
        columns, rows = self._core_shape(weight.shape)
        core = stream.shared().normal("core", self.cores, groups, rows, columns, *taps)[0]
        if (columns, rows) != (inputs, outputs):
            core *= math.sqrt(inputs * outputs / (columns * rows))
        if rows < outputs:  # a row of zeros, which all outputs that are not selected use
            core = torch.cat([core, core.new_zeros(self.cores, groups, 1, columns, *taps)], dim=2)
        input_index = output_index = None
        if self.side != "out":
            input_index = _draw_channels(stream, "inputs", groups, inputs, columns)
        if self.side != "in":
            output_index = _draw_channels(stream, "outputs", groups, outputs, outputs).clamp_(max=rows)
        return PermutedNoise(core, input_index, output_index, inputs, stream.members)

    @override
    def correction(self, op: AbstractOperator, noise: PermutedNoise, x: Tensor) -> Tensor:
        if noise.inputs is not None:
            x = take_channels(x, noise.inputs)
        y = apply_cores(op, x, noise.core, noise.members)
        return y if noise.outputs is None else take_channels(y, noise.outputs)

    @override
    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: PermutedNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        if noise.outputs is not None:  # the row of zeros takes the outputs that are not selected
            x = add_to_channels(
                x.new_zeros(*x.shape[:3], noise.core.shape[2], *x.shape[4:]), noise.outputs, x
            )
        changes = apply_cores(op, x, noise.core, noise.members) * sigma
        return y.add_(changes) if noise.inputs is None else add_to_channels(y, noise.inputs, changes)

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        # For one side utilities are summed by the places of channels before they multiply the core.
        core = noise.core.reshape(*noise.core.shape[:4], -1)
        if noise.outputs is None:
            columns = _sum_utilities_by_channel(noise, noise.inputs, utilities, noise.width)
            total = _sum_products(core.mT.flatten(2, 3), columns).view(*core.shape[1:3], -1, noise.width).mT
        elif noise.inputs is None:
            rows = _sum_utilities_by_channel(noise, noise.outputs, utilities, core.shape[2])
            total = _sum_products(rows, core.flatten(3))
        elif core.is_cpu and not torch.compiler.is_compiling():
            total = _sum_selected(noise, noise.inputs, noise.outputs, utilities)
        else:
            member_bytes = noise.outputs[0].numel() * noise.width * core.shape[4] * core.itemsize
            total = sum_pieces(
                torch.tensordot(utilities[start:stop], self.dense_noise(noise.narrow(start, stop)), dims=1)
                for start, stop in pieces(len(utilities), member_bytes, piece_bytes(core.device))
            )
        outputs = core.shape[2] if noise.outputs is None else noise.outputs.shape[2]
        return total.reshape(-1, outputs, noise.width, *noise.core.shape[4:])

    @override
    def dense_noise(self, noise: PermutedNoise) -> Tensor:
        dense = member_cores(noise.core, noise.members)
        if noise.outputs is not None:
            rows = append_axes(noise.outputs, dense)
            dense = dense.gather(2, rows.expand(*noise.outputs.shape, *dense.shape[3:]))
        if noise.inputs is not None:
            columns = append_axes(noise.inputs.unsqueeze(2), dense).expand_as(dense)
            zeros = dense.new_zeros(*dense.shape[:3], noise.width, *dense.shape[4:])
            dense = zeros.scatter_(3, columns, dense)
        return dense

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        groups, outputs, inputs, *taps = weight.shape
        columns, rows = self._core_shape(weight.shape)
        axes = {"in": [(inputs, columns)], "out": [(outputs, rows)]}
        axes["both"] = axes["in"] + axes["out"]
        moved_together = math.prod(taps) * {"in": outputs, "out": inputs, "both": 1}[self.side]
        return permuted_kappa(
            axes[self.side], moved_together, groups, same_core_fraction(members, self.cores)
        )

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        columns, rows = self._core_shape(weight)
        axes = [] if self.side == "out" else [(weight[2], columns)]
        axes += [] if self.side == "in" else [(weight[1], rows)]
        # In floats, which overflow to infinity: the number of ordered choices of k of w channels per group.
        choices = (float(w - j) for w, k in axes for j in range(k) for _ in range(weight[0]))
        return math.prod(choices, start=float(self.cores))

    @override
    def read_bytes(self, weight: Tensor, noise: PermutedNoise) -> int:
        return super().read_bytes(weight, noise) - unused_core_bytes(noise.core, noise.members)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs, *_ = weight
        columns, rows = self._core_shape(weight)
        selected = weight.numel() // (outputs * inputs) * rows * columns
        update = 2 * selected * members
        # Either each member's E_m is summed, or utilities are summed by place, followed by one product.
        if self.side == "both":
            sums, product = outputs * columns, 2 * weight.numel() * rows * columns
        else:
            sums, width = (columns, inputs) if self.side == "in" else (rows, outputs)
            product = 2 * selected * width
        update = min(update, groups * sums * members + product * min(self.cores, members))
        return Flops(forward=2 * (weight.numel() + selected), update=update)

    def _core_shape(self, weight: torch.Size) -> tuple[int, int]:
        """Return the numbers of columns and rows of a core; a share is rounded down, as by NESgpu."""
        return max(1, int(self.in_sparsity * weight[2])), max(1, int(self.out_sparsity * weight[1]))


def _draw_channels(stream: NoiseStream, draw: str, groups: int, width: int, size: int) -> Tensor:
    """Draw ``size`` of ``width`` channels in random order, [m, groups, size]."""
    if size == width:
        return stream.permutations(draw, groups, width)
    return stream.subsets(draw, groups, width, size)


def permuted_kappa(
    axes: Sequence[tuple[int, int]], moved_together: int, groups: int, same_core: float
) -> float | None:
    """Return kappa of a Gaussian core whose channels are put in random places of one or two axes.

    Let a permuted axis have w channels, of which the core has k, and let T entries of the core move together
    (those of the other axis and the taps). Given the core C, all channels are exchangeable: E[E E^T | C] has
    on each axis one eigenvalue for the mean over channels and one for the w - 1 deviations from it. Each is a
    quadratic form z^T B z of T core entries at a time: B = J / w for the mean, with J all ones, and B = (1 -
    J / w) / (w - 1) for a deviation, over the k selected places. Both have the trace k / w. Members have the
    same core with probability f = ``same_core``. Over Gaussian cores the square of such a T x T form has
    the trace

        T (tr B)^2 + T (T + 1) tr B^2 f.

    1 + kappa is d times the sum of these over all forms but the mean of means, divided by the square of the
    sum of traces. With N = prod w the number of forms, and S = prod (1 + a) - 1 the sum of tr B^2 / (tr B)^2
    over them, where a = (w / k)^2 (k - 1 + (1 - k / w)^2) / (w - 1) is that of an axis' deviations,

        1 + kappa = N (N - 1 + (T + 1) f S + (1 - f)^2 + (T g + 1) f (1 - f)) / (N - f)^2.

    The last terms are the mean of means. Centering removes the part that all cores share, but not the
    differences between the cores' means, which members with the same core share in all g groups.

    Args:
        axes: (w, k) of each permuted axis.
        moved_together: T.
        groups: g, groups of a convolution.
        same_core: f, the fraction of pairs of members with the same core.

    Returns:
        kappa, or None if members do not differ: a single channel is permuted.
    """
    forms = math.prod(width for width, _ in axes)
    if forms == same_core:
        return None
    squares = math.prod(
        1 + (w / k) ** 2 * (k - 1 + (1 - k / w) ** 2) / (w - 1) if w > 1 else 1 for w, k in axes
    )
    mean_of_means = (1 - same_core) ** 2 + (moved_together * groups + 1) * same_core * (1 - same_core)
    total = forms - 1 + (moved_together + 1) * same_core * (squares - 1) + mean_of_means
    return forms * total / (forms - same_core) ** 2 - 1


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """Sum left [c, g, p, k] @ right [c, g, k, q] over cores c, by one product for each group: [g, p, q]."""
    if len(left) == 1:
        return torch.bmm(left[0], right[0])
    return torch.bmm(left.permute(1, 2, 0, 3).flatten(2), right.transpose(0, 1).flatten(1, 2))


def _sum_selected(noise: PermutedNoise, inputs: Tensor, outputs: Tensor, utilities: Tensor) -> Tensor:
    """Sum utilities[m] * E_m where members permute both sides: [g, o, i * taps].

    Copies of the core have their columns in each member's order, and embedding_bag sums the rows that the
    outputs select: one look-up for each entry of E_m, several times faster than to write it out.
    """
    dtype = torch.promote_types(torch.float32, noise.core.dtype)
    count, groups, rows, columns = noise.core.shape[:4]
    core = noise.core.to(dtype).reshape(count, groups, rows, columns, -1)
    if columns < noise.width:  # inputs that are not selected have a column of zeros
        core = functional.pad(core, (0, 0, 0, 1))
    selected = torch.full((*inputs.shape[:2], noise.width), columns).scatter_(
        2, inputs, torch.arange(columns).expand_as(inputs)
    )
    if count * groups > 1:
        core_index = torch.arange(noise.members.start, noise.members.stop).view(-1, 1, 1) % count
        selected += (core_index * groups + torch.arange(groups).view(-1, 1)) * core.shape[3]
    core = core.permute(2, 0, 1, 3, 4).flatten(1, 3)
    total = core.new_zeros(groups * outputs.shape[2], noise.width * core.shape[2])
    table = core.new_empty(0)
    # Larger pieces than elsewhere: the table is read only once.
    most_bytes = 2 * piece_bytes(core.device)
    for start, stop in pieces(len(utilities), groups * rows * total[0].nbytes, most_bytes):
        count = (stop - start) * groups
        torch.index_select(core, 1, selected[start:stop].flatten(), out=table.resize_(0))
        # The rows of the table are [rows, members, groups].
        bags = outputs[start:stop] * count + torch.arange(count).view(-1, groups, 1)
        weights = utilities[start:stop].to(dtype).expand(len(total), -1).contiguous()
        total += functional.embedding_bag(
            bags.permute(1, 2, 0).flatten(0, 1),
            table.view(rows * count, -1),
            per_sample_weights=weights,
            mode="sum",
        )
    return total.to(noise.core.dtype)


def _sum_utilities_by_channel(
    noise: PermutedNoise, index: Tensor | None, utilities: Tensor, width: int
) -> Tensor:
    """Sum, for each core, the utilities of members that select channel c for place p: [cores, g, p, c]."""
    assert index is not None  # noqa: S101  one side is always permuted
    count = noise.core.shape[0]
    if count == 1:
        channels = index.permute(1, 2, 0).unsqueeze(0)
    else:
        channels = group_by_core(index, count, noise.members).permute(0, 2, 3, 1)
        utilities = group_by_core(utilities, count, noise.members).view(count, 1, 1, -1)
    return utilities.new_zeros(*channels.shape[:3], width).scatter_add_(
        3, channels, utilities.expand(channels.shape)
    )
