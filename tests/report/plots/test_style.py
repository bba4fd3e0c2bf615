"""Properties of every plot: layout, greyscale, files, names, and the functions of the shared style."""

import itertools
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

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
from esbench.report.plots.style import METADATA, WIDTHS, Figure, fit, printable, text_inches, wrap
from esbench.schema import Run
from tests.report.plots.figures import ODD, RUNS, draw, renamed, texts
from tests.synthetic import BASE

ROOT = Path(__file__).parents[3]
Figures = Mapping[tuple[str, str], Figure]


@pytest.fixture(scope="module")
def figures() -> Figures:
    """Return figures by name and width."""
    return {
        (name, width): draw(name, request=PlotRequest(width=inches))
        for name in PLOTS
        for width, inches in WIDTHS.items()
    }


def test_every_plot_is_laid_out_and_says_where_it_comes_from(figures: Figures, tmp_path: Path) -> None:
    """Texts fit and do not overlap at both widths; each plot has title, device, commit, dtype and run.

    Every pixel is opaque, so that the plot looks the same on a dark page.
    """
    assert {name for name, _ in figures} == set(PLOTS) == set(RUNS)
    for (name, width), figure in figures.items():
        assert figure.get_figwidth() == pytest.approx(WIDTHS[width])
        assert_laid_out(figure, f"{name} {width}")
        assert figure.title
        assert name == "history" or all(axes.get_xlabel() for axes in figure.axes)
        commit = "01abcde" if name == "history" else "commit 0123456"
        assert all(words in figure.origin for words in ("Test CPU", commit, "float32"))
        assert name == "history" or f"run {RUNS[name][0].header.run_id}" in figure.origin
        assert "method host" not in figure.origin  # a CPU has one method, which is not named
        if width == "column":
            with style.styled():
                figure.savefig(tmp_path / "a.png", dpi=50)
            pixels = imread(tmp_path / "a.png")
            assert (pixels[..., 3] == 1).all()
            assert pixels[0, 0].tolist() == [1, 1, 1, 1]


def test_every_plot_reads_in_greyscale(figures: Figures) -> None:
    """Neighbouring series differ in marker, filling, line or lightness."""
    for name, figure in figures.items():
        for axes in figure.axes:
            for (one, light), (other, lighter) in itertools.pairwise(series(axes)):
                assert one != other or abs(light - lighter) > 0.1, (name, one, other)


def test_the_same_runs_give_the_same_bytes(figures: Figures, tmp_path: Path) -> None:
    """A plot drawn again has the same bytes in every format, without a date; files are small."""
    for name in RUNS:
        old, new = figures[name, "column"], draw(name)
        for axes in new.axes:
            bounds = axes.get_position().bounds
            assert bounds == pytest.approx([round(end, 6) for end in bounds], abs=1e-14, rel=0)
        for suffix in METADATA if name == "multipliers" else (".svg",):
            one, other = (figure.write(tmp_path / f"a{suffix}").read_bytes() for figure in (old, new))
            assert one == other, name
            assert len(one) < 150_000, name
            assert not any(word in one for word in (b"<dc:date>", b"CreationDate", b"tIME"))
            assert new.title.encode() in one or suffix == ".pdf"


def test_an_svg_has_short_numbers_and_its_text(figures: Figures, tmp_path: Path) -> None:
    """Coordinates are rounded to a hundredth of a point; texts are text elements."""

    def numbers(svg: str) -> list[float]:
        svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
        paths = re.findall(r' (?:d|x|y|points)="([^"]*)"', svg)
        return [float(one) for path in paths for one in re.findall(r"-?\d+(?:\.\d+)?", path)]

    figure, plain = figures["pareto", "column"], tmp_path / "plain.svg"
    with style.styled():
        figure.savefig(plain)
    text = figure.write(tmp_path / "a.svg").read_text(encoding="utf-8")
    whole = plain.read_text(encoding="utf-8")
    assert numbers(text) == pytest.approx(numbers(whole), abs=0.0051)
    assert len(text) < 0.85 * len(whole)
    assert ">peak memory of a step (MB), lower is better</text>" in text


@pytest.mark.parametrize("odd", ODD)
def test_odd_names_are_drawn_as_text(tmp_path: Path, odd: str) -> None:
    """Formulas, markup, control characters, emoji, long and empty names are text in a valid file."""
    for name in RUNS:
        figure = draw(name, [renamed(run, ODD[odd]) for run in RUNS[name]])
        assert_laid_out(figure, f"{name}, {odd}", apart=False)
        if odd == "markup":
            text = figure.write(tmp_path / "a.svg").read_text(encoding="utf-8")
            tags = [one.tag for one in ET.fromstring(text).iter()]  # noqa: S314  # our own file
            assert not any(tag.endswith("script") for tag in tags)


def test_unusable_samples_break_no_plot() -> None:
    """NaN, infinite, huge, tiny, zero and missing samples are left out; with no others there is no plot."""
    for name in RUNS:
        for samples in (((math.nan,), (1.0, 0.0)), ((math.inf, 1e24), (1e-24,)), ((0.0, 0.0),), ()):
            try:
                draw(name, [spoilt(run, samples) for run in RUNS[name]])
            except UserError as error:
                assert str(error).startswith(("nothing to draw", "no case"))  # noqa: PT017  # or it is drawn


