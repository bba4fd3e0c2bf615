"""Check a user's model: the population's rows against a few members that are evaluated by themselves."""

import copy
import itertools
import secrets
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from impls.perturbation.population import Population

CHECKED = 4
"""The most members, and the most repeats of each, that are evaluated."""


def check_rows(population: "Population", x: Tensor) -> None:
    """Compare rows of random members, each evaluated alone by the plain model with the member's weights.

    The reference is computed in float64. The error may be at most four times that of the plain model in its
    own dtype, which counts as 1 % of the output at most, plus a few roundings.

    Raises:
        ValueError: a row differs, or the model does not return one tensor with a row for each input row.
    """
    noise = population.sample(secrets.randbelow(2**31))
    y, members = population(x, noise), population.members
    if not isinstance(y, Tensor) or y.shape[:1] != x.shape[:1]:
        returned = f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        message = (
            f"verify compares rows, but the model returned {returned}: return one tensor [{len(x)}, ...] for "
            f"{len(x)} rows"
        )
        raise ValueError(message)
    # Copies: functional_call() does not restore a module that a model has under two names.
    narrow_model, wide_model = copy.deepcopy(population.model), copy.deepcopy(population.model).double()
    plain = copy.deepcopy(dict(wide_model.named_parameters(remove_duplicate=False)))
    narrow_error = 0.0
    expected: dict[tuple[int, int], Tensor] = {}
    repeats = len(x) // members
    for repeat, member in itertools.product(_choose(repeats), _choose(members)):
        is_negated = population.antithetic and repeat >= repeats // 2
        row = x[repeat * members + member].unsqueeze(0)
        sigma = -population.sigma if is_negated else population.sigma
        changes = {
            name: sigma * value.double() for name, value in population.perturbation(noise, member).items()
        }
        weights = population.effective_weights({name: plain[name] for name in changes}, changes)
        wide_row = row.double() if row.is_floating_point() else row
        wide_model.load_state_dict(weights, strict=False)
        wide = wide_model(wide_row)[0]
        narrow_model.load_state_dict(population.member(noise, member, negated=is_negated), strict=False)
        narrow = narrow_model(row)[0]
        narrow_error = max(narrow_error, float((narrow.double() - wide).norm()))
        expected[repeat, member] = wide
    largest = max(float(wide.norm()) for wide in expected.values())
    narrow_error = min(narrow_error, largest / 100)  # a model that draws random numbers differs by more
    roundings = 1024 if y.dtype == torch.float64 else 4
    for (repeat, member), wide in expected.items():
        error = float((y[repeat * members + member].double() - wide).norm())
        allowed = 4 * narrow_error + roundings * torch.finfo(y.dtype).eps * float(wide.norm())
        if not error <= allowed:
            message = (
                f"row {repeat * members + member} (repeat {repeat}, member {member}) differs by {error:.2g} "
                f"from the model with this member's weights alone, allowed {allowed:.2g}: do not mix or "
                "reorder rows, draw random numbers, or use copies of weights"
            )
            raise ValueError(message)


def _choose(count: int) -> list[int]:
    """Return the first, the last and random numbers below ``count``, without a global generator."""
    drawn = secrets.SystemRandom().sample(range(count), min(CHECKED - 2, count))
    return sorted({0, count - 1, *drawn})
