"""The pictures of histories."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from esbench.records import Run, Variant
from esbench.report import drawing
from esbench.report.history import history
from esbench.report.history_pages import write_picture, write_pictures
from esbench.report.sheets import Sheet
from esbench.report.timelines import Panel, most_telling, panels, timeline
from tests.history_cases import EIGHT, SMALL, a_run, over_days, rows
from tests.picture_cases import key
from tests.synthetic import BASE, linear, time_row, variant

LEVELS = (3.0,) * 4 + (3.3,) * 4


def many(count: int, days: int = 2) -> list[Run]:
    """Runs of so many variants, each slower than the one before."""
    of_a_day = [time_row(BASE, SMALL, *EIGHT)]
    of_a_day += [time_row(variant(f"V{k:02d}"), SMALL, *(k + 2 for _ in EIGHT)) for k in range(count)]
    return [a_run(day, of_a_day) for day in range(1, days + 1)]


def picture(runs: list[Run], metric: str = "multiplier", variants: str = "*") -> Sheet:
    """The picture of all panels."""
    found = history(runs, metric=metric, variants=[variants])
    return timeline(found, panels(found))


def lines(axes: Axes) -> list[Line2D]:
    """The lines of variants."""
    return [line for line in axes.lines if line.get_fillstyle() != "none"]


def rings(axes: Axes) -> list[tuple[float, float]]:
    """Where change points are marked."""
    marks = [line for line in axes.lines if line.get_fillstyle() == "none"]
    return [(float(np.asarray(one.get_xdata())[0]), float(np.asarray(one.get_ydata())[0])) for one in marks]


def words(axes: Axes) -> list[str]:
    """The sizes of steps."""
    return [text.get_text() for text in axes.texts if isinstance(text, Annotation)]


def test_a_line_stands_over_its_runs() -> None:
    """One point for each run, labelled with date and commit; the axis is logarithmic."""
    figure = picture(over_days(2.0, 3.0, 4.0))
    (axes,) = figure.axes
    (line,) = lines(axes)
    assert list(np.asarray(line.get_ydata())) == pytest.approx([2, 3, 4])
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        f"2026-01-0{day}\n0{day}abcde" for day in (1, 2, 3)
    ]
    assert (axes.get_yscale(), axes.get_ylabel()) == ("log", "multiplier")
    assert axes.get_title("left") == "Linear(256, 256)"
    assert key(figure) == ["Perturbed"]
    assert figure.heading == "Linear, forward: time(variant) / time(Base) over the runs, lower is better"
    assert figure.origin == (
        "Test CPU, 3 runs from 2026-01-01 01abcde to 2026-01-03 03abcde, float32, method host"
    )


def test_a_change_point_has_a_ring_and_its_size() -> None:
    """The ring is around the first run of the new level; the key says what it is, where there is one."""
    figure = picture(over_days(*LEVELS))
    (axes,) = figure.axes
    (ring,) = rings(axes)
    assert ring == pytest.approx((4.0, 3.3))
    assert words(axes) == ["+10.0 %"]
    (legend,) = figure.legends
    assert "the first run of a new level" in legend.get_texts()[0].get_text()
    assert picture(over_days(*[3.0] * 8)).legends == []


def test_times_have_their_unit() -> None:
    """Absolute figures stand in the unit of the table's column, rings too."""
    (axes,) = picture(over_days(*LEVELS), metric="latency_ns", variants="Perturbed").axes
    assert axes.get_ylabel() == "ms"
    (line,) = lines(axes)
    assert float(np.asarray(line.get_ydata())[0]) == pytest.approx(3.3)


def test_a_missing_run_breaks_the_line() -> None:
    """Where other variants have a figure and this one has none, its line has a gap."""
    runs = many(2, days=3)
    kept = tuple(row for row in runs[1].rows if row.variant.name != "V01")
    runs[1] = msgspec.structs.replace(runs[1], rows=kept)
    slow, fast = lines(picture(runs).axes[0])
    assert [math.isnan(y) for y in np.asarray(slow.get_ydata())] == [False, True, False]
    assert [math.isnan(y) for y in np.asarray(fast.get_ydata())] == [False] * 3


def test_runs_without_the_case_take_no_room() -> None:
    """A panel has only the runs that hold its case."""
    runs = over_days(3.0, 3.0, 3.0)
    runs[1] = a_run(2, rows(2.0, linear(512)))
    (axes,) = picture(runs).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "2026-01-01\n01abcde",
        "2026-01-03\n03abcde",
    ]


def test_what_one_run_has_is_no_line() -> None:
    """A variant that only one run measured is in the table alone."""
    runs = over_days(3.0, 3.0)
    new = time_row(variant("New"), SMALL, *EIGHT)
    runs[1] = msgspec.structs.replace(runs[1], rows=(*runs[1].rows, new))
    (panel,) = panels(history(runs))
    assert [one.name for one in panel.series] == ["PerturbedLinear"]
    assert panels(history(runs[:1])) == []


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (6, [6]), (7, [3, 4]), (18, [6, 6, 6]), (20, [5] * 4)]
)
def test_a_panel_has_few_lines(count: int, sizes: list[int]) -> None:
    """At most six lines share a panel, evenly many, and like figures stand together."""
    found = panels(history(many(count)))
    assert [len(panel.series) for panel in found] == sizes
    last = [one.points[-1].value for panel in found for one in panel.series]
    assert last == sorted(last, reverse=True)
    assert [(panel.number, panel.of) for panel in found] == [(k + 1, len(sizes)) for k in range(len(sizes))]


