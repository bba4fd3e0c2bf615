"""Messages between the gate and its workers: questions and answers, sent as JSON. No torch."""

from typing import Annotated, Literal

import msgspec

from esbench.gate.records import Arm, Cell, Nanoseconds, Surveyed


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker, given at its start.

    Attributes:
        root: the folder with the files of the arm; its packages of variants take precedence.
        threads: CPU threads of torch.
        core: the CPU core of the worker; None for any.
        seed: seed of weights, inputs and noise.
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
    """Cells of one variant on one case."""


class Open(_Message, frozen=True, tag="open"):
    """Set a cell up and warm it up; the following visits time it."""

    cell: Cell


class Control(_Message, frozen=True, tag="control"):
    """Set up ``units`` of control work; the following visits time it."""

    units: int
    method: str


class Visit(_Message, frozen=True, tag="visit"):
    """Time ``launches`` calls of the open cell, after ``before`` calls that are not timed."""

    launches: int
    before: int = 0


Question = Survey | Open | Control | Visit


class Hello(_Message, frozen=True, tag="hello"):
    """The first message of a worker: its packages and cells.

    Attributes:
        own_packages: packages of variants imported from the folder of the revision.
        code: package of variants -> hash of its files.
        harness: hash of the files of esbench.
        cell_s: seconds to spend on a cell.
        unknown: the error if the revision has no such suite or variant; ``cells`` is then empty.
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
    """A cell is set up and warm; ``launch_ns`` is the approximate time of a launch."""

    launch_ns: Nanoseconds


class Visited(_Message, frozen=True, tag="visited"):
    """The times of the launches of a visit."""

    samples: Annotated[tuple[Nanoseconds, ...], msgspec.Meta(min_length=1)]


class Failure(_Message, frozen=True, tag="failure"):
    """The error that ends the worker: the revision cannot be loaded, or a timed call failed."""

    reason: str


Answer = Hello | Rows | Opened | Visited | Failure
