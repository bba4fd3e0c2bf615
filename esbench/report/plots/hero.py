"""Members evaluated per ms and n_eff per ms of each scheme: its speed, and how many of its members count."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report import captions
from esbench.report.analysis.quality import percent_of_members
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, FINE, PAGE, WHITE, Figure, drawable
from esbench.schema import DENSE
from esbench.units import format_multiplier, format_value

_MAX_ROWS = 16
"""Of more schemes the last are left out, but never dense noise or the fastest."""
_SMALL_SHARE = 0.5
"""A step that keeps a smaller share of its members is not recommended by its speed."""
_CIRCLE: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "color": BLACK,
    "markerfacecolor": WHITE,
    "markeredgewidth": 0.8,
}


@style.styled()
def hero(rankings: Rankings, width: float = PAGE) -> Figure | None:
    """Draw a row per scheme: an open circle at members evaluated per ms, a filled marker at n_eff per ms.

    The line between the two is what the scheme loses because its members share noise. An exact estimate,
    whose n_eff is infinite, ends in an arrow. The case is the one with the largest population of
    ``rankings.largest``. ``None`` if fewer than two schemes have a rate.
    """
    case = rankings.main
    schemes = best_of_each_scheme(rankings.of(case)) if case else []
    if case is None or len(schemes) < 2:  # noqa: PLR2004  # one scheme alone has nothing to be compared with
        return None
    rows = _shown(schemes)
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 0.45 + 0.185 * len(rows))
    style.log_axis(axes, "x", [x for row in rows for x in (_evaluated(row), row.rate) if x and drawable(x)])
    for place, row in enumerate(rows):
        _draw(axes, place, row)
    axes.set_yticks(range(len(rows)), [style.fit(label(row), 0.3 * width) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.tick_params(axis="y", length=0, labelsize=FINE)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("members per ms of a whole step", loc="right")
    _write_columns(axes, -0.8, "of the population", "one step", color="0.4")
    figure.finish(
        f"{captions.invalid(rankings.grid.run)}{finding(rankings.of(case))}",
        f"{case.label}, {style.origin(rankings.grid, [case])}",
        style.part_of(rows, schemes, "schemes"),
        [
            Line2D([], [], **_CIRCLE, markersize=4.0, label="evaluated"),
            *style.family_legend((row.variant.scheme for row in rows), "n_eff: "),
        ],
    )
    return figure


def best_of_each_scheme(ranked: Sequence[RankedVariant]) -> list[RankedVariant]:
    """Return each scheme's best variant, best first; for dense noise, the variant without options."""
    best: dict[str, RankedVariant] = {}
    for entry in ranked:
        scheme = entry.variant.scheme.removeprefix("Fused")
        is_drawable = entry.rate is not None and not entry.variant.baseline and drawable(_evaluated(entry))
        if is_drawable and (scheme != DENSE or entry.variant.name == DENSE):
            best.setdefault(scheme, entry)
    return list(best.values())


def label(ranked: RankedVariant) -> str:
    """Return the name of a variant; that of dense noise is explained."""
    return f"{DENSE} (dense noise)" if ranked.variant.name == DENSE else ranked.variant.name


def finding(ranked: Sequence[RankedVariant]) -> str:
    """Return the result in two sentences: how much the fastest step keeps, and which scheme is best."""
    rated = [scheme for scheme in ranked if scheme.rate is not None and not scheme.variant.baseline]
    fastest = min(rated, key=lambda scheme: scheme.step_ns or 0.0)
    best = next((scheme for scheme in rated if not scheme.is_exact), rated[0])
    reference = dense(rated)
    times = best.times(reference) if reference != best else None
    more = f" and gives {format_multiplier(times)} the n_eff per ms of dense noise" if times else ""
    if fastest == best or fastest.effective is None or (fastest.share or 0.0) >= _SMALL_SHARE:
        first = "" if fastest == best else f"{fastest.variant.name} is fastest and {_keeps(fastest)}. "
        return f"{first}{best.variant.name} {_keeps(best)}{more}."
    n_eff, members = fastest.effective.value, fastest.case.members
    number = f"{n_eff:.3g}" if n_eff < 100 else f"{n_eff:,.0f}"  # noqa: PLR2004  # three digits, no exponent
    return (
        f"The fastest step keeps {number} of its {members:,} members. "
        f"{best.variant.name} {_keeps(best).replace('all members', 'all of them')}{more}."
    )


def _keeps(ranked: RankedVariant) -> str:
    share = (
        percent_of_members(ranked.effective, ranked.case.members) if ranked.effective else "an unknown share"
    )
    if ranked.is_exact:
        return "is exact for a linear fitness"
    return "keeps all members" if share == "100 %" else f"keeps {share} of its members"


def _shown(schemes: Sequence[RankedVariant]) -> list[RankedVariant]:
    fastest = min(schemes, key=lambda scheme: scheme.step_ns or 0.0)
    always = [scheme for scheme in schemes if scheme.variant.name == DENSE or scheme == fastest]
    first = [scheme for scheme in schemes if scheme not in always][: _MAX_ROWS - len(always)]
    return [scheme for scheme in schemes if scheme in first or scheme in always]


def _evaluated(ranked: RankedVariant) -> float:
    """Return the members evaluated per ms."""
    return ranked.case.members / (ranked.step_ns / 1e6) if ranked.step_ns else 0.0


def _draw(axes: Axes, place: int, row: RankedVariant) -> None:
    look, evaluated, rate = style.family_look(row.variant.scheme), _evaluated(row), row.rate or 0.0
    if row.variant.name == DENSE:
        axes.axhspan(place - 0.5, place + 0.5, color="0.93", linewidth=0, zorder=0.5)
    if row.is_exact:
        arrow = {"arrowstyle": "-|>", "color": look.color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (axes.get_xlim()[1], place), (evaluated, place), arrowprops=arrow, zorder=2)
    elif drawable(rate):
        axes.plot([rate, evaluated], [place, place], color=look.color, linewidth=1.6, zorder=2)
        axes.plot(rate, place, **look.point, markersize=5.5, zorder=4)
    axes.plot(evaluated, place, **_CIRCLE, markersize=5.5, zorder=3)
    share = percent_of_members(row.effective, row.case.members) if row.effective else ""
    share_text = "exact" if row.is_exact else f"{share} kept"
    _write_columns(axes, place, share_text, format_value("step_ns", row.step_ns))


def _write_columns(axes: Axes, place: float, share: str, step: str, color: str = "black") -> None:
    """Write the two columns of text to the right of the axes."""
    for points, text, side in ((5, share, "left"), (100, step, "right")):
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
