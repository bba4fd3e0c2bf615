"""FusedBinary has the bits, outputs and updates of Binary in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impls import BinarizedConv2d, BinarizedLinear, Binary, FusedBinary, FusedLowRank, Population, perturb
from impls.binary import bits
from impls.perturbation.noise import NoiseStream, PhiloxStream
from impls.verify.reference import compare, double, updated
from tests.kernels.launched.canaries import DEVICE, generator

SHAPES = [(1, 5, 70), (1, 1, 1), (1, 3, 64), (1, 70, 33), (1, 4, 6, 3, 2), (1, 3, 65, 2, 1)]
"""Shapes of weights [g, o, i, *taps]; most widths are not multiples of a word."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(shape, generator=generator(seed)).to(DEVICE, dtype)


def both(layer: nn.Module, members: int, scheme: FusedBinary | None = None) -> tuple[Population, Population]:
    """Seed a layer; return its population with kernels, and one in plain torch with the same stream."""
    with torch.no_grad():
        for parameter in layer.to(DEVICE).parameters():
            parameter.copy_(normal(*parameter.shape))
    fused = perturb(layer, scheme or FusedBinary(), members=members, sigma=0.3)
    return fused, perturb(layer, Binary(), members=members, sigma=0.3, stream="philox")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_plain_torch(shape: tuple[int, ...]) -> None:
    """Members have the bits that the plain scheme draws from the stream philox, and P is the same."""
    for members, dtype in (
        (range(3), torch.float32),
        (range(250, 260), torch.float16),
        (range(1), torch.float64),
    ):
        weight = normal(*shape, seed=len(members), dtype=dtype)
        stream = PhiloxStream(3, 5, "0.weight", members, torch.device(DEVICE), dtype)
        plain, drawn = Binary().sample(weight, stream), FusedBinary().sample(weight, stream)
        assert torch.equal(drawn.words, plain.words), members
        assert torch.equal(drawn.p, plain.p), members


LAYERS = [
    (lambda **options: BinarizedLinear(70, 37, **options), (70,), 1),
    (lambda **options: BinarizedLinear(64, 5, **options), (64,), 3),
    (lambda **options: BinarizedLinear(129, 5, **options), (129,), 17),
    (lambda **options: BinarizedConv2d(6, 5, (3, 2), padding=(1, 2), stride=(2, 1), **options), (5, 4, 6), 2),
    (lambda **options: BinarizedConv2d(70, 3, 2, **options), (2, 3, 70), 1),
]
"""Layers, the shape of a row, and the number of rows per member."""


@pytest.mark.parametrize(("made", "row", "repeats"), LAYERS)
def test_outputs_are_those_of_plain_torch(made: Any, row: tuple[int, ...], repeats: int) -> None:
    """With either product kernel, outputs equal the plain scheme's, both as real numbers and as bits.

    A GPU divides by multiplying with the reciprocal, so real outputs may be off by a rounding there.
    """
    for few in (0, 1000):
        for options in ({}, {"outputs": "real"}):
            fused, plain = both(made(**options), 3, FusedBinary(few))
            x = bits.pack(normal(3 * repeats, *row, seed=1))
            y, expected = fused(x, fused.sample(2)), plain(x, plain.sample(2))
            if options:
                torch.testing.assert_close(y, expected, rtol=0 if DEVICE == "cpu" else 1e-6, atol=0)
            else:
                assert torch.equal(y, expected), few


@pytest.mark.parametrize("rows", [1, 9])
def test_weights_are_read_where_they_are(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution copies patches of its input but reads the members' weights in place."""
    fused, _ = both(BinarizedConv2d(6, 5, (2, 3)), 3)
    noise: Any = fused.sample(0)
    words, seen = noise.layers[""].weight.words, []
    multiply = FusedBinary._multiply  # noqa: SLF001  the method to watch

    def watched(self: FusedBinary, x: Tensor, columns: Tensor, *others: Any) -> Tensor:
        seen.append((columns.data_ptr(), columns.is_contiguous(), x.shape[1]))
        return multiply(self, x, columns, *others)

    monkeypatch.setattr(FusedBinary, "_multiply", watched)
    fused(bits.pack(normal(3, 2, 2 + rows, 6)), noise)
    assert seen == [(words.data_ptr(), True, rows)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", [BinarizedLinear(70, 5), BinarizedConv2d(6, 5, (2, 3))], ids=str)
def test_updates_err_at_most_twice_as_those_of_plain_torch(layer: nn.Module, dtype: torch.dtype) -> None:
    """Updates err at most twice as much as plain torch, for utilities whose mean is far from 0."""
    fused, slow = both(layer.to(dtype), 40)
    truth = perturb(double(layer), Binary(), members=40, sigma=0.3, stream="philox")
    utilities = 20 + torch.randint(-1, 2, (40,), generator=generator(3)).to(DEVICE)
    got, exact, near = (updated(one, one.sample(0), utilities)["weight"] for one in (fused, truth, slow))
    compare("update", got, exact, near)


def test_unsupported_settings_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsupported streams, antithetic halves, layers and devices are refused, without any fallback."""
    layer = BinarizedLinear(4, 4).to(DEVICE)
    with pytest.raises(ValueError, match="supports no antithetic sampling"):
        perturb(layer, FusedBinary(), members=2, sigma=1.0, antithetic=True)
    with pytest.raises(ValueError, match="stream philox: leave stream out"):
        perturb(layer, FusedBinary(), members=2, sigma=1.0, stream="block")
    with pytest.raises(ValueError, match="does not support Linear"):
        perturb(nn.Linear(4, 4), FusedBinary(), members=2, sigma=1.0)
    with pytest.raises(ValueError, match="does not support BinarizedLinear"):
        perturb(layer, FusedLowRank(1), members=2, sigma=1.0)
    with pytest.raises(ValueError, match="few must be an int of at least 0"):
        FusedBinary(few=-1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device, the layer is on cpu"):
        perturb(layer.cpu(), FusedBinary(), members=2, sigma=1.0)


def test_more_members_than_counters_are_refused() -> None:
    """Member 2^32 - 1 is refused, because its counter is reserved for shared noise."""
    stream: NoiseStream = PhiloxStream(0, 0, "", range(2**32 - 1, 2**32), torch.device(DEVICE), torch.float32)
    with pytest.raises(ValueError, match="too many: the stream philox counts"):
        FusedBinary().sample(normal(1, 2, 3), stream)
