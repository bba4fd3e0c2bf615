"""Cosine between a scheme's gradient estimate and backpropagation's gradient, on a small trained network.

Fitness is minus the cross-entropy on images of digits, the same for all members, evaluated in antithetic
pairs. Unlike kappa (:mod:`impls.quality.kappa`) the cosine includes the curvature of the fitness at a
finite sigma.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional

from impls.perturbation.population import ActivationRecord, Population, PopulationNoise
from impls.quality.kappa import SMALLEST_SHARE, Subject
from impls.training.networks import digits, rows_for
from impls.verify.reference import compute_update, to_float64

if TYPE_CHECKING:
    from impls.perturbation.layer import LayerCall

SIGMAS = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Scales of the noise: the fitness is nearly linear at the first, and curved at the last."""

IMAGES = 16
"""Number of images that each member evaluates."""

MAX_ROWS = 2**14
"""The most rows evaluated in one call."""


@dataclass(frozen=True)
class DigitsFitness:
    """The fitness of a network with a scheme: minus its cross-entropy on images of digits.

    Attributes:
        subject: the scheme and the network; ``subject.members`` antithetic pairs are evaluated.
        x: the images as rows of the network, [rows, *features].
        y: the classes of the images, int64 [rows].
    """

    subject: Subject
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, subject: Subject) -> Self:
        """Create the fitness on the first ``IMAGES`` training images.

        Raises:
            UserError: scikit-learn is not installed.
        """
        weight, data = next(subject.model.parameters()), digits()
        x, y = data.train_x[:IMAGES].to(weight), data.train_y[:IMAGES].to(weight.device)
        return cls(subject, rows_for(subject.model, x), y)

    def gradient(self) -> Tensor:
        """Return backpropagation's gradient of the cross-entropy, [d] in float64."""
        model = to_float64(self.subject.model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            loss = functional.cross_entropy(model(self.x.double()), self.y)
            gradients = torch.autograd.grad(loss, parameters)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def estimate(self, sigma: float, step: int) -> Tensor:
        """Return the estimate of the gradient by the members of one step, [d] in float64."""
        population = replace(self.subject, sigma=sigma).population(antithetic=True)
        noise = population.sample(step)
        losses, record = self.evaluate(population, noise)
        # Subtracting the mean removes the noise component that all members share.
        utilities = losses.mean(1, keepdim=True) - losses
        gradients = compute_update(population, noise, utilities, record)
        return torch.cat([gradient.double().flatten() for gradient in gradients.values()])

    def cosine(self, sigma: float, step: int) -> float:
        """Return the cosine of the members' estimate at one step and backpropagation's gradient."""
        return float(functional.cosine_similarity(self.estimate(sigma, step), self.gradient(), dim=0))

    def evaluate(self, population: Population, noise: PopulationNoise) -> tuple[Tensor, ActivationRecord]:
        """Return the members' mean losses with the noise and with its negative, [2, members].

        The record of the layers' inputs has the calls of all batches.
        """
        members, losses = population.members, torch.zeros(2, population.members, dtype=torch.float64)
        calls: dict[str, list[LayerCall]] = {}
        for x, y in self._batches(members):
            rows = x.repeat(2, *[1] * (x.dim() - 1)).repeat_interleave(members, 0)
            logits, record = population.call_with_activations(rows, noise=noise)
            classes = y.repeat(2).repeat_interleave(members)
            row_losses = functional.cross_entropy(logits.double(), classes, reduction="none")
            losses = losses.to(row_losses.device) + row_losses.view(2, len(y), members).sum(1)
            for name, recorded in record.layers.items():
                calls.setdefault(name, []).extend(recorded)
        return losses / len(self.y), ActivationRecord(calls, noise)

    def _batches(self, members: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of images and classes, of at most ``MAX_ROWS`` rows for all members together."""
        count = max(1, MAX_ROWS // (2 * members))
        return zip(self.x.split(count), self.y.split(count), strict=True)


def effective_members_of_cosine(cosine: float, size: int) -> float:
    """Return n_eff = d cos^2 / (1 - cos^2), the effective population for a cosine.

    It is at most d / :data:`~impls.quality.kappa.SMALLEST_SHARE`, because a cosine may round to 1.
    """
    return size * cosine**2 / max(1 - cosine**2, SMALLEST_SHARE)
