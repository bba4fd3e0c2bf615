"""Warn of layers where most members are wasted: their perturbations repeat, or share most of their noise."""

import glob
import warnings
from collections.abc import Sequence

from esbench.text import pluralize
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.summary import distinct_perturbations, n_eff, parameter_count

LEAST_SHARE = 0.1
"""The least n_eff / n without a warning."""


def warn_of_wasted_members(layers: Sequence[PerturbedLayer], members: int) -> None:
    """Warn of each layer with fewer different perturbations than members, or n_eff / n below ``LEAST_SHARE``.

    Only what schemes declare is used, see :func:`n_eff`. Layers that learn from rows are left out.
    """
    size = sum(map(parameter_count, layers))
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
    distinct = distinct_perturbations(layer)
    if distinct < members:
        return f"has at most {pluralize(int(distinct), 'different perturbation')} for {members} members"
    effective = n_eff(layer, members, size)
    if effective is None or effective >= LEAST_SHARE * members:
        return ""
    kappa = (members / effective - 1) * size / members
    return (
        f"keeps {effective:.0f} of {members} members: n_eff = n / (1 + kappa n / d) with kappa = {kappa:.3g}"
    )
