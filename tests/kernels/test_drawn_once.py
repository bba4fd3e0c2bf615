"""Kernels that draw make each call of Philox in one thread only: counted in what they compile to."""

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels.drawn import NORMALS, SIGNS
from impls.kernels.inspection.drawn import SPECIMENS
from impls.kernels.inspection.specimen import Specimen, inspect
from tests.kernels import one_per_kernel

MULTIPLICATIONS = 20
"""Wide ones of a call, fewer where several calls of a thread have a member or an element in common."""

TILES = {
    "few_rows_kernel": ("OWN", "COLUMNS", "CALLS"),
    "many_rows_kernel": ("COLUMNS", "DEEP"),
    "narrow_kernel": ("OWN", "RANK", "CALLS"),
    "redrawn_kernel": ("ROWS", "COLUMNS"),
    "noise_sum_kernel": ("CALLS",),
}
"""What the calls of a tile are counted by; channels, where no CALLS are among them."""


def calls(specimen: Specimen) -> float:
    """Count the calls of a thread in one step."""
    constants, counted = specimen.constants, TILES[specimen.kernel.fn.__name__]
    tile = 1 if "CALLS" in counted else 1 / (SIGNS if constants["SIGN"] else NORMALS)
    for name in counted:
        tile *= int(str(constants[name]))
    return tile * (1 if constants.get("WHOLE", True) else 2) / (32 * specimen.warps)


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.parametrize(
    "specimen",
    # Signs of ``up`` are drawn by every thread that has a row of theirs, which is cheaper than to pass them;
    # those of images by all threads, which have nothing else to do. In wider types tiles are so small that
    # threads outnumber the calls many times, and some make the same one.
    one_per_kernel(
        one
        for one in SPECIMENS
        if one.title.endswith("bfloat16")
        and ("up," not in one.title or "normals" in one.title)
        and "images" not in one.title
    ),
    ids=lambda specimen: specimen.title,
)
def test_a_call_is_made_once(specimen: Specimen) -> None:
    """No thread computes again what another one has, as a layout that repeats values would have it."""
    ptx = inspect(specimen, 90)
    wide = ptx.count("mul.hi.u32") + ptx.count("mul.wide.u32")
    # Addresses are computed with a few more.
    assert wide <= MULTIPLICATIONS * max(1, calls(specimen)) + 4
