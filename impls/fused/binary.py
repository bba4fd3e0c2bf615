"""Networks of bits by kernels: members' bits drawn, multiplied and summed up, each in one launch.

What stays torch's, and why:

* A convolution's patches are one copy of words, two with padding. For 64 channels and nine taps it is 72
  bytes written and read for each position, whose 64 outputs are 256 bytes in float32. A kernel of its own
  would be one launch of as many bytes; only a product that finds its own patches would save them.
* Thresholds and their noise are added outside of schemes, for all of them once, so a product ends with real
  outputs, and :func:`impls.kernels.bits.bit_product_threshold` has no place here. Packing the bits that
  follow is then six launches, of a byte or two for each output.
* A max-pool is a launch for each row and each column of its window, over words: a 32nd of what a product
  writes. No member's weights are in it, and no scheme is asked.
* Writing bits out as numbers is for the slow truth alone: a product unpacks them in registers.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from impls.binary.operators import AbstractPackedOperator, packed_shape
from impls.fused.draws import draw_of
from impls.fused.scheme import FLOATING, without_kernels, without_type
from impls.perturbation.noise import NoiseStream, PhiloxStream
from impls.perturbation.scheme import check_count
from impls.schemes.binary import OPERATORS, AbstractBitScheme, Binary, BinaryNoise, probabilities


@variant(operators=OPERATORS, source="Bernoulli weights, score function: Williams 1992; the kernels are ours")
@dataclass(frozen=True)
class FusedBinary(AbstractBitScheme[BinaryNoise]):
    """:class:`~impls.schemes.binary.Binary` by kernels, with its very bits of the stream ``philox``.

    Args:
        few: up to how many rows of a member differing bits are counted, by exclusive or and popcount; more
            rows are multiplied on int8 matrix units, which weights are unpacked for. By arithmetic a word is
            counted for eight rows in the time that it is unpacked in; nobody has measured it yet.

    Memory    that of the plain scheme.
    Work      two calls of Philox for 32 bits that are drawn, behind a few passes over logits; a bit read once
              by a forward with up to four rows; a bit read once, and two operations for it, by an update. By
              arithmetic that is 174, 31 and 73 us on an H200 for 1024 members with a weight of 1024 x 1024.
    Quality   that of the plain scheme.
    """

    few: int = 8

    def __post_init__(self) -> None:
        """Refuse what is no number of rows; with 0 all products are those of matrices."""
        check_count("few", self.few, 0)

    @property
    def plain(self) -> Binary:
        """The scheme that is accelerated."""
        return Binary()

    @property
    @override
    def stream(self) -> str:
        return "philox"

    @override
    def supports(self, module: nn.Module) -> str:
        weight = module.weight
        assert isinstance(weight, Tensor)  # noqa: S101  every layer that is perturbed has one
        return (
            self.plain.supports(module)
            or without_kernels(weight.device)
            or without_type(weight.dtype, weight.device, FLOATING)
        )

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BinaryNoise:
        if not isinstance(stream, PhiloxStream):
            message = (
                f"{self}: its kernel draws by the counters of the stream philox, not {type(stream).__name__}"
            )
            raise ValueError(message)  # noqa: TRY004  a person's choice of a stream, by name
        # Shapes and counters are held to what the stream can draw; on meta nothing is drawn.
        replace(stream, device=torch.device("meta")).words("bits", 8, *packed_shape(weight.shape))
        if weight.is_meta:
            return self.plain.sample(weight, stream)
        from impls.kernels.planes import bit_planes
        from impls.kernels.sampling import sample_bits

        p = probabilities(weight)
        return BinaryNoise(p, 1.0, sample_bits(bit_planes(p), *draw_of(stream, "bits")))

    @override
    def product(self, op: AbstractPackedOperator, noise: BinaryNoise, x: Tensor) -> Tensor:
        return op.bits(x, noise.words, self._multiply)

    def _multiply(self, rows: Tensor, columns: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Multiply bits, by the kernel for so many rows of a member."""
        from impls.kernels.bits import bit_product
        from impls.kernels.matrices import int8_product

        kernel = bit_product if rows.shape[1] <= self.few else int8_product
        return kernel(rows, columns, length, dtype)

    @override
    def written(self, noise: BinaryNoise) -> Tensor:
        return self.plain.written(noise)

    @override
    def weighted_sum(self, noise: BinaryNoise, utilities: Tensor) -> Tensor:
        from impls.kernels.sums import centred_sum

        # In a wide type: utilities about their mean leave little of two large sums.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        return centred_sum(noise.words, utilities.to(wide) * noise.sigma, noise.p)

    @override
    def read_bytes(self, weight: Tensor, noise: BinaryNoise) -> int:
        return self.plain.read_bytes(weight, noise)

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa_of(weight, members)
