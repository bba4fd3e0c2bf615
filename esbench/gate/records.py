"""Records of a gate: cells, orders and messages of workers, verdicts and the decision. No torch."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from esbench.schema import Case, Environment, Phase, Sample, Strict, Variant

SCHEMA = 5

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
MEAN = "geometric mean"
"""Name of the mean over all cells, which is tested like a cell."""
Metric = Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "graphs", "row", "output"]


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


def controls_of(cells: Iterable[Cell]) -> dict[str, float]:
    """Return the controls of cells, one of each kind for each timing method: name -> additional work."""
    methods = sorted({cell.method for cell in cells})
    return {f"{control} | {method}": more for control, more in CONTROLS.items() for method in methods}


def control_of(name: str) -> str:
    """Return the kind of a control, a key of :data:`CONTROLS`, by its name; empty for a cell."""
    kind = name.rpartition(" | ")[0]
    return kind if kind in CONTROLS else ""


def method_of(name: str) -> str:
    """Return the timing method of a cell or control by its name."""
    return name.rpartition(" | ")[2]


# Workers


class Orders(Strict, frozen=True, kw_only=True):
    """What a worker measures, given at its start.

    Attributes:
        roots: the folder with the files of each arm; their packages of variants take precedence.
        core: the CPU core of the worker; None for any.
        separate: whether each arm is imported into a process of its own.
        seed: seed of weights, inputs and noise.
        variants: globs over variants; empty for those of the suite.
        plugins: modules or files that register variants.
        look: the look for which replicates are measured.
        process: the number of this worker among those of the survey or the look, from 0.
        processes: how many there are; they share the variants of a survey, and the replicates of a look.
        names: the names of the cells and controls to time; empty for a survey.
        replicates: replicates of each of them in this look.
    """

    roots: dict[Arm, str]
    device: Literal["cpu", "cuda"]
    core: int | None = None
    separate: bool = False
    seed: int = 0
    suite: str
    variants: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    look: int = 0
    process: int = 0
    processes: int = 1
    names: tuple[str, ...] = ()
    replicates: int = 0


class _Message(Strict, frozen=True, tag_field="record"):
    """A line that a worker writes; the field ``record`` names its kind."""


class Begin(_Message, frozen=True, tag="begin"):
    """What the worker does next, for errors and the display of progress; ``done`` of ``total`` are done."""

    subject: str
    done: int
    total: int


class Surveyed(_Message, frozen=True, tag="survey"):
    """The counts of a cell in one arm by metric, or the reason for not having them.

    ``timed``: whether the gate compares the times of the cell.
    """

    cell: Cell
    arm: Arm
    status: Literal["ok", "unavailable", "failed"]
    figures: dict[str, Sample] = msgspec.field(default_factory=dict)
    reason: str = ""
    timed: bool = False


class Replicate(_Message, frozen=True, tag="replicate"):
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


class End(_Message, frozen=True, tag="end"):
    """The last message: the reason for an error, or empty if everything was measured."""

    failure: str = ""


Message = Begin | Surveyed | Replicate | End


# The decision


class Opening(_Message, frozen=True, tag="gate"):
    """The first line of the file of samples: the compared revisions and the machine.

    ``separate``: whether each arm was imported into a process of its own.
    """

    schema: int
    gate_id: str
    started: str
    seed: int
    suite: str
    revisions: dict[Arm, Revision]
    environment: Environment
    separate: bool = False


class Bounds(Strict, frozen=True):
    """The slowdown of head relative to base with one-sided bounds; 0.01 is 1 %.

    Attributes:
        effect: the trimmed mean over replicates.
        low: lower bound at the level of the test.
        high: upper bound at the level ``Settings.beta``.
        p: p-value for the null hypothesis that the slowdown is within the margin.
        replicates: the number of replicates.
    """

    effect: float
    low: float
    high: float
    p: float
    replicates: int


class Verdict(Strict, frozen=True):
    """The verdict on one metric of a cell; ``accepted`` is the reason of the waiver that applies to it."""

    cell: str
    metric: Metric
    status: Status
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
        per_pair: set-ups of a cell in a pair of processes, one for each arm, whose mean is one replicate, as
            they share the addresses and the hash seeds of the processes; 0 if both arms are in one process.
        alpha: family-wise level of the gate.
        beta: level of the upper bound with which a cell ends early.
        worst: a cell that may be slower by more after the last look is too noisy.
        trim: share of replicates dropped at either end. On a shared machine one visit in 20 is interrupted
            and takes twice as long.
    """

    margin: float = 0.005
    indifferent: float = 0.01
    looks: tuple[int, ...] = (36, 108, 216)
    processes: int = 4
    per_pair: int = 0
    alpha: float = 0.01
    beta: float = 0.01
    worst: float = 0.05
    trim: float = 0.2

    @classmethod
    def of(cls, margin: float, *, separate: bool) -> "Settings":
        """Return the settings of a gate; with ``separate``, as many set-ups in more processes."""
        return cls(margin=margin, looks=(12, 36, 72), per_pair=3) if separate else cls(margin=margin)

    @property
    def new_replicates(self) -> list[int]:
        """The replicates that each look adds."""
        return [count - before for before, count in pairwise((0, *self.looks))]


class Decision(Strict, frozen=True, kw_only=True):
    """All verdicts of a gate, stored as ``gate.json``.

    ``invalid``: reasons to ignore the times; ``unused``: an error for each waiver that applies to nothing.
    """

    opening: Opening
    settings: Settings
    verdicts: tuple[Verdict, ...]
    controls: tuple[Verdict, ...]
    invalid: tuple[str, ...]
    unused: tuple[str, ...]
    exit_code: int

    @property
    def schema(self) -> int:
        """The version of the format."""
        return self.opening.schema
