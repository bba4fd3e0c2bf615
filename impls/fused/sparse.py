"""Noise of a few input columns in the epilogue of the product that it belongs to, and its sum in order."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.scheme import AbstractFused
from impls.perturbation.scheme import check_choice, check_count
from impls.schemes.sparse import SparseNoise, SparsePerturbed

MOST = 8
"""Columns of a member that a kernel keeps in registers."""


@variant(k=(1, 2), values="sign", source="NESgpu's sparse noise, with signs; the kernels are ours")
@variant(k=(1, 2), source="NESgpu; the kernels are ours")
@dataclass(frozen=True)
class FusedSparsePerturbed(AbstractFused[SparseNoise]):
    """:class:`~impls.schemes.sparse.SparsePerturbed` in one kernel, which adds no pass over rows or outputs.

    The update sorts members' columns and adds each up in order: other than that of the plain scheme on a GPU,
    its sum is the same every time.

    Memory    that of the plain scheme.
    Work      that of the plain scheme; a row's columns are gathered once for each tile of outputs.
    Quality   that of the plain scheme.
    """

    k: int
    values: Literal["normal", "sign"] = "normal"

    def __post_init__(self) -> None:
        """Refuse a k that is no number of columns or above what a kernel holds, and unknown values."""
        check_count("k", self.k)
        check_choice("values", self.values, "normal", "sign")
        if self.k > MOST:
            message = f"k must be at most {MOST} for a kernel, which keeps so many in registers, got {self.k}"
            raise ValueError(message)

    @property
    @override
    def plain(self) -> SparsePerturbed:
        return SparsePerturbed(self.k, self.values)

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: SparseNoise, sigma: float | Tensor, y: Tensor) -> None:
        from impls.kernels.sparse import sparse_product

        sparse_product(x, weight, noise.columns[:, 0], noise.values[:, 0].flatten(2), sigma, y)

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        from impls.kernels.sparse import column_sums, sorted_columns

        rows = sorted_columns(noise.columns[:, 0], noise.inputs)
        total = column_sums(rows, noise.values[:, 0].flatten(2), utilities)
        return total.view(1, noise.inputs, *noise.values.shape[3:]).transpose(1, 2)
