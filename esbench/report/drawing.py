"""What all pictures share: one style, two widths of paper, the looks of series, and the files.

A picture can be read in greyscale (marks, lines and hatches differ, not only colours, which run from dark to
light and suit the colour-blind), in a paper's column, and on a dark page: it is a white card. The same figure
gives the same bytes.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib import style
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from esbench.report.lettering import FAMILY

Line = Literal["-", "--", "-.", ":"]
Color = tuple[float, float, float, float]


@dataclass(frozen=True)
class Paper:
    """How wide a picture is, in inches, and the sizes of its letters, in points."""

    name: str
    inches: float
    text: float
    small: float
    fine: float


COLUMN = Paper("column", 3.3, text=7.0, small=6.0, fine=5.0)
PAGE = Paper("page", 6.9, text=8.0, small=7.0, fine=6.0)
PAPERS = {paper.name: paper for paper in (COLUMN, PAGE)}

MARKS = ("o", "s", "^", "D", "v", "P", "*", "<", ">", "X")
LINES: tuple[Line, ...] = ("-", "--", "-.", ":")
HATCHES = ("", "////", "||||", "xxxx", "\\\\\\\\", "++++")
"""No dots: each is a curve of its own, and a file of them is large."""
BLACK: Color = (0.0, 0.0, 0.0, 1.0)
WHITE: Color = (1.0, 1.0, 1.0, 1.0)
PALE = "0.8"
"""What stands behind, for comparison."""
FLOOR = "0.45"

KINDS: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""How a file's name may end -> what must not stand in it, so that the same figure gives the same bytes."""
_WORDS = {
    ".svg": ("Title", "Description"),
    ".png": ("Title", "Description"),
    ".pdf": ("Title", "Subject"),
}
"""What title and description are called in a file."""
STORED = (".svg", ".png")
"""The kinds that reports hold."""

_TINY, _HUGE = 1e-6, 1e7
"""Numbers between them are written out."""
_SMALLEST, _LARGEST = 1e-30, 1e30
_COLORS = 128
"""As many as a small file has room for."""
DPI, STORED_DPI = 300, 144
"""Of images for a paper, and of those that reports hold."""
_PLACES = re.compile(rb'(?: d| x| y|translate)[=(]"?[^")]*')
_DECIMALS = re.compile(rb"(\d\.\d\d)\d+")
"""Of where things are in a drawing: a hundredth of a point cannot be seen."""
_HIGHEST = 60_000
"""Pixels that an image may be high."""
_LIGHTEST = 0.85
_FILLS = (0.45, 0.95)
"""Colours of bars are light enough for an interval's line to be seen on them."""
_STEPS = ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
"""Where in a decade ticks stand, by how much room there is."""
_FEWEST, _EVEN = 2, 5
"""The least ticks of an axis; parts of one that is too short for powers of ten."""


class Look(NamedTuple):
    """What tells a series from the others, in colour and without."""

    color: Color
    mark: str
    line: Line
    filled: bool = True

    @property
    def face(self) -> Color:
        """What a mark is filled with: its colour, or the card's where marks come around again."""
        return self.color if self.filled else WHITE


def shades(count: int) -> list[Color]:
    """Colours that run from dark to light, so that they differ in greyscale."""
    colors = mpl.colormaps["viridis"].resampled(256)
    return [colors(_LIGHTEST * place / max(1, count - 1)) for place in range(count)]


def fills(count: int) -> list[Color]:
    """Colours of areas that black lines can be seen on; they differ in greyscale too."""
    colors, (first, last) = mpl.colormaps["viridis"].resampled(256), _FILLS
    return [colors(first + (last - first) * place / max(1, count - 1)) for place in range(count)]


