"""What a caller keeps between the calls of one step: its noise, and what its layers saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from impls.perturbation.layer import LayerNoise
from impls.perturbation.operators import AbstractOperator


@dataclass(frozen=True, eq=False)
class PopulationNoise:
    """The noise of one step for a range of members, by layer: a value, kept by the caller."""

    members: range
    layers: Mapping[str, LayerNoise]
    owner: object
    """Whose noise it is: a population takes only its own."""

    @property
    def nbytes(self) -> int:
        """Bytes that the noise holds."""
        return sum(noise.nbytes for noise in self.layers.values())


class Seen(NamedTuple):
    """One call of a layer: the operator it was called with, and its rows [repeats * members, ...].

    ``version`` is torch's count of the changes that were made to the rows in place.
    """

    operator: AbstractOperator
    rows: Tensor
    version: int

    @classmethod
    def of(cls, operator: AbstractOperator, rows: Tensor) -> "Seen":
        """Take a call as it is made; nothing is copied."""
        return cls(operator, rows, 0 if rows.is_inference() else rows._version)  # noqa: SLF001  torch's own name for it


@dataclass(frozen=True, eq=False)
class Record:
    """What the layers saw that learn from rows, by name, call after call; empty where none does."""

    layers: Mapping[str, Sequence[Seen]]
    noise: PopulationNoise
    """The noise that they saw it with."""

    @property
    def nbytes(self) -> int:
        """Bytes that the record keeps alive."""
        return sum(seen.rows.nbytes for calls in self.layers.values() for seen in calls)

    def check(self, noise: PopulationNoise) -> None:
        """Hold the record to the noise that is to be summed, and its rows to what the layers saw.

        Raises:
            ValueError: it is of other noise, or its rows were changed in place since.

        """
        if self.noise is not noise:
            message = (
                "this record was made with other noise: pass the one that call_with_activations() returned "
                "with it"
            )
            raise ValueError(message)
        for name, calls in self.layers.items():
            if any(seen.version != Seen.of(*seen[:2]).version for seen in calls):
                message = (
                    f"the rows that layer {name!r} saw were changed in place since: its update needs them. "
                    "Write y = y + x instead of y += x, or give each call inputs of its own"
                )
                raise ValueError(message)


def signed_utilities(
    utilities: Tensor, members: int, device: torch.device, *, antithetic: bool, validate: bool
) -> Tensor:
    """Return one number for each member, in float64 on ``device``: its utility, or what its two differ by.

    Raises:
        ValueError: they are not as many as there are members, or not all finite, where that is looked at.

    """
    c = torch.as_tensor(utilities, device=device).detach().flatten().double()
    if c.numel() != members * (2 if antithetic else 1):
        message = f"{c.numel()} utilities for {members} members" + " twice (antithetic)" * antithetic
        raise ValueError(message)
    if validate and not bool(c.isfinite().all()):
        message = f"{int((~c.isfinite()).sum())} of {c.numel()} utilities are not finite"
        raise ValueError(message)
    return c[:members] - c[members:] if antithetic else c


def length(c: Tensor) -> Tensor:
    """Return the length of utilities, in float64, but 1 at least.

    Scaled to length 1, utilities of any size fit the narrowest float type; the size comes back in float64.
    Its square need not fit that.
    """
    largest = c.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return largest * (c / largest).norm().clamp_min(1.0)


def check_part(part: range, members: int, boundary: int) -> None:
    """Hold a range of members to where a population of that many may be split.

    Raises:
        ValueError: it is empty, beyond the population, or cut where there is no boundary.

    """
    ends_well = part.stop % boundary == 0 or part.stop == members
    inside = part and part.step == 1 and part.start >= 0 and part.stop <= members
    if not (inside and part.start % boundary == 0 and ends_well):
        message = (
            f"members {part} is no part of the population: parts of 0..{members} start and end "
            f"at multiples of {boundary} (or at the end)"
        )
        raise ValueError(message)


def check_rows(x: Tensor, members: int, *, antithetic: bool) -> int:
    """Return how many rows an input has, [repeats * members, ...].

    Raises:
        ValueError: they are no multiple of the members, or the repeats are odd with antithetic sampling.

    """
    if x.dim() == 0:
        message = "the input has no rows: expected [repeats * members, ...]"
        raise ValueError(message)
    rows = x.shape[0]
    if rows == 0 or rows % members:
        message = (
            f"a batch of {rows} rows is no multiple of {members} members (row = repeat * members + member)"
        )
        raise ValueError(message)
    if antithetic and rows // members % 2:
        message = (
            f"antithetic sampling needs an even number of repeats, got {rows // members} "
            f"({rows} rows, {members} members)"
        )
        raise ValueError(message)
    return rows
