"""Records of a study of the harness itself, and their file: what was read, and what could not be.

A study is one JSON file, ``<results>/<device>/accuracy/<study id>.json``. It is written at once and
whole; reading is strict. Nothing here imports torch.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from esbench import store
from esbench.schema import Environment, Sample

SCHEMA = 1
FOLDER = "accuracy"
"""The folder of a device's results that holds its studies."""

Samples = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, le=1e24)], ...], msgspec.Meta(min_length=1)]
"""The nanoseconds of a round: no timer that works reads zero."""

Question = Literal["agreement", "twins", "sequence", "length", "replicates", "sampler"]
"""What a reading belongs to.

``agreement``: this harness beside other timers. ``twins``: one call under two names in the same rounds.
``sequence``: the same, one name after the other. ``length``: a wait of known length. ``replicates``: one call
in fresh processes. ``sampler``: one call with and without the thread that samples the device.
"""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding refuses fields that it does not know."""


class Reading(_Strict, frozen=True, kw_only=True, omit_defaults=True):
    """What one arm read of one kernel, every sample in nanoseconds for a call.

    ``samples`` holds one tuple for each round; it, ``metric`` and ``places`` are those of
    :class:`esbench.schema.Measurement`. The arm of ``replicates`` is the process. ``expected_ns`` is the
    length that was asked for. A kernel is read in several sittings: only arms of the same one share rounds.
    """

    question: Question
    kernel: str
    arm: str
    metric: str = "latency_ns"
    sitting: int = 0
    samples: Annotated[tuple[Samples, ...], msgspec.Meta(min_length=1)]
    places: tuple[int, ...] = ()
    expected_ns: Sample | None = None


class Missing(_Strict, frozen=True, kw_only=True):
    """An arm that could not be read here, and why."""

    question: Question
    arm: str
    reason: str
    kernel: str = ""


class Study(_Strict, frozen=True, kw_only=True):
    """All readings of a study, and where they were taken.

    ``environment.load`` is the load average before, ``load_after`` the one at the end.
    """

    schema: int
    study_id: str
    started: str
    seed: int
    wall_s: float
    environment: Environment
    load_after: float | None
    readings: tuple[Reading, ...]
    missing: tuple[Missing, ...] = ()

    def of(self, question: Question) -> tuple[Reading, ...]:
        """The readings that belong to a question, in their order."""
        return tuple(reading for reading in self.readings if reading.question == question)


def write_study(study: Study, results: Path) -> Path:
    """Write a study; an interrupt leaves the whole file or none.

    Raises:
        ValueError: it could not be read back, for instance because a sample is NaN.

    """
    return store.write_document(study, results / study.environment.slug / FOLDER / f"{study.study_id}.json")


def read_study(path: Path) -> Study:
    """Read a study.

    Raises:
        UserError: the file does not hold one; the message names file and field.

    """
    return store.read_document(path, Study, what="study of accuracy", schema=SCHEMA, again="measure again")


def newest_studies(results: Path) -> list[Study]:
    """Read the newest study of each device, in the order of their folders.

    Raises:
        UserError: one of them cannot be read.

    """
    newest = {path.parent: path for path in sorted(results.glob(f"*/{FOLDER}/*.json"))}
    return [read_study(path) for path in newest.values()]
