"""Check a user's model: the population's rows against a few members that are evaluated by themselves."""

import copy
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from impls.perturbation.population import Population

CHECKED = 4
"""The most members, and the most repeats of each, that are evaluated."""


def check_rows(population: "Population", args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Compare rows of random members, each evaluated alone by the plain model with the member's weights.

    The reference is computed in float64. The error may be at most four times that of the plain model in its
    own dtype, which counts as 1 % of the output at most, plus a few roundings.

    Raises:
        ValueError: a row differs, or no tensor that the model returns has a row for each input row.
    """
    noise = population.sample(secrets.randbelow(2**31))
    outputs, members = tree_leaves(population(*args, noise=noise, **kwargs)), population.members
    rows = next(len(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
    has_rows = [isinstance(y, Tensor) and y.shape[:1] == (rows,) for y in outputs]
    if not any(has_rows):
        returned = ", ".join(
            f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__ for y in outputs
        )
        message = (
            f"verify compares rows, but the model returned {returned}: return a tensor [{rows}, ...] for "
            f"{rows} rows"
        )
        raise ValueError(message)

    def run(model: nn.Module, row: int, dtype: torch.dtype | None) -> Tensor:
        """Return the outputs of a row alone as one vector."""

        def select(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            value = value[row : row + 1] if value.shape[:1] == (rows,) else value
            return value.to(dtype) if dtype and value.is_floating_point() else value

        alone_args, alone_kwargs = tree_map(select, (args, kwargs))
        leaves = tree_leaves(model(*alone_args, **alone_kwargs))
        return _join(y[0] for y, is_row in zip(leaves, has_rows, strict=True) if is_row)

    # Copies: functional_call() does not restore a module that a model has under two names.
    narrow_model, wide_model = copy.deepcopy(population.model), copy.deepcopy(population.model).double()
    plain = copy.deepcopy(dict(wide_model.named_parameters(remove_duplicate=False)))
    narrow_error = 0.0
    expected: dict[tuple[int, int], Tensor] = {}
    repeats = rows // members
    for repeat, member in itertools.product(_choose(repeats), _choose(members)):
        is_negated = population.antithetic and repeat >= repeats // 2
        row = repeat * members + member
        sigma = -population.sigma if is_negated else population.sigma
        changes = {
            name: sigma * value.double() for name, value in population.perturbation(noise, member).items()
        }
        weights = population.effective_weights({name: plain[name] for name in changes}, changes)
        wide_model.load_state_dict(weights, strict=False)
        wide = run(wide_model, row, torch.float64)
        narrow_model.load_state_dict(population.member(noise, member, negated=is_negated), strict=False)
        narrow_error = max(narrow_error, float((run(narrow_model, row, None) - wide).norm()))
        expected[repeat, member] = wide
    largest = max(float(wide.norm()) for wide in expected.values())
    narrow_error = min(narrow_error, largest / 100)  # a model that draws random numbers differs by more
    compared = [y for y, is_row in zip(outputs, has_rows, strict=True) if is_row]
    eps = max(torch.finfo(y.dtype).eps for y in compared if y.is_floating_point())
    roundings = 1024 if eps == torch.finfo(torch.float64).eps else 4
    for (repeat, member), wide in expected.items():
        row = repeat * members + member
        error = float((_join(y[row] for y in compared) - wide).norm())
        allowed = 4 * narrow_error + roundings * eps * float(wide.norm())
        if not error <= allowed:
            message = (
                f"row {row} (repeat {repeat}, member {member}) differs by {error:.2g} "
                f"from the model with this member's weights alone, allowed {allowed:.2g}: do not mix or "
                "reorder rows, draw random numbers, or use copies of weights"
            )
            raise ValueError(message)


def _join(outputs: Iterable[Tensor]) -> Tensor:
    """Return outputs as one vector in float64."""
    return torch.cat([y.double().flatten() for y in outputs])


def _choose(count: int) -> list[int]:
    """Return the first, the last and random numbers below ``count``, without a global generator."""
    drawn = secrets.SystemRandom().sample(range(count), min(CHECKED - 2, count))
    return sorted({0, count - 1, *drawn})
