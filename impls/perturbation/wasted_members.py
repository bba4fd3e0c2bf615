"""Warn of layers where most members are wasted: their perturbations repeat, or share most of their noise."""

import glob
import warnings
from collections.abc import Sequence

from torch import Tensor

from esbench.text import pluralize
from impls.perturbation.layer import PerturbedLayer

LEAST_SHARE = 0.1
"""The least n_eff / n without a warning."""


def warn_of_wasted_members(layers: Sequence[PerturbedLayer], members: int) -> None:
    """Warn of each layer with fewer different perturbations than members, or n_eff / n below ``LEAST_SHARE``.

    Only what schemes declare is used; no numbers of a weight are read. Layers whose noise scales with the
    weight have no n_eff here, and layers that learn from rows are left out.
    """
    size = sum(p.numel() for layer in layers for p in (layer.weight, layer.bias) if p is not None)
    for layer in layers:
        if not layer.learns_from_rows and (waste := _waste(layer, members, size)):
            label, example = type(layer.module).__name__, "Perturbed()"
            if layer.name:
                label = f"layer {layer.name!r}"
                example = f"{{{glob.escape(layer.name)!r}: Perturbed(), '*': ...}}"
            message = f"{label}: {layer.scheme} {waste}: use another scheme for this layer, such as {example}"
            warnings.warn(message, stacklevel=3)


def _waste(layer: PerturbedLayer, members: int, size: int) -> str:
    """Return why members of a layer are wasted in a network of ``size`` perturbed parameters, or ``""``."""
    weight = layer.split_groups(layer.weight.detach().to("meta"))
    distinct = layer.scheme.distinct_perturbations(weight.shape)
    if distinct < members:
        return f"has at most {pluralize(int(distinct), 'different perturbation')} for {members} members"
    if isinstance(layer.scheme.noise_std(weight, 1.0), Tensor):
        return ""
    kappa = layer.scheme.kappa(weight, members) or 0.0
    members_per_independent = 1 + kappa * members / size
    if members_per_independent <= 1 / LEAST_SHARE:
        return ""
    n_eff = members / members_per_independent
    return f"keeps {n_eff:.0f} of {members} members: n_eff = n / (1 + kappa n / d) with kappa = {kappa:.3g}"
