"""Noise stays the same from version to version: seed, step, layer and member decide its bits."""

import hashlib

import pytest
import torch
from torch import Tensor, nn

import impls
from impls import BinarizedLinear, perturb
from impls.perturbation.scheme import AnyScheme

DIGESTS = {
    ("LowRankSign", "block"): "e7e9aab62a9f9f3f",
    ("LowRankSign", "philox"): "8d96b57844378239",
    ("FlippedSign", "block"): "31a0070390c40fda",
    ("FlippedSign", "philox"): "e14dbc4b6570f1ac",
    ("DropoutMask", "block"): "d23f87bb388cb94b",
    ("DropoutMask", "philox"): "985c1caa4a8047d5",
    ("Binary", "block"): "2fb2c94a6ade15c2",
    ("Binary", "philox"): "757f2fded2e7d487",
}
"""Digests of noise made of integers, which do not depend on how a machine computes a logarithm or a sine."""

NORMALS = {
    "block": [-0.607851, 0.190422, -0.636018, 1.781533, 1.188453, -0.63381, 1.218874],
    "philox": [-0.034984, 0.972338, 0.01562, -0.680066, 0.103428, -0.837833, 0.94951],
}
"""Entries of dense noise, which differ between machines by a few roundings of float32."""

PLACES = [0, 1, 2, 3, 349, 350, 699]


def written(scheme: AnyScheme, stream: str) -> Tensor:
    """Return the dense noise of two members of a small layer at seed 7 and step 11."""
    kind = BinarizedLinear if isinstance(scheme, impls.Binary) else nn.Linear
    model = kind(70, 5, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-2, 2, 350).view(5, 70))
    population = perturb(model, scheme, members=2, sigma=0.1, seed=7, stream=stream)
    return population.dense_noise(population.sample(11))["weight"]


@pytest.mark.parametrize(("name", "stream"), DIGESTS)
def test_integers_have_the_stored_bits(name: str, stream: str) -> None:
    """Signs, gates and bits, written out as weights, have the stored digest."""
    entries = (written(getattr(impls, name)(), stream) * 2**20).round().to(torch.int64)
    digest = hashlib.blake2b(entries.numpy().tobytes(), digest_size=8).hexdigest()
    assert digest == DIGESTS[name, stream]


@pytest.mark.parametrize("stream", NORMALS)
def test_normals_have_the_stored_values(stream: str) -> None:
    """Dense noise has the stored entries, up to a few roundings of float32."""
    entries = written(impls.Perturbed(), stream).flatten()[PLACES].tolist()
    assert entries == pytest.approx(NORMALS[stream], abs=2e-6)
