"""A step of an ordinary optimizer with some of its parameters, as if it had no others."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from impls.training.ownership import BackwardError

Group = dict[str, Any]


class PartialSteps:
    """Steps with parts of an optimizer's parameters.

    Args:
        ordinary: the optimizer; its groups stay the same objects.

    """

    def __init__(self, ordinary: Optimizer) -> None:
        """Begin before the first step."""
        self._ordinary = ordinary
        self._is_first = True

    def step(self, parts: Sequence[list[nn.Parameter]]) -> None:
        """Step with these parameters of each group.

        Raises:
            BackwardError: the rule keeps something in its groups from step to step, found at the first.

        """
        ordinary, groups = self._ordinary, self._ordinary.param_groups
        wholes = [group["params"] for group in groups]
        before = [dict(group) for group in groups] if self._is_first else []
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            ordinary.param_groups = [group for group in groups if group["params"]]
            ordinary.step()
        finally:
            ordinary.param_groups = groups
            for group, whole in zip(groups, wholes, strict=True):
                group["params"] = whole
        if self._is_first:
            self._check(before)
        self._is_first = False

    def _check(self, before: Sequence[Group]) -> None:
        pairs = zip(before, self._ordinary.param_groups, strict=True)
        if changed := {name for old, new in pairs for name in _changed(old, new)}:
            message = (
                f"{type(self._ordinary).__name__} changes {', '.join(sorted(changed))} of its groups in a "
                "step, of which a backward pass has several: use it as an ordinary optimizer"
            )
            raise BackwardError(message)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in new.items()
        if name not in {"params", "lr"} and (name not in old or not _is_same(old[name], value))
    ]


def _is_same(old: object, new: object) -> bool:
    return old is new or (not isinstance(new, Tensor) and bool(old == new))
