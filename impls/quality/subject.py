"""Whose quality is looked at: a scheme on a model, and its members written out as rows of a matrix."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esbench.registry import UnavailableError
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.noise import NoiseStream
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AnyScheme
from impls.perturbation.selection import perturbed, trainable

NUMBERS = 2**26
"""Most numbers that are written out at once: 256 MB."""

FEWEST, ENOUGH = 64, 128
"""Members that are looked at, see :func:`looked_at`."""

CHEAP = 2**22
"""Numbers that take a few hundredths of a second: more than the fewest members are looked at for so many."""

PIECE = 2**24
"""Numbers that a scheme is asked to write out in one call."""

NOISE_BYTES = 2**28
"""A population whose noise takes more is not drawn to look at some of its members, if any others will do."""

MOST_BYTES = 2**31
"""Nor is one whose noise takes more than this, if no others will do."""


@dataclass(frozen=True)
class Subject:
    """A scheme on a plain model, at a population's size.

    Attributes:
        model: a plain model; all its weights count, layer after layer.
        scheme: how they are perturbed.
        members: of the population whose quality is asked for; pairs, with antithetic sampling.
        sigma: the scale of the noise.
        seed: of all noise.

    """

    model: nn.Module
    scheme: AnyScheme
    members: int
    sigma: float = 0.02
    seed: int = 0

    @property
    def layers(self) -> list[PerturbedLayer]:
        """The layers of the model, with the scheme that each has."""
        return perturbed(trainable(self.model, ()), {"*": self.scheme})

    @property
    def size(self) -> int:
        """How many perturbed numbers there are: d."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def population(self, members: int | None = None, *, antithetic: bool = False) -> Population:
        """Make a population, of as many members as asked for."""
        return perturb(
            self.model,
            self.scheme,
            members=self.members if members is None else members,
            sigma=self.sigma,
            antithetic=antithetic,
            seed=self.seed,
        )

    def sample(self, step: int, count: int, *, directions: bool = False) -> Tensor:
        """Write members of one step out, drawn at random from all of them: [count, d], in float32.

        With ``directions`` what the update sums of the same members, times utilities.

        Each pair of members is met equally often, so that what some pairs share, one of several cores for
        instance, counts as often as it does in the whole population. Where it would cost too much to draw
        everybody's noise, they are all members of a smaller population whose pairs share as much.

        Raises:
            UnavailableError: only the whole population will do, and its noise takes too much memory.

        """
        everybody = self._draws_everybody(count)
        population = self.population(None if everybody else count)
        noise = population.sample(step)
        rng = random.Random(f"{self.seed} {self.scheme} {step}")  # noqa: S311  a choice, not a secret
        chosen = sorted(rng.sample(range(population.members), count))
        rows = torch.empty(count, self.size, device=next(self.model.parameters()).device)
        filled = 0
        for start, stop in _runs(chosen, max(1, PIECE // self.size)):
            place = 0
            for value in population.dense_noise(noise, start, stop, directions=directions).values():
                width = value[0].numel()
                rows[filled : filled + stop - start, place : place + width] = value.flatten(1)
                place += width
            filled += stop - start
        return rows

    def _draws_everybody(self, count: int) -> bool:
        """Whether the whole population is drawn, so that some of its members can be picked."""
        if count == self.members or self.scheme.contrasts:
            return True
        layers = self.layers
        noise = [layer.sample(0, 0, range(self.members), device="meta") for layer in layers]
        nbytes = sum(one.nbytes for one in noise)
        shapes = [layer.grouped(layer.weight.detach()).shape for layer in layers]
        if any(self.scheme.kappa(one, self.members) != self.scheme.kappa(one, count) for one in shapes):
            if nbytes > MOST_BYTES:
                message = (
                    f"what two members share depends on how many there are, and the noise of {self.members} "
                    f"takes {nbytes / 1e9:.1f} GB: more than is drawn to look at some of them"
                )
                raise UnavailableError(message)
            return True
        held = [getattr(one.weight, name) for one in noise for name in vars(one.weight)]
        # Noise that is drawn again is drawn with all the members of its block.
        if any(isinstance(value, NoiseStream) for value in held):
            return False
        # Of dense noise no less is drawn than is written out.
        return nbytes <= NOISE_BYTES and nbytes < self.members * self.size * torch.float32.itemsize


def looked_at(members: int, size: int) -> int:
    """Return how many of a population's members are looked at, for weights of that size.

    The standard error of kappa is about 2 (1 + kappa) / (members looked at) for one replicate. That leaves an
    interval of 0.02 (1 + kappa) for up to 2^15 weights and of 0.04 (1 + kappa) for up to 2^20, in 0.1 to 2 s
    on two cores. Where few pairs of members share much, as those that meet in one column of a thousand, it is
    wider, and what was not met is not in it: of wide layers the closed form knows more. n_eff takes kappa as
    kappa n / d: where there are more members than weights, more of them are looked at.
    """
    wanted = max(FEWEST, min(ENOUGH, CHEAP // size), math.ceil(64 * members / size))
    return min(members, wanted, max(8, NUMBERS // size))


def _runs(chosen: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of neighbours in a sorted list, each no longer than that."""
    start = previous = chosen[0]
    for place in chosen[1:]:
        if place != previous + 1 or place - start == longest:
            yield start, previous + 1
            start = place
        previous = place
    yield start, previous + 1
