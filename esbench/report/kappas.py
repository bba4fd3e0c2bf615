"""The picture of the quality law: kappa as it was fitted, against its closed form."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, NullLocator

from esbench.records import Case, Variant
from esbench.report.drawing import BLACK, FLOOR, PAGE, Look, Paper, scheme_looks, styled
from esbench.report.estimates import Estimate
from esbench.report.grid import Grid
from esbench.report.qualities import (
    ABSOLUTE,
    CLOSED,
    CONTRADICTED,
    KAPPA,
    LINEAR,
    RELATIVE,
    UNSEEN,
    Qualities,
    holds,
)
from esbench.report.sheets import Sheet, by_reason, mark, origin, short, titled

_LINEAR = 0.1
"""Up to here the axes are linear: many closed forms are 0, and some are below."""
_INCHES = {"column": 2.4, "page": 3.4}
_MARGIN = 1.6
_REACH = 1e12
"""Larger numbers are no kappa."""
_BAND = 200
_WHOLE = 60
_RING = Look(BLACK, "o", "-", filled=False)
_TICKS = 8


class Fit(NamedTuple):
    """A variant's kappa on a case: fitted, by its closed form, and what the table says of the two."""

    variant: Variant
    case: Case
    fitted: Estimate
    closed: float
    verdict: str


def fits(grid: Grid) -> list[Fit]:
    """Every variant and case with both numbers."""
    qualities = Qualities(grid.run)
    found = []
    for variant in grid.variants:
        for case in grid.cases:
            fitted, closed, unseen = (
                qualities.estimate(variant, case, KAPPA, method) for method in (LINEAR, CLOSED, UNSEEN)
            )
            if fitted and closed and max(abs(fitted.mean), abs(closed.mean)) < _REACH:
                verdict = holds(fitted, closed.mean, unseen.mean if unseen else math.inf)
                found.append(Fit(variant, case, fitted, closed.mean, verdict))
    return found


def kappas(grid: Grid, paper: Paper = PAGE) -> Sheet | None:
    """Kappa as it was fitted, with its 95 % interval, against its closed form: a mark for each case.

    On the line the two are equal; the band around it is what counts as equal. A ring is around a fit that
    contradicts its form. ``None`` where nothing has both.
    """
    found = fits(grid)
    if not found:
        return None
    looks = scheme_looks(one.variant.scheme for one in found)
    with styled(paper):
        sheet = Sheet(paper)
        (axes,) = sheet.panels(1, 1)
        _scale(axes, found)
        for one in found:
            _draw(axes, one, looks[one.variant.scheme])
        handles = [mark(look, scheme) for scheme, look in looks.items()]
        if any(one.verdict == CONTRADICTED for one in found):
            handles.append(mark(_RING, "contradicts its form", 7))
        cases = list(dict.fromkeys(one.case for one in found))
        sheet.finish(
            _INCHES[paper.name] + sheet.key_inches(0),
            titled(grid, f"{grid.operator}: kappa as fitted against its closed form"),
            origin(grid, cases),
            list(_notes(grid, found)),
            handles,
        )
    return sheet


def _scale(axes: Axes, found: Sequence[Fit]) -> None:
    ends = [end for one in found for end in (one.closed, *_interval(one.fitted))]
    low, high = min(0.0, *ends), max(_LINEAR, *ends)
    edges = (_beyond(low, -1), _beyond(high, 1))
    for axis, scale, limits in (
        (axes.xaxis, axes.set_xscale, axes.set_xlim),
        (axes.yaxis, axes.set_yscale, axes.set_ylim),
    ):
        scale("symlog", linthresh=_LINEAR)
        limits(*edges)
        _ticks(axis, *edges)
    # Each side by itself, from its edge to where the axis is linear: between two points the band is straight.
    down, up = (np.geomspace(abs(edge), _LINEAR / 100, _BAND) for edge in edges)
    line = np.concatenate([-down, up[::-1]])
    allowed = np.maximum(RELATIVE * np.abs(line), ABSOLUTE)
    axes.fill_between(line, line - allowed, line + allowed, color="0.85", linewidth=0, zorder=1.2)
    axes.plot(edges, edges, color=FLOOR, linewidth=0.8, zorder=1.3)
    axes.set_xlabel("kappa by the closed form")
    axes.set_ylabel("kappa as fitted")


def _interval(fitted: Estimate) -> tuple[float, float]:
    return fitted.mean - fitted.reach, fitted.mean + fitted.reach


def _beyond(end: float, sign: int) -> float:
    return end * _MARGIN if end * sign > _LINEAR else sign * _LINEAR * _MARGIN


def _ticks(axis: Axis, low: float, high: float) -> None:
    """0, and powers of 10 on both sides, as many as have room."""
    first, last = (math.floor(math.log10(max(abs(end), _LINEAR))) for end in (low, high))
    every = max(1, math.ceil((last + 2 + max(0, first + 2)) / _TICKS))
    above = [10.0**power for power in range(last, -2, -every)]
    below = [-(10.0**power) for power in range(first, -2, -every)]
    places = sorted([*(below if low < -_LINEAR * _MARGIN else []), 0.0, *above])
    axis.set_major_locator(FixedLocator(places))
    axis.set_ticklabels([f"{place:g}" for place in places])
    axis.set_minor_locator(NullLocator())


def _draw(axes: Axes, one: Fit, look: Look) -> None:
    low, high = _interval(one.fitted)
    axes.vlines(one.closed, low, high, color=look.color, linewidth=0.8, zorder=1.8)
    axes.plot(
        one.closed,
        one.fitted.mean,
        linestyle="none",
        marker=look.mark,
        markersize=3.6,
        color=look.color,
        markerfacecolor=look.face,
        markeredgewidth=0.7,
    )
    if one.verdict == CONTRADICTED:
        axes.plot(
            one.closed, one.fitted.mean, marker="o", markersize=8, color=BLACK, fillstyle="none", zorder=4
        )


def _notes(grid: Grid, found: Sequence[Fit]) -> Iterator[str]:
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("yes", "unclear")}
    against = dict.fromkeys(one.variant.name for one in found if one.verdict == CONTRADICTED)
    yield (
        f"Grey band: ±{100 * RELATIVE:g} % or ±{ABSOLUTE:g}, which counts as equal. Of {len(found)} fits "
        f"{counts['yes']} lie there, {counts['unclear']} have intervals that say neither"
    )
    if against:
        yield f"Contradicted: {', '.join(against)}"
    qualities, placed = Qualities(grid.run), {one.variant for one in found}
    reasons = {}
    for variant in grid.variants:
        if variant in placed or variant.mode != "batched":
            continue
        rows = [qualities.reason(variant, case, {LINEAR, CLOSED}) for case in grid.cases]
        fitted = any(qualities.estimate(variant, case, KAPPA, LINEAR) for case in grid.cases)
        reasons[variant.name] = "no closed form" if fitted else short(next(filter(None, rows), None), _WHOLE)
    yield from by_reason(reasons, "Not shown")
