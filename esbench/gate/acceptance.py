"""Changes that are intended: accepted by name, with a reason, until a day, in a file that is reviewed.

``gate.toml`` stands at the top of the revision that is judged:

    [[accept]]
    cell = "PerturbedLinear | Linear(64, 64) members=64 | forward | host"
    metric = "latency_ns"
    reason = "the noise is drawn in float64 from now on, which is what makes it exact"
    expires = 2027-01-31

``cell`` is a name as the gate prints it, or a glob over such names.
"""

import datetime as dt
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from esbench.errors import UserError
from esbench.gate.judgement import MEAN, PASSED, exit_code
from esbench.gate.records import Judgement, Verdict

FILE = "gate.toml"


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change that is intended. A wrong output is none: there is no metric for it."""

    cell: Annotated[str, msgspec.Meta(min_length=1)]
    metric: Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "row"]
    reason: Annotated[str, msgspec.Meta(min_length=10)]
    expires: dt.date

    def covers(self, verdict: Verdict) -> bool:
        """Say whether it accepts this verdict; the mean over cells only by its own name."""
        if verdict.status != "FAIL" or verdict.metric != self.metric:
            return False
        return verdict.cell == self.cell or (
            verdict.cell != MEAN and fnmatch.fnmatchcase(verdict.cell, self.cell)
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    accept: tuple[Acceptance, ...] = ()


def read(folder: Path, today: dt.date) -> tuple[Acceptance, ...]:
    """Return what is accepted at the top of a tree; nothing where there is no such file.

    Raises:
        UserError: it cannot be read, or an acceptance has expired; the message names it.

    """
    path = folder / FILE
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File).accept
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        message = f"{FILE}: {error}"
        raise UserError(message) from error
    for one in found:
        if one.expires < today:
            message = (
                f"{FILE}: the acceptance of {one.metric} of {one.cell} expired on {one.expires}: remove it"
            )
            raise UserError(message)
    return found


def apply(judgement: Judgement, acceptances: Sequence[Acceptance]) -> Judgement:
    """Return the judgement with what was accepted."""

    def accepted(verdict: Verdict) -> Verdict:
        found = next((one for one in acceptances if one.covers(verdict)), None)
        return msgspec.structs.replace(verdict, accepted=found.reason) if found else verdict

    verdicts = tuple(map(accepted, judgement.verdicts))
    mean = accepted(judgement.mean) if judgement.mean else None
    code = exit_code((*verdicts, *([mean] if mean else [])), judgement.invalid)
    return msgspec.structs.replace(judgement, verdicts=verdicts, mean=mean, exit_code=code)


def hold_to_use(judgement: Judgement, acceptances: Sequence[Acceptance]) -> None:
    """Look whether each acceptance accepts something, where a judgement has nothing worse to say.

    Raises:
        UserError: one does not: what it was for is over, and it would hide the next regression.

    """
    every = (*judgement.verdicts, *([judgement.mean] if judgement.mean else []))
    unused = [one for one in acceptances if not any(one.covers(verdict) for verdict in every)]
    if unused and judgement.exit_code == PASSED:
        names = "; ".join(f"{one.metric} of {one.cell}" for one in unused)
        message = f"{FILE}: nothing is accepted by {names}: remove what is no longer needed"
        raise UserError(message)
