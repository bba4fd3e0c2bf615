"""Records of a gate: cells, surveys, replicates with every sample, verdicts and the decision. No torch."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from esbench.schema import Case, Environment, Phase, Sample, Strict, Variant

SCHEMA = 2

Arm = Literal["base", "head"]
ARMS: tuple[Arm, Arm] = ("base", "head")
Nanoseconds = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
"""A positive time of at most 1e18 ns; decoding rejects other numbers."""
Visits = tuple[Annotated[tuple[Nanoseconds, ...], msgspec.Meta(min_length=1)], ...]
"""The times of the calls of each visit, in order; a round has two visits of each arm."""

Status = Literal["PASS", "FAIL", "INCONCLUSIVE"]
SAME, MORE = "control: the same work", "control: 2 % more work"
CONTROLS: Mapping[str, float] = {SAME: 0.0, MORE: 0.02}
"""Control -> additional work in head, as a share. Every gate times these calls of the harness, too."""
Metric = Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "row", "output"]
Code = Literal[
    "no-sign",  # shown not to be much slower than the margin
    "not-confirmed",  # looked slower at first, but is not shown to be slower than the margin
    "slower",  # slower than the margin
    "noisy",  # too noisy to show a regression
    "more-bytes",  # head needs more memory
    "more-launches",  # head launches more kernels
    "fewer",  # head needs less memory or fewer launches
    "missing",  # in base only
    "added",  # in head only
    "wrong",  # the output of head is wrong
    "wrong-base",  # the output of base is wrong: nothing to compare with
]


class Revision(Strict, frozen=True):
    """The name of a revision on the command line, and its commit; that of a work tree is on no branch."""

    asked: str
    commit: str


class Cell(Strict, frozen=True):
    """The unit of a verdict: a variant on a case, in one phase, timed by one method."""

    variant: Variant
    case: Case
    phase: Phase
    method: str

    @property
    def name(self) -> str:
        """The name of the cell in tables and waivers."""
        label = self.variant.label(self.case.operator)
        return f"{label} | {self.case.label} | {self.phase} | {self.method}"


def control_name(control: str, method: str) -> str:
    """Return the name of a control that is timed by a method, of the same form as :attr:`Cell.name`."""
    return f"{control} | {method}"


def controls_of(cells: Iterable[Cell]) -> dict[str, float]:
    """Return the controls of cells, one of each kind for each timing method: name -> additional work."""
    methods = sorted({cell.method for cell in cells})
    return {control_name(control, method): more for control, more in CONTROLS.items() for method in methods}


def split_method(name: str) -> tuple[str, str]:
    """Split the name of a cell or control into all but its timing method, and the method."""
    rest, _, method = name.rpartition(" | ")
    return rest, method


class _Line(Strict, frozen=True, tag_field="record"):
    """A line of the file of samples; the field ``record`` is its tag."""


class Opening(_Line, frozen=True, tag="gate"):
    """The first line of the file of samples: the compared revisions, the machine and the code.

    ``code``: arm -> package of variants -> hash of its files; ``harness``: hash of the files of esbench.
    """

    schema: int
    gate_id: str
    started: str
    seed: int
    suite: str
    revisions: dict[Arm, Revision]
    environment: Environment
    code: dict[Arm, dict[str, str]]
    harness: str


class Surveyed(_Line, frozen=True, tag="survey"):
    """The counts of a cell in one arm by metric, or the reason for not having them."""

    cell: Cell
    arm: Arm
    status: Literal["ok", "absent", "unavailable", "failed"]
    figures: dict[str, Sample] = msgspec.field(default_factory=dict)
    reason: str = ""


class Replicate(_Line, frozen=True, tag="replicate"):
    """The times of a cell or control that was set up anew in both arms.

    Attributes:
        look: the look before which it was measured, from 0.
        process: the number of the process among those of this look.
        cell: the name of the cell or control.
        first: for each round, arm A of the order ABBA.
        base: the visits of base, two in a round.
        head: the visits of head.
    """

    look: int
    process: int
    cell: str
    first: tuple[Arm, ...]
    base: Visits
    head: Visits


class Bounds(Strict, frozen=True):
    """The slowdown of head relative to base with one-sided bounds; 0.01 is 1 %.

    Attributes:
        effect: the trimmed mean over replicates.
        low: lower bound at the level of the test.
        high: upper bound at the level ``Settings.beta``.
        mde: minimum detectable effect, found with a probability of ``Settings.power``.
        p: p-value for the null hypothesis that the slowdown is within the margin.
        replicates: the number of replicates.
    """

    effect: float
    low: float
    high: float
    mde: float
    p: float
    replicates: int


class Verdict(Strict, frozen=True):
    """The verdict on one metric of a cell; ``accepted`` is the reason of the waiver that applies to it."""

    cell: str
    metric: Metric
    status: Status
    code: Code
    bounds: Bounds | None = None
    base: float | None = None
    head: float | None = None
    reason: str = ""
    accepted: str = ""


class Settings(Strict, frozen=True):
    """The decision rule; see :mod:`esbench.gate.decision`.

    Attributes:
        margin: tolerated slowdown; 0.01 is 1 %.
        indifferent: a cell ends early if it is shown to be slower by less than ``margin + indifferent``.
        looks: replicates of a cell at each look.
        processes: processes in which the replicates of a look are measured.
        alpha: family-wise level of the gate.
        beta: level of the upper bound with which a cell ends early.
        power: probability that defines the minimum detectable effect.
        worst_mde: a cell with a larger minimum detectable effect is too noisy.
        trim: share of replicates dropped at either end, and of rounds in a replicate. On a shared machine one
            visit in 20 is interrupted and takes twice as long.
    """

    margin: float = 0.005
    indifferent: float = 0.01
    looks: tuple[int, ...] = (24, 72, 216)
    processes: int = 4
    alpha: float = 0.01
    beta: float = 0.01
    power: float = 0.8
    worst_mde: float = 0.1
    trim: float = 0.2

    @property
    def new_replicates(self) -> list[int]:
        """The replicates that each look adds."""
        return [count - before for before, count in pairwise((0, *self.looks))]


class Decision(Strict, frozen=True, kw_only=True):
    """All verdicts of a gate, stored as ``gate.json``.

    ``invalid``: reasons to ignore the times; ``unused``: an error for each waiver that applies to nothing.
    """

    schema: int
    gate_id: str
    opening: Opening
    settings: Settings
    verdicts: tuple[Verdict, ...]
    mean: Verdict | None
    controls: tuple[Verdict, ...]
    invalid: tuple[str, ...]
    unused: tuple[str, ...] = ()
    exit_code: int
    wall_s: float

    @property
    def all_verdicts(self) -> list[Verdict]:
        """The verdicts on all cells and, if there is one, on their mean."""
        return [*self.verdicts, self.mean] if self.mean else [*self.verdicts]


Line = Opening | Surveyed | Replicate
