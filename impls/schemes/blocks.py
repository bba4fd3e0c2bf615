"""Block dropout shared by groups of members: dropped blocks are not computed, so the product is smaller.

Blocks of input columns, or of input columns and output rows, are kept or dropped for a whole group of
members. Members of a group have the same noise.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.member_ops import append_axes, group_by_core, members_of_core, same_core_fraction
from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import (
    AbstractRowScheme,
    Flops,
    TensorRef,
    check_choice,
    check_count,
    check_probability,
    inverse_participation_ratio,
)
from impls.schemes.dropout import FAIR, AbstractDropoutNoise, AbstractWeightDropout
from impls.schemes.hadamard import FACTOR, hadamard_matrix, hadamard_width, sylvester

ALIGNED = 16
"""Borders of wide blocks are multiples of this number; otherwise products take 10 % longer."""

Spans = tuple[tuple[int, int], ...]
"""Runs of kept channels: (start, length) of each."""


@dataclass(frozen=True, eq=False)
class BlocksNoise(AbstractDropoutNoise):
    """The kept blocks of each group; member j is in group j modulo the number of groups.

    Attributes:
        members: the members of the noise.
        factors: xi = sigma E / W for each group and pair of blocks, [groups, output blocks, input blocks].
        inputs: kept input channels of each group.
        outputs: kept output channels of each group.
    """

    SHARED = frozenset({"factors", "inputs", "outputs", "sigma"})

    members: range
    factors: Tensor
    inputs: tuple[Spans, ...]
    outputs: tuple[Spans, ...]


def split_into_cells(width: int, count: int) -> tuple[int, int]:
    """Return the channels of a cell and the number of cells; each of ``count`` blocks is a run of cells.

    The last block also has the channels that are left over.
    """
    channels = ALIGNED if width >= 2 * ALIGNED * count else 1
    return channels, width // channels


def _block_borders(width: int, count: int) -> list[int]:
    """Return the start of each block of channels, and the end of the last one."""
    cell_width, cell_count = split_into_cells(width, count)
    return [*(block * cell_count // count * cell_width for block in range(count)), width]


def _merge_kept_blocks(kept: list[bool], width: int) -> Spans:
    """Return the channels of the kept blocks; adjacent blocks make one run."""
    spans = list[tuple[int, int]]()
    for is_kept, (start, stop) in zip(kept, pairwise(_block_borders(width, len(kept))), strict=True):
        if is_kept and spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], stop - spans[-1][0])
        elif is_kept:
            spans.append((start, stop - start))
    return tuple(spans)


def _take_runs(values: Tensor, axis: int, spans: Spans) -> Tensor:
    """Concatenate runs of channels; a single run is a view."""
    runs = [values.narrow(axis, start, length) for start, length in spans]
    return runs[0] if len(runs) == 1 else torch.cat(runs, axis)


def _expand_to_channels(values: Tensor, weight: Tensor) -> Tensor:
    """Expand values [..., output blocks, input blocks] to a weight's channels, [..., o, i, 1, ...]."""
    for axis, width in ((-2, weight.shape[1]), (-1, weight.shape[2])):
        count = values.shape[axis]
        cell_width, cell_count = split_into_cells(width, count)
        cell = (torch.arange(width, device=values.device) // cell_width).clamp(max=cell_count - 1)
        # The largest block with block * cell_count // count <= cell, so that it begins at or before the cell.
        block = ((cell + 1) * count - 1) // cell_count
        values = values.index_select(axis, block)
    return values.reshape(*values.shape, *[1] * (weight.dim() - 3))


@variant(source="ours")
@variant(side="both", groups=8, source="ours")
@dataclass(frozen=True)
class DropoutBlocks(AbstractWeightDropout[BlocksNoise], AbstractRowScheme[BlocksNoise]):
    """Groups of members drop random blocks of input columns, with ``both`` also of output rows.

    A gate says for each group whether one block is kept. With p = 1/2 the gates are columns of a Hadamard
    matrix, with random columns and signs at each step. Within a group, gates are independent and fair. If the
    number of groups is a power of two and above the number of gates, every block is kept in exactly half of
    the groups, and every two blocks agree in exactly half: the estimated effects of blocks do not mix. With
    another p each group keeps the same number of random blocks, the nearest to (1 - p) * blocks.

    ``side="in"`` updates by sum_m c_m E_m, the contrast E[c | on] - E[c | off] of each block: it can only
    rescale blocks of columns of W. ``side="both"`` learns W from rows by node perturbation, see
    :class:`~impls.perturbation.scheme.AbstractRowScheme`.

    A layer with fewer channels than ``blocks`` has one block per channel. Groups of a convolution have the
    same gates. The weight of an antithetic member is 2 W - (W + sigma E), which needs the plain product too.

    Memory    groups * blocks numbers; 0 per member.
    Work      1 - p of the plain product, (1 - p)^2 with ``both``, in one product for each group: few large
              groups are fast; many small ones give more independent samples. The update of ``both`` takes two
              products and a forward.
    Quality   kappa = d / blocks for d weights if every two blocks agree in half of the groups and groups are
              large: n_eff of a large population is the number of blocks. No closed form otherwise.
    """

    p: float = 0.5
    side: Literal["in", "both"] = "in"
    groups: int = 4
    blocks: int = 2

    def __post_init__(self) -> None:
        check_probability("p", self.p)
        check_choice("side", self.side, "in", "both")
        check_count("groups", self.groups, 2)  # a contrast needs two groups
        check_count("blocks", self.blocks)

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.side == "both"

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BlocksNoise:
        _, outputs, inputs, *_ = weight.shape
        columns, rows = self._block_count(inputs), self._block_count(outputs) if self.side == "both" else 0
        # Gates are drawn on the host, so that a forward does not synchronize with the device.
        host_stream = replace(stream.shared(), device=torch.device("cpu"), dtype=torch.float32)
        kept = self._draw_gates(host_stream, columns, rows)
        kept_in = kept[:, :columns]
        kept_out = kept[:, columns:] if rows else kept.new_ones(self.groups, 1)  # one block of all outputs
        gates_in = kept_in.double() / self._kept_fraction(inputs)
        gates_out = kept_out.double() / (self._kept_fraction(outputs) if rows else 1)
        factors = gates_out.unsqueeze(2) * gates_in.unsqueeze(1) - 1
        return BlocksNoise(
            weight=TensorRef(weight),
            sigma=1.0,
            members=stream.members,
            factors=factors.to(stream.device, weight.dtype),
            inputs=tuple(_merge_kept_blocks(gates, inputs) for gates in kept_in.tolist()),
            outputs=tuple(_merge_kept_blocks(gates, outputs) for gates in kept_out.tolist()),
        )

    @override
    def apply_gated_weights(
        self, op: AbstractOperator, weight: Tensor, noise: BlocksNoise, x: Tensor
    ) -> Tensor:
        scale = 1 / self.density(weight.shape)
        empty = op.apply_shared(x[:, :0], weight)
        y = empty.new_empty(*x.shape[:2], *empty.shape[2:])
        for group, (inputs, outputs) in enumerate(zip(noise.inputs, noise.outputs, strict=True)):
            group_members = members_of_core(group, len(noise.inputs), noise.members)
            group_x, group_y = x[:, group_members], y[:, group_members]
            if not group_x.shape[1]:
                continue
            if not inputs or sum(length for _, length in outputs) < weight.shape[1]:
                group_y.zero_()  # dropped outputs
            if not inputs:
                continue
            # Scaling also makes the inputs contiguous, which makes the product fast.
            kept_x = _take_runs(group_x, 3, inputs) * scale
            for start, length in outputs:
                kept_weight = _take_runs(weight.narrow(1, start, length), 2, inputs)
                op.add_shared_to(group_y.narrow(3, start, length), 0.0, kept_x, kept_weight)
        return y

    @override
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: BlocksNoise, utilities: Tensor, x: Tensor
    ) -> Tensor:
        y, vjp = torch.func.vjp(lambda w: op.apply_shared(x, w), weight)  # type: ignore[misc]  # 2-tuple
        change = self.apply_gated_weights(op, weight, noise, x) - y
        total: Tensor = vjp(change * append_axes(utilities / self.variance(weight.shape), y))[0]
        return total

    @override
    def weighted_sum(self, noise: BlocksNoise, utilities: Tensor) -> Tensor:
        weight = noise.weight.tensor
        group_utilities = group_by_core(utilities, noise.factors.shape[0], noise.members).sum(1)
        block_factors = torch.tensordot(group_utilities, noise.factors, dims=1)
        return weight * _expand_to_channels(block_factors, weight) / noise.sigma

    @override
    def dense_noise(self, noise: BlocksNoise) -> Tensor:
        weight = noise.weight.tensor
        members = torch.arange(noise.members.start, noise.members.stop, device=noise.factors.device)
        factors = noise.factors[members % noise.factors.shape[0]]
        return weight * _expand_to_channels(factors, weight).unsqueeze(1) / noise.sigma

    @override
    def variance(self, weight: torch.Size) -> float:
        return 1 / self.density(weight) - 1

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        blocks = self._block_count(weight.shape[2])
        is_balanced = self.p == FAIR and self.groups == hadamard_width(self.groups, blocks + 1)
        column_squares = weight.double().square().transpose(0, 2).flatten(1).sum(1)
        borders = pairwise(_block_borders(len(column_squares), blocks))
        block_squares = torch.stack([column_squares[start:stop].sum() for start, stop in borders])
        ratio = inverse_participation_ratio(block_squares)
        if self.learns_from_rows or not is_balanced or ratio is None:
            return None
        # Members of a group have equal gates; members of different groups have orthogonal rows of the matrix.
        same_group = same_core_fraction(members, self.groups)
        other_groups = ratio - (1 - ratio) / (self.groups - 1)
        return weight.numel() * (same_group + (1 - same_group) * other_groups)

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return self.groups

    def density(self, weight: torch.Size) -> float:
        """Return the share of the plain product that a forward computes."""
        kept_in = self._kept_fraction(weight[2])
        return kept_in * self._kept_fraction(weight[1]) if self.side == "both" else kept_in

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        product = 2 * weight.numel()
        forward = math.ceil(product * self.density(weight))
        if self.learns_from_rows:
            return Flops(forward=forward, update=forward + 2 * product)
        # The update sums utilities by group, sums the groups' factors by block, and scales each weight once.
        scaling = members + 2 * self.groups * self._block_count(weight[2]) + weight.numel()
        return Flops(forward=forward, update=scaling)

    @override
    def read_bytes(self, weight: Tensor, noise: BlocksNoise) -> int:
        # One group on average: all groups may keep the same blocks.
        return int(weight.nbytes * self.density(weight.shape))

    def _draw_gates(self, stream: NoiseStream, columns: int, rows: int) -> Tensor:
        """Draw the gates of blocks, bool [groups, columns + rows], on the CPU."""
        if self.p != FAIR:
            kept = torch.zeros(self.groups, columns + rows, dtype=torch.bool)
            for name, first, count in (("inputs", 0, columns), ("outputs", columns, rows)):
                size = round((1 - self.p) * count)
                if size:
                    kept.scatter_(1, stream.subsets(name, self.groups, count, size)[0] + first, value=True)
            return kept
        # Groups are rows of a Hadamard matrix, and gates its columns with random signs.
        gates = columns + rows
        order = hadamard_width(self.groups, gates + 1)
        factor = sylvester(FACTOR, device=stream.device, dtype=stream.dtype)
        matrix = hadamard_matrix(order, order, factor)
        # The first column is constant, so it cannot be a gate.
        gate_columns = stream.permutations("columns", 1, order - 1)[0, 0, :gates] + 1
        group_rows = stream.permutations("rows", 1, order)[0, 0, : self.groups]
        return matrix[group_rows][:, gate_columns] * stream.signs("signs", gates)[0] > 0

    def _block_count(self, width: int) -> int:
        """Return the number of blocks of an axis of ``width`` channels.

        Raises:
            UnsupportedError: all blocks would be kept, or none.
        """
        count = min(self.blocks, width)
        # With p = 0.5 each block has a fair sign, so that the number of kept blocks varies.
        if self.p != FAIR and not 0 < round((1 - self.p) * count) < count:
            raise UnsupportedError(
                f"p = {self.p} keeps none or all of {count} blocks: use p = 0.5, or more blocks, at most "
                f"one for each of the layer's {width} channels"
            )
        return count

    def _kept_fraction(self, width: int) -> float:
        """Return q, the mean fraction of blocks that a group keeps on an axis of ``width`` channels."""
        count = self._block_count(width)
        return FAIR if self.p == FAIR else round((1 - self.p) * count) / count
