"""What all pictures share: one style, the looks of their series, title, ticks, and the files.

Readable in greyscale (marks and lines differ, not only colours), on a dark page and at the width of a
README column. The same figure gives the same bytes.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib import style
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from esbench.records import Case
from esbench.report import captions
from esbench.report.grid import Grid
from esbench.report.words import one_line

Line = Literal["-", "--", "-.", ":"]

WIDTH = 8.0
"""Inches."""
MARKS = ("o", "s", "^", "D", "v", "P", "*", "<", ">", "h")
LINES: tuple[Line, ...] = ("-", "--", "-.", ":")

KINDS: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}
"""How a file's name may end -> what must not stand in it, so that the same figure gives the same bytes."""

_CHARACTERS = 110
_LINES = 4
_LINE_INCHES = 0.17
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.color": "0.88",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
    "svg.hashsalt": "esbench",
    # A name of a foreign run is no formula.
    "text.parse_math": False,
}


class Look(NamedTuple):
    """What tells a series from the others, in colour and without."""

    color: tuple[float, float, float, float]
    mark: str
    line: Line


def shades(count: int) -> list[tuple[float, float, float, float]]:
    """Colours that run from dark to light, so that they differ in greyscale."""
    colors = mpl.colormaps["viridis"].resampled(256)
    return [colors(0.85 * place / max(1, count - 1)) for place in range(count)]


@contextmanager
def styled() -> Iterator[None]:
    """One look everywhere, whatever a person's own configuration says."""
    with style.context(["default", _STYLE]):
        yield


def plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, written out."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def entitle(figure: Figure, grid: Grid, cases: Sequence[Case], text: str) -> None:
    """Say over a figure what it shows, where that was measured, and whether it must not be used."""
    where = f"{captions.source(grid.run)}, {captions.conditions(grid, cases).rstrip('.')}"
    head(figure, [text, where, *filter(None, [captions.invalid(grid.run).strip()])])


def head(figure: Figure, lines: Sequence[str]) -> None:
    """Write some lines over a figure, and make it taller where they are long."""
    wrapped = [
        part
        for line in lines
        for part in textwrap.wrap(one_line(line), _CHARACTERS, max_lines=_LINES, placeholder=" …")
    ]
    # A long title takes nothing from the picture below it.
    figure.set_figheight(figure.get_figheight() + _LINE_INCHES * max(0, len(wrapped) - 2))
    figure.suptitle("\n".join(wrapped), fontsize="medium")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as SVG and PNG; the same figure gives the same bytes."""
    paths = [stem.with_name(f"{stem.name}{kind}") for kind in KINDS]
    for path in paths:
        write(figure, path)
    return paths


def write(figure: Figure, path: Path) -> None:
    """Write a figure as one file, of the kind that its name ends in."""
    with styled():
        figure.savefig(path, metadata=KINDS[path.suffix])