def looks(count: int) -> list[Look]:
    """Looks of series that stand together: neighbours differ in colour, in mark and in line."""
    return [
        Look(shade, MARKS[place % len(MARKS)], LINES[place % len(LINES)], place // len(MARKS) % 2 == 0)
        for place, shade in enumerate(shades(count))
    ]


def scheme_looks(schemes: Iterable[str]) -> dict[str, Look]:
    """A colour and a mark for each scheme, whatever order they come in."""
    names = sorted(set(schemes))
    return dict(zip(names, looks(len(names)), strict=True))


@contextmanager
def styled(paper: Paper) -> Iterator[None]:
    """One look everywhere, whatever a person's own configuration says."""
    with style.context(["default", _settings(paper)]):
        yield


def _settings(paper: Paper) -> dict[str, object]:
    return {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.labelpad": 2,
        "axes.labelsize": paper.small,
        "axes.linewidth": 0.6,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlepad": 3,
        "axes.titlesize": paper.small,
        "figure.facecolor": "white",
        "font.family": FAMILY,
        "font.size": paper.text,
        "grid.color": "0.9",
        "grid.linewidth": 0.4,
        "hatch.linewidth": 0.35,
        "legend.borderaxespad": 0,
        "legend.borderpad": 0,
        "legend.columnspacing": 1.2,
        "legend.fontsize": paper.fine,
        "legend.frameon": False,
        "legend.handlelength": 2.1,
        "legend.handletextpad": 0.4,
        "legend.labelspacing": 0.3,
        "lines.linewidth": 1.0,
        "lines.markersize": 3.2,
        # Journals refuse the fonts that matplotlib embeds otherwise.
        "pdf.fonttype": 42,
        "savefig.dpi": DPI,
        "savefig.facecolor": "white",
        "svg.hashsalt": "esbench",
        # As wide in an image as in a drawing, and as it was measured.
        "text.hinting": "no_hinting",
        # A name of a foreign run is no formula.
        "text.parse_math": False,
        **{f"{axis}tick.{name}": size for axis in "xy" for name, size in _ticks(paper).items()},
    }


def _ticks(paper: Paper) -> dict[str, object]:
    return {
        "labelsize": paper.small,
        "major.pad": 1.5,
        "major.size": 2.0,
        "major.width": 0.6,
        "minor.size": 1.2,
        "minor.width": 0.4,
    }


def plain_ticks(axis: Axis, inches: float, tick_inches: float = 0.16) -> None:
    """Ticks of a logarithmic axis so long, written out, two to as many as have room; set its limits before.

    Args:
        axis: logarithmic.
        inches: its length.
        tick_inches: what each number needs.

    """
    low, high = axis.get_view_interval()
    decades = math.log10(high) - math.log10(low) if 0 < low < high < math.inf else math.inf
    most = inches / tick_inches
    steps = next((steps for steps in _STEPS if len(steps) * decades <= most), _STEPS[-1])
    locator: Locator = LogLocator(subs=steps, numticks=max(_FEWEST, int(most)))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high))) if decades < _FEWEST else ()
    if powers and sum(low <= step * 10.0**power <= high for power in powers for step in steps) < _FEWEST:
        # Between two powers of ten there may be no round number, and one tick is no scale.
        locator = MaxNLocator(max(_FEWEST, min(int(most), _EVEN)), steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(_written_out))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def drawable(*values: float) -> bool:
    """Whether a logarithmic axis has room for these: none is 0, NaN, infinite or beyond all instruments."""
    return all(_SMALLEST <= value <= _LARGEST for value in values)


def _written_out(value: float, _: int) -> str:
    if not _TINY <= value < _HUGE:
        return f"{value:g}"
    return f"{value:.6f}".rstrip("0").rstrip(".")


def write(figure: Figure, path: Path, title: str = "", description: str = "", dpi: int = DPI) -> None:
    """Write a figure as one file, of the kind that its name ends in; title and description stand inside."""
    kind = path.suffix.lower()
    words = dict(zip(_WORDS[kind], (title, description), strict=True)) if title else {}
    buffer = io.BytesIO()
    with styled(PAGE):
        if kind == ".png":
            dots = min(dpi, _HIGHEST / figure.get_figheight())
            figure.savefig(buffer, format="png", dpi=dots, metadata=KINDS[kind])
            _write_image(buffer, path, words, dots)
            return
        figure.savefig(buffer, format=kind[1:], metadata={**KINDS[kind], **words})
    content = buffer.getvalue()
    path.write_bytes(_PLACES.sub(_rounded, content) if kind == ".svg" else content)


def _write_image(drawn: io.BytesIO, path: Path, words: dict[str, str], dpi: float) -> None:
    # A picture has few colours: named in a table they take a third of the room.
    image = Image.open(drawn).convert("RGB")
    table = image.quantize(_COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    said = PngInfo()
    for name, text in words.items():
        said.add_itxt(name, text)
    table.save(path, format="PNG", optimize=True, dpi=(dpi, dpi), pnginfo=said)


def _rounded(places: re.Match[bytes]) -> bytes:
    return _DECIMALS.sub(rb"\1", places[0])
