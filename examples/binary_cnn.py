"""Train a small binarized CNN to classify handwritten digits by evolution strategies alone.

The first convolution reads the eight bits of each pixel as channels; max pooling of bits is OR. The last
layer is a convolution as large as its input: a linear layer of the flattened map would also read the unused
bits of each position's word. The training loop is that of ``binary_mlp.py``.

Example: python examples/binary_cnn.py --members 256 --steps 1000
"""

from binary_mlp import PixelBits, arguments, compare
from comparison import run_example
from torch import nn

from impls import BinarizedConv2d, BinarizedMaxPool2d


def network() -> nn.Module:
    """Return a convolution to 16 channels, max pooling and a layer of scores."""
    convolution = BinarizedConv2d(8, 16, 3, padding=1)
    # A bit is then 1 with probability 1/5, and the OR of four about half of the time.
    nn.init.constant_(convolution.get_parameter("bias"), -0.8)
    scores = BinarizedConv2d(16, 10, 4, outputs="real")
    return nn.Sequential(PixelBits(8, 8, 1), convolution, BinarizedMaxPool2d(2), scores, nn.Flatten())


if __name__ == "__main__":
    options = arguments(__doc__, members=128, batch=32)
    run_example(lambda: compare(network, "DigitsCNN", options))
