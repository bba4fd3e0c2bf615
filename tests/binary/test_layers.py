"""Binarized layers and the schemes that perturb them agree with arithmetic on +1 and -1."""

import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from impls import (
    BinarizedConv2d,
    BinarizedLinear,
    BinarizedMaxPool2d,
    Binary,
    BinaryMixture,
    Perturbed,
    perturb,
)
from impls.binary import bits
from impls.perturbation.scheme import AnyScheme
from impls.schemes.binary import probabilities

SCHEMES: list[AnyScheme] = [Binary(), Binary(stored="float"), BinaryMixture(group=4)]


def coins(*shape: int, seed: int = 0) -> Tensor:
    """Return random fair values +1 and -1 in float64."""
    return (torch.rand(*shape, generator=Generator().manual_seed(seed)) < 0.5).double() * 2 - 1


def seeded(layer: nn.Module, seed: int = 0) -> nn.Module:
    """Give a layer seeded logits and thresholds."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=Generator().manual_seed(seed)))
    return layer


def test_a_linear_layer_is_the_product_of_signs() -> None:
    """Real outputs are x sign(W)^T / sqrt(i) + b; packed outputs are the bits of those above 0."""
    for inputs, outputs in ((1, 1), (31, 5), (64, 64), (65, 33), (130, 3)):
        x = coins(7, inputs)
        layer = seeded(BinarizedLinear(inputs, outputs, outputs="real", dtype=torch.float64))
        sign = torch.where(layer.get_parameter("weight") > 0, 1.0, -1.0).double()
        expected = x @ sign.T / math.sqrt(inputs) + layer.get_parameter("bias")
        torch.testing.assert_close(layer(bits.pack(x)), expected)
        layer.outputs = "bits"  # type: ignore[assignment]  # a module's attribute
        assert torch.equal(layer(bits.pack(x)), bits.pack(expected))


def test_a_convolution_is_that_of_signs_padded_with_minus_one() -> None:
    """A binarized convolution of NHWC images pads with -1."""
    x = coins(3, 70, 7, 6)
    windows: list[tuple[Any, Any, Any]] = [
        ((3, 3), 1, 1),
        ((1, 1), 1, 0),
        ((3, 2), (2, 1), (1, 2)),
        ((5, 4), 3, 0),
    ]
    for kernel, stride, padding in windows:
        sizes = {"stride": stride, "padding": padding}
        layer = seeded(BinarizedConv2d(70, 9, kernel, **sizes, outputs="real", dtype=torch.float64))
        sign = torch.where(layer.get_parameter("weight") > 0, 1.0, -1.0).double()
        vertical, horizontal = (padding, padding) if isinstance(padding, int) else padding
        padded = nn.functional.pad(x, (horizontal, horizontal, vertical, vertical), value=-1.0)
        expected = nn.functional.conv2d(padded, sign, stride=stride).movedim(1, -1)
        expected = expected / math.sqrt(70 * math.prod(kernel)) + layer.get_parameter("bias")
        torch.testing.assert_close(layer(bits.pack(x.movedim(1, -1))), expected)


def network(**options: Any) -> nn.Module:
    """Return a small binarized CNN."""
    return nn.Sequential(
        seeded(BinarizedConv2d(8, 12, 3, padding=1, dtype=torch.float64, **options)),
        BinarizedMaxPool2d(3, 2, 1),
        nn.Flatten(),
        seeded(BinarizedLinear(16 * 64, 5, outputs="real", dtype=torch.float64)),
    )


def test_each_member_of_a_network_sees_its_own_bits() -> None:
    """For every binary scheme, a member's rows are those of the plain network with its bits."""
    for scheme in SCHEMES:
        model, members = network(), 6
        population = perturb(model, scheme, members=members, sigma=0.3)
        x = bits.expand(torch.randint(0, 256, (2 * members, 8, 8, 1), dtype=torch.uint8))
        noise = population.sample(3)
        y = population(x, noise=noise)
        for member in range(members):
            state = population.member(noise, member)
            assert set(state["0.weight"].round(decimals=9).unique().tolist()) <= {-1.0, 1.0}
            expected = torch.func.functional_call(model, state, (x[member::members],))
            torch.testing.assert_close(y[member::members], expected)
    image = x[:2]
    assert torch.equal(BinarizedMaxPool2d((2, 3))(image), bits.max_pool(image, (2, 3), (2, 3), (0, 0)))


