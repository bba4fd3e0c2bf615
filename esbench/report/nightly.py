"""A run beside a stored one of the same device: which multipliers against base have moved.

A multiplier is taken inside a run, where the machine's drift falls on both of its sides, so it may be
compared over days as times may not. But each run is one process, and processes differ by more than an
interval inside one knows: what moved is amber, something to look at, and nothing to fail by. To judge a
change, compare both revisions in the same minutes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from esbench.errors import UserError
from esbench.report.circumstances import different_devices
from esbench.report.words import one_line
from esbench.schema import Case, Measurement, Phase, Run, RunHeader, Variant
from esbench.stats import LATENCY, Ratio, ratio
from esbench.store import run_name
from esbench.units import format_multiplier

MARGIN = 0.05
"""What moved by less is not shown: processes of one revision differ by some percent."""


class Place(NamedTuple):
    """What two multipliers must share to be compared."""

    variant: Variant
    case: Case
    phase: Phase
    method: str

    @property
    def words(self) -> tuple[str, ...]:
        """The place as a table shows it."""
        return self.variant.label(self.case.operator), self.case.label, self.phase, self.method


class Shift(NamedTuple):
    """A multiplier then and now; ``amber`` where it moved by more than the margin and both intervals."""

    place: Place
    then: Ratio
    now: Ratio
    amber: bool

    @property
    def factor(self) -> float:
        """By how much it grew."""
        return self.now.value / self.then.value


class Night(NamedTuple):
    """All shifts, and the places that only one of the runs has."""

    shifts: tuple[Shift, ...]
    gone: tuple[Place, ...]
    new: tuple[Place, ...]


def hold_to_place(path: Path, run: Run) -> None:
    """Look whether a run's file is the one that its name and its folder say.

    Raises:
        UserError: it is another's: renamed, moved, or swapped.

    """
    header = run.header
    for what, said, right in (
        ("run", run_name(path), header.run_id),
        ("device", path.resolve().parent.name, header.environment.slug),
    ):
        if said != right:
            message = f"{path}: holds {what} {right}, and its name says {said}: was the file swapped?"
            raise UserError(message)


def hold_to_stored(stored: Run, here: RunHeader) -> None:
    """Look whether multipliers of a stored run can be compared with those that are measured here.

    Raises:
        UserError: it is another device's, is no whole and valid run, or has no base.

    """
    name = stored.header.run_id
    if apart := different_devices(stored, Run(header=here, rows=())):
        message = f"run {name} is another device's: {apart}"
        raise UserError(message)
    if stored.end is None or stored.end.status != "complete" or stored.end.invalid:
        why = "; ".join(stored.end.invalid) if stored.end and stored.end.invalid else "it is not complete"
        message = f"run {name} cannot be compared with: {why}"
        raise UserError(message)
    if not _multipliers(stored):
        message = f"run {name} has no multiplier against base: nothing to compare with"
        raise UserError(message)


def night(stored: Run, fresh: Run, margin: float = MARGIN) -> Night:
    """Compare the multipliers of two runs.

    Raises:
        UserError: they were timed by other methods, or have nothing in common.

    """
    then, now = _multipliers(stored), _multipliers(fresh)
    methods = [sorted({place.method for place in side}) for side in (then, now)]
    if methods[0] != methods[1]:
        message = f"timed by {', '.join(methods[0])} then and by {', '.join(methods[1]) or 'nothing'} now"
        raise UserError(message)
    shifts = [_shift(place, then[place], now[place], margin) for place in then if place in now]
    if not shifts:
        message = f"runs {stored.header.run_id} and {fresh.header.run_id} have no multiplier in common"
        raise UserError(message)
    return Night(
        shifts=tuple(sorted(shifts, key=lambda shift: -shift.factor)),
        gone=tuple(place for place in then if place not in now),
        new=tuple(place for place in now if place not in then),
    )


def text(found: Night) -> str:
    """The night for a terminal."""
    amber = [shift for shift in found.shifts if shift.amber]
    rows = [
        [*shift.place.words, _range(shift.then), _range(shift.now), f"{100 * (shift.factor - 1):+.1f} %"]
        for shift in amber
    ]
    headings = ("variant", "case", "phase", "method", "then", "now", "moved")
    parts = []
    if rows:
        lines = [list(map(one_line, row)) for row in rows]
        parts.append(tabulate(lines, headers=headings, tablefmt="simple", disable_numparse=True))
    for name, places in (("gone", found.gone), ("new", found.new)):
        parts += (
            ["\n".join(one_line(f"{name}: {', '.join(place.words)}") for place in places)] if places else []
        )
    parts.append(
        f"AMBER: {len(amber)} of {len(found.shifts)} multipliers against base moved"
        if amber
        else f"no multiplier of {len(found.shifts)} moved"
    )
    return "\n\n".join(parts) + "\n"


def _multipliers(run: Run) -> dict[Place, Ratio]:
    """The times of a run as multiples of base's forward in the same company."""
    return dict(_found(run))


def _found(run: Run) -> Iterator[tuple[Place, Ratio]]:
    times = [row for row in run.measurements if row.metric == LATENCY]
    base: dict[tuple[Case, int, str], Measurement] = {
        (row.case, row.company, row.method): row
        for row in times
        if row.variant.mode == "base" and row.phase == "forward"
    }
    for row in times:
        reference = base.get((row.case, row.company, row.method))
        if reference is None or row.variant.mode == "base":
            continue
        found = ratio(row, reference)
        if found is not None and found.value > 0:
            yield Place(row.variant, row.case, row.phase, row.method), found


def _shift(place: Place, then: Ratio, now: Ratio, margin: float) -> Shift:
    moved = max(now.value / then.value, then.value / now.value) > 1 + margin
    return Shift(place, then, now, amber=moved and not _overlap(then, now))


def _overlap(a: Ratio, b: Ratio) -> bool:
    """Whether the two intervals meet; a multiplier without one is a point."""
    low, high = (max(one.low or one.value for one in (a, b)), min(one.high or one.value for one in (a, b)))
    return low <= high


def _range(found: Ratio) -> str:
    if found.low is None or found.high is None:
        return format_multiplier(found.value)
    return f"{format_multiplier(found.low)} to {format_multiplier(found.high)}"