def test_lines_of_a_panel_differ_without_colour() -> None:
    """Marks differ, and neighbours' lines too."""
    drawn = lines(picture(many(6)).axes[0])
    assert len({line.get_marker() for line in drawn}) == 6
    assert all(a.get_linestyle() != b.get_linestyle() for a, b in pairwise(drawn))


@pytest.mark.parametrize("days", [1, 2, 7, 8, 30])
def test_many_runs_have_few_ticks(days: int) -> None:
    """No more dates stand side by side than have room, the newest among them."""
    runs = over_days(*[3.0] * days, 3.0)
    labels = [label.get_text() for label in picture(runs).axes[0].get_xticklabels()]
    assert 2 <= len(labels) <= 7
    assert labels[-1].startswith(f"2026-01-{days + 1:02d}")


def test_panels_with_change_points_go_first_where_there_is_room_for_some() -> None:
    """Of more panels than a picture has room for those that changed are shown, in their order."""

    def panel(case: int, *, changed: bool) -> Panel:
        (one,) = panels(history([a_run(day, rows(f, linear(case))) for day, f in enumerate(LEVELS, 1)]))
        (series,) = one.series
        return one if changed else Panel(one.key, (replace(series, steps=()),), 1, 1)

    every = [
        panel(8, changed=False),
        panel(16, changed=True),
        panel(32, changed=False),
        panel(64, changed=True),
    ]
    assert most_telling(every, 3) == [every[0], every[1], every[3]]
    assert most_telling(every, 9) == every


def test_a_picture_with_room_for_some_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says of how many panels so many are shown."""
    monkeypatch.setattr("esbench.report.history_pages._PANELS", 2)
    found = history(many(18))
    paths, (said,) = write_picture(found, panels(found), [tmp_path / "a.svg"])
    assert [path.name for path in paths] == ["a.svg"]
    assert said == "a.svg shows 2 of 3 panels, those with change points first: the table has all"
    assert write_picture(found, [], [tmp_path / "b.svg"]) == ([], [])
    assert not (tmp_path / "b.svg").exists()


def test_cases_have_pictures_of_their_own(tmp_path: Path) -> None:
    """A folder gets a picture for each case, also where labels differ in nothing a file's name may hold."""
    cases = [linear(8), *(msgspec.structs.replace(linear(8), padding_mode=name) for name in ("a b", "a-b"))]
    runs = [a_run(day, [row for case in cases for row in rows(3.0, case)]) for day in (1, 2)]
    paths, said = write_pictures(history(runs), tmp_path / "new")
    assert said == []
    assert sorted(path.name for path in paths) == [
        "history-2-linear-8-8-padding_mode-a-b.svg",
        "history-linear-8-8-padding_mode-a-b.svg",
        "history-linear-8-8.svg",
    ]


def test_methods_are_told_apart() -> None:
    """Where panels of one case differ in their method, their titles say it."""
    graph = [msgspec.structs.replace(row, method="graph") for row in rows(5.0)]
    runs = [a_run(day, [*rows(3.0), *graph]) for day in (1, 2)]
    titles = [axes.get_title("left") for axes in picture(runs).axes]
    assert titles == ["Linear(256, 256) (graph, Base)", "Linear(256, 256) (host, Base)"]


@pytest.mark.parametrize("name", ["$\\frac$", "a\x00b\x1b\ufffe\nc", "--></svg>", "x" * 200])
def test_odd_names_are_drawn(tmp_path: Path, name: str) -> None:
    """Names that are broken formulas, markup or too long end in a well-formed file."""
    case = msgspec.structs.replace(SMALL, padding_mode=name)
    runs = [
        a_run(day, rows(f, case, Variant(scheme=name)), device_name=name, commit=name)
        for day, f in enumerate(LEVELS, 1)
    ]
    (path,), _ = write_pictures(history(runs), tmp_path)
    ET.parse(path)  # noqa: S314  a file of our own


@pytest.mark.parametrize("figures", [(1e-300, 1e23), (1.0, 1.0), (1e23, 1e23), (1.0, 1.0000001)])
def test_odd_figures_are_drawn(tmp_path: Path, figures: tuple[float, float]) -> None:
    """A huge range and none at all have an axis."""
    figure = picture([a_run(day, rows(f)) for day, f in enumerate(figures, 1)])
    figure.write(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


@pytest.mark.parametrize("kind", sorted(drawing.KINDS))
def test_same_runs_same_bytes(tmp_path: Path, kind: str) -> None:
    """Drawn twice, whatever order the runs are read in, a picture has the same bytes."""
    runs = over_days(*LEVELS)
    for name, order in (("a", runs), ("b", runs[::-1])):
        picture(order).write(tmp_path / f"{name}{kind}")
    assert (tmp_path / f"a{kind}").read_bytes() == (tmp_path / f"b{kind}").read_bytes()
