"""Which members a scheme's quality is looked at: pairs of the whole population, or of one that is as good."""

import pytest
import torch
from torch import nn

import impls
from esbench.registry import UnavailableError
from impls.perturbation.scheme import AnyScheme
from impls.quality import kappa as law
from impls.quality.kappa import Subject, kappa, moments


@pytest.mark.parametrize(
    ("scheme", "shape", "members"),
    [
        (impls.Orthogonal(regenerated=True), (16, 16), 1024),
        (impls.Flipped(cores=32), (32, 32), 4096),
    ],
    ids=str,
)
def test_pairs_are_those_of_the_whole_population(
    scheme: AnyScheme, shape: tuple[int, int], members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what two members share depends on how many there are, few are picked from all of them."""
    monkeypatch.setattr(law, "NOISE_BYTES", 0)
    here = Subject(nn.Linear(shape[1], shape[0]), scheme, members)
    fitted = torch.tensor([kappa(moments(here.sample(step, 128)), here.size) for step in range(12)])
    weights = shape[0] * shape[1]
    declared = scheme.kappa(torch.Size((1, *shape)), members)
    assert declared is not None
    # Biases are dense: the mean over all entries.
    expected = declared * weights / here.size
    error = fitted.std().item() / len(fitted) ** 0.5
    assert abs(fitted.mean().item() - expected) < 5 * error
    assert error < 0.2 * (1 + abs(expected))
    alone = scheme.kappa(torch.Size((1, *shape)), 128)
    assert alone is not None
    assert abs(alone - declared) > 5 * error


def test_a_population_too_large_to_pick_from_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a smaller one would share less, so there is no figure, and the reason has the numbers."""
    monkeypatch.setattr(law, "MOST_BYTES", 1000)
    here = Subject(nn.Linear(32, 32), impls.Flipped(cores=32), 4096)
    with pytest.raises(UnavailableError, match="4096"):
        here.sample(0, 64)
    assert len(Subject(nn.Linear(32, 32), impls.Flipped(), 4096).sample(0, 64)) == 64
