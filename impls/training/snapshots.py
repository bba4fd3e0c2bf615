"""The state of a RigLScheduler, which is looked through in full before any of it is used."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Generator, Tensor, nn

from impls.training import topology
from impls.training.schedule import Schedule, is_count
from impls.training.sparsity import zeros

ENTRIES = ("schedule", "shapes", "step", "updates", "masks", "gathered", "generator")
Weights = Mapping[str, nn.Parameter]
Gathered = tuple[Tensor, int, bool]
"""A sum of dense gradients, of how many finite ones, whether they stand in for others: see Connections."""
GATHERED = 3


@dataclass(frozen=True)
class Snapshot:
    """Where a scheduler is: its settings, masks and gradients by the names of weights, its generator."""

    schedule: Schedule
    step: int
    updates: int
    masks: Mapping[str, Tensor]
    gathered: Mapping[str, Gathered]
    generator: Tensor

    def stored(self, weights: Weights) -> dict[str, Any]:
        """Return it in plain types, with the shapes of the weights that it is of."""
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**parts, "schedule": asdict(self.schedule), "shapes": shapes}


def first(schedule: Schedule, weights: Weights, seed: int) -> Snapshot:
    """Return where a scheduler begins: with masks at random.

    Raises:
        ValueError: there are no weights, or the seed cannot be one.

    """
    generator = topology.seeded(seed)
    masks = {
        one.name: topology.scattered(one.weight, one.kept, generator)
        for one in zeros(weights, schedule.dense_allocation, schedule.sparsity_distribution)
        if one.zeros
    }
    return Snapshot(schedule, 0, 0, masks, {}, generator.get_state())


def read(state: Mapping[str, Any], weights: Weights) -> Snapshot:
    """Return a copy of what was stored, where the weights are.

    Raises:
        ValueError: it is none, that of another model, or damaged, and how.

    """
    if not isinstance(state, Mapping):
        message = f"this is no state of a RigLScheduler, which is a dict, but of type {type(state).__name__}"
        raise ValueError(message)  # noqa: TRY004  # as for all that is none
    if missing := [name for name in ENTRIES if name not in state]:
        known = ", ".join(map(str, state))
        message = f"this is no state of a RigLScheduler: it has no {missing[0]!r}, only {known}"
        raise ValueError(message)
    _check_shapes(_mapping(state, "shapes"), weights)
    settings = _mapping(state, "schedule")
    if wrong := settings.keys() ^ {field.name for field in fields(Schedule)}:
        _refuse(f"its schedule lacks, or has besides, {', '.join(sorted(map(str, wrong)))}")
    schedule = Schedule(**settings)
    for name in ("step", "updates"):
        if not is_count(state[name], least=0):
            _refuse(f"{name} {state[name]!r} is no number of steps")
    masks, gathered = _mapping(state, "masks"), _mapping(state, "gathered")
    _check_masks(schedule, masks, weights)
    if strange := sorted(map(str, gathered.keys() - masks.keys())):
        _refuse(f"it has gathered gradients of {', '.join(strange)}, without a mask")
    for name, one in gathered.items():
        _check_gathered(name, one, weights[name])
    return Snapshot(
        schedule,
        int(state["step"]),
        int(state["updates"]),
        {name: masks[name].to(weight.device, copy=True) for name, weight in weights.items() if name in masks},
        {name: (one[0].to(weights[name], copy=True), *one[1:]) for name, one in gathered.items()},
        _generator_state(state["generator"]),
    )


def _check_shapes(found: Mapping[str, Any], weights: Weights) -> None:
    shapes = {
        name: tuple(shape) if isinstance(shape, list | tuple) else shape for name, shape in found.items()
    }
    expected = {name: tuple(weight.shape) for name, weight in weights.items()}
    if shapes != expected:
        other, own = (
            ", ".join(f"{name} {shape}" for name, shape in one.items()) for one in (shapes, expected)
        )
        message = f"the state is that of another model: it has {other}; this one has {own}"
        raise ValueError(message)


def _check_masks(schedule: Schedule, masks: Mapping[str, Any], weights: Weights) -> None:
    """Hold masks to those that the settings ask for: of which weights, and how many connections."""
    parts = zeros(weights, schedule.dense_allocation, schedule.sparsity_distribution)
    kept = {one.name: one.kept for one in parts if one.zeros}
    if missing := [name for name in kept if name not in masks]:
        _refuse(f"it has no mask of {', '.join(missing)}")
    if strange := sorted(map(str, masks.keys() - kept.keys())):
        _refuse(f"it has masks of {', '.join(strange)}, which its settings leave dense")
    for name, mask in masks.items():
        if not _is_plain(mask) or mask.dtype != torch.bool:
            _refuse(f"the mask of {name} is no tensor of bools")
        if mask.shape != weights[name].shape:
            _refuse(f"the mask of {name} is {tuple(mask.shape)}, and the weight {tuple(weights[name].shape)}")
        if (count := int(mask.count_nonzero())) != kept[name]:
            _refuse(f"the mask of {name} has {count} connections, and its settings ask for {kept[name]}")


def _check_gathered(name: str, found: Any, weight: nn.Parameter) -> None:  # noqa: ANN401  # whatever was stored
    is_whole = isinstance(found, list | tuple) and len(found) == GATHERED
    dense, passes, stands_in = found if is_whole else (None, None, None)
    if not _is_plain(dense) or not dense.is_floating_point() or dense.shape != weight.shape:
        _refuse(f"the gathered gradients of {name} are no tensor of {tuple(weight.shape)}")
    if not is_count(passes, least=0) or not isinstance(stands_in, bool):
        _refuse(f"the gathered gradients of {name} are of {passes!r} passes, stand-ins: {stands_in!r}")


def _is_plain(found: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that has all of its entries."""
    return isinstance(found, Tensor) and found.layout == torch.strided and not found.is_meta


def _generator_state(found: object) -> Tensor:
    if not _is_plain(found):
        _refuse("the state of its generator is no tensor")
    try:
        return Generator().set_state(found.cpu()).get_state()
    except (RuntimeError, TypeError) as error:
        message = f"the state is damaged: that of its generator cannot be used: {error}"
        raise ValueError(message) from error


def _mapping(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = state[name]
    if not isinstance(found, Mapping):
        _refuse(f"{name} is of type {type(found).__name__}, and no dict")
    return found


def _refuse(what: str) -> NoReturn:
    message = f"the state is damaged: {what}"
    raise ValueError(message)
