"""Floors of convolutions with noise on an H200: by torch, with written-out weights, and in one kernel.

No kernel computes a convolution with several taps. It would be an implicit product: for each tap a program
multiplies a shifted tile of the input by that tap's weights, which it forms for its member in registers. A
tile has positions of one member only, so that forming W + sigma E_m takes little for any scheme, and flips
need one product instead of two.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from esbench.compiled import PROCESSORS, Record
from esbench.report.formats.markdown import table
from esbench.studies.kernel_limits import CACHE_BYTES, CLOCK_HZ, MEMORY_BYTES, SCHEDULERS, TENSOR_FLOPS
from esbench.units import format_multiplier, format_number

MEMBERS = 1024
NUMBER_BYTES = 2
"""Of a number in bfloat16."""
SHAPES = (
    (16, 16, (3, 3), (64, 64)),
    (32, 32, (3, 3), (64, 64)),
    (64, 64, (3, 3), (32, 32)),
    (32, 32, (1, 1), (32, 32)),
    (1024, 1024, (1, 1), (1, 1)),
)
"""Outputs, inputs, kernel and input size of NESgpu's convolutions, without padding."""

# Tiles of the kernel

TILE_POSITIONS, TILE_WARPS = 256, 8
"""A tile has all output channels at this many positions; each thread computes one position."""
STEP_CHANNELS = 64
"""Channels multiplied at once, for one tap."""
TILE_INSTRUCTIONS = 300
"""Assumed instructions of a warp for a tile besides its steps; base has 700 for tiles of 128 x 256."""
STEP_KERNEL = "two products, bfloat16"
"""The compile check whose loop, of loads by descriptors and a product, has the instructions of a step."""


class Convolution(NamedTuple):
    """Sizes of a convolution of all members.

    Attributes:
        outputs: output channels, and likewise input channels.
        taps: of the kernel.
        pixels: positions of an image of the input, and of the output.
    """

    outputs: int
    inputs: int
    taps: int
    pixels: int
    positions: int

    @classmethod
    def of(cls, outputs: int, inputs: int, kernel: tuple[int, int], size: tuple[int, int]) -> "Convolution":
        """Return the sizes for a kernel and an input size, without padding."""
        positions = math.prod(pixels - taps + 1 for pixels, taps in zip(size, kernel, strict=True))
        return cls(outputs, inputs, math.prod(kernel), math.prod(size), positions)

    @property
    def x(self) -> int:
        """Bytes of the input."""
        return NUMBER_BYTES * MEMBERS * self.inputs * self.pixels

    @property
    def y(self) -> int:
        """Bytes of the output."""
        return NUMBER_BYTES * MEMBERS * self.outputs * self.positions

    @property
    def weight(self) -> int:
        """Bytes of a weight."""
        return NUMBER_BYTES * self.outputs * self.inputs * self.taps

    @property
    def flops(self) -> int:
        """Flops of a product with one weight."""
        return 2 * MEMBERS * self.positions * self.outputs * self.inputs * self.taps

    def product_ns(self, more_bytes: float = 0.0) -> float:
        """Return the floor of a convolution that moves more than x, y and the weight."""
        moved = self.x + self.y + self.weight + more_bytes
        return 1e9 * max(moved / MEMORY_BYTES, self.flops / TENSOR_FLOPS)

    @property
    def written_out_ns(self) -> float:
        """The floor of writing each member's weight, and of a convolution with groups of members."""
        weights = MEMBERS * self.weight
        return 1e9 * weights / MEMORY_BYTES + self.product_ns(weights)

    def kernel_ns(self, noise_bytes: int, step_instructions: int) -> float:
        """Return the floor of one kernel: of bytes, flops, loads from the L2 cache and instructions.

        Tiles have all pixels of the input, so that a tap is a shift of a tile; those without a position are
        computed and not written.
        """
        tiles = MEMBERS * self.pixels / TILE_POSITIONS
        wasted = self.pixels / self.positions
        steps = self.taps * math.ceil(self.inputs / STEP_CHANNELS)
        instructions = tiles * TILE_WARPS * (steps * step_instructions + TILE_INSTRUCTIONS)
        cached = self.taps * self.x + tiles * self.weight
        cycle_ns = 1e9 / (PROCESSORS * CLOCK_HZ)
        return max(
            self.product_ns(noise_bytes),
            wasted * 1e9 * self.flops / TENSOR_FLOPS,
            cycle_ns * cached / CACHE_BYTES,
            cycle_ns * instructions / SCHEDULERS,
        )


class Scheme(NamedTuple):
    """What a scheme adds to a plain convolution.

    Attributes:
        passes: bytes that torch moves besides, in passes of their own.
        products: convolutions by torch.
        noise: bytes of all members' noise.
    """

    passes: int
    products: int
    noise: int


def schemes(conv: Convolution) -> Mapping[str, Scheme]:
    """Return the schemes, for each of which a kernel would form its members' weights."""
    x, y, channel = conv.x, conv.y, conv.x // conv.inputs
    members = NUMBER_BYTES * MEMBERS
    inner = members * conv.positions
    filters = members * conv.inputs * conv.taps
    return {
        # x . down, written, and added to y with up.
        "low rank": Scheme(x + 2 * inner + filters + 2 * y, 1, filters + members * conv.outputs),
        # A channel is copied and convolved, and the result added to the product in a pass.
        "sparse": Scheme(3 * channel + y + 3 * y, 1, members * conv.outputs * conv.taps + MEMBERS * 8),
        # Both sides: x is flipped, its product with the core flipped in place, and added in a pass.
        "flips": Scheme(2 * x + 2 * y + 3 * y, 2, conv.weight + MEMBERS * (conv.inputs + conv.outputs)),
        "dropout": Scheme(2 * x, 1, MEMBERS * conv.inputs),
    }


HEADER = ("outputs, inputs, taps, pixels", "base (us)", "weights written out", "one kernel")


def convolution_table(record: Record) -> str:
    """Return a table of floors as multiples of base; those of torch depend on the scheme.

    Raises:
        LookupError: the record has no kernel for the instructions of a step.
    """
    kernel = record.at(STEP_KERNEL)
    if kernel is None:
        raise LookupError(f"the record of compiled kernels has no {STEP_KERNEL!r}")
    step_instructions = kernel.code.steps[-1].instructions
    rows: list[Sequence[str]] = []
    names: tuple[str, ...] = ()
    for shape in SHAPES:
        conv = Convolution.of(*shape)
        all_schemes = schemes(conv)
        names, base_ns = tuple(f"torch: {name}" for name in all_schemes), conv.product_ns()
        common_ns = (
            conv.written_out_ns,
            conv.kernel_ns(max(scheme.noise for scheme in all_schemes.values()), step_instructions),
        )
        torch_ns = (
            scheme.products * base_ns + 1e9 * scheme.passes / MEMORY_BYTES for scheme in all_schemes.values()
        )
        multiples = [format_multiplier(time_ns / base_ns) for time_ns in (*common_ns, *torch_ns)]
        if conv.taps == 1:
            multiples[1] = "has one"
        label = f"{conv.outputs}, {conv.inputs}, {conv.taps}, {conv.pixels}"
        rows.append((label, format_number(base_ns / 1e3), *multiples))
    return table((*HEADER, *names), rows)
