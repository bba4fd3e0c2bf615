"""Dropped blocks that groups of members share: the product is really smaller than the plain one.

Blocks of input columns, or of input columns and output rows, are on or off for a whole group of members, and
what is off is not computed. There is no noise of a member's own: groups are what is sampled.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import append_axes, group_by_core, same_core_fraction
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import (
    AbstractRowScheme,
    Flops,
    TensorRef,
    check_choice,
    check_count,
    check_probability,
    concentration,
)
from impls.schemes.hadamard import FACTOR, hadamard_matrix, hadamard_width, sylvester

FAIR = 0.5
"""The p for which there are designs."""

ALIGNED = 16
"""Wide blocks begin at multiples of it: products of odd lengths take a tenth longer."""

Spans = tuple[tuple[int, int], ...]
"""Runs of channels that are kept: where each starts, and how many it has."""


@dataclass(frozen=True, eq=False)
class BlocksNoise(Noise):
    """What each group of members keeps; member j is in group j modulo their number.

    Attributes:
        members: whose noise this is.
        factors: sigma E / W for each group and pair of blocks, [groups, output blocks, input blocks].
        inputs: for each group the input channels that are kept.
        outputs: for each group the output channels that are kept.
        weight: W itself, which E_m is a multiple of whatever it becomes; it is not copied.
        sigma: the scale that E_m is divided by.

    """

    SHARED = frozenset({"factors", "inputs", "outputs", "sigma"})

    members: range
    factors: Tensor
    inputs: tuple[Spans, ...]
    outputs: tuple[Spans, ...]
    weight: TensorRef
    sigma: float = 1.0


def cells(width: int, count: int) -> tuple[int, int]:
    """Return how many channels a cell has, which no block cuts in two, and how many cells there are."""
    unit = ALIGNED if width >= 2 * ALIGNED * count else 1
    return unit, width // unit


def _borders(width: int, count: int) -> list[int]:
    """Return where each block of channels begins, and where the last one ends."""
    unit, number = cells(width, count)
    return [*(block * number // count * unit for block in range(count)), width]


def _spans(on: list[bool], width: int) -> Spans:
    """Return the channels of the blocks that are on, neighbours as one run."""
    spans = list[tuple[int, int]]()
    for is_on, (start, stop) in zip(on, pairwise(_borders(width, len(on))), strict=True):
        if is_on and spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], stop - spans[-1][0])
        elif is_on:
            spans.append((start, stop - start))
    return tuple(spans)


def _take(values: Tensor, axis: int, spans: Spans) -> Tensor:
    """Return runs of channels beside each other: a view of one run. Of none the first channel stands in."""
    parts = [values.narrow(axis, start, length) for start, length in spans or ((0, 1),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _over_channels(values: Tensor, weight: Tensor) -> Tensor:
    """Give values [..., output blocks, input blocks] to a weight's channels, [..., o, i, *taps]."""
    for axis, width in ((-2, weight.shape[1]), (-1, weight.shape[2])):
        count = values.shape[axis]
        unit, number = cells(width, count)
        cell = (torch.arange(width, device=values.device) // unit).clamp(max=number - 1)
        values = values.index_select(axis, ((cell + 1) * count - 1) // number)
    return values.reshape(*values.shape, *[1] * (weight.dim() - 3))


@variant(source="ours")
@variant(side="both", groups=8, source="ours")
@dataclass(frozen=True)
class DropoutBlocks(AbstractRowScheme[BlocksNoise]):
    """Groups of members drop blocks of input columns, with ``both`` also of output rows, at random.

    With p = 1/2 the gates are columns of a Hadamard matrix, chosen and given signs at random at each step. To
    one group its blocks are independent fair gates. Over the groups every block is on in exactly half of
    them, and every two blocks agree in exactly half, if there are a power of two of groups, and more of them
    than gates: the effects of blocks do not leak into each other. With another p each group keeps the same
    number of blocks, the nearest to (1 - p) * blocks, chosen at random.

    ``side="in"`` updates by sum_m c_m E_m, the contrast of each block, E[c | on] - E[c | off]: W with its
    blocks of columns rescaled, and nothing else. ``side="both"`` learns W from rows, as dropout of outputs
    does: what dropping did to a row's output, times its utility, is pulled back to W.

    A layer has as many blocks as channels if it has fewer than ``blocks``. Groups of a convolution share
    their members' gates. Antithetic halves see 2 W - (W + sigma E), which takes the plain product as well.

    Memory    groups * blocks numbers; nothing for each member.
    Work      1 - p of the plain product, (1 - p)^2 with ``both``, in one product for each group: few large
              groups are fast, many small ones sample more. The update of ``both`` takes two products and
              a forward.
    Quality   kappa = d / blocks for d weights where every two blocks agree in half of the groups, each of
              many members: a population of any size is worth as many as there are blocks. Otherwise, and
              of rows, no closed form.
    """

    p: float = 0.5
    side: Literal["in", "both"] = "in"
    groups: int = 4
    blocks: int = 2

    def __post_init__(self) -> None:
        """Refuse what is no probability, side or number."""
        check_probability("p", self.p)
        check_choice("side", self.side, "in", "both")
        check_count("groups", self.groups, 2)  # one group has no other to be compared with
        check_count("blocks", self.blocks)

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.side == "both"

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BlocksNoise:
        _, outputs, inputs, *_ = weight.shape
        columns, rows = self._blocks(inputs), self._blocks(outputs) if self.side == "both" else 0
        # Which slices to take is decided on the host, so that a forward need not ask the device.
        host = replace(stream.shared(), device=torch.device("cpu"), dtype=torch.float32)
        on = self._gates(host, columns, rows)
        kept_in, kept_out = on[:, :columns], on[:, columns:] if rows else on.new_ones(self.groups, 1)
        rise_in = kept_in.double() / self._share(inputs)
        rise_out = kept_out.double() / (self._share(outputs) if rows else 1)
        factors = rise_out.unsqueeze(2) * rise_in.unsqueeze(1) - 1
        return BlocksNoise(
            members=stream.members,
            factors=factors.to(stream.device, weight.dtype),
            inputs=tuple(_spans(gates, inputs) for gates in kept_in.tolist()),
            outputs=tuple(_spans(gates, outputs) for gates in kept_out.tolist()),
            weight=TensorRef(weight),
        )

    @override
    def prepare(self, noise: BlocksNoise, weight: Tensor, sigma: float) -> BlocksNoise:
        return replace(noise, sigma=sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: BlocksNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = self._dropped(op, weight, noise, x)
        ratio = sigma / noise.sigma
        if not isinstance(ratio, Tensor):
            return y if ratio == 1 else torch.lerp(op.apply_shared(x, weight), y, ratio)
        return torch.lerp(op.apply_shared(x, weight), y, ratio.to(y.dtype))

    @override
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: BlocksNoise, utilities: Tensor, x: Tensor
    ) -> Tensor:
        y, pull = torch.func.vjp(lambda w: op.apply_shared(x, w), weight)  # type: ignore[misc]  # two without has_aux
        change = self._dropped(op, weight, noise, x) - y
        total: Tensor = pull(change * append_axes(utilities / self._variance(weight.shape), y))[0]
        return total

    @override
    def weighted_sum(self, noise: BlocksNoise, utilities: Tensor) -> Tensor:
        each = group_by_core(utilities, noise.factors.shape[0], noise.members).sum(1)
        total = _over_channels(torch.tensordot(each, noise.factors, dims=1), noise.weight.tensor)
        return noise.weight.tensor * total / noise.sigma

    @override
    def dense_noise(self, noise: BlocksNoise) -> Tensor:
        group = torch.arange(noise.members.start, noise.members.stop, device=noise.factors.device)
        factors = noise.factors[group % noise.factors.shape[0]]
        return noise.weight.tensor * _over_channels(factors, noise.weight.tensor).unsqueeze(1) / noise.sigma

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor:
        return weight.abs() * (math.sqrt(self._variance(weight.shape)) / sigma)

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return self._shared(weight.numel(), torch.ones(weight[2]), members)

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        columns = weight.double().square().transpose(0, 2).flatten(1).sum(1)
        return self._shared(weight.numel(), columns, members)

    @override
    def density(self, weight: torch.Size) -> float:
        return self._share(weight[2]) * (self._share(weight[1]) if self.side == "both" else 1.0)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        product, kept = 2 * weight.numel(), self.density(weight)
        rescaling = members + 2 * self.groups * self._blocks(weight[2]) + weight.numel()
        forward = math.ceil(product * kept)
        return Flops(forward=forward, update=forward + 2 * product if self.learns_from_rows else rescaling)

    @override
    def read_bytes(self, weight: Tensor, noise: BlocksNoise) -> int:
        # What one group keeps, on average; others may keep the same.
        return int(weight.nbytes * self.density(weight.shape))

    def _dropped(self, op: AbstractOperator, weight: Tensor, noise: BlocksNoise, x: Tensor) -> Tensor:
        """Each row's product with what its group keeps, [r, m, g, o, *s]."""
        scale = 1 / self.density(weight.shape)
        like = op.apply_shared(x[:, :0], weight)
        y = like.new_empty(*x.shape[:2], *like.shape[2:])
        for group, (inputs, outputs) in enumerate(zip(noise.inputs, noise.outputs, strict=True)):
            mine = slice((group - noise.members.start) % len(noise.inputs), None, len(noise.inputs))
            rows = x[:, mine]
            if not rows.shape[1]:
                continue
            if not inputs or sum(length for _, length in outputs) < weight.shape[1]:
                y[:, mine].zero_()
            # Scaling the rows lays them out side by side as well, which a product needs to be fast.
            rows = _take(rows, 3, inputs) * scale
            for start, length in outputs if inputs else ():
                kept = _take(weight.narrow(1, start, length), 2, inputs)
                op.add_shared_to(y[:, mine].narrow(3, start, length), 0.0, rows, kept)
        return y

    def _gates(self, host: NoiseStream, columns: int, rows: int) -> Tensor:
        """Draw which blocks are on, bool [groups, columns + rows], on the CPU."""
        if self.p != FAIR:
            on = torch.zeros(self.groups, columns + rows, dtype=torch.bool)
            for name, first, count in (("inputs", 0, columns), ("outputs", columns, rows)):
                size = round((1 - self.p) * count)
                if size:
                    on.scatter_(1, host.subsets(name, self.groups, count, size)[0] + first, value=True)
            return on
        gates = columns + rows
        order = hadamard_width(self.groups, gates + 1)
        seed = sylvester(FACTOR, device=host.device, dtype=host.dtype)
        matrix = hadamard_matrix(order, order, seed)
        # The first column is constant: it is what all groups share, not a gate.
        chosen = host.permutations("columns", 1, order - 1)[0, 0, :gates] + 1
        taken = host.permutations("rows", 1, order)[0, 0, : self.groups]
        return matrix[taken][:, chosen] * host.signs("signs", gates)[0] > 0

    def _shared(self, size: int, columns: Tensor, members: int) -> float | None:
        """Return kappa for columns of these squared lengths; None where the gates are no design."""
        blocks = self._blocks(len(columns))
        is_balanced = self.p == FAIR and self.groups == hadamard_width(self.groups, blocks + 1)
        borders = pairwise(_borders(len(columns), blocks))
        squares = concentration(torch.stack([columns[start:stop].sum() for start, stop in borders]))
        if self.learns_from_rows or not is_balanced or squares is None:
            return None
        # Members of one group are the same, those of two have two rows of the design, which are orthogonal.
        same = same_core_fraction(members, self.groups)
        return size * (same + (1 - same) * (squares - (1 - squares) / (self.groups - 1)))

    def _blocks(self, width: int) -> int:
        """Return into how many blocks so many channels are cut.

        Raises:
            ValueError: all of them would be kept, or none.

        """
        count = min(self.blocks, width)
        if self.p != FAIR and not 0 < round((1 - self.p) * count) < count:
            message = f"p = {self.p} keeps none or all of {count} blocks, for {width} channels"
            raise ValueError(message)
        return count

    def _share(self, width: int) -> float:
        """Return q, how much of so many channels a group keeps on average."""
        count = self._blocks(width)
        return FAIR if self.p == FAIR else round((1 - self.p) * count) / count

    def _variance(self, weight: torch.Size) -> float:
        """Return the variance of sigma E / W."""
        return 1 / self.density(weight) - 1
