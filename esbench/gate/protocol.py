"""Messages between the gate and its workers: one JSON object per line, question and answer. No torch."""

from typing import Annotated, Literal

import msgspec

from esbench.schema import Case, Phase, Sample, Variant

Arm = Literal["base", "head"]
ARMS: tuple[Arm, Arm] = ("base", "head")

Nanoseconds = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
"""A positive time of at most 1e18 ns; decoding refuses zero, negative numbers, NaN and null."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding refuses unknown fields."""


class Cell(_Strict, frozen=True, kw_only=True):
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


class Orders(_Strict, frozen=True, kw_only=True):
    """The settings that a worker gets when it starts.

    Attributes:
        root: the work tree; packages of variants are imported from it in preference to installed ones.
        device: cpu or cuda.
        threads: CPU threads of torch.
        core: the core that it is pinned to; None for any.
        seed: of weights, inputs and noise.
        suite: name of the suite.
        variants: globs over variants; empty for those of the suite.
        plugins: modules or files that register variants.
        methods: timing methods; empty for all of the device.

    """

    root: str = ""
    device: Literal["cpu", "cuda"]
    threads: int
    core: int | None = None
    seed: int
    suite: str
    variants: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


class _Message(_Strict, frozen=True, kw_only=True, tag_field="message"):
    """A line; the field ``message`` names its kind."""


class Survey(_Message, frozen=True, kw_only=True, tag="survey"):
    """Check a variant on a case against its reference, and count bytes and launches of its phases."""

    variant: Variant
    case: Case
    phases: tuple[Phase, ...]


class Open(_Message, frozen=True, kw_only=True, tag="open"):
    """Set a cell up and warm it up; the next visits time it."""

    cell: Cell


class Control(_Message, frozen=True, kw_only=True, tag="control"):
    """Set a number of units of control work up; the next visits time it."""

    units: int
    method: str


class Visit(_Message, frozen=True, kw_only=True, tag="visit"):
    """Time ``launches`` calls of the open cell, after ``before`` calls that are not timed."""

    launches: int
    before: int = 0


Question = Survey | Open | Control | Visit


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """The first message of a worker: the loaded variants and its cells.

    Attributes:
        packages: package of variants -> the folder that it was imported from.
        code: package of variants, and esbench -> hash of its files.
        cells: the cells of the suite in this tree.
        cell_s: seconds to spend on a cell.
        unknown: the error if this tree has no suite or variants of the given names; then it has no cells.

    """

    packages: dict[str, str]
    code: dict[str, str]
    cells: tuple[Cell, ...] = ()
    cell_s: float = 1.0
    unknown: str = ""


class Found(_Message, frozen=True, kw_only=True, tag="found"):
    """Result of a survey. ``figures``: phase -> metric -> count; ``missing``: phase -> why it has none."""

    figures: dict[Phase, dict[str, Sample]]
    missing: dict[Phase, str] = {}


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """Why there is nothing to measure: no such variant, it cannot run here, or it is wrong."""

    status: Literal["absent", "unavailable", "failed"]
    reason: str


class Opened(_Message, frozen=True, kw_only=True, tag="opened"):
    """The cell is warm; ``launch_ns`` is about how long a launch takes."""

    launch_ns: Nanoseconds


class Visited(_Message, frozen=True, kw_only=True, tag="visited"):
    """The time of each launch of a visit."""

    samples: Annotated[tuple[Nanoseconds, ...], msgspec.Meta(min_length=1)]


class WorkerFailure(_Message, frozen=True, kw_only=True, tag="failure"):
    """Why the worker has to end: its tree cannot be loaded, or a clock failed."""

    reason: str


Answer = Hello | Found | Refused | Opened | Visited | WorkerFailure
