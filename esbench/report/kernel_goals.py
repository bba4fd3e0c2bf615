"""What fused kernels are held to on an H200, in bfloat16, by replays of a graph: data, and the verdict."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from esbench.report.goals import NOT_MET
from esbench.schema import Phase
from esbench.units import format_multiplier, format_value

SQUARE = "Linear(1024, 1024) members=8192 dtype=bfloat16"
WIDE = "Linear(8192, 8192) dtype=bfloat16"
LARGEST = "Linear(1024, 1024) members=1048576 dtype=bfloat16"
"""A case for each weight: a dense perturbation of it would be 2 TB."""


BITS = "BinarizedLinear(1024, 1024)"


@dataclass(frozen=True)
class KernelGoal:
    """What a variant is held to on a case: a multiple of base in the same rounds, or a time.

    Attributes:
        variant: its name.
        case: the case's label.
        phase: what is timed; base has the same phase, a product too.
        most: time(variant) / time(base) at most.
        most_ns: or a time at most.

    """

    variant: str
    case: str
    phase: Phase = "forward"
    most: float | None = None
    most_ns: float | None = None

    @property
    def words(self) -> str:
        """The goal as a cell of a table."""
        limit = format_multiplier(self.most) if self.most else format_value("most_ns", self.most_ns)
        return f"{limit} at most"

    def excess(self, ns: float | None, multiplier: float | None) -> float | None:
        """By which share of the goal something is above it, below 0 where it is met; None: not known."""
        found, limit = (multiplier, self.most) if self.most else (ns, self.most_ns)
        return found / limit - 1 if found is not None and limit else None


def verdict(excess: float | None) -> str:
    """Whether a goal is met, as a cell of a table."""
    return "not shown" if excess is None else "met" if excess <= 0 else NOT_MET


def _goals() -> Iterator[KernelGoal]:
    for most, variants in FORWARD.items():
        yield from (KernelGoal(variant, SQUARE, most=most) for variant in variants)
    for most, variants in INFERENCE.items():
        yield from (KernelGoal(variant, WIDE, most=1 / most) for variant in variants)
    for variant in itertools.chain.from_iterable(FORWARD.values()):
        if not variant.startswith("FusedDropout"):
            yield KernelGoal(variant, SQUARE, "update", UPDATE)
    yield KernelGoal("FusedRegenerated", LARGEST, most_ns=2.5e9)
    yield from (KernelGoal("FusedBinary", BITS, phase, most_ns=ns) for phase, ns in BINARY.items())


FORWARD = {
    1.15: (
        "FusedHadamard",
        "FusedLowRank(rank=1, regenerated=True)",
        "FusedLowRankSign(regenerated=True)",
        "FusedSparsePerturbed(k=2)",
    ),
    1.10: ("FusedLowRank(rank=1)", "FusedLowRankSign", "FusedSparsePerturbed(k=1)"),
    2.10: ("FusedFlipped(side=both)", "FusedFlippedSign", "FusedPermuted"),
    1.20: ("FusedPermuted(in_sparsity=0.1)",),
    1.03: ("FusedDropoutMask",),
    0.65: ("FusedDropoutBlocks",),
    0.40: ("FusedDropoutBlocks(side=both, groups=8)",),
}
"""Multiples of base at most -> the variants whose forward is held to it."""

INFERENCE = {
    0.97: ("FusedLowRank(rank=1)", "FusedLowRankSign"),
    0.95: ("FusedLowRank(rank=1, regenerated=True)", "FusedLowRankSign(regenerated=True)"),
}
"""Share of the speed of plain inference at least, at a width of 8192 -> the variants that are held to it."""

BINARY: dict[Phase, float] = {"forward": 39e3, "sample": 220e3, "update": 90e3}
"""Nanoseconds at most of networks of bits, whose noise is words."""

UPDATE = 1.25
"""Multiples of base's own product at most, of every update that is a product."""

GOALS = tuple(_goals())
"""Every goal."""
