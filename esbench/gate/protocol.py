"""What the referee and a worker say to each other: one JSON line a message. No torch.

The referee asks, the worker answers; every answer repeats the number of the question and the arm that was
asked, so that an answer that comes late or from somebody else is known as such.
"""

from typing import Annotated, Literal

import msgspec

from esbench.schema import Case, Phase, Sample, Variant

PROTOCOL = 1

Arm = Literal["base", "head"]
ARMS: tuple[Arm, Arm] = ("base", "head")

Nanoseconds = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
"""What a launch can take: a clock that reads zero or less, or no number, has read nothing."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding refuses fields that it does not know."""


class Cell(_Strict, frozen=True, kw_only=True):
    """What is judged: a variant on a case, in one phase and by one method."""

    variant: Variant
    case: Case
    phase: Phase
    method: str

    @property
    def name(self) -> str:
        """The cell in words, as a table shows it and an acceptance names it."""
        label = self.variant.label(self.case.operator)
        return f"{label} | {self.case.label} | {self.phase} | {self.method}"


class Orders(_Strict, frozen=True, kw_only=True):
    """What a worker is told when it starts: which tree it serves, and how.

    ``root`` is the tree; packages of variants are taken from there if they are in it. ``replicate`` is the
    name of what it is started for. ``threads`` are torch's on a CPU, ``core`` is the one that it may use,
    None for any; ``methods`` are those of the device's clocks, all where none is named.
    """

    arm: Arm
    root: str
    device: Literal["cpu", "cuda"]
    threads: int
    core: int | None = None
    seed: int
    suite: str
    replicate: str = ""
    variants: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


class _Message(_Strict, frozen=True, kw_only=True, tag_field="message"):
    """A line; the field ``message`` says which kind it is."""

    number: int


class Survey(_Message, frozen=True, kw_only=True, tag="survey"):
    """Hold a variant on a case to its oracle, and count what its phases hold and launch."""

    variant: Variant
    case: Case
    phases: tuple[Phase, ...]


class Open(_Message, frozen=True, kw_only=True, tag="open"):
    """Set a cell up and warm it: the next visits are to it."""

    cell: Cell


class Control(_Message, frozen=True, kw_only=True, tag="control"):
    """Set the harness's own work up, so many units of it: the next visits are to it."""

    units: int
    method: str


class Visit(_Message, frozen=True, kw_only=True, tag="visit"):
    """Launch what is open so many times, behind launches that take the caches back and are not timed."""

    launches: int
    before: int = 0


Question = Survey | Open | Control | Visit


class _Answer(_Message, frozen=True, kw_only=True):
    """An answer repeats the number of the question, and says whose it is."""

    arm: Arm


class Hello(_Answer, frozen=True, kw_only=True, tag="hello"):
    """What a worker says first, as number 0: what it has loaded from where, and its cells.

    ``packages``: name of a package of variants -> its folder; ``code``: the hash of its files, and of the
    harness. ``unknown`` says which name of suite or variants this tree does not have: then it has no cells.
    """

    protocol: int
    packages: dict[str, str]
    code: dict[str, str]
    cells: tuple[Cell, ...] = ()
    cell_s: float = 1.0
    unknown: str = ""


class Found(_Answer, frozen=True, kw_only=True, tag="found"):
    """What a survey found: phase -> metric -> figure; ``missing``: phase -> why it has none."""

    figures: dict[Phase, dict[str, Sample]]
    missing: dict[Phase, str] = {}


class Refused(_Answer, frozen=True, kw_only=True, tag="refused"):
    """Why there is nothing to measure: it cannot run here, or it is wrong, or there is no such variant."""

    status: Literal["absent", "unavailable", "failed"]
    reason: str


class Opened(_Answer, frozen=True, kw_only=True, tag="opened"):
    """It is warm, and a launch takes about so long."""

    launch_ns: Nanoseconds


class Visited(_Answer, frozen=True, kw_only=True, tag="visited"):
    """The nanoseconds of each launch of a visit."""

    samples: Annotated[tuple[Nanoseconds, ...], msgspec.Meta(min_length=1)]


class WorkerFailure(_Answer, frozen=True, kw_only=True, tag="failure"):
    """The worker cannot go on, and why: its tree cannot be loaded, or a clock failed."""

    reason: str


Answer = Hello | Found | Refused | Opened | Visited | WorkerFailure
