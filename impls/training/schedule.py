"""When connections move, and how many: the settings of RigL, as numbers that can be stored.

Evci et al., Rigging the Lottery, 2020, section 3: every delta steps until T_end the share
alpha / 2 (1 + cos(pi t / T_end)) of the connections moves.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Literal

from impls.training.sparsity import Distribution

Growth = Literal["gradient", "random"]


@dataclass(frozen=True)
class Schedule:
    """What a RigLScheduler was asked for; the names are those of its arguments.

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
                not 0 < self.dense_allocation <= 1,
                f"dense_allocation {self.dense_allocation:g}: expected a share of the weights in (0, 1]",
            ),
            (not _is_count(self.delta), f"delta {self.delta}: expected a number of steps, at least 1"),
            (
                not 0 <= self.alpha <= 1,
                f"alpha {self.alpha:g}: expected a share of the connections in [0, 1]",
            ),
            (
                not (self.begin == 0 or _is_count(self.begin)),
                f"begin {self.begin}: expected a step, 0 or later",
            ),
            (
                self.sparsity_distribution not in {"uniform", "erk"},
                f"sparsity_distribution {self.sparsity_distribution!r}: there are uniform and erk",
            ),
            (
                self.growth not in {"gradient", "random"},
                f"growth {self.growth!r}: there are gradient and random",
            ),
            (
                self.T_end is None and not self.static_topo,
                "T_end is missing: the step from which connections stay; three quarters of all steps do well",
            ),
            (
                self.T_end is not None and not _is_count(self.T_end),
                f"T_end {self.T_end}: expected a step, at least 1",
            ),
        ]
        message = next((words for is_wrong, words in faults if is_wrong), "")
        # One gradient is always there: with delta 1 it is that of the step itself.
        last = max(self.delta - 1, 1) if not message else 1
        n = self.grad_accumulation_n
        if not message and not (_is_count(n) and n <= last):
            message = (
                f"grad_accumulation_n {n}: expected a number of steps in [1, {self.delta}), as updates are "
                f"{self.delta} steps apart"
            )
        if message:
            raise ValueError(message)

    def updates_at(self, step: int) -> bool:
        """Whether connections move at a step; the first step is 1."""
        if self.static_topo or self.T_end is None:
            return False
        return max(self.begin, 1) <= step < self.T_end and (step - self.begin) % self.delta == 0

    def gathers_after(self, step: int) -> bool:
        """Whether the dense gradients of a backward pass that follows so many steps count for an update."""
        return any(self.updates_at(step + left) for left in range(1, self.grad_accumulation_n + 1))

    def fraction(self, step: int) -> float:
        """Return the share of connections that moves at a step: it falls from alpha to nothing at the end."""
        if self.T_end is None:
            return 0.0
        return self.alpha / 2 * (1 + math.cos(math.pi * step / self.T_end))


def _is_count(number: object) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool) and int(number) >= 1
