"""The slow truth of a topology update: the rule itself, and lists sorted in plain Python."""

import torch
from torch import Tensor

from esbench.registry import WrongResultError

EXACT = 10**4
"""Up to so many entries are sorted in plain Python, too."""


def check(weight: Tensor, gradient: Tensor, before: Tensor, after: Tensor, moved: int) -> None:
    """Hold a mask to the rule: those of the least weight go, those of the largest gradient come.

    Where scores tie, any choice is right. Few enough entries are sorted in plain Python as well.

    Raises:
        WrongResultError: it is another one.

    """
    magnitude, steep = weight.abs().flatten(), gradient.abs().flatten()
    was, now = before.flatten(), after.flatten()
    if after.dtype is not torch.bool or after.shape != before.shape or int(now.sum()) != int(was.sum()):
        message = f"{int(after.sum())} connections are left of {int(before.sum())}"
        raise WrongResultError(message)
    kept = int(was.sum()) - moved
    least = magnitude[was].topk(kept).values.min() if kept else torch.inf
    if not bool(now[was & (magnitude > least)].all()):
        message = "a connection of a large weight was dropped"
        raise WrongResultError(message)
    rest = ~was | (magnitude < least)
    if moved and bool((rest & now).any()) and bool((rest & ~now).any()):
        worst, best = steep[rest & now].min(), steep[rest & ~now].max()
        if not worst >= best:
            message = f"a connection was grown at a gradient of {worst:.3g}, and none at one of {best:.3g}"
            raise WrongResultError(message)
    if len(was) <= EXACT:
        _check_sorted(magnitude.tolist(), steep.tolist(), was.tolist(), now.tolist(), moved)


def _check_sorted(
    magnitude: list[float], steep: list[float], was: list[bool], now: list[bool], moved: int
) -> None:
    active = sorted((place for place, is_on in enumerate(was) if is_on), key=magnitude.__getitem__)
    stays = set(active[moved:])
    rest = sorted(set(range(len(was))) - stays, key=lambda place: -steep[place])
    if {place for place, is_on in enumerate(now) if is_on} != stays | set(rest[:moved]):
        message = "other connections moved than lists sorted in plain Python say"
        raise WrongResultError(message)
