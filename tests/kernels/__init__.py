"""Tests of kernels: what they compile to, and in processes with Triton's interpreter what they compute."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from impls.kernels.inspection.specimen import Specimen


def one_per_kernel(specimens: "Iterable[Specimen]") -> "list[Specimen]":
    """Return the first launch of each kernel; `nox -s kernels` compiles all of them."""
    return list({one.kernel: one for one in reversed([*specimens])}.values())
