"""Properties of every plot: layout, grayscale, files, names, and the functions of the shared style."""

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as PlainFigure
from matplotlib.image import imread
from matplotlib.typing import ColorType

from esbench.errors import UserError
from esbench.report.plots import style
from esbench.report.plots.catalog import PLOTS, PlotRequest
from esbench.report.plots.style import METADATA, WIDTHS, Figure, fit, printable
from esbench.schema import Run
from tests.report.plots.figures import ODD, RUNS, draw, renamed, texts
from tests.synthetic import BASE

pytestmark = pytest.mark.xdist_group("plots")  # one worker makes what these tests share

Figures = Mapping[tuple[str, str], Figure]


@pytest.fixture(scope="module")
def figures() -> Figures:
    """Return every plot by name and width."""
    assert {*PLOTS, "history"} == set(RUNS)
    keys = itertools.product(RUNS, WIDTHS)
    return {(name, width): draw(name, request=PlotRequest(width=WIDTHS[width])) for name, width in keys}


def test_every_plot_is_laid_out_and_names_its_run(figures: Figures, tmp_path: Path) -> None:
    """Texts fit and do not overlap at both widths; each plot has title, device, commit, dtype and run.

    Every pixel is opaque, so that the plot looks the same on a dark page.
    """
    for (name, width), figure in figures.items():
        assert_laid_out(figure, f"{name} {width}")
        assert figure.title
        assert name == "history" or all(axes.get_xlabel() for axes in figure.axes)
        commit = "01abcde" if name == "history" else "commit 0123456"
        assert all(words in figure.origin for words in ("Test CPU", commit, "float32"))
        assert name == "history" or f"run {RUNS[name][0].header.run_id}" in figure.origin
        assert "method host" not in figure.origin  # a CPU has one method, which is not named
        if width == "column":
            pixels = imread(figure.write(tmp_path / "a.png"))
            assert pixels.shape[1] == pytest.approx(300 * WIDTHS[width], abs=1)
            assert (
                pixels.shape[0] > 300 * figure.get_figheight() + 50
            )  # title and notes lie outside the panels
            assert (pixels[..., 3] == 1).all()
            assert all((pixels[edge] == 1).all() for edge in (0, -1))  # nothing is cut off


def test_every_plot_is_readable_in_grayscale(figures: Figures) -> None:
    """Neighboring series differ in marker, line or lightness, and so do the styles of twenty series."""
    for name, figure in figures.items():
        for axes in figure.axes:
            for (first, light), (second, lighter) in itertools.pairwise(series(axes)):
                assert first != second or abs(light - lighter) > 0.1, (name, first, second)
    looks = list(style.looks(map(str, range(20))).values())
    assert all(series_style[1:] != following[1:] for series_style, following in itertools.pairwise(looks))
    shades = [luminance(series_style.color) for series_style in looks]
    assert shades == sorted(set(shades))
    assert shades[-1] < 0.8  # visible on white


def test_the_same_runs_give_the_same_bytes(figures: Figures, tmp_path: Path) -> None:
    """A plot drawn again has the same bytes in every format, without a date."""
    figure, again = figures["multipliers", "column"], draw("multipliers")
    for suffix in METADATA:
        content = figure.write(tmp_path / f"a{suffix}").read_bytes()
        assert content == again.write(tmp_path / f"b{suffix}").read_bytes()
        assert not any(word in content for word in (b"<dc:date>", b"CreationDate", b"tIME"))
        assert escape(figure.title).encode() in content or suffix == ".pdf"


def test_odd_names_are_drawn_as_text(tmp_path: Path) -> None:
    """Formulas, markup, control characters, emoji, long and empty names are text in a valid, small file."""
    for name, (odd, words) in itertools.product(RUNS, ODD.items()):
        figure = draw(name, [renamed(run, words) for run in RUNS[name]])
        assert_laid_out(figure, f"{name}, {odd}", is_odd=True)
        if odd == "markup":
            text = figure.write(tmp_path / "a.svg").read_text(encoding="utf-8")
            tags = [element.tag for element in ET.fromstring(text).iter()]  # noqa: S314  # our own file
            assert not any(tag.endswith("script") for tag in tags)
            assert len(text) < 200_000, name
            assert escape(figure.title) in text
            assert "lower is better</text>" in text or name not in {"pareto", "multipliers"}
            assert not re.search(r' (d|x|y)="[^"]*\.\d{3}', text)  # a hundredth of a point


