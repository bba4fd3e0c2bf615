"""Changes that are intended: accepted by name, with a reason, until a day, in a file that is reviewed.

``gate.toml`` stands at the top of the revision that is judged:

    [[accept]]
    cell = "PerturbedLinear | Linear(64, 64) members=64 | forward | host"
    metric = "latency_ns"
    reason = "the noise is drawn in float64 from now on, which is what makes it exact"
    expires = 2027-01-31

``cell`` is a name as the gate prints it, or a glob over such names. With ``device = "cuda"`` an acceptance is
for GPUs alone, with ``"cpu"`` for CPUs.
"""

import datetime as dt
import fnmatch
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from esbench.errors import UserError
from esbench.gate.decision import MEAN, PASSED, USAGE, exit_code
from esbench.gate.records import Decision, Verdict
from esbench.schema import METHODS

FILE = "gate.toml"


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change that is intended. A wrong output is none: there is no metric for it."""

    cell: Annotated[str, msgspec.Meta(min_length=1)]
    metric: Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "row"]
    reason: Annotated[str, msgspec.Meta(pattern=r"(\S\s*){10}")]
    expires: dt.date
    device: Literal["cpu", "cuda"] | None = None

    def is_same(self, other: "Waiver") -> bool:
        """Say whether another one accepts the same, for whatever reason."""
        return (self.cell, self.metric, self.device) == (other.cell, other.metric, other.device)

    def is_of(self, verdict: Verdict) -> bool:
        """Say whether it is about this cell and metric; the mean over cells only by its own name."""
        named = verdict.cell == self.cell or (
            verdict.cell != MEAN and fnmatch.fnmatchcase(verdict.cell, self.cell)
        )
        return named and verdict.metric == self.metric

    def covers(self, verdict: Verdict) -> bool:
        """Say whether it accepts this verdict."""
        return verdict.status == "FAIL" and self.is_of(verdict)

    def is_needed(self, verdict: Verdict, margin: float) -> bool:
        """Say whether it accepts this verdict, or a time of which nobody knows that it is no longer slower.

        Chance decides whether a small slowdown is seen again, so not to have seen it says nothing.
        """
        open_ = verdict.bounds is not None and verdict.bounds.high > margin
        return self.covers(verdict) or (open_ and self.is_of(verdict))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    accept: tuple[Waiver, ...] = ()


def read(folder: Path, today: dt.date) -> tuple[Waiver, ...]:
    """Return what is accepted at the top of a tree; nothing where there is no such file.

    Raises:
        UserError: it cannot be read, or an acceptance has expired or is there twice; the message names it.

    """
    path = folder / FILE
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File).accept
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        message = f"{FILE}: {getattr(error, 'strerror', None) or error}"
        raise UserError(message) from error
    for place, one in enumerate(found):
        if any(one.is_same(other) for other in found[:place]):
            message = f"{FILE}: {one.metric} of {one.cell} is accepted twice: remove one of them"
            raise UserError(message)
        if one.expires < today:
            message = (
                f"{FILE}: the acceptance of {one.metric} of {one.cell} expired on {one.expires}: remove it"
            )
            raise UserError(message)
    return found


def apply(judgement: Decision, acceptances: Sequence[Waiver], *, whole: bool = True) -> Decision:
    """Return the judgement with what was accepted, and which acceptances accept nothing.

    What one was for is then over, and it would hide the next regression: that is an error, unless there is
    worse to say. Nothing is known of cells by methods that were not measured, nor where not the ``whole``
    suite was; those for another kind of device say nothing here.
    """
    environment, margin = judgement.opening.environment, judgement.settings.margin
    acceptances = [one for one in acceptances if one.device in {None, environment.device}]

    def accepted(verdict: Verdict) -> Verdict:
        found = next((one for one in acceptances if one.covers(verdict)), None)
        return msgspec.structs.replace(verdict, accepted=found.reason) if found else verdict

    every = (*judgement.verdicts, *([judgement.mean] if judgement.mean else []))
    verdicts = tuple(map(accepted, judgement.verdicts))
    mean = accepted(judgement.mean) if judgement.mean else None
    code = exit_code((*verdicts, *([mean] if mean else [])), judgement.invalid)
    asked = [one for one in acceptances if whole and _was_asked(one, judgement)]
    unused = tuple(
        f"{FILE}: nothing is accepted by {one.metric} of {one.cell}: remove what is no longer needed"
        for one in asked
        if not any(one.is_needed(verdict, margin) for verdict in every)
    )
    return msgspec.structs.replace(
        judgement,
        verdicts=verdicts,
        mean=mean,
        unused=unused,
        exit_code=USAGE if unused and code == PASSED else code,
    )


def _was_asked(acceptance: Waiver, judgement: Decision) -> bool:
    """Say whether cells of the acceptance's method were measured: one file serves a CPU and a GPU."""
    elsewhere = {*itertools.chain.from_iterable(METHODS.values())}
    elsewhere -= {one.cell.rpartition(" | ")[2] for one in judgement.verdicts}
    return acceptance.cell.rpartition(" | ")[2] not in elsewhere
