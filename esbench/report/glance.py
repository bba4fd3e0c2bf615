"""Which scheme at which shape, at a glance: of each case the variant that gives most for its time."""

from collections.abc import Sequence

from esbench.records import Case, Run
from esbench.report import captions
from esbench.report.cells import Cell, Table, said
from esbench.report.footnotes import NOTHING, Footnotes
from esbench.report.grid import headings, operators
from esbench.report.headline import Figures
from esbench.report.ranking import DENSE, Rankings, Standing, dense, rankings
from esbench.report.tables import Block, Section

TITLE = "Which scheme at which shape"

_SHOWN = (f"x {DENSE}", "x base", "step (ms)", "peak (MB)")
_NOTE = (
    ": the first by effective members per millisecond of a whole step, what it costs, and the first of another "
    f"scheme. Multiples of {DENSE} (dense noise) and of base (the plain layer, which learns by "
    "backpropagation) in the same run. exact: a linear fitness's gradient without error."
)


def glance(runs: Sequence[Run], layers: Sequence[str] = ("Linear", "Conv2d")) -> Section | None:
    """A row for each shape and population of these operators that a run ranks; ``None`` where none does.

    A shape that several runs have is taken from the first of them. Nothing of base and of other baselines
    takes a place.
    """
    rows: dict[tuple[str, Case], tuple[Rankings, list[Standing]]] = {}
    for run in runs:
        for operator in (name for name in operators(run) if name in layers):
            for ranking in rankings(run, operator):
                for case in ranking.cases:
                    ranked = [one for one in ranking.of(case) if one.rate is not None]
                    rows.setdefault((ranking.grid.method, case), (ranking, ranked))
    known = [key for key in rows if any(not one.variant.baseline for one in rows[key][1])]
    if not known:
        return None
    names = headings([case for _, case in known])
    labels = (f"{case.operator} {name}" for (_, case), name in zip(known, names, strict=True))
    cells = (tuple(_row(*rows[key], key[1])) for key in known)
    table = Table("layer", ("first", "n_eff / ms", *_SHOWN, "then"), tuple(labels), tuple(cells))
    shown = {rows[key][0].grid.run.header.run_id for key in known}
    dtypes = " and ".join(dict.fromkeys(case.dtype for _, case in known))
    methods = " and ".join(dict.fromkeys(method for method, _ in known))
    return Section(
        title=TITLE,
        origin=" ".join(captions.origin(run) for run in runs if run.header.run_id in shown),
        conditions=f"{dtypes}, one row for each member, method {methods}.",
        blocks=(Block(TITLE, _NOTE, table),),
        footnotes=(),
    )


def _row(ranking: Rankings, ranked: Sequence[Standing], case: Case) -> list[Cell]:
    """The first, its figures, and the next one, of those that are no baselines."""
    figures = dict(Figures(ranking, case, dense(ranked), Footnotes()).columns)
    first, *others = [one for one in ranked if not one.variant.baseline]
    shown = [figures[name](first) or said(NOTHING) for name in ("n_eff / ms", *_SHOWN)]
    following = next((one for one in others if one.variant.scheme != first.variant.scheme), None)
    return [said(_name(first)), *shown, said(_name(following) if following else NOTHING)]


def _name(one: Standing) -> str:
    return one.variant.label("")
