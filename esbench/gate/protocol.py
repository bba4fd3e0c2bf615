"""Messages from a worker of the gate, and the orders that it gets at its start. No torch."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from esbench.gate.records import Arm, Cell, Replicate, Surveyed


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker measures, given at its start.

    Attributes:
        roots: the folder with the files of each arm; their packages of variants take precedence.
        threads: CPU threads of torch.
        core: the CPU core of the worker; None for any.
        seed: seed of weights, inputs and noise.
        variants: globs over variants; empty for those of the suite.
        plugins: modules or files that register variants.
        methods: timing methods; empty for all of the device.
        look: the look for which replicates are measured.
        process: the number of this worker among those of the survey or the look, from 0.
        processes: how many there are; in a survey each checks its share of the variants.
        cells: the cells to time; empty for a survey.
        controls: control -> additional work in head, as a share; timed with the cells.
        replicates: replicates of each cell and control in this worker.
    """

    roots: Mapping[Arm, str] = msgspec.field(default_factory=dict)
    device: Literal["cpu", "cuda"]
    threads: int
    core: int | None = None
    seed: int
    suite: str
    variants: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    look: int = 0
    process: int = 0
    processes: int = 1
    cells: tuple[Cell, ...] = ()
    controls: Mapping[str, float] = msgspec.field(default_factory=dict)
    replicates: int = 0


class _Message(msgspec.Struct, frozen=True, tag_field="record"):
    """A message that is not stored; the field ``record`` names its kind."""


class Hello(_Message, frozen=True, tag="hello"):
    """The first message of a survey.

    Attributes:
        code: arm -> package of variants -> hash of its files.
        harness: hash of the files of esbench.
        cells: the cells of the suite in either revision.
        timed: those of head whose times the gate compares.
    """

    code: dict[Arm, dict[str, str]]
    harness: str
    cells: tuple[Cell, ...]
    timed: tuple[Cell, ...]


class Begin(_Message, frozen=True, tag="begin"):
    """What the worker does next, for errors and the display of progress; ``done`` of ``total`` are done."""

    subject: str
    done: int
    total: int


class Failure(_Message, frozen=True, tag="failure"):
    """The error that ends the worker: a revision cannot be loaded, or a timed call failed."""

    reason: str


class Done(_Message, frozen=True, tag="done"):
    """The last message of a worker that has measured everything."""


Message = Hello | Begin | Surveyed | Replicate | Failure | Done
