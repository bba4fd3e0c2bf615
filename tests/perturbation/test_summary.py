"""The summary of a population: what each layer gets, as values and as a table."""

import re
from typing import Any

import pytest
from torch import nn

import impls


def test_a_summary_has_each_layers_scheme_noise_and_effective_members() -> None:
    """The figures are those that the schemes declare, the bytes those of the noise that is drawn."""
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Linear(1, 32, bias=False))
    schemes: dict[str, impls.AbstractScheme[Any]] = {"0": impls.Flipped(side="both"), "*": impls.Permuted()}
    population = impls.perturb(model, schemes, members=64, sigma=0.1, warn=False)
    summary = population.summary()
    noise = population.sample(0)
    flipped, norm, _ = summary.layers
    assert [layer.name for layer in summary.layers] == ["0", "1", "2"]
    assert [layer.kind for layer in summary.layers] == ["Linear", "LayerNorm", "Linear"]
    assert flipped.scheme == str(impls.Flipped(side="both"))
    assert norm.scheme == "dense noise"
    assert [layer.parameters for layer in summary.layers] == [160, 64, 32]
    assert [layer.noise_bytes for layer in summary.layers] == [noise.layers[i].nbytes for i in "012"]
    assert population.noise_bytes == noise.nbytes
    assert [layer.distinct for layer in summary.layers] == [64, 64, 1]  # the only column cannot move
    first = population.layers[0]
    kappa = first.scheme.kappa(first.weight.view(1, 32, 4), 64)
    assert kappa
    assert flipped.n_eff == pytest.approx(64 / (1 + kappa * 64 / 256))
    assert norm.n_eff == 64


def test_a_printed_summary_is_a_table_with_a_total() -> None:
    """There is a line for each layer; an n_eff that is not known from the scheme alone is "unknown"."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    population = impls.perturb(
        model, {"0": impls.Perturbed(), "*": impls.DropoutMask()}, members=2000, sigma=0.1, warn=False
    )
    heading, _, dense, dropout, total = str(population.summary()).splitlines()
    assert heading.split() == ["layer", "type", "scheme", "parameters", "noise", "MB", "distinct", "n_eff"]
    assert re.fullmatch(r"0 +Linear +Perturbed\(stored='noise'\) +64 +0\.512 +2,000 +2,000", dense)
    assert dropout.endswith("unknown")
    assert re.match(r"total +2,000 members +80 +0\.\d+", total)
