"""The plots of histories."""

import math

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report.analysis.history import history as history_of
from esbench.report.plots.history import history, panels
from esbench.report.plots.style import Figure
from esbench.schema import Run
from tests.report.history_cases import EIGHT, SMALL, a_run, over_days, rows
from tests.report.plots.figures import along, legend, points
from tests.synthetic import BASE, linear, time_row, variant

LEVELS = (3.0,) * 4 + (3.3,) * 4


def many(count: int, days: int = 2) -> list[Run]:
    """Return runs with this number of variants, each slower than the one before."""
    of_a_day = [time_row(BASE, SMALL, *EIGHT)]
    of_a_day += [time_row(variant(f"V{k:02d}"), SMALL, *(k + 2 for _ in EIGHT)) for k in range(count)]
    return [a_run(day, of_a_day) for day in range(1, days + 1)]


def draw(runs: list[Run]) -> Figure:
    """Draw the plot of all panels."""
    past = history_of(runs)
    return history(past, panels(past))


def lines(axes: Axes) -> list[Line2D]:
    """Return the lines of variants."""
    return [line for line in axes.lines if line.get_linestyle() != "None"]


def titles(figure: Figure) -> list[str]:
    """Return the titles of the panels."""
    return [axes.get_title("left") for axes in figure.axes]


def test_a_line_over_the_runs() -> None:
    """Each run of the case is a point, labelled with date and commit, on a logarithmic axis."""
    runs = over_days(2.0, 3.0, 4.0)
    figure = draw([*runs[:2], a_run(4, rows(2.0, linear(512))), runs[2]])
    (axes,) = figure.axes
    (line,) = lines(axes)
    assert along(line, "y") == pytest.approx([2, 3, 4])
    dates = [label.get_text() for label in axes.get_xticklabels()]
    assert dates == [f"2026-01-0{day}\n0{day}abcde" for day in (1, 2, 3)]
    assert (axes.get_yscale(), axes.get_ylabel()) == ("log", "multiplier")
    assert titles(figure) == ["Linear(256, 256)"]
    assert [text.get_text() for text in axes.texts] == ["Perturbed"]
    assert figure.title == "Linear, forward: time(variant) / time(Base) over the runs, lower is better"
    assert figure.origin == "Test CPU, 3 runs from 2026-01-01 01abcde to 2026-01-03 03abcde, float32"
    dates = [tick_label.get_text() for tick_label in draw(over_days(*[3.0] * 31)).axes[0].get_xticklabels()]
    assert 2 <= len(dates) <= 8  # as many as fit, including the newest
    assert dates[-1].startswith("2026-01-31")


def test_a_change_point_has_a_ring_and_its_size() -> None:
    """The ring is at the first run of the new level."""
    figure = draw(over_days(*LEVELS))
    (axes,) = figure.axes
    assert points(axes) == [pytest.approx((4.0, 3.3))]
    assert [text.get_text() for text in axes.texts] == ["+10.0 %", "Perturbed"]
    assert "the first run of a new level" in legend(figure)[-1]
    assert draw(over_days(*[3.0] * 8)).legends == []


def test_a_missing_value_breaks_the_line() -> None:
    """A gap splits a line; a variant of a single run has no line at all."""
    runs = many(3, days=3)
    for index, names in ((1, {"V01", "V02"}), (2, {"V02"})):
        remaining = tuple(row for row in runs[index].rows if row.variant.name not in names)
        runs[index] = msgspec.structs.replace(runs[index], rows=remaining)
    slow, fast = lines(draw(runs).axes[0])
    assert [math.isnan(y) for y in along(slow, "y")] == [False, True, False]
    assert [math.isnan(y) for y in along(fast, "y")] == [False] * 3
    assert panels(history_of(runs[:1])) == []


def test_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel has at most six similar lines; of too many, those with change points. Titles have methods."""
    for count, sizes in ((6, [6]), (20, [5] * 4)):
        all_panels = panels(history_of(many(count)))
        assert [len(panel.series) for panel in all_panels] == sizes
        last = [series.points[-1].value for panel in all_panels for series in panel.series]
        assert last == sorted(last, reverse=True)
    assert panels(history_of(many(3, days=4)), fewest=5) == []
    steady = {8: (3.0,) * 8, 16: LEVELS, 32: (3.0,) * 8, 64: LEVELS}
    runs = [
        a_run(day + 1, [row for size in steady for row in rows(steady[size][day], linear(size))])
        for day in range(8)
    ]
    monkeypatch.setattr("esbench.report.plots.history._MAX_PANELS", 3)
    figure = draw(runs)
    assert titles(figure) == ["Linear(8, 8)", "Linear(16, 16)", "Linear(64, 64)"]
    assert figure.notes == ["3 of 4 panels, those with change points first: the table has all"]
    graph = [msgspec.structs.replace(row, method="graph") for row in rows(5.0)]
    figure = draw([a_run(day, [*rows(3.0), *graph]) for day in (1, 2)])
    assert titles(figure) == [f"Linear(256, 256) ({method}, Base)" for method in ("graph", "host")]


@pytest.mark.parametrize("figures", [(1e-300, 1e23), (1.0, 1.0), (1.0, 1.0000001)])
def test_any_range_of_values_has_an_axis(figures: tuple[float, float]) -> None:
    """Values of any range have a finite axis, independent of the order of the runs."""
    runs = [a_run(day, rows(value)) for day, value in enumerate(figures, 1)]
    for order in (runs, runs[::-1]):
        (axes,) = draw(order).axes
        assert np.isfinite(axes.get_ylim()).all()
        assert along(lines(axes)[0], "y") == pytest.approx(list(figures))
