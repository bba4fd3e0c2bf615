"""Waivers: intended regressions, listed in ``gate.toml`` with a reason and an expiry date.

``gate.toml`` is read from the top folder of the revision under test:

    [[accept]]
    cell = "PerturbedLinear | Linear(64, 64) members=64 | forward | host"
    metric = "latency_ns"
    reason = "the noise is generated in float64, which makes it exact"
    expires = 2027-01-31

``cell`` is a name as the gate prints it, or a glob over such names. ``device = "cuda"`` or ``"cpu"`` limits a
waiver to that kind of device. A waiver expires within a year.
"""

import codecs
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
from esbench.store import read_regular_file

FILE = "gate.toml"
LONGEST = dt.timedelta(days=366)
"""The longest time until a waiver expires."""


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An intended regression. A wrong output cannot be waived."""

    cell: Annotated[str, msgspec.Meta(min_length=1)]
    metric: Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "row"]
    reason: Annotated[str, msgspec.Meta(pattern=r"(\S\s*){10}")]
    expires: dt.date
    device: Literal["cpu", "cuda"] | None = None

    def __str__(self) -> str:
        """Return the beginning of an error message about the waiver."""
        return f"{FILE}: the waiver for {self.metric} of {self.cell}"

    def matches(self, verdict: Verdict) -> bool:
        """Return whether the waiver is for this cell and metric; a glob does not match the geometric mean."""
        is_named = verdict.cell == self.cell or (
            verdict.cell != MEAN and fnmatch.fnmatchcase(verdict.cell, self.cell)
        )
        return is_named and verdict.metric == self.metric

    def is_needed(self, verdict: Verdict, margin: float) -> bool:
        """Return whether the waiver matches a failure, or a time that may be slower than the margin.

        A small slowdown is found in some gates only, so a PASS alone does not make a waiver unused.
        """
        may_be_slower = verdict.bounds is not None and verdict.bounds.high > margin
        return self.matches(verdict) and (verdict.status == "FAIL" or may_be_slower)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    accept: tuple[Waiver, ...] = ()


def read(folder: Path, today: dt.date) -> tuple[Waiver, ...]:
    """Return the waivers in the top folder of a revision; empty without the file.

    Raises:
        UserError: the file is invalid, or a waiver has expired, expires in more than a year or is listed
            twice; the message names it.
    """
    path = folder / FILE
    try:
        content = read_regular_file(path).removeprefix(codecs.BOM_UTF8)
        waivers = msgspec.toml.decode(content, type=_File).accept
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{FILE}: {getattr(error, 'strerror', None) or error}") from error
    for index, waiver in enumerate(waivers):
        key = (waiver.cell, waiver.metric, waiver.device)
        if any(key == (other.cell, other.metric, other.device) for other in waivers[:index]):
            raise UserError(f"{waiver} is listed twice: remove one of them")
        if waiver.expires < today:
            raise UserError(f"{waiver} expired on {waiver.expires}: remove it")
        if waiver.expires > today + LONGEST:
            raise UserError(f"{waiver} expires on {waiver.expires}: choose a date within {LONGEST.days} days")
    return waivers


def apply(decision: Decision, waivers: Sequence[Waiver], *, whole: bool = True) -> Decision:
    """Return the decision with accepted failures, unused waivers and the resulting exit code.

    An unused waiver would hide the next regression, so a decision that passes becomes an error. A waiver for
    another device or method is never unused; without the ``whole`` suite, no waiver is.
    """
    environment, margin = decision.opening.environment, decision.settings.margin
    waivers = [waiver for waiver in waivers if waiver.device in {None, environment.device}]

    def accept(verdict: Verdict) -> Verdict:
        reason = next((waiver.reason for waiver in waivers if waiver.matches(verdict)), "")
        return msgspec.structs.replace(verdict, accepted=reason) if verdict.status == "FAIL" else verdict

    verdicts = tuple(map(accept, decision.verdicts))
    mean = accept(decision.mean) if decision.mean else None
    every = (*verdicts, *filter(None, [mean]))
    code = exit_code(every, decision.invalid)
    measured = {verdict.cell.rpartition(" | ")[2] for verdict in verdicts}
    unmeasured = {*itertools.chain(*METHODS.values())} - measured
    unused = tuple(
        f"{waiver} applies to nothing: remove it"
        for waiver in waivers
        if whole
        and waiver.cell.rpartition(" | ")[2] not in unmeasured
        and not any(waiver.is_needed(verdict, margin) for verdict in every)
    )
    return msgspec.structs.replace(
        decision,
        verdicts=verdicts,
        mean=mean,
        unused=unused,
        exit_code=USAGE if unused and code == PASSED else code,
    )
