"""Permuted noise: members' picks are written once, and then two products have one set of sums."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.cores import check_one_core
from impls.fused.scheme import AbstractFused
from impls.perturbation.scheme import check_choice, check_share
from impls.schemes.permuted import Permuted, PermutedNoise


@variant(in_sparsity=(0.5, 0.1), source="NESgpu; the kernels are ours")
@variant(source="NESgpu; the kernels are ours")
@dataclass(frozen=True)
class FusedPermuted(AbstractFused[PermutedNoise]):
    """:class:`~impls.schemes.permuted.Permuted` of inputs: one kernel that picks, one with both products.

    Picking inside of the products' kernel would do it again for each tile of columns, which takes several
    times the product. Outputs cannot be permuted here: a row's picks take them from anywhere in it, so the
    core's product has to be whole, R * o numbers written, before one of them can be added, and picking from
    it is R * o loads again. All that a kernel could save is one of the plain scheme's passes over outputs.

    Memory    that of the plain scheme: R * k picked numbers.
    Work      1 + k / i products, and 8 bytes of index a pick. The update is the plain scheme's: n k numbers
              scattered into k x i, and one product of the core with them, whatever the population.
    Quality   that of the plain scheme.
    """

    side: Literal["in", "out", "both"] = "in"
    in_sparsity: float = 1.0
    replace: bool = False
    cores: int = 1

    def __post_init__(self) -> None:
        """Refuse permuted outputs, a sparsity outside its range and several cores."""
        check_choice("side", self.side, "in", "out", "both")
        check_share("in_sparsity", self.in_sparsity)
        check_one_core(self.cores)
        if self.side != "in":
            message = (
                f"side must be 'in' for a kernel, got {self.side!r}: permuted outputs come from all over "
                "a row of the core's product, which has to be written, e bytes a number, and picked from, "
                "8 + e bytes, before it can be added, as the plain scheme does"
            )
            raise ValueError(message)

    @property
    @override
    def plain(self) -> Permuted:
        return Permuted(in_sparsity=self.in_sparsity, replace=self.replace)

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: PermutedNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        from impls.kernels.permuted import added_product, picked_rows

        assert noise.inputs is not None  # noqa: S101  inputs are permuted
        picked = picked_rows(x, noise.inputs[:, 0])
        added_product(x, weight, picked, noise.core[0, 0].flatten(1), sigma, y)

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        return self.plain.weighted_sum(noise, utilities)
