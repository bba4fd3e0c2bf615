"""What a gate keeps: the replicates as they were measured, and the verdict. No torch."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from esbench.gate.protocol import Arm, Cell, Nanoseconds
from esbench.gate.worktree import Revision
from esbench.schema import Environment, Sample

SCHEMA = 1

Visits = tuple[tuple[Nanoseconds, ...], ...]
"""The nanoseconds of each launch of each visit, two visits a round, in the order of time."""

Status = Literal["PASS", "FAIL", "INCONCLUSIVE"]
SAME, MORE = "control: the same work", "control: 2 % more work"
"""Names of the gate's own work, which stands beside the cells."""

STUDY_CONTROLS: Mapping[str, float] = {
    SAME: 0.0,
    **{f"control: {100 * more:g} % more work": more for more in (0.005, 0.01, 0.02, 0.03)},
}
"""The controls of a study of the gate: name -> the share of additional work in head."""

Stage = Literal["screen", "confirm", "study"]
LONGER: Mapping[Stage, int] = {"screen": 1, "confirm": 3, "study": 3}
"""By how many times as many rounds a cell has as at the screen. A study is as long as a confirmation, so that
its first third is as long as a screen."""
Metric = Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "row", "output"]
Code = Literal[
    "no-sign",  # the screen saw nothing
    "not-confirmed",  # new replicates did not bear out what the screen saw
    "slower",  # they did
    "noisy",  # too noisy to have seen a regression worth the name
    "more-bytes",  # it holds more
    "more-launches",  # it launches more
    "fewer",  # a count went down
    "missing",  # the base has it, the head has not
    "added",  # the head has it, the base has not
    "wrong",  # the head's output is wrong
    "wrong-base",  # the base's output is wrong: there is nothing to compare with
]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decoding refuses fields that it does not know."""


class _Line(_Strict, frozen=True, kw_only=True, tag_field="record"):
    """A line of a gate's file; the field ``record`` says which kind it is."""


class Opening(_Line, frozen=True, kw_only=True, tag="gate"):
    """The first line: what is compared, where, and with what.

    ``code``: arm -> package of variants -> hash of its files; ``harness``: that of the one harness.
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


class Surveyed(_Line, frozen=True, kw_only=True, tag="survey"):
    """What an arm said of a cell before it was timed: its counts, or why it has none."""

    cell: Cell
    arm: Arm
    status: Literal["ok", "absent", "unavailable", "failed"]
    figures: dict[str, Sample] = {}
    reason: str = ""


class Timed(_Strict, frozen=True, kw_only=True):
    """What both arms took on a cell in one replicate.

    ``first`` says for each round who was visited first and last; the other arm was visited twice between.
    """

    cell: str
    first: tuple[Arm, ...]
    base: Visits
    head: Visits


class Replicate(_Line, frozen=True, kw_only=True, tag="replicate"):
    """Two fresh processes that took turns on cells, in the order in which these stand here."""

    stage: Stage
    number: int
    cells: tuple[Timed, ...]
    wall_s: float


class Bounds(_Strict, frozen=True, kw_only=True):
    """An effect: by which share head takes longer, the one-sided bounds of it, and what could have been seen.

    ``mde``: the least slowdown that would have been found with a probability of 80 %. All are shares: 0.01 is
    1 %.
    """

    effect: float
    low: float
    high: float
    mde: float
    p: float
    replicates: int


class Verdict(_Strict, frozen=True, kw_only=True):
    """What is decided of a cell's metric, and why. ``accepted`` is the reason that a person gave for it."""

    cell: str
    metric: Metric
    status: Status
    code: Code
    bounds: Bounds | None = None
    base: float | None = None
    head: float | None = None
    reason: str = ""
    accepted: str = ""


class Settings(_Strict, frozen=True, kw_only=True):
    """By which rule a gate judges; see :mod:`esbench.gate.decision`.

    ``trim`` is a quarter: on a machine that others use too, one visit in twenty is cut into and takes twice
    as long, so that of twenty rounds more than two at either end may hold one.
    """

    margin: float = 0.005
    screen: Annotated[int, msgspec.Meta(ge=2)] = 3
    confirm: Annotated[int, msgspec.Meta(ge=2)] = 10
    screen_alpha: float = 0.05
    alpha: float = 0.01
    power: float = 0.8
    worst_mde: float = 0.1
    trim: float = 0.25


class Decision(_Strict, frozen=True, kw_only=True):
    """All verdicts of a gate: ``gate.json``.

    ``invalid`` says why its times decide nothing, ``unused`` which acceptances accept nothing.
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


Line = Opening | Surveyed | Replicate
