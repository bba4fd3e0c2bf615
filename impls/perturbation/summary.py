"""The table of a population's layers: their schemes, their noise, and how many members they are worth."""

import math
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from impls.perturbation.layer import PerturbedLayer, ScaleScheme
from impls.perturbation.noise import NoiseStream


@dataclass(frozen=True)
class LayerSummary:
    """One perturbed weight, with its bias.

    Attributes:
        name: the layer's name, as in ``population.layers``.
        kind: the class of its module.
        scheme: the scheme of the weight; dense noise for normalizations and a module's own parameters.
        parameters: the number of perturbed parameters.
        noise_bytes: memory of a step's noise for the whole population.
        distinct: how many members can have different E_m of the weight in a step, at most.
        n_eff: the number of members with independent noise that would give as good a gradient; infinite if
            that of a linear fitness is exact, None if the scheme declares no kappa.
    """

    name: str
    kind: str
    scheme: str
    parameters: int
    noise_bytes: int
    distinct: int
    n_eff: float | None


@dataclass(frozen=True)
class PopulationSummary:
    """The layers of a population; ``print`` shows a table.

    Attributes:
        members: number of members.
        layers: the perturbed layers.
    """

    members: int
    layers: tuple[LayerSummary, ...]

    @override
    def __str__(self) -> str:
        from tabulate import tabulate  # noqa: PLC0415  # measuring must work without it

        header = ("layer", "type", "scheme", "parameters", "noise MB", "distinct", "n_eff")
        rows = [
            (
                layer.name,
                layer.kind,
                layer.scheme,
                f"{layer.parameters:,}",
                f"{layer.noise_bytes / 1e6:.3g}",
                f"{layer.distinct:,}",
                _n_eff_text(layer.n_eff),
            )
            for layer in self.layers
        ]
        parameters = f"{sum(layer.parameters for layer in self.layers):,}"
        noise_mb = f"{sum(layer.noise_bytes for layer in self.layers) / 1e6:.3g}"
        rows.append(("total", "", f"{self.members:,} members", parameters, noise_mb, "", ""))
        align = ("left", "left", "left", "right", "right", "right", "right")
        return tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=align)


def _n_eff_text(value: float | None) -> str:
    if value is None:
        return "unknown"
    return "exact" if math.isinf(value) else f"{value:,.0f}"


def summarize_layer(
    layer: PerturbedLayer, members: int, size: int, stream: type[NoiseStream]
) -> LayerSummary:
    """Return the summary of a layer in a network of ``size`` perturbed parameters; no noise is drawn."""
    return LayerSummary(
        name=layer.name,
        kind=type(layer.module).__name__,
        scheme="dense noise" if isinstance(layer.scheme, ScaleScheme) else str(layer.scheme),
        parameters=parameter_count(layer),
        noise_bytes=noise_bytes(layer, members, stream),
        distinct=int(min(distinct_perturbations(layer), members)),
        n_eff=n_eff(layer, members, size),
    )


def noise_bytes(layer: PerturbedLayer, members: int, stream: type[NoiseStream]) -> int:
    """Return the memory of a layer's noise of one step for all members; no noise is drawn."""
    return layer.sample(0, 0, range(members), device="meta", stream=stream).nbytes


def parameter_count(layer: PerturbedLayer) -> int:
    """Return the number of perturbed parameters of a layer."""
    return layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel())


def distinct_perturbations(layer: PerturbedLayer) -> float:
    """Return how many different E_m a step can have for the layer's weight, or an upper bound."""
    return layer.scheme.distinct_perturbations(layer.split_groups(layer.weight).shape)


def n_eff(layer: PerturbedLayer, members: int, size: int) -> float | None:
    """Return n / (1 + kappa n / d), with d = ``size`` perturbed parameters of the network.

    Only what the scheme declares is used; no numbers of the weight are read. Returns None if kappa is not
    declared, if the noise scales with the weight, or if the scheme learns from rows.
    """
    weight = layer.split_groups(layer.weight.detach().to("meta"))
    if layer.learns_from_rows or isinstance(layer.scheme.noise_std(weight, 1.0), Tensor):
        return None
    kappa = layer.scheme.kappa(weight, members)
    if kappa is None:
        return None
    members_per_independent = 1 + kappa * members / size
    return members / members_per_independent if members_per_independent > 0 else math.inf