def test_a_plot_of_an_invalid_run_says_so() -> None:
    """Before anything else in the title."""
    for name in ("pareto", "multipliers", "time-width", "roofline", "kappa", "kept-population"):
        (run,) = RUNS[name]
        assert run.end
        end = msgspec.structs.replace(run.end, invalid=("other processes on the GPU",))
        title = draw(name, [msgspec.structs.replace(run, end=end)]).title
        assert title.startswith("INVALID: other processes on the GPU. ")


def test_drawing_changes_nothing_global(figures: Figures, tmp_path: Path) -> None:
    """Drawing elsewhere, without pyplot and with other settings, keeps them and writes the same bytes."""
    script = (
        "import sys, matplotlib\n"
        "from pathlib import Path\n"
        "matplotlib.rcParams['font.size'] = 31\n"
        "from tests.report.plots.figures import draw\n"
        "def settings(): return [matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend']\n"
        "before = settings()\n"
        "draw('time-population').write(Path(sys.argv[1]))\n"
        "assert settings() == before\n"
        "assert not {'matplotlib.pyplot', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.svg")], cwd=ROOT, check=True)
    here = figures["time-population", "column"].write(tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == here.read_bytes()


def test_twenty_series_differ_without_colour() -> None:
    """No two have the same marker and filling, neighbours differ in their lines, and shades get lighter."""
    looks = style.looks(20)
    assert len({(one.marker, one.filled) for one in looks}) == 20
    assert all(one.line != other.line for one, other in itertools.pairwise(looks))
    light = [luminance(one.color) for one in looks]
    assert light == sorted(set(light))
    assert light[-1] < 0.8  # visible on white


def test_a_logarithmic_axis_has_plain_ticks() -> None:
    """Axes of any length and range have at least two different numbers, and no more than fit."""
    for low, ratio, inches in itertools.product(
        (0.0011, 1.0, 2.1, 6.2, 730.0), (1.2, 1.8, 2.5, 6.0, 9.0, 1e3, 1e9), (1.0, 2.0, 3.3)
    ):
        axes = PlainFigure(figsize=(inches, inches)).add_axes((0.0, 0.0, 1.0, 1.0))
        style.log_axis(axes, "y", (low, low * ratio))
        bottom, top = axes.get_ylim()
        shown = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
        assert 2 <= len(shown) <= inches / 0.16 + 1, (low, ratio, inches)
        assert len({axes.yaxis.get_major_formatter()(tick) for tick in shown}) == len(shown)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), max_size=60), st.floats(0.3, 2))
def test_text_fits_its_room(text: str, inches: float) -> None:
    """Text on one line is shortened in its middle as little as possible; wrapped lines are never too wide."""
    short = fit(text, inches)
    assert text_inches(short, style.FINE) <= inches
    if short != printable(text):
        assert text_inches(short, style.FINE) > inches - 0.3
        assert "…" in short
    assert all(text_inches(line, style.FINE) <= inches for line in wrap(text, inches, style.FINE))


def test_long_names_keep_their_ends_and_long_texts_their_words() -> None:
    """The end of a name has the options; a text that is too long ends in an ellipsis."""
    assert fit("Permuted(side=out)", 3.0) == "Permuted(side=out)"
    cut = fit("PermutedConv2d(side=out, out_sparsity=0.125)", 1.2)
    assert cut.startswith("Permuted")
    assert cut.endswith("0.125)")
    assert " ".join(wrap("one two three " * 20, 1.5, 6.0, most=99)).split() == ["one", "two", "three"] * 20
    assert printable("a\nb\tc \N{ROCKET} $x$ κ ≥ 1 ± 2") == "a b c \ufffd $x$ κ ≥ 1 ± 2"
    few = wrap(f"{'x' * 300} " * 9, 1.5, 6.0, most=2)
    assert len(few) == 2
    assert few[-1].endswith("…")


def assert_laid_out(figure: Figure, name: str, *, apart: bool = True) -> None:
    """Check that texts are inside the figure and apart, and that panels end before title and notes."""
    width, height = figure.get_size_inches() * figure.dpi
    found = [(text, box) for text, box in texts(figure) if text.strip() and box.width]
    for text, box in found:
        assert box.x0 >= -0.5, (name, text)
        assert box.y0 >= -0.5, (name, text)
        assert box.x1 <= width + 0.5, (name, text)
        assert box.y1 <= height + 0.5, (name, text)
    for (text, box), (other, place) in itertools.combinations(found, 2) if apart else ():
        over_x = min(box.x1, place.x1) - max(box.x0, place.x0)
        over_y = min(box.y1, place.y1) - max(box.y0, place.y0)
        assert min(over_x, over_y) < 1.0, (name, text, other)
    title = min(box.y0 for text, box in found if text == figure.get_suptitle())
    foot = max(box.y1 for text, box in found if text == figure.texts[-1].get_text())
    for axes in figure.axes:
        panel = axes.get_tightbbox()
        assert panel is not None
        assert foot - 1 <= panel.y0 < panel.y1 <= title + 1, name


def series(axes: Axes) -> list[tuple[tuple[str, bool, str], float]]:
    """Return a panel's series with markers, as (marker, filled, line), and their lightness."""
    found = []
    for line in axes.lines:
        marker = str(line.get_marker())
        if marker in {"None", "none", "x", ""} or line.get_fillstyle() == "none":
            continue
        filled = to_rgb(line.get_markerfacecolor()) != (1.0, 1.0, 1.0)
        look = (marker, filled, str(line.get_linestyle())), luminance(line.get_color())
        if look not in found:
            found.append(look)
    return found


def luminance(color: ColorType) -> float:
    """Return the lightness of a colour in greyscale, from 0 to 1."""
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
