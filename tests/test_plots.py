"""The picture of multipliers, and what all pictures share."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from esbench.records import Row
from esbench.report import drawing, plots, sweeps
from esbench.report.grid import TIMES, Grid, grids
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row

SPARSE = synthetic.variant("SparsePerturbed", k=1)


def forward(rows: Iterable[Row], suite: str = "quick") -> Grid:
    """The first grid of a run's forward times."""
    return grids(synthetic.run(rows, suite=suite), "Linear", TIMES)[0]


def some(*populations: int) -> list[Row]:
    """Three variants over populations."""
    return [
        time_row(v, linear(256, members=members), members / 100, members / 88.888888888888888)
        for members in populations
        for v in (SPARSE, BASE, NAIVE)
    ]


def legend(figure: Figure) -> list[str]:
    """The names in the legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def heading(figure: Figure) -> str:
    """The text over a figure."""
    return figure.get_suptitle()


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
    figure = drawn(plots.multipliers(forward([*rows, skipped(SPARSE, linear(256), "no")])))
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["PerturbedLinear", "SparsePerturbedLinear(k=1)", "Naive"]
    assert legend(figure) == ["(256, 256)", "(512, 512)", "no number: see the table"]
    assert list(np.asarray(axes.lines[0].get_xdata())) == [3.0, 1.0]
    assert axes.get_xscale() == "log"


def test_multipliers_show_the_largest_population_that_most_could_do() -> None:
    """A shape that was measured with several populations has one mark, and the title says which."""
    figure = drawn(plots.multipliers(forward(some(64, 128))))
    assert legend(figure) == ["(256, 256)"]
    assert "128 x 1 (members x repeats)" in heading(figure)
    huge = linear(256, members=4096)
    others = [skipped(v, huge, "out of memory") for v in (SPARSE, NAIVE)]
    figure = drawn(plots.multipliers(forward([*some(64, 128), time_row(BASE, huge, 1.0), *others])))
    assert "128 x 1 (members x repeats)" in heading(figure)


@pytest.mark.parametrize("name", ["$\\frac$", "$x$", "a\x00b\x1b\ufffe\nc", "--></svg>"])
def test_odd_names_are_drawn(tmp_path: Path, name: str) -> None:
    """A name that is a broken formula, or holds what XML cannot, is drawn as text in a well-formed file."""
    odd = synthetic.variant(name)
    cases = [
        msgspec.structs.replace(linear(256, members=members), padding_mode=name)
        for members in (64, 128, 256, 512)
    ]
    rows: list[Row] = [time_row(v, case, 1.0) for case in cases[:3] for v in (odd, BASE)]
    rows.append(skipped(odd, cases[3], f"{name} is no reason"))
    run = synthetic.run(rows, suite=name, device_name=name, invalid=(name,))
    (grid,) = grids(run, "Linear", TIMES)
    for stem, figure in (("a", plots.multipliers(grid)), ("b", sweeps.against(grid, sweeps.POPULATION))):
        paths = drawing.save(drawn(figure), tmp_path / stem)
        ET.parse(paths[0])  # noqa: S314  a file of our own


def test_multipliers_show_their_interval() -> None:
    """A mark whose ratio has an interval has a line from its low to its high end."""
    rows = [time_row(BASE, linear(), *[1.0] * 6), time_row(DENSE, linear(), 2, 2, 2, 2, 2, 3)]
    figure = drawn(plots.multipliers(forward(rows)))
    (bar,) = [one for one in figure.axes[0].collections if isinstance(one, LineCollection)]
    (ends,) = bar.get_segments()
    assert [float(x) for x, _ in np.asarray(ends)] == [2.0, 3.0]


def test_invalid_run_is_said_in_the_picture() -> None:
    """A picture of a run that must not be used says so and why."""
    run = synthetic.run(some(64), invalid=("other processes on the GPU",))
    figure = drawn(plots.multipliers(grids(run, "Linear", TIMES)[0]))
    assert "INVALID: other processes on the GPU" in heading(figure)


def test_nothing_to_compare_with_is_no_figure() -> None:
    """Without a plain layer, or with nothing else, there are no multipliers."""
    assert plots.multipliers(forward([time_row(BASE, linear(), 1.0)])) is None
    assert plots.multipliers(forward([time_row(DENSE, linear(), 1.0)])) is None
    assert plots.multipliers(forward([skipped(DENSE, linear(), "no")])) is None


def test_unusable_samples_have_a_cross() -> None:
    """A row without a median has no mark and breaks no plot."""
    dead = msgspec.structs.replace(time_row(DENSE, linear(), 1.0), samples=((float("nan"),), ()))
    figure = drawn(plots.multipliers(forward([time_row(BASE, linear(), 1.0), dead])))
    assert "no number: see the table" in legend(figure)


def test_published_figures_are_labelled_in_the_picture() -> None:
    """A picture of figures of others says so in its title."""
    rows = [msgspec.structs.replace(time_row(v, linear(), 1.0), method="published") for v in (DENSE, BASE)]
    figure = drawn(plots.multipliers(forward(rows, suite="A paper")))
    assert "published by others (A paper)" in heading(figure)


def test_same_run_same_bytes(tmp_path: Path) -> None:
    """Drawn twice, a figure has the same bytes as SVG and as PNG, and no date in them."""
    for name in ("a", "b"):
        drawing.save(drawn(plots.multipliers(forward(some(64)))), tmp_path / name)
    first, second = (sorted(tmp_path.glob(f"{name}*")) for name in ("a", "b"))
    assert [path.suffix for path in first] == [".png", ".svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()


def test_pages_behind_are_covered(tmp_path: Path) -> None:
    """The background is opaque white, so that a dark page hides nothing."""
    drawing.save(drawn(plots.multipliers(forward(some(64)))), tmp_path / "x")
    corner = imread(tmp_path / "x.png")[0, 0]
    assert list(corner) == [1.0, 1.0, 1.0, 1.0]


def test_nothing_global_is_left_behind() -> None:
    """Drawing neither loads pyplot nor changes a person's own matplotlib settings."""
    # Reading the setting `backend` would load pyplot.
    script = (
        "import sys, matplotlib\n"
        "from esbench.report import plots, sweeps\n"
        "from tests.test_plots import forward, some\n"
        "def settings(): return [matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend']\n"
        "before = settings()\n"
        "assert plots.multipliers(forward(some(64)))\n"
        "assert sweeps.against(forward(some(64, 128, 256)), sweeps.POPULATION)\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)
