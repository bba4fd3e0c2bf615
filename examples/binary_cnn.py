"""Train a small CNN of bits to read handwritten digits, by evolution strategies alone.

The convolution reads the eight bits of each pixel as channels, and a pool of bits is their OR. What scores
the digits is a convolution too, as large as the map it reads: that is a linear layer of the flattened map,
but flattened words would bring the rest of a word behind every position's 16 bits. The loop is the one of
``binary_mlp.py``.

Example: python examples/binary_cnn.py --members 256 --steps 1000
"""

from binary_mlp import PixelBits, arguments, compare
from comparison import ended
from torch import nn

from impls import BinarizedConv2d, BinarizedMaxPool2d


def network() -> nn.Module:
    """Make a convolution to 16 channels, a pool and a layer of scores."""
    convolution = BinarizedConv2d(8, 16, 3, padding=1)
    # So bits are on one time in five, and the OR of four of them about half of the time.
    nn.init.constant_(convolution.get_parameter("bias"), -0.8)
    scores = BinarizedConv2d(16, 10, 4, outputs="real")
    return nn.Sequential(PixelBits(8, 8, 1), convolution, BinarizedMaxPool2d(2), scores, nn.Flatten())


if __name__ == "__main__":
    options = arguments(__doc__, members=128, batch=32)
    ended(lambda: compare(network, "DigitsCNN", options))
