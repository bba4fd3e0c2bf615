"""When connections move, and how many: the settings of RigL, as numbers that can be stored.

Evci et al., Rigging the Lottery, 2020, section 3: every delta steps until T_end the share
alpha / 2 (1 + cos(pi t / T_end)) of the connections moves. The paper begins at step 0. Here a later begin is
where the cosine begins too: t and T_end are counted from it. The paper's own code (google-research/rigl,
sparse_optimizers_base.py) counts T_end from begin but t from step 0, so that there a later begin starts below
alpha and ends before the end. It also moves connections at the very end, and at step 0; here the end is the
first step at which they stay, as in rigl-torch, and nothing is known yet before step 1.
"""

import math
import numbers
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from impls.training.sparsity import Distribution

Growth = Literal["gradient", "random"]


@dataclass(frozen=True)
class Schedule:
    """What a RigLScheduler was asked for; the names are those of its arguments, in Python's own types.

    Warns where connections could never move, unless ``static_topo`` asks for that or all are there.

    Raises:
        ValueError: a setting cannot be.

    """

    dense_allocation: float
    T_end: int | None
    delta: int = 100
    alpha: float = 0.3
    grad_accumulation_n: int = 1
    sparsity_distribution: Distribution = "uniform"
    static_topo: bool = False
    begin: int = 0
    growth: Growth = "gradient"

    def __post_init__(self) -> None:
        """Look whether each setting can be."""
        faults = [
            (
                not (_is_share(self.dense_allocation) and self.dense_allocation > 0),
                f"dense_allocation {self.dense_allocation!r}: expected a share of the weights in (0, 1]",
            ),
            (not is_count(self.delta), f"delta {self.delta!r}: expected a number of steps, at least 1"),
            (
                not _is_share(self.alpha),
                f"alpha {self.alpha!r}: expected a share of the connections in [0, 1]",
            ),
            (
                not is_count(self.begin, least=0),
                f"begin {self.begin!r}: expected a step, 0 or later",
            ),
            (
                self.sparsity_distribution not in ("uniform", "erk"),
                f"sparsity_distribution {self.sparsity_distribution!r}: there are uniform and erk",
            ),
            (
                self.growth not in ("gradient", "random"),
                f"growth {self.growth!r}: there are gradient and random",
            ),
            (
                not isinstance(self.static_topo, bool),
                f"static_topo {self.static_topo!r}: expected True or False",
            ),
            (
                self.T_end is None and not self.static_topo,
                "T_end is missing: the step from which connections stay; three quarters of all steps do well",
            ),
            (
                self.T_end is not None and not is_count(self.T_end),
                f"T_end {self.T_end!r}: expected a step, at least 1",
            ),
        ]
        message = next((words for is_wrong, words in faults if is_wrong), "")
        # One gradient is always there: with delta 1 it is that of the step itself.
        last = max(self.delta - 1, 1) if not message else 1
        n = self.grad_accumulation_n
        if not message and not (is_count(n) and n <= last):
            message = (
                f"grad_accumulation_n {n!r}: expected a number of steps in [1, {self.delta}), as updates are "
                f"{self.delta} steps apart"
            )
        if message:
            raise ValueError(message)
        for name in ("dense_allocation", "alpha"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("T_end", "delta", "grad_accumulation_n", "begin"):
            object.__setattr__(self, name, None if getattr(self, name) is None else int(getattr(self, name)))
        for name in ("sparsity_distribution", "growth"):
            object.__setattr__(self, name, str(getattr(self, name)))
        first, is_static = self.begin or self.delta, self.static_topo or self.dense_allocation == 1
        if self.T_end is not None and first >= self.T_end and not is_static:
            message = (
                f"connections will never move: the first update would be at step {first}, and they stay from "
                f"T_end {self.T_end} on; if that is meant, say static_topo=True"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def updates_at(self, step: int) -> bool:
        """Whether connections move at a step; the first step is 1."""
        if self.static_topo or self.T_end is None:
            return False
        return max(self.begin, 1) <= step < self.T_end and (step - self.begin) % self.delta == 0

    def gathers_after(self, step: int) -> bool:
        """Whether the dense gradients of a backward pass that follows so many steps count for an update."""
        ahead = range(step + 1, step + self.grad_accumulation_n + 1)
        return self.growth == "gradient" and any(map(self.updates_at, ahead))

    def fraction(self, step: int) -> float:
        """Return the share of connections that moves at a step: it falls from alpha to nothing at the end."""
        if self.T_end is None or step >= self.T_end:
            return 0.0
        passed = max(step - self.begin, 0) / (self.T_end - self.begin)
        return self.alpha / 2 * (1 + math.cos(math.pi * passed))


def is_count(number: object, least: int = 1) -> bool:
    """Whether something is a whole number, at least that, of no more than 64 bits."""
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        return False
    return least <= int(number) < 2**63


def _is_share(number: Any) -> bool:  # noqa: ANN401  # whatever was given
    is_real = isinstance(number, numbers.Real) and not isinstance(number, bool)
    return is_real and bool(0 <= number <= 1)
