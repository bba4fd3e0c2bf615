"""The pictures."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from esbench.records import Row, Run
from esbench.report import plots
from esbench.report.grid import MEMORY, TIMES
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row

SPARSE = synthetic.variant("SparsePerturbed", k=1)


def sweep(*populations: int) -> Run:
    """Four variants over populations; dense noise has no number above 256 members."""
    rows: list[Row] = []
    for members in populations:
        case = linear(256, members=members)
        rows += [
            time_row(v, case, members / 100, members / 88.888888888888888) for v in (SPARSE, BASE, NAIVE)
        ]
        rows += [bytes_row(v, case, "peak_bytes", 1000 * members) for v in (SPARSE, BASE)]
        fits = members <= 256
        rows += [time_row(DENSE, case, members, members)] if fits else [skipped(DENSE, case, "out of memory")]
    return synthetic.run(rows)


def legend(figure: Figure) -> list[str]:
    """The names in the legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def heading(figure: Figure) -> str:
    """The text over a figure."""
    return figure.get_suptitle()


def along(line: Line2D, axis: str) -> list[float]:
    """The coordinates of a line's points."""
    return [float(value) for value in np.asarray(line.get_xdata() if axis == "x" else line.get_ydata())]


def drawn(figure: Figure | None) -> Figure:
    """A figure that there is."""
    assert figure is not None
    return figure


def test_multipliers_have_a_row_for_each_variant_and_a_mark_for_each_shape() -> None:
    """Every variant but the plain layer is a row, every shape a mark, missing numbers a cross."""
    rows = [
        time_row(v, linear(width), width * (3 if v == DENSE else 1))
        for width in (256, 512)
        for v in (DENSE, BASE, NAIVE)
    ]
    figure = drawn(plots.multipliers(synthetic.run([*rows, skipped(SPARSE, linear(256), "no")]), "Linear"))
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["PerturbedLinear", "SparsePerturbedLinear(k=1)", "Naive"]
    assert legend(figure) == ["(256, 256)", "(512, 512)", "no number: see the table"]
    assert along(axes.lines[0], "x") == [3.0, 1.0]
    assert axes.get_xscale() == "log"


def test_multipliers_show_the_largest_population_of_a_shape() -> None:
    """A shape that was measured with several populations has one mark, and the title says which."""
    figure = drawn(plots.multipliers(sweep(64, 128), "Linear"))
    assert legend(figure) == ["(256, 256)"]
    assert "128 x 1 (members x repeats)" in heading(figure)


@pytest.mark.parametrize(("suffix", "unit", "value"), [(TIMES, "ms", 0.68), (MEMORY, "MB", 0.064)])
def test_a_line_over_the_population(suffix: str, unit: str, value: float) -> None:
    """Time and memory stand over the number of members, on two logarithmic axes, in the table's unit."""
    figure = drawn(plots.against_population(sweep(64, 256), "Linear", suffix))
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", unit)
    assert axes.get_title() == "(256, 256)"
    assert along(axes.lines[0], "x") == [64, 256]
    assert along(axes.lines[0], "y")[0] == pytest.approx(value)


def test_a_line_that_breaks_off_ends_in_a_cross() -> None:
    """The last population that a variant could do is marked, and the legend says what that means."""
    figure = drawn(plots.against_population(sweep(64, 256, 1024), "Linear", TIMES))
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert along(cross, "x") == [256]
    assert "a larger population has no number" in legend(figure)
    whole = drawn(plots.against_population(sweep(64, 256), "Linear", TIMES))
    assert "a larger population has no number" not in legend(whole)


def test_series_differ_without_colour() -> None:
    """No two series share a mark or a line, and their shades run from dark to light."""
    figure = drawn(plots.against_population(sweep(64, 256), "Linear", TIMES))
    lines = figure.axes[0].lines
    assert len({line.get_marker() for line in lines}) == len(lines) == 4
    assert len({line.get_linestyle() for line in lines}) == 4
    shades = [sum(to_rgb(line.get_color())) for line in lines]
    assert shades == sorted(set(shades))


@pytest.mark.parametrize("empty", [[], [time_row(DENSE, linear(), 1.0)], [skipped(DENSE, linear(), "no")]])
def test_nothing_to_draw_is_no_figure(empty: list[Row]) -> None:
    """Without a plain layer there are no multipliers, without several populations no lines."""
    run = synthetic.run(empty)
    assert plots.multipliers(run, "Linear") is None
    assert plots.against_population(run, "Linear", TIMES) is None
    assert plots.against_population(run, "Linear", MEMORY) is None


def test_unusable_samples_leave_a_gap() -> None:
    """A row without a median is left out of a line and breaks no plot."""
    run = sweep(64, 256)
    rows = [
        msgspec.structs.replace(row, samples=()) if row.case.members == 64 else row
        for row in run.measurements
    ]
    figure = drawn(plots.against_population(synthetic.run(rows), "Linear", TIMES))
    assert [along(line, "x") for line in figure.axes[0].lines] == [[256]] * 4


def test_published_figures_are_labelled_in_the_picture() -> None:
    """A picture of figures of others says so in its title."""
    rows = [msgspec.structs.replace(time_row(v, linear(), 1.0), method="published") for v in (DENSE, BASE)]
    figure = drawn(plots.multipliers(synthetic.run(rows, suite="A paper"), "Linear"))
    assert "published by others (A paper)" in heading(figure)


def test_same_run_same_bytes(tmp_path: Path) -> None:
    """Drawn twice, a figure has the same bytes as SVG and as PNG, and no date in them."""
    for name in ("a", "b"):
        for place, figure in enumerate(
            (
                plots.multipliers(sweep(64), "Linear"),
                plots.against_population(sweep(64, 256), "Linear", TIMES),
            )
        ):
            plots.save(drawn(figure), tmp_path / f"{name}{place}")
    first, second = (sorted(tmp_path.glob(f"{name}*")) for name in ("a", "b"))
    assert [path.suffix for path in first] == [".png", ".svg", ".png", ".svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"<dc:date>" not in (tmp_path / "a0.svg").read_bytes()


def test_pages_behind_are_covered(tmp_path: Path) -> None:
    """The background is opaque white, so that a dark page hides nothing."""
    plots.save(drawn(plots.multipliers(sweep(64), "Linear")), tmp_path / "x")
    corner = imread(tmp_path / "x.png")[0, 0]
    assert list(corner) == [1.0, 1.0, 1.0, 1.0]


def test_nothing_global_is_left_behind() -> None:
    """Drawing neither loads pyplot nor changes a person's own matplotlib settings."""
    # Reading the setting `backend` would load pyplot.
    script = (
        "import sys, matplotlib\n"
        "from esbench.report import plots\n"
        "from tests.test_plots import sweep\n"
        "def settings(): return [matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend']\n"
        "before = settings()\n"
        "assert plots.multipliers(sweep(64), 'Linear')\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)