def test_each_member_is_normalized_over_its_rows_and_positions() -> None:
    """A member's outputs have mean 0 and variance 1, computed in float32 and independent of other members."""
    layer = seeded(BinarizedLinear(96, 4, bias=False, outputs="real", normalized=True, dtype=torch.float64))
    population = perturb(layer, Binary(), members=3, sigma=1.0)
    noise, x = population.sample(0), bits.pack(coins(3 * 20, 96))
    y, changed = population(x, noise=noise), x.clone()
    changed[1::3] = changed[1::3].flip(0) ^ changed[0::3]
    again = population(changed, noise=noise)
    assert torch.equal(y[0::3], again[0::3])
    assert not torch.equal(y[1::3], again[1::3])
    torch.testing.assert_close(y[2::3].mean(0), torch.zeros(4).double())
    torch.testing.assert_close(y[2::3].square().mean(0), torch.ones(4).double(), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="a member needs several rows"):
        layer(x[:1])
    single, half = (seeded(layer.to(dtype))(x) for dtype in (torch.float32, torch.float16))
    assert torch.equal(half, single.half())  # rounded once
    convolution = seeded(BinarizedConv2d(16, 4, 3, bias=False, outputs="real", normalized=True))
    y = convolution(bits.pack(coins(1, 9, 9, 16)))
    torch.testing.assert_close(y.mean((0, 1, 2)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.square().mean((0, 1, 2)), torch.ones(4), atol=1e-3, rtol=0)


def test_sums_beyond_float16_are_scaled_first() -> None:
    """A sum of 70,000 equal signs is sqrt(70,000), not infinity."""
    layer = BinarizedLinear(70_000, 1, bias=False, outputs="real", dtype=torch.float16)
    with torch.no_grad():
        layer.get_parameter("weight").fill_(1.0)
    assert float(layer(bits.pack(torch.ones(1, 70_000)))) == pytest.approx(math.sqrt(70_000), rel=1e-3)


def test_probabilities_do_not_depend_on_the_dtype_of_the_logits() -> None:
    """A copy in another dtype has the same probabilities at every logit."""
    logits = torch.randn(20_000, generator=Generator().manual_seed(0)) * 3
    for dtype in (torch.float64, torch.bfloat16):
        narrow = logits.bfloat16() if dtype is torch.bfloat16 else logits
        assert torch.equal(probabilities(narrow.to(dtype)).float(), probabilities(narrow.float()))


def test_large_logits_always_draw_the_same_bit_and_nan_is_refused() -> None:
    """Logits of +-1000 have no gradient; NaN is an error."""
    layer = BinarizedLinear(70, 2, bias=False, outputs="real")
    weight = layer.get_parameter("weight")
    with torch.no_grad():
        weight.fill_(1000.0)[1].neg_()
    population = perturb(layer, Binary(), members=300, sigma=1.0)
    noise, x = population.sample(0), bits.pack(torch.ones(300, 70))
    y = population(x, noise=noise)
    assert torch.equal(y, math.sqrt(70) * torch.tensor([[1.0, -1.0]]).expand(300, 2))
    population.update(noise, torch.randn(300))
    assert weight.grad is not None
    assert weight.grad.abs().max() < 1e-6
    with torch.no_grad():
        weight[0, 3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        population.sample(1)
    with pytest.raises(ValueError, match="of a binarized layer is NaN"):
        layer(x)


def test_schemes_and_settings_that_do_not_fit_are_refused() -> None:
    """Binarized layers need binary schemes, other layers refuse them; bits have no antithetic half."""
    with pytest.raises(ValueError, match="does not support BinarizedLinear"):
        perturb(BinarizedLinear(4, 4), Perturbed(), members=2, sigma=1.0)
    with pytest.raises(ValueError, match="does not support Linear"):
        perturb(nn.Linear(4, 4), Binary(), members=2, sigma=1.0)
    with pytest.raises(ValueError, match="does not support antithetic sampling"):
        perturb(BinarizedLinear(4, 4), Binary(), members=2, sigma=1.0, antithetic=True)
    with pytest.raises(ValueError, match="does not support convolutions"):
        perturb(BinarizedConv2d(4, 4, 3), Binary(stored="int8"), members=2, sigma=1.0)
    with pytest.raises(ValueError, match="stride must be one or two integers"):
        BinarizedConv2d(4, 4, 3, stride=0)


def test_rows_that_are_not_packed_bits_are_refused() -> None:
    """Numbers, another number of words, images for a linear layer and bits after the last are refused."""
    layer, rows = BinarizedLinear(65, 4), bits.pack(coins(3, 65))
    for x in (torch.zeros(3, 65), rows.int(), rows[:, :1], rows[:, None]):
        with pytest.raises(
            ValueError, match=r"65 input channels reads packed words \[rows, words\], 2 of int64"
        ):
            layer(x)
    for bit in (1, 62, 63):
        dirty = rows.clone()
        dirty[1, 1] |= torch.tensor(1) << bit
        with pytest.raises(ValueError, match="after the last of 65 channels"):
            layer(dirty)
    assert layer(rows).shape == (3, 1)
    population = perturb(layer, Binary(), members=2, sigma=1.0)
    with pytest.raises(ValueError, match="not a multiple of 2 members"):
        population(rows, noise=population.sample(0))


def test_a_population_is_never_split_inside_a_group() -> None:
    """Splits are at the ends of a mixture's groups and of the stream's blocks."""
    population = perturb(BinarizedLinear(9, 2), BinaryMixture(group=6), members=2000, sigma=1.0)
    assert population.shard_multiple == math.lcm(256, 6)
    philox = perturb(BinarizedLinear(9, 2), BinaryMixture(group=6), members=20, sigma=1.0, stream="philox")
    assert philox.shard_multiple == 6
    with pytest.raises(ValueError, match="multiples of 6"):
        philox.sample(0, range(4, 10))


def test_noise_takes_a_32nd_of_dense_noise() -> None:
    """Noise has one bit per member and weight, and one probability per weight."""
    layer = BinarizedLinear(256, 64, bias=False)
    assert perturb(layer, Binary(), members=512, sigma=1.0).noise_bytes == 4 * 256 * 64 * (512 // 32 + 1)
