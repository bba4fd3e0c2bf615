"""The state of an optimizer by the names of parameters, in torch's own form.

That is ``{"state": {number: ...}, "param_groups": [{"params": [numbers], "param_names": [names], ...}]}``: an
ordinary optimizer of the same groups loads it as it is.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

State = dict[str, Any]
Names = Sequence[Sequence[str]]
"""The names of the parameters of each group."""


def named(state: State, names: Names) -> State:
    """Return a state with the names of its parameters."""
    groups = [
        {**group, "param_names": list(those)}
        for group, those in zip(state["param_groups"], names, strict=True)
    ]
    return {**state, "param_groups": groups}


def aligned(state: object, names: Names, shapes: dict[str, tuple[int, ...]]) -> State:
    """Return a copy of a state in the order of these groups and names, numbered from 0.

    With names in it the state may be of other groups: what its group says holds for a parameter. Without, it
    counts by place.

    Raises:
        ValueError: it is no state, that of another model, or cannot be told apart into these groups.

    """
    slots_of, given = _opened(state)
    groups = copy.deepcopy(given)
    if not all("param_names" in group for group in groups):
        if [len(group["params"]) for group in groups] != [len(those) for those in names]:
            message = "a state without names, of other groups: it holds another number of parameters"
            raise ValueError(message)
        for group, those in zip(groups, names, strict=True):
            group["param_names"] = list(those)
    places = {name: (group, key) for group in groups for name, key in _pairs(group)}
    wanted = {name for those in names for name in those}
    if places.keys() != wanted:
        message = (
            f"a state of another model: it lacks {_listed(wanted - places.keys())} and knows "
            f"{_listed(places.keys() - wanted)} besides"
        )
        raise ValueError(message)
    numbers = iter(range(len(wanted)))
    found: State = {"state": {}, "param_groups": []}
    for those in names:
        options = [_options(places[name][0]) for name in those]
        if any(other != options[0] for other in options):
            message = f"{_listed(those)} are of one group here, and of several in this state"
            raise ValueError(message)
        keys = [next(numbers) for _ in those]
        found["param_groups"].append({**options[0], "params": keys, "param_names": list(those)})
        for name, key in zip(those, keys, strict=True):
            slots = slots_of.get(places[name][1])
            if slots is not None:
                _check(name, slots, shapes[name])
                found["state"][key] = copy.deepcopy(slots)
    return found


def joined(states: Sequence[State]) -> State:
    """Return several states with names as one, numbered from 0."""
    found: State = {"state": {}, "param_groups": []}
    first = 0
    for state in states:
        keys = [key for group in state["param_groups"] for key in group["params"]]
        numbers = {key: first + place for place, key in enumerate(keys)}
        first += len(keys)
        found["state"] |= {numbers[key]: slots for key, slots in state["state"].items()}
        found["param_groups"] += [
            {**group, "params": [numbers[key] for key in group["params"]]} for group in state["param_groups"]
        ]
    return found


def _opened(state: object) -> tuple[dict[int, State], list[State]]:
    """Return what is kept of each parameter, and the groups.

    Raises:
        ValueError: this is not in torch's form.

    """
    found = state if isinstance(state, Mapping) else {}
    slots, groups = found.get("state"), found.get("param_groups")
    if (
        isinstance(slots, Mapping)
        and all(isinstance(one, Mapping) for one in slots.values())
        and isinstance(groups, Sequence)
        and all(map(_is_group, groups))
    ):
        return dict(slots), [dict(group) for group in groups]
    message = "not the state of an optimizer: give what its state_dict() returned"
    raise ValueError(message)


def _is_group(group: object) -> bool:
    """Whether this is a group, with as many names as parameters if it has any."""
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
        return False
    names = group.get("param_names", group["params"])
    return isinstance(names, list) and len(names) == len(group["params"])


def _pairs(group: State) -> list[tuple[str, int]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def _options(group: State) -> State:
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}


def _check(name: str, slots: State, shape: tuple[int, ...]) -> None:
    """Hold what is kept of a parameter to its shape: of the same, or one that is spread over it.

    Raises:
        ValueError: it is of another.

    """
    for slot, value in slots.items():
        if isinstance(value, Tensor) and not _fits(tuple(value.shape), shape):
            message = f"a state of another model: {slot} of {name} is {tuple(value.shape)}, and it is {shape}"
            raise ValueError(message)


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    sizes = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in {1, full} for size, full in sizes)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
