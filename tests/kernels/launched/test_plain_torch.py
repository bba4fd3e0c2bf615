"""A step on packed bits by kernels is the same as by plain torch: drawn, multiplied, compared and summed."""

import pytest
import torch

from impls.binary import bits
from impls.binary.bit_products import products, weighted_sum
from impls.kernels import binary, binary_matmul
from impls.perturbation import philox
from impls.perturbation.noise import PhiloxStream
from tests.kernels.launched.canaries import DEVICE, generator


@pytest.mark.parametrize(("inputs", "outputs"), [(70, 9), (64, 40)])
def test_a_step_is_that_of_plain_torch(inputs: int, outputs: int) -> None:
    """Bits, products, thresholds and sums of one layer are equal, bit for bit, in words of 64 bits."""
    members, rows = range(3, 6), 2
    counts = bits.quantised(torch.rand(outputs, inputs, generator=generator(0))).to(DEVICE)
    planes = bits.planes(counts).mT.contiguous()
    stream = PhiloxStream(1, 2, "0", members, torch.device(DEVICE), torch.float32)
    key, layer, draw = philox.Place.of(1, 2, "0", "bits")
    weights = binary.sample_bits(planes, key, layer, draw, members)
    assert torch.equal(weights, bits.sample(planes, stream.words("bits", 8, *planes.shape[1:])))

    x = bits.pack(torch.randn(len(members), rows, inputs, generator=generator(1))).to(DEVICE)
    y = products(x, weights, inputs)
    assert torch.equal(binary_matmul.bit_product(x, weights, inputs), y)
    assert torch.equal(binary_matmul.int8_product(x, weights, inputs), y)
    zero = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
    assert torch.equal(binary_matmul.bit_product_threshold(x, weights, inputs, zero), bits.thresholded(y))

    utilities = torch.tensor([1.0, -2.5, 0.25], device=DEVICE)
    found = binary.weighted_sum(weights, utilities, inputs)
    assert torch.equal(found, weighted_sum(weights, utilities, inputs, axis=-2))
