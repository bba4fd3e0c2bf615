"""Members evaluated per ms beside n_eff per ms: what each scheme promises and what it delivers."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report.analysis.quality import percent_of_members
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, FINE, PAGE, WHITE, Figure, drawable
from esbench.schema import DENSE
from esbench.units import format_multiplier, format_value

TITLE = "members evaluated per ms, and how many of them count"
_ROW = 0.185
"""Inches of a row."""
_MOST = 16
"""Rows: of more schemes the last are left out, but never dense noise or the fastest."""
_FEW = 0.5
"""A step that keeps a smaller share of its members is not recommended by its speed."""
_SHARE_AT, _STEP_AT = 5, 100
"""Points from the axes to the left end of the column of shares, and to the right end of that of times."""
_NS_PER_MS = 1e6


@style.styled()
def hero(rankings: Rankings, width: float = PAGE) -> Figure | None:
    """Draw a row per scheme: an open circle at members evaluated per ms, a filled marker at n_eff per ms.

    The line between the two is what the scheme loses because its members share noise. An exact estimate,
    whose n_eff is infinite, ends in an arrow. The case is the one with the largest population of
    ``rankings.largest``. ``None`` if fewer than two schemes have a rate.
    """
    case = rankings.main
    every = best_of_each_scheme(rankings.of(case)) if case else []
    if case is None or len(every) < 2:  # noqa: PLR2004  # one scheme alone has nothing to be compared with
        return None
    rows = _shown(every)
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, len(rows) * _ROW)
    style.log_axis(axes, "x", [x for one in rows for x in (_evaluated(one), one.rate) if x and drawable(x)])
    for place, one in enumerate(rows):
        _draw(axes, place, one)
    axes.set_yticks(range(len(rows)), [style.fit(_name(one), 0.3 * width) for one in rows])
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.tick_params(axis="y", length=0, labelsize=FINE)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("members per ms of a whole step")
    _headings(axes)
    schemes = dict.fromkeys(style.family(one.variant.scheme) for one in rows)
    handles = [
        _open_circle("evaluated"),
        *(
            style.legend_point(style.FAMILIES[name], f"n_eff: {name}")
            for name in style.FAMILIES
            if name in schemes
        ),
    ]
    figure.finish(
        f"{style.warning(rankings.grid)}{finding(rankings.of(case))}",
        f"{case.label}, {style.origin(rankings.grid, [case])}",
        style.part_of(rows, every, "schemes"),
        handles,
    )
    return figure


def best_of_each_scheme(ranked: Sequence[RankedVariant]) -> list[RankedVariant]:
    """Return the variant of each scheme with the best rate, best first; of dense noise the plain variant."""
    found: dict[str, RankedVariant] = {}
    for one in ranked:
        if one.rate is None or one.variant.baseline or not drawable(_evaluated(one)):
            continue
        scheme = one.variant.scheme.removeprefix("Fused")
        if scheme != DENSE or one.variant.name == DENSE:
            found.setdefault(scheme, one)
    return list(found.values())


def finding(ranked: Sequence[RankedVariant]) -> str:
    """Return the result in two sentences: what the fastest step keeps, and which scheme is best."""
    rated = [one for one in ranked if one.rate is not None and not one.variant.baseline]
    fastest = min(rated, key=lambda one: one.step_ns or 0.0)
    best = next((one for one in rated if not one.is_exact), rated[0])
    reference = dense(rated)
    times = best.times(reference) if reference != best else None
    more = f" and gives {format_multiplier(times)} the n_eff per ms of dense noise" if times else ""
    if fastest == best or fastest.effective is None or (fastest.share or 0.0) >= _FEW:
        first = "" if fastest == best else f"{fastest.variant.name} is fastest and {_keeps(fastest)}. "
        return f"{first}{best.variant.name} {_keeps(best)}{more}."
    kept, members = fastest.effective.value, fastest.case.members
    number = f"{kept:.3g}" if kept < 100 else f"{kept:,.0f}"  # noqa: PLR2004  # three digits, no exponent
    return (
        f"The fastest step keeps {number} of its {members:,} members. "
        f"{best.variant.name} {_keeps(best).replace('all members', 'all of them')}{more}."
    )


def _keeps(one: RankedVariant) -> str:
    share = percent_of_members(one.effective, one.case.members) if one.effective else "an unknown share"
    if one.is_exact:
        return "is exact for a linear fitness"
    return "keeps all members" if share == "100 %" else f"keeps {share} of its members"


def _shown(every: Sequence[RankedVariant]) -> list[RankedVariant]:
    fastest = min(every, key=lambda one: one.step_ns or 0.0)
    kept = [one for one in every if one.variant.name == DENSE or one == fastest]
    first = [one for one in every if one not in kept][: _MOST - len(kept)]
    return [one for one in every if one in first or one in kept]


def _name(one: RankedVariant) -> str:
    return f"{DENSE} (dense noise)" if one.variant.name == DENSE else one.variant.name


def _evaluated(one: RankedVariant) -> float:
    return one.case.members / (one.step_ns / _NS_PER_MS) if one.step_ns else 0.0


def _draw(axes: Axes, place: int, one: RankedVariant) -> None:
    look, evaluated, rate = style.FAMILIES[style.family(one.variant.scheme)], _evaluated(one), one.rate or 0.0
    if one.variant.name == DENSE:
        axes.axhspan(place - 0.5, place + 0.5, color="0.93", linewidth=0, zorder=0.5)
    if one.is_exact:
        arrow = {"arrowstyle": "-|>", "color": look.color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (axes.get_xlim()[1], place), (evaluated, place), arrowprops=arrow, zorder=2)
    elif drawable(rate):
        axes.plot([rate, evaluated], [place, place], color=look.color, linewidth=1.6, zorder=2)
        axes.plot(rate, place, **look.point | {"markersize": 5.5, "zorder": 4})
    axes.plot(evaluated, place, **_CIRCLE, zorder=3)
    share = percent_of_members(one.effective, one.case.members) if one.effective else ""
    _beside(axes, place, "exact" if one.is_exact else f"{share} kept", format_value("step_ns", one.step_ns))


def _headings(axes: Axes) -> None:
    _beside(axes, -0.8, "of the population", "one step", color="0.4")


def _beside(axes: Axes, place: float, share: str, step: str, color: str = "black") -> None:
    """Write the two columns of text to the right of the axes."""
    for points, text, side in ((_SHARE_AT, share, "left"), (_STEP_AT, step, "right")):
        axes.annotate(
            text,
            (1, place),
            (points, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="center",
            fontsize=FINE,
            color=color,
            annotation_clip=False,
        )


_CIRCLE: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 5.5,
    "color": BLACK,
    "markerfacecolor": WHITE,
    "markeredgewidth": 0.8,
}


def _open_circle(label: str) -> Line2D:
    return Line2D([], [], **_CIRCLE | {"markersize": 4.0, "label": label})