def test_unusable_samples_break_no_plot() -> None:
    """NaN, infinite, huge, tiny, zero and missing samples are left out; with no others there is no plot."""
    for name in PLOTS:
        for samples in (((math.nan,), (1.0, 0.0)), ((math.inf, 1e24), (1e-24,)), ((0.0, 0.0),), ()):
            try:
                draw(name, [spoilt(run, samples) for run in RUNS[name]])
            except UserError as error:
                assert str(error).startswith("nothing to draw")  # noqa: PT017  # or it is drawn


def test_a_plot_of_an_invalid_run_has_a_warning() -> None:
    """The warning stands before anything else in the title."""
    for name in PLOTS:
        (run,) = RUNS[name]
        assert run.end
        end = msgspec.structs.replace(run.end, invalid=("other processes on the GPU",))
        title = draw(name, [msgspec.structs.replace(run, end=end)]).title
        assert title.startswith("INVALID: other processes on the GPU. ")


def test_a_logarithmic_axis_has_plain_ticks() -> None:
    """Axes of any length and range have at least two different numbers, and not too many."""
    of_length = [PlainFigure(figsize=(inches, inches)).add_axes((0, 0, 1, 1)) for inches in (1.0, 2.0, 3.3)]
    for low, ratio, axes in itertools.product(
        (0.0011, 1.0, 2.1, 6.2, 730.0), (1.2, 1.8, 2.5, 6.0, 9.0, 1e3, 1e9), of_length
    ):
        style.log_axis(axes, "y", (low, low * ratio))
        bottom, top = axes.get_ylim()
        shown = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
        assert 2 <= len(shown) <= 7, (low, ratio, axes.bbox.width)
        assert len({axes.yaxis.get_major_formatter()(tick) for tick in shown}) == len(shown)


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    """Such names are below each other, in the order of the ends."""
    axes = PlainFigure(figsize=(3, 2)).add_subplot()
    axes.set_ylim(0, 10)
    style.label_ends(axes, [style.Label(1, y, name) for name, y in (("b", 5.0), ("a", 5.1), ("c", 4.9))], 1.0)
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert boxes["a"].y0 > boxes["b"].y1 > boxes["b"].y0 > boxes["c"].y1


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), max_size=60), st.floats(0.3, 2))
def test_long_names_keep_their_ends(text: str, inches: float) -> None:
    """A name that is too long loses its middle; characters that the font lacks are replaced."""
    short = fit(text, inches)
    assert short == printable(text) or len(short) <= inches / style.FINE * 72 / 0.5
    cut = fit("PermutedConv2d(side=out, out_sparsity=0.125)", 1.2)
    assert cut.startswith("Permuted")
    assert cut.endswith("0.125)")
    assert printable("a\nb\tc \N{ROCKET} $x$ κ ≥ 1 ± 2") == "a b c \ufffd $x$ κ ≥ 1 ± 2"


def assert_laid_out(figure: Figure, name: str, *, is_odd: bool = False) -> None:
    """Check that texts are inside the figure and apart, and that panels are between title and notes.

    Odd names may overlap, and are only about as wide as their room.
    """
    placed = list(texts(figure))
    slack = 40 if is_odd else 0.5
    for text, box in placed:
        assert -slack <= box.x0 <= box.x1 <= figure.bbox.width + slack, (name, text)
    for (text, box), (second_text, second_box) in itertools.combinations(placed, 2) if not is_odd else ():
        over_x = min(box.x1, second_box.x1) - max(box.x0, second_box.x0)
        over_y = min(box.y1, second_box.y1) - max(box.y0, second_box.y0)
        assert min(over_x, over_y) < 1.0, (name, text, second_text)
    title, notes = (text.get_window_extent() for text in (figure.texts[0], figure.texts[-1]))
    for axes in figure.axes:
        panel = axes.get_tightbbox()
        assert panel is not None
        assert notes.y1 - 1 <= panel.y0 < panel.y1 <= title.y0 + 1, name


def series(axes: Axes) -> list[tuple[tuple[str, str], float]]:
    """Return a panel's series with markers, as (marker, line), and their lightness."""
    all_series = []
    for line in axes.lines:
        marker, is_ring = str(line.get_marker()), line.get_fillstyle() == "none"
        if marker.lower() not in {"none", ""} and not is_ring:
            all_series.append(((marker, str(line.get_linestyle())), luminance(line.get_color())))
    return list(dict.fromkeys(all_series))


def luminance(color: ColorType) -> float:
    """Return the lightness of a color in grayscale, from 0 to 1."""
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))


def spoilt(run: Run, samples: tuple[tuple[float, ...], ...]) -> Run:
    """Return the run with only base's samples usable."""
    rows = tuple(
        msgspec.structs.replace(row, samples=samples)
        if hasattr(row, "samples") and row.variant != BASE
        else row
        for row in run.rows
    )
    return msgspec.structs.replace(run, rows=rows)
