"""Which scheme at which shape, at a glance: of each case the variant that gives most for its time."""

from collections.abc import Sequence

import msgspec

from esbench.report import captions
from esbench.report.cells import Cell, Table, said
from esbench.report.footnotes import Footnotes
from esbench.report.grid import headings, operators
from esbench.report.headline import COST, RATE, Figures
from esbench.report.ranking import DENSE, RankedVariant, Rankings, dense, rankings
from esbench.report.tables import Block, Section
from esbench.schema import Case, Run

TITLE = "Which scheme at which shape"

_SHOWN = (RATE, COST, "step (ms)", "peak (MB)")
_ALIKE = "≈"
_NOTE = (
    ": by effective members per millisecond of a whole step, what it costs, and the first of "
    f"another scheme, with {_ALIKE} where the intervals do not tell the two apart. Multiples of the rate of "
    f"{DENSE} (dense noise), more is better, and of the time of base (the plain layer, which learns by "
    "backpropagation), less is better, in the same run. exact: a linear fitness's gradient without error."
)


def glance(runs: Sequence[Run], layers: Sequence[str] = ("Linear", "Conv2d")) -> Section | None:
    """A row for each shape and population of these operators that a run ranks; ``None`` where none does.

    A shape that several runs have is taken from the first of them. Nothing of base and of other baselines
    takes a place.
    """
    rows: dict[tuple[str, Case], tuple[Rankings, list[RankedVariant]]] = {}
    for run in runs:
        for operator in (name for name in operators(run) if name in layers):
            for ranking in rankings(run, operator):
                for case in ranking.cases:
                    rows.setdefault((ranking.grid.method, case), (ranking, ranking.of(case)))
    known = [key for key in rows if _candidates(rows[key][1])]
    if not known:
        return None
    alike = [msgspec.structs.replace(case, members=1) for _, case in known]
    names = dict(zip(dict.fromkeys(alike), headings(dict.fromkeys(alike)), strict=True))
    several = len({method for method, _ in known}) > 1
    notes = Footnotes()
    table = Table(
        corner="layer",
        headings=("members", "first", "n_eff / ms", *_SHOWN, "then"),
        labels=tuple(
            f"{case.operator} {names[case]}" + (f", {method}" if several else "")
            for case, (method, _) in zip(alike, known, strict=True)
        ),
        cells=tuple(tuple(_row(*rows[key], key[1], notes)) for key in known),
    )
    shown = {rows[key][0].grid.run.header.run_id for key in known}
    dtypes = " and ".join(dict.fromkeys(case.dtype for _, case in known))
    methods = " and ".join(dict.fromkeys(method for method, _ in known))
    return Section(
        title=TITLE,
        origin=" ".join(captions.origin(run) for run in runs if run.header.run_id in shown),
        conditions=f"{dtypes}, one row for each member, method {methods}.",
        blocks=(Block("The first of each", _NOTE, table),),
        footnotes=tuple(notes),
    )


def _row(ranking: Rankings, standings: Sequence[RankedVariant], case: Case, notes: Footnotes) -> list[Cell]:
    """The population, the first, its figures, and the first of another scheme; none of them a baseline."""
    figures = dict(Figures(ranking, case, dense(standings), notes).columns)
    first, *others = _candidates(standings)
    shown = [figures[name](first) or said(notes.hole()) for name in ("n_eff / ms", *_SHOWN)]
    following = next((one for one in others if one.variant.scheme != first.variant.scheme), None)
    if following is None:
        then = notes.hole()
    else:
        then = f"{_ALIKE} {following.variant.name}" if first.alike([following]) else following.variant.name
    return [said(str(case.members)), said(first.variant.name), *shown, said(then)]


def _candidates(standings: Sequence[RankedVariant]) -> list[RankedVariant]:
    return [one for one in standings if one.rate is not None and not one.variant.baseline]
