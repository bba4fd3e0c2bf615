"""Members evaluated per ms and n_eff per ms of each scheme: its speed and its effective members."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from esbench.report import captions
from esbench.report.analysis.quality import MORE_THAN_DENSE, percent_of_members
from esbench.report.analysis.ranking import RankedVariant, Rankings, best_of_each_scheme, dense, tied_schemes
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, FINE, PAGE, WHITE, Figure, is_drawable
from esbench.schema import DENSE
from esbench.units import format_multiplier, format_value

_MAX_ROWS = 16
"""More schemes are left out, the worst first; dense noise and the fastest are always shown."""
SMALL_SHARE = 0.5
"""The title warns of a fastest step that keeps less than this share of its members."""
_CIRCLE: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "color": BLACK,
    "markerfacecolor": WHITE,
    "markeredgewidth": 0.8,
}


@style.use_style()
def hero(rankings: Rankings, width: float = PAGE) -> Figure | None:
    """Draw a row per scheme: an open circle at members evaluated per ms, a filled marker at n_eff per ms.

    The line between the two is the loss due to noise that members share. An arrow to the right: n_eff is
    infinite (an exact estimate), or only its lower bound is known. The case is ``rankings.main``. Return
    ``None`` if fewer than two schemes have a rate.
    """
    case = rankings.main
    ranked = rankings.of(case) if case else []
    # The fastest variant is drawn even if it is not the best of its scheme.
    chosen = [*drawable_schemes(ranked), _fastest(ranked)]
    schemes = [entry for entry in ranked if entry in chosen]
    if case is None or len(schemes) < 2:  # noqa: PLR2004  # one scheme has nothing to be compared with
        return None
    rows = _limit_rows(schemes)
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 0.5 + 0.19 * len(rows))
    rates = [rate for row in rows for rate in (row.evaluated_per_ms, row.rate) if rate and is_drawable(rate)]
    style.log_axis(axes, "x", rates)
    if width < PAGE:  # beside the names there is little room for the numbers
        axes.xaxis.set_major_locator(LogLocator(subs=(1,)))
    for index, row in enumerate(rows):
        _draw_row(axes, index, row)
    style.name_rows(axes, [style.fit(label(row), 0.32 * width) for row in rows], -0.8)
    axes.tick_params(labelsize=FINE)
    axes.set_xlabel("members per ms of a step", loc="right")
    _write_columns(axes, -0.8, "members kept", "step", color="0.3")
    figure.finish(
        f"{captions.invalid_note(rankings.grid.run)}{finding(ranked)}",
        style.origin(rankings.grid, [case]),
        style.note_if_incomplete(rows, schemes, "schemes"),
        [
            Line2D([], [], **_CIRCLE, markersize=4.0, label="evaluated"),
            *style.family_legend((row.variant.scheme for row in rows), "n_eff: "),
        ],
    )
    return figure


def drawable_schemes(ranked: Sequence[RankedVariant]) -> list[RankedVariant]:
    """Return the best variant of each scheme, best first, without rates that no axis can show."""
    return [entry for entry in best_of_each_scheme(ranked) if is_drawable(entry.evaluated_per_ms)]


def label(ranked: RankedVariant) -> str:
    """Return the name of a variant; dense noise is explained."""
    return f"{DENSE} (dense noise)" if ranked.variant.name == DENSE else ranked.variant.name


def finding(ranked: Sequence[RankedVariant]) -> str:
    """Return the title: the members that the fastest step keeps, and the scheme with the most n_eff per ms.

    An exact estimate counts as the best only if all are exact. The best is compared with dense noise.
    """
    rated = [entry for entry in ranked if entry.is_candidate]
    fastest = _fastest(ranked) or rated[0]
    best = next((entry for entry in rated if not entry.is_exact), rated[0])
    reference = dense(rated)
    times = best.rate_over(reference) if reference != best else None
    least = "at least " if best.effective and best.effective.is_bound else ""
    gain = f" and gives {least}{format_multiplier(times)} the n_eff per ms of dense noise" if times else ""
    ties = tied_schemes(best, rated)
    advice = f"{best.variant.name}{f', {ties},' if ties else ''} {_keeps(best)}{gain}."
    if fastest == best:
        return advice
    if fastest.effective is None or (fastest.share or 0.0) >= SMALL_SHARE:
        return f"{fastest.variant.name} is fastest and {_keeps(fastest)}. {advice}"
    kept = f"{format_n_eff(fastest.effective.value)} of its {fastest.case.members:,} members"
    return f"{fastest.variant.name} is fastest but keeps only {kept}. {advice}"


def _fastest(ranked: Sequence[RankedVariant]) -> RankedVariant | None:
    """Return the variant with the fastest step among those with a rate that can be drawn."""
    drawn = [entry for entry in ranked if entry.is_candidate and is_drawable(entry.evaluated_per_ms)]
    return min(drawn, key=lambda entry: entry.step_ns or 0.0, default=None)


def format_n_eff(n_eff: float) -> str:
    """Return n_eff with three digits, without an exponent."""
    return f"{n_eff:.3g}" if n_eff < 100 else f"{n_eff:,.0f}"  # noqa: PLR2004  # three digits


def _keeps(ranked: RankedVariant) -> str:
    if ranked.is_exact:
        return "is exact for a linear fitness"
    if ranked.effective is None:
        return "keeps an unknown share of its members"
    share = percent_of_members(ranked.effective, ranked.case.members)
    return "keeps all members" if share in {"100 %", MORE_THAN_DENSE} else f"keeps {share} of its members"


def _limit_rows(schemes: Sequence[RankedVariant]) -> list[RankedVariant]:
    """Return dense noise, the fastest and the best of the others, in the order of ``schemes``."""
    fastest = min(schemes, key=lambda entry: entry.step_ns or 0.0)
    always = [entry for entry in schemes if entry.variant.name == DENSE or entry == fastest]
    best = [entry for entry in schemes if entry not in always][: _MAX_ROWS - len(always)]
    return [entry for entry in schemes if entry in best or entry in always]


def _draw_row(axes: Axes, index: int, row: RankedVariant) -> None:
    """Draw a variant: a circle at its members per ms, a point at its n_eff per ms, and a line between them.

    An arrow to the right starts at a rate that is only a lower bound.
    """
    look = style.family_look(row.variant.scheme)
    evaluated, rate = row.evaluated_per_ms, row.rate or 0.0
    if row.variant.name == DENSE:
        axes.axhspan(index - 0.5, index + 0.5, color="0.92", linewidth=0, zorder=0.5)
    if row.is_exact or (row.effective and row.effective.is_bound):
        start = evaluated if row.is_exact else rate  # the rate of an exact estimate is infinite
        style.arrow(axes, (start, index), (axes.get_xlim()[1], index), look.color)
    if is_drawable(rate):
        axes.plot([rate, evaluated], [index, index], color=look.color, linewidth=1.6, zorder=2)
        axes.plot(rate, index, **look.point, markersize=5.5, zorder=4)
    axes.plot(evaluated, index, **_CIRCLE, markersize=5.5, zorder=3)
    share = percent_of_members(row.effective, row.case.members) if row.effective else ""
    _write_columns(axes, index, share, format_value("step_ns", row.step_ns))


def _write_columns(axes: Axes, y: float, share: str, step: str, color: str = "black") -> None:
    for offset, text, side in ((4, share, "left"), (100, step, "right")):
        axes.annotate(
            text,
            (1, y),
            (offset, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="center",
            fontsize=FINE,
            color=color,
            annotation_clip=False,
        )
