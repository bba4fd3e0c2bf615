"""Structure of the noise: inner products, spectrum and correlations of members."""

import itertools

import torch
from torch import Tensor, nn

from impls.perturbation.population import perturb
from impls.quality.kappa import Moments, Subject
from impls.verify.reference import double

SHOWN = 64
"""Most singular values of a stored spectrum, evenly spaced."""

FEW = 4
"""Members whose entries are compared with those of other layers and steps."""


def dots(found: Moments, size: int) -> tuple[float, float]:
    """Return mean and variance of <E_i, E_j> / sqrt(d), i != j: 0 and 1 for independent Gaussian members.

    Args:
        found: moments of the members.
        size: d.

    """
    pairs = found.members * (found.members - 1)
    scale = size**0.5 * found.members / found.trace
    mean = found.total / pairs * scale
    return mean, found.squares / pairs * scale**2 - mean**2


def member_correlation(found: Moments) -> float:
    """Return the correlation coefficient of the entries of two members, averaged over all pairs."""
    return found.total / (found.members - 1) / found.trace


def spectrum(subject: Subject) -> tuple[tuple[float, ...], float]:
    """Return the singular values of one member's largest weight, and its stable rank |E|_F^2 / |E|_2^2.

    The weight is the matrix [o, i * taps] of its first group. Singular values are sorted, largest first, and
    divided by their root mean square; at most :data:`SHOWN` are returned, evenly spaced.

    Raises:
        ValueError: the noise is zero.

    """
    layer = max(subject.layers, key=lambda layer: layer.weight.numel())
    population = subject.population(1)
    name = f"{layer.name}.weight".removeprefix(".")
    written = population.perturbation(population.sample(0), 0)[name]
    values = torch.linalg.svdvals(layer.grouped(written)[0].flatten(1).double())
    square = values.square()
    if not values.any():
        message = "the sampled perturbation is zero: it has no directions"
        raise ValueError(message)
    scaled = (values / square.mean().sqrt()).tolist()
    places = {round(place * (len(scaled) - 1) / (SHOWN - 1)) for place in range(SHOWN)}
    return tuple(scaled[place] for place in sorted(places)), float(square.sum() / square.max())


def correlations(subject: Subject, step: int) -> tuple[float, float]:
    """Return the correlation coefficients of entries across layers, and across steps.

    A model of one layer is paired with a copy of itself. For layers of different shapes the first values of
    the first member are compared: equal streams fill different shapes in the same order.
    """
    alone = len(subject.layers) == 1
    model = nn.ModuleList([subject.model, _twin(subject.model)]) if alone else subject.model
    population = perturb(model, subject.scheme, members=FEW, sigma=subject.sigma, seed=subject.seed)
    here, later = (
        [
            value.flatten(1).float()
            for name, value in population.dense_noise(population.sample(when)).items()
            if name.endswith("weight")
        ]
        for when in (step, step + 1)
    )
    layers = [_coefficient(one, other) for one, other in itertools.pairwise(here)]
    steps = [_coefficient(one, other) for one, other in zip(here, later, strict=True)]
    return sum(layers) / len(layers), sum(steps) / len(steps)


def _twin(model: nn.Module) -> nn.Module:
    dtype = next(model.parameters()).dtype
    return double(model).to(dtype)


def _coefficient(one: Tensor, other: Tensor) -> float:
    """Return sum xy / sqrt(sum x^2 sum y^2) over the common part of two tensors [m, *]."""
    width = min(one.shape[1], other.shape[1])
    met = len(one) if one.shape == other.shape else 1
    x, y = one[:met, :width].flatten(), other[:met, :width].flatten()
    return float(x @ y / (x.norm() * y.norm()).clamp_min(torch.finfo(x.dtype).tiny))
