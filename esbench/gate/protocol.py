"""Messages between the gate and its workers, sent as JSON: question and answer. No torch."""

from typing import Annotated, Literal

import msgspec

from esbench.gate.records import Arm, Cell, Nanoseconds, Surveyed


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a worker gets when it starts.

    Attributes:
        arm: the revision that it measures.
        root: the folder of that revision; packages of variants are imported from it if it has them.
        device: cpu or cuda.
        threads: CPU threads of torch.
        core: the core that it is pinned to; None for any.
        seed: seed of weights, inputs and noise.
        suite: name of the suite.
        variants: globs over variants; empty for those of the suite.
        plugins: modules or files that register variants.
        methods: timing methods; empty for all of the device.

    """

    arm: Arm = "head"
    root: str = ""
    device: Literal["cpu", "cuda"]
    threads: int
    core: int | None = None
    seed: int
    suite: str
    variants: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


class _Message(msgspec.Struct, frozen=True, tag_field="message"):
    """A message; the field ``message`` names its kind."""


class Survey(_Message, frozen=True, tag="survey"):
    """Check a variant on a case against its reference, and count bytes and launches of its phases."""

    cells: tuple[Cell, ...]
    """The cells of the variant on the case."""


class Open(_Message, frozen=True, tag="open"):
    """Set a cell up and warm it up; the next visits time it."""

    cell: Cell


class Control(_Message, frozen=True, tag="control"):
    """Set up some units of control work; the next visits time them."""

    units: int
    method: str


class Visit(_Message, frozen=True, tag="visit"):
    """Time ``launches`` calls of the open cell, after ``before`` calls that are not timed."""

    launches: int
    before: int = 0


Question = Survey | Open | Control | Visit


class Hello(_Message, frozen=True, tag="hello"):
    """The first message of a worker: the loaded variants and its cells.

    Attributes:
        own_packages: packages of variants that were imported from the folder of the revision.
        code: package of variants -> hash of its files.
        harness: hash of the files of esbench.
        cells: the cells of the suite in this revision.
        cell_s: seconds to spend on a cell.
        unknown: the error if this revision has no suite or variants of the given names; then it has no cells.

    """

    own_packages: tuple[str, ...]
    code: dict[str, str]
    harness: str
    cells: tuple[Cell, ...] = ()
    cell_s: float = 1.0
    unknown: str = ""


class Rows(_Message, frozen=True, tag="rows"):
    """The result of a survey: one row per cell."""

    rows: tuple[Surveyed, ...]


class Opened(_Message, frozen=True, tag="opened"):
    """The cell is warm; ``launch_ns`` is about how long a launch takes."""

    launch_ns: Nanoseconds


class Visited(_Message, frozen=True, tag="visited"):
    """The time of each launch of a visit."""

    samples: Annotated[tuple[Nanoseconds, ...], msgspec.Meta(min_length=1)]


class Failure(_Message, frozen=True, tag="failure"):
    """The error with which the worker ends: it cannot load the revision, or a call failed while timed."""

    reason: str


Answer = Hello | Rows | Opened | Visited | Failure
