"""Waivers: intended regressions, listed in ``gate.toml`` with a reason and an expiry date.

``gate.toml`` is read from the top folder of the revision under test:

    [[accept]]
    cell = "PerturbedLinear | Linear(64, 64) members=64 | forward | host"
    metric = "latency_ns"
    reason = "the noise is generated in float64, which makes it exact"
    expires = 2027-01-31

``cell`` is a name as the gate prints it, or a glob over such names. A waiver expires within a year.
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
from esbench.gate.records import MEAN, Verdict, method_of
from esbench.schema import METHODS, Strict
from esbench.store import read_regular_file

FILE = "gate.toml"
LONGEST = dt.timedelta(days=366)
"""The longest time until a waiver expires."""


class Waiver(Strict, frozen=True):
    """An intended regression. A wrong output cannot be waived."""

    cell: Annotated[str, msgspec.Meta(min_length=1)]
    metric: Literal["latency_ns", "peak_bytes", "noise_bytes", "launches", "graphs", "row"]
    reason: Annotated[str, msgspec.Meta(pattern=r"(\S\s*){10}")]
    expires: dt.date

    def __str__(self) -> str:
        """Return the beginning of an error message about the waiver."""
        return f"{FILE}: the waiver for {self.metric} of {self.cell}"

    def matches(self, verdict: Verdict) -> bool:
        """Return whether the waiver is for this cell and metric; a glob does not match the geometric mean."""
        is_named = verdict.cell == self.cell or (
            verdict.cell != MEAN and fnmatch.fnmatchcase(verdict.cell, self.cell)
        )
        return is_named and verdict.metric == self.metric


class _File(Strict, frozen=True):
    accept: tuple[Waiver, ...] = ()


def read(folder: Path, today: dt.date) -> tuple[Waiver, ...]:
    """Return the waivers in the top folder of a revision; empty without the file.

    Raises:
        UserError: the file is invalid, or a waiver has expired or expires in more than a year.
    """
    path = folder / FILE
    try:
        content = read_regular_file(path).removeprefix(codecs.BOM_UTF8)
        waivers = msgspec.toml.decode(content, type=_File).accept
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UserError(f"{FILE} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # the latter from a thousand nested brackets
        raise UserError(
            f"{FILE} is invalid: {error}; an [[accept]] has a cell, a metric, a reason of at least 10 "
            "characters and expires = YYYY-MM-DD"
        ) from error
    for waiver in waivers:
        if waiver.expires < today:
            raise UserError(f"{waiver} expired on {waiver.expires}: remove it")
        if waiver.expires > today + LONGEST:
            raise UserError(f"{waiver} expires on {waiver.expires}: choose a date within {LONGEST.days} days")
    return waivers


def accept(verdict: Verdict, waivers: Sequence[Waiver]) -> Verdict:
    """Return a verdict with the reason of the first waiver that accepts it, if it FAILs and there is one."""
    reason = next((waiver.reason for waiver in waivers if waiver.matches(verdict)), "")
    return msgspec.structs.replace(verdict, accepted=reason) if verdict.status == "FAIL" else verdict


def unused_waivers(waivers: Sequence[Waiver], verdicts: Sequence[Verdict], margin: float) -> list[str]:
    """Return an error for each waiver that applies to nothing: it would hide the next regression.

    A waiver for a timing method of another device is no error. A small slowdown is found in some gates only,
    so a waiver is used while its time may be slower than the margin.
    """
    at_risk = [
        verdict
        for verdict in verdicts
        if verdict.status == "FAIL" or (verdict.bounds and verdict.bounds.high > margin)
    ]
    measured_methods = {method_of(verdict.cell) for verdict in verdicts}
    other_methods = {*itertools.chain(*METHODS.values())} - measured_methods
    return [
        f"{waiver} applies to nothing: remove it"
        for waiver in waivers
        if method_of(waiver.cell) not in other_methods and not any(map(waiver.matches, at_risk))
    ]
