"""Noise written out as kernels draw it, in Triton: what sums and products of it are held to."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.drawn import COUNTERS, NORMALS, SIGNS, Draw, seed_of, unsigned, values_of
from impls.kernels.words import programs, tile

OWN_MEMBERS = 4
"""Members in a tile of :func:`fill`."""

MOST_CALLS = 512
"""Values of a member in a tile of :func:`fill`."""


@triton.jit(do_not_specialize=COUNTERS)
def fill_kernel(
    values, key0, key1, layer, draw, first_member, members, start, size, tiles,
    SIGN: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Draw OWN members' values of CALLS calls: the grid is tiles times groups of members."""
    program = tl.program_id(0).to(tl.int64)
    member = program // tiles * OWN + tl.arange(0, OWN)
    at = (program % tiles) * CALLS * WIDTH
    first = start + at + tl.arange(0, CALLS).to(tl.int64) * WIDTH
    counter = unsigned(first_member) + member.to(tl.uint32)
    drawn = values_of(
        seed_of(key0, key1), first[None, :], counter[:, None], unsigned(layer), unsigned(draw), SIGN, WHOLE
    )
    element = at + tl.arange(0, CALLS * WIDTH)
    inside = (member < members)[:, None] & (element < size)[None, :]
    where = member[:, None] * size + element[None, :]
    tl.store(values + where, drawn.to(values.dtype.element_ty), mask=inside)


def fill(values: Tensor, draw: Draw, start: int = 0, *, signs: bool = False) -> Tensor:
    """Draw elements from ``start`` on into ``values`` [members, elements], which is returned.

    They are those of the stream :class:`impls.perturbation.noise.PhiloxStream` whose
    :class:`impls.perturbation.philox.Place` and
    members ``draw`` names, whatever the range of members and of elements. For e bytes a value:

    * bytes: e written for each value.
    * calls: one for 4 normals or 128 signs; two where ``start`` is no multiple of that.

    Raises:
        ValueError: a member or an element has no counter, or values are no [members, elements] in a row.

    """
    width = SIGNS if signs else NORMALS
    counters = draw.arguments(start + values.shape[-1], width)
    if values.dim() != 2 or len(values) != len(draw.members) or not values.is_contiguous():  # noqa: PLR2004  members, elements
        message = f"values must be [{len(draw.members)}, elements] and contiguous, got {list(values.shape)}"
        raise ValueError(message)
    if not values.numel():
        return values
    calls = tile(-(-values.shape[1] // width), MOST_CALLS // width)
    tiles = -(-values.shape[1] // (calls * width))
    with torch.cuda.device_of(values):
        fill_kernel[programs(tiles, -(-len(values) // OWN_MEMBERS))](
            values, *counters, *values.shape[:1], start, values.shape[1], tiles,
            SIGN=signs, WHOLE=start % width == 0, WIDTH=width, OWN=OWN_MEMBERS, CALLS=calls,
        )  # fmt: skip
    return values
