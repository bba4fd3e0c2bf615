"""What somebody asks of a picture, and the runs that may answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.records import Phase, Row, Run, Variant
from esbench.report.drawing import PAGE, Paper
from esbench.report.newest import flaws
from esbench.report.words import listed, one_line


@dataclass(frozen=True)
class Wish:
    """What somebody wants of a picture; where nothing is said, its usual subject.

    ``cases`` is a glob over labels and shapes, ``variants`` are globs over names and labels.
    """

    operator: str | None = None
    cases: str = "*"
    variants: tuple[str, ...] = ()
    phase: Phase | None = None
    metric: str | None = None
    dtype: str | None = None
    method: str | None = None
    paper: Paper = PAGE


@dataclass(frozen=True)
class Source:
    """What there is to draw from: runs, those first that answer best, and the folder of results."""

    runs: tuple[Run, ...]
    results: Path = Path("results")


def by_start(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs, the newest first, whole ones before others."""
    newest = sorted(runs, key=lambda run: run.header.run_id, reverse=True)
    return tuple(sorted(newest, key=lambda run: any(flaws(run))))


def narrowed(run: Run, wish: Wish) -> Run:
    """The run with those rows alone that were asked for; the plain layer stays, to hold others to."""
    return msgspec.structs.replace(run, rows=tuple(row for row in run.rows if _asked(row, wish)))


def _asked(row: Row, wish: Wish) -> bool:
    return fits_case(row, wish) and (row.variant.mode == "base" or fits(row.variant, row, wish.variants))


def fits_case(row: Row, wish: Wish) -> bool:
    """Whether a row is of the operator, number format and case that were asked for."""
    case = row.case
    return (
        wish.operator in {None, case.operator}
        and wish.dtype in {None, case.dtype}
        and any(fnmatchcase(name, wish.cases) for name in (case.label, case.shape))
    )


def fits(variant: Variant, row: Row, globs: Sequence[str]) -> bool:
    """Whether any of these globs, if there are any, matches a variant by its name or its label."""
    names = (variant.name, variant.label(row.case.operator))
    return not globs or any(fnmatchcase(name, glob) for glob in globs for name in names)


def check(runs: Sequence[Run], wish: Wish) -> None:
    """Hold what was asked for to what there is.

    Raises:
        UserError: a choice matches nothing in any of the runs.

    """
    rows = [row for run in runs for row in run.rows]
    for kind, asked, there in (
        ("operator", wish.operator, [row.case.operator for row in rows]),
        ("dtype", wish.dtype, [row.case.dtype for row in rows]),
    ):
        if asked is not None and asked not in there:
            _nothing(kind, asked, there)
    cases = [row for row in rows if fits_case(row, wish)]
    if rows and not cases:
        _nothing("case", wish.cases, [row.case.label for row in rows])
    for glob in wish.variants:
        if rows and not any(fits(row.variant, row, [glob]) for row in cases):
            _nothing("variant", glob, [row.variant.name for row in cases])


def _nothing(kind: str, asked: str, there: Sequence[str]) -> None:
    message = f"no {kind} matches {asked!r} in these runs; there are: {listed(list(dict.fromkeys(there)))}"
    raise UserError(one_line(message))
