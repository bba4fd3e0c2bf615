"""Choices at random in models of a narrow type: drawn in a wide one, so that they prefer nothing."""

import pytest
import torch
from torch import Tensor, nn

from impls.perturbation.noise import STREAMS
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import DropConnect, DropoutMask, Permuted

WIDTH, MEMBERS = 64, 20000
STREAM = pytest.mark.parametrize("stream", STREAMS)


def drawn(scheme: AnyScheme, field: str, stream: str, members: int = MEMBERS) -> Tensor:
    """Return a part of the noise that a layer of a bfloat16 model has."""
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    population = perturb(model, scheme, members=members, sigma=0.1, stream=stream)
    (noise,) = population.sample(0).layers.values()
    part: Tensor = getattr(noise.weight, field)
    return part


@STREAM
def test_permutations_prefer_no_order(stream: str) -> None:
    """Half of all pairs of channels change their order: a tie of keys would leave them as they are."""
    places = drawn(Permuted(), "inputs", stream).flatten(0, -2)
    first, second = torch.triu_indices(WIDTH, WIDTH, 1)
    turned = sum((part[:, first] > part[:, second]).sum().item() for part in places.split(1000))
    # Inversions of a random permutation have the variance w (w - 1) (2 w + 5) / 72.
    error = (WIDTH * (WIDTH - 1) * (2 * WIDTH + 5) / 72 / len(places)) ** 0.5 / len(first)
    assert abs(turned / len(places) / len(first) - 0.5) < 4 * error


@STREAM
@pytest.mark.parametrize(("scheme", "members"), [(DropoutMask(p=0.1), MEMBERS), (DropConnect(p=0.1), 500)])
def test_masks_drop_as_often_as_they_say(stream: str, scheme: AnyScheme, members: int) -> None:
    """A tenth of what is gated is dropped, not the nearest share that the model's type has room for."""
    kept = drawn(scheme, "kept", stream, members)
    dropped = 1 - kept.double().mean().item()
    assert abs(dropped - 0.1) < 4 * (0.1 * 0.9 / kept.numel()) ** 0.5
