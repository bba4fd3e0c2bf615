"""Kappa of the quality law: fitted, against its closed form."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter, SymmetricalLogLocator

from esbench.report import captions
from esbench.report.analysis import quality
from esbench.report.analysis.pivot import Grid
from esbench.report.analysis.quality import ABSOLUTE, CLOSED, CONTRADICTED, KAPPA, LINEAR, RELATIVE, Qualities
from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure
from esbench.schema import Case, Variant

_THRESHOLD = 0.1
"""The axes are linear up to here: many closed forms are 0, and some are negative."""
_MARGIN = 1.6
"""The axes end at the largest value times this factor."""
_LARGEST = 1e12
"""A larger kappa is not drawn."""


class Fit(NamedTuple):
    """A variant and case with its kappa: fitted, by the closed form, and whether the two agree."""

    variant: Variant
    case: Case
    fitted: quality.Estimate
    closed: float
    verdict: str

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the fit."""
        return self.fitted.mean - self.fitted.reach, self.fitted.mean + self.fitted.reach


def fits(grid: Grid) -> list[Fit]:
    """Return the fits of all variants and cases with a fitted kappa and a closed form."""
    qualities = Qualities(grid.run)
    all_fits = []
    for variant in grid.variants:
        for case in grid.cases:
            fit = qualities.fit(variant, case)
            if fit and max(abs(fit.fitted.mean), abs(fit.closed.mean)) < _LARGEST:
                all_fits.append(Fit(variant, case, fit.fitted, fit.closed.mean, fit.verdict))
    return all_fits


@style.use_style()
def kappa(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw fitted kappa with its 95 % interval against its closed form, a marker per variant and case.

    The line is equality, the band around it the tolerance. A ring marks a fit that contradicts its closed
    form. Return ``None`` if no variant has both numbers.
    """
    all_fits = fits(grid)
    if not all_fits:
        return None
    looks = style.looks(sorted(fit.variant.scheme for fit in all_fits))
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 3.8 if width == PAGE else 2.8)
    _set_up_axes(axes, all_fits)
    for fit in all_fits:
        look = looks[fit.variant.scheme]
        axes.vlines(fit.closed, *fit.interval, color=look.color, linewidth=0.8, zorder=1.8)
        axes.plot(fit.closed, fit.fitted.mean, **look.point, markersize=3.6)
        if fit.verdict == CONTRADICTED:
            axes.plot(fit.closed, fit.fitted.mean, **style.RING)
    handles = [style.legend_point(look, scheme) for scheme, look in looks.items()]
    if any(fit.verdict == CONTRADICTED for fit in all_fits):
        handles.append(Line2D([], [], **style.RING, label="contradicts its form"))
    figure.finish(
        f"{captions.invalid_note(grid.run)}{grid.operator}: fitted kappa against its closed form",
        style.origin(grid, list(dict.fromkeys(fit.case for fit in all_fits))),
        list(_notes(grid, all_fits)),
        handles,
    )
    return figure


def _set_up_axes(axes: Axes, all_fits: Sequence[Fit]) -> None:
    """Give both axes the same scale, linear near 0, and draw the line of equality and its tolerance."""
    ends = [end for fit in all_fits for end in (fit.closed, *fit.interval)]
    low, high = _MARGIN * min(-_THRESHOLD, *ends), _MARGIN * max(_THRESHOLD, *ends)
    axes.set_xscale("symlog", linthresh=_THRESHOLD)
    axes.set_yscale("symlog", linthresh=_THRESHOLD)
    for axis in (axes.xaxis, axes.yaxis):
        locator = SymmetricalLogLocator(base=10, linthresh=_THRESHOLD)
        locator.set_params(numticks=8)
        axis.set_major_locator(locator)
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    # Many points, because the band's edges are curved on this scale, and matplotlib draws straight lines.
    negative, positive = (np.geomspace(abs(end), _THRESHOLD / 100, 200) for end in (low, high))
    xs = np.concatenate([-negative, positive[::-1]])
    allowed = np.maximum(RELATIVE * np.abs(xs), ABSOLUTE)
    axes.fill_between(xs, xs - allowed, xs + allowed, color="0.85", linewidth=0, zorder=1.2)
    axes.plot((low, high), (low, high), color=style.GREY, linewidth=0.8, zorder=1.3)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="kappa by the closed form", ylabel="fitted kappa")


def _notes(grid: Grid, all_fits: Sequence[Fit]) -> Iterator[str]:
    counts = {verdict: sum(fit.verdict == verdict for fit in all_fits) for verdict in ("yes", "unclear")}
    against = dict.fromkeys(fit.variant.name for fit in all_fits if fit.verdict == CONTRADICTED)
    yield (
        f"Grey band: ±{100 * RELATIVE:g} % or ±{ABSOLUTE:g}, which counts as equal. Of {len(all_fits)} fits "
        f"{counts['yes']} lie in it, {counts['unclear']} are undecided by their intervals"
    )
    if against:
        yield f"Contradicted: {', '.join(against)}"
    qualities, drawn = Qualities(grid.run), {fit.variant for fit in all_fits}
    reasons = {}
    for variant in grid.variants:
        if variant in drawn or variant.mode != "batched":
            continue
        if any(qualities.estimate(variant, case, KAPPA, LINEAR) for case in grid.cases):
            reasons[variant.name] = "no closed form"
        else:
            rows = (qualities.reason(variant, case, {LINEAR, CLOSED}) for case in grid.cases)
            reasons[variant.name] = style.missing_reason(next(filter(None, rows), None))
    yield from style.notes_by_reason(reasons, "Not shown")
