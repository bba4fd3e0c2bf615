"""The style of all plots: sizes, colors, markers, axes, and a figure with a title above and notes below.

Plots are readable in grayscale (markers and line styles differ) and have a white background on a dark page.
The same data gives the same bytes.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import figure
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.style import context
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import Bbox
from numpy.typing import ArrayLike, NDArray

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.analysis.families import family
from esbench.report.analysis.pivot import Grid
from esbench.schema import Case, Measurement, Row
from esbench.text import one_line

COLUMN, PAGE = 3.3, 6.9
"""Widths of a figure in inches."""
WIDTHS = {"column": COLUMN, "page": PAGE}
TITLE, LABEL, FINE = 9.0, 8.0, 7.0
"""Font sizes in points of the title, of the axes and of other text; esbench.mplstyle repeats the last two."""
BLACK, WHITE, GREY = "#000000", "#ffffff", "#737373"
_FAMILY = "DejaVu Sans"
_EDGE = 0.06
"""Inches around the figure, and between title, panels, legend and notes."""
_LEGEND_HANDLE = 0.35
"""Inches of a legend entry without its text."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Limits of a logarithmic axis."""

METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""File suffix -> metadata to leave out, because it differs between machines and days."""


@contextmanager
def use_style() -> Iterator[None]:
    """Draw in this style, whatever the user's matplotlib configuration; also a decorator."""
    with context(["default", Path(__file__).with_name("esbench.mplstyle")]):
        yield


# Colors and markers


class Look(NamedTuple):
    """The color, marker and line style of a series."""

    color: str
    marker: str
    line: Literal["-", "--", "-.", ":"]

    @property
    def point(self) -> dict[str, Any]:
        """Arguments of ``Axes.plot`` for unconnected points."""
        return {"linestyle": "none", "marker": self.marker, "color": self.color, "markeredgewidth": 0.7}


FAMILIES = {
    "dense noise": Look("#202020", "o", "-"),
    "low rank": Look("#0072B2", "s", "--"),
    "sparse": Look("#009E73", "^", "-."),
    "shared core": Look("#D55E00", "D", ":"),
    "dropout": Look("#CC79A7", "v", "--"),
    "other": Look("#7F7F7F", "X", "-"),
}
"""Families of schemes and their look in every plot, in the palette of Okabe and Ito."""
RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 8,
    "color": BLACK,
    "markeredgewidth": 0.7,
    "fillstyle": "none",
}
"""Arguments of ``Axes.plot`` for a ring around a point."""


def family_look(scheme: str) -> Look:
    """Return the look of the family of a scheme."""
    return FAMILIES[family(scheme)]


def family_legend(schemes: Iterable[str], prefix: str = "") -> list[Line2D]:
    """Return legend entries of the families of these schemes."""
    shown = {family(scheme) for scheme in schemes}
    return [legend_point(look, prefix + name) for name, look in FAMILIES.items() if name in shown]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look per name: colors from dark to light; markers and line styles take turns."""
    unique = list(dict.fromkeys(names))
    colors = mpl.colormaps["viridis"]
    lightest = 0.7  # of 1; lighter colors are hard to see on white
    lines: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
    return {
        name: Look(
            mpl.colors.to_hex(colors(lightest * index / max(1, len(unique) - 1))),
            "os^DvP*<>X"[index % 10],
            lines[index % 4],
        )
        for index, name in enumerate(unique)
    }


def legend_point(look: Look, name: str, size: float = 4.0) -> Line2D:
    """Return a legend entry for points of this look."""
    return Line2D([], [], **look.point, markersize=size, label=name)


# The figure


class Figure(figure.Figure):
    """A figure with a title above its panels, and legend, notes and origin below.

    Draw in its :meth:`panels`, then call :meth:`finish`, all inside :func:`use_style`. The height of the
    figure is that of the panels; :meth:`write` adds the title and the notes.
    """

    def __init__(self, width: float) -> None:
        """Create an empty figure; ``width`` is in inches."""
        super().__init__(figsize=(width, 1.0), layout="constrained")
        self.title = self.origin = ""
        self.notes: list[str] = []
        self.panel_width = 0.0

    def panels(self, count: int, columns: int, height: float) -> list[Axes]:
        """Add ``count`` axes, at most ``columns`` side by side. ``height`` of a row is in inches."""
        rows = math.ceil(count / columns)
        columns = math.ceil(count / rows)
        self.set_figheight(rows * height)
        self.panel_width = self.get_figwidth() / columns - 0.5  # without the labels of the y axis
        panels = list(self.subplots(rows, columns, squeeze=False).flat)
        for unused in panels[count:]:
            unused.remove()
        return panels[:count]

    def finish(
        self, title: str, origin: str, notes: Sequence[str] = (), handles: Sequence[Artist] = ()
    ) -> None:
        """Lay out the panels; add the title above, and a legend of ``handles``, notes and origin below."""
        self.title, self.origin, self.notes = printable(title), printable(origin), list(notes)
        if engine := self.get_layout_engine():
            engine.execute(self)
        self.set_layout_engine("none")  # title, legend and notes are outside, and must not move the panels
        for axes in self.axes:
            # The solver's last digits differ between processes, and the ids in an SVG depend on them.
            axes.set_position(tuple(round(end, 6) for end in axes.get_position().bounds))
        width, height = self.get_size_inches()
        room, left, gap = width - 2 * _EDGE, _EDGE / width, _EDGE / height
        self.text(left, 1 + gap, "\n".join(wrap(title, room, TITLE)), va="bottom", fontsize=TITLE)
        bottom = -gap
        if handles:
            names = [fit(str(handle.get_label()), room - _LEGEND_HANDLE) for handle in handles]
            widest = _LEGEND_HANDLE + max(map(len, names)) * _character_inches(FINE)
            rows = math.ceil(len(names) / max(1, int(room / widest)))
            legend = self.legend(
                list(handles),
                names,
                loc="upper left",
                bbox_to_anchor=(left, bottom),
                ncols=math.ceil(len(names) / rows),
            )
            bottom = legend.get_window_extent().y0 / self.bbox.height - gap
        lines = [line for text in (*notes, origin) for line in wrap(text, room, FINE)]
        self.text(left, bottom, "\n".join(lines), va="top", fontsize=FINE, color="0.3")

    def write(self, path: Path) -> Path:
        """Write the figure in the format of the file's suffix, with title and origin in its metadata.

        Raises:
            UserError: the format is unknown.
        """
        suffix = path.suffix.lower()
        if suffix not in METADATA:
            raise UserError(f"--out {path}: expected a file that ends in {', '.join(METADATA)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        subject = "Subject" if suffix == ".pdf" else "Description"
        metadata = METADATA[suffix] | ({"Title": self.title, subject: self.origin} if self.title else {})
        drawn = self.get_tightbbox()  # with title, legend and notes, which lie outside the figure
        bottom, top = round(drawn.y0 - _EDGE, 2), round(drawn.y1 + _EDGE, 2)
        box = Bbox.from_extents(0, bottom, self.get_figwidth(), top)
        with use_style():
            self.savefig(path, format=suffix[1:], metadata=metadata, bbox_inches=box)
        if suffix == ".svg":
            path.write_text(_compact(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
        return path


def _compact(svg: str) -> str:
    """Return an SVG without comments and indentation, with numbers rounded to 0.01 and a fallback font."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace(f"font-family: '{_FAMILY}'; ", "")
    begin = '<style type="text/css">'
    svg = svg.replace(begin, f"{begin}text{{font-family: '{_FAMILY}', Verdana, sans-serif}}", 1)

    def round_number(number: re.Match[str]) -> str:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    def round_numbers(tag: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", round_number, tag[0])

    svg = re.sub(r"<[^>]*>", round_numbers, svg)  # only in tags: the text between them stays as it is
    return re.sub(r"\s*\n\s*", "\n", svg)


# Text


def printable(text: str) -> str:
    """Return a text on one line; U+FFFD replaces each character that the font lacks."""
    return "".join(char if ord(char) in _glyphs() else "\ufffd" for char in one_line(text))


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=_FAMILY))).get_charmap())


def _character_inches(points: float) -> float:
    """Return the mean width of a character of the font, rounded up, for a font size in points."""
    return 0.57 * points / 72


def fit(text: str, inches: float, points: float = FINE) -> str:
    """Return a text on one line; if it is wider than ``inches``, an ellipsis replaces its middle.

    The end of a variant's name has its options, which distinguish it from others of its scheme.
    """
    line, most_characters = printable(text), int(inches / _character_inches(points))
    half = max(1, (most_characters - 1) // 2)
    return line if len(line) <= most_characters else f"{line[:half]}…{line[-half:]}"


def wrap(text: str, inches: float, points: float) -> list[str]:
    """Return the lines of a text wrapped at ``inches``, at most six."""
    characters = int(inches / _character_inches(points))
    return textwrap.wrap(printable(text), characters, max_lines=6, placeholder=" …")


def origin(grid: Grid, cases: Sequence[Case]) -> str:
    """Return where the numbers of a plot come from: layer, device, commit, dtype, batch, method and run."""
    run, conditions = grid.run, captions.conditions(grid, cases).rstrip(".")
    layer = f"{captions.layer(cases[0])}, " if len(cases) == 1 else ""
    if captions.is_published(run):
        return f"{layer}{captions.source(run)}, {conditions}"
    here = run.header.environment
    commit = f"commit {here.commit[:7]}{'+' if here.dirty else ''}" if here.commit else "commit unknown"
    return f"{layer}{captions.device_and_threads(run)}, {commit}, {conditions}, run {run.header.run_id}"


def note_if_incomplete(shown: Sequence[object], available: Sequence[object], noun: str) -> list[str]:
    """Return a note with the counts if fewer are shown than available, else nothing."""
    if len(shown) == len(available):
        return []
    return [f"{len(shown)} of {len(available)} {noun}: the table has all"]


def notes_by_reason(reasons: Mapping[str, str], prefix: str = "No number") -> list[str]:
    """Return a note per reason. ``reasons`` maps names of variants to reasons."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_by_reason.setdefault(reason, []).append(name)
    return [f"{prefix}, {reason}: {', '.join(names)}" for reason, names in names_by_reason.items()]


def missing_reason(row: Row | None, longest: int = 60) -> str:
    """Return why a cell of a table has no number, in at most ``longest`` characters."""
    if isinstance(row, Measurement):
        return "no usable samples"
    return captions.short_reason(row.reason, longest) if row else "not measured"


# Axes and labels


def name_rows(axes: Axes, names: Sequence[str], top: float) -> None:
    """Give the y axis a row for each name, the first below ``top``, without ticks and lines."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, top)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def log_axis(axes: Axes, name: Literal["x", "y"], values: Iterable[float], margin: float = 1.3) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks.

    The positive ``values`` are inside, with a margin: the factor ``margin``, or 8 % of the length if larger.
    """
    positive = [value for value in values if value]
    low, high = min(positive), max(positive)
    room = max(margin, (high / low) ** 0.08)
    low, high = low / room, high * room
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    for largest_ratio, locator in _LOCATORS:
        if high / low < largest_ratio:
            axis.set_major_locator(locator())
            break
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_locator(NullLocator())


_LOCATORS: Sequence[tuple[float, Callable[[], Locator]]] = (
    (5.0, lambda: MaxNLocator(3, steps=[1, 2, 2.5, 5, 10])),
    (30.0, lambda: LogLocator(subs=(1, 2, 5))),
    (1e3, lambda: LogLocator(subs=(1, 3))),
    (math.inf, lambda: LogLocator(subs=(1,))),
)
"""Ticks of a logarithmic axis whose limits have a ratio below the first number."""


def is_drawable(*values: float) -> bool:
    """Return whether a logarithmic axis can show all values: positive, finite and not extreme."""
    return all(_SMALLEST <= value <= _LARGEST for value in values)


_BEFORE = {"left": 0.0, "bottom": 0.0, "center": 0.5, "right": 1.0, "top": 1.0}
"""Alignment of a text -> the share of its size that lies before its anchor."""
_CANDIDATES = [
    ("left", "center", 5, 0),
    ("right", "center", -5, 0),
    ("center", "bottom", 0, 4),
    ("center", "top", 0, -4),
    *(
        (side, vertical, right * distance, up * distance)
        for distance in (8, 14, 20, 26)
        for side, right in (("left", 1), ("right", -1))
        for vertical, up in (("bottom", 1), ("top", -1))
    ),
]
"""Alignments of a text and its offset from what it names, in 1/72 inch; the preferred ones first."""
_BESIDE = 4
"""The candidates before this index touch the point, and need no thin line that leads to it."""
_OVERLAP = 7.0
"""Pixels between the centers of two markers, below which they overlap."""


class Label(NamedTuple):
    """The name of a point or of the last point of a line, and its position in data coordinates."""

    x: float
    y: float
    text: str


def label_points(axes: Axes, labels: Sequence[Label], arrows: Sequence[Label] = ()) -> None:
    """Write names next to points, each where it covers the least of other names, points, lines and arrows.

    Points that overlap share a text, and a thin line leads to a point that is not beside its text. ``arrows``
    are the points from which an arrow leads to the top. Call it after :meth:`Figure.finish`, when the axes
    have their final size.
    """
    frame, to_pixels = axes.get_window_extent(), axes.transData.transform
    markers = [to_pixels(label[:2]) for label in labels]
    starts = [to_pixels(label[:2]) for label in arrows]
    covered = [
        *((x - 4, y - 4, x + 4, y + 4) for x, y in markers),
        *((x - 4, y, x + 4, frame.y1) for x, y in starts),
        *((x - 2, y - 2, x + 2, y + 2) for x, y in _sample_lines(axes)),
    ]
    pixels = axes.figure.dpi / 72  # per point
    for label in sorted(_merge_overlapping(axes, labels), key=lambda label: -label.y):
        name = fit(label.text, 0.6 * frame.width / axes.figure.dpi)
        drawn_name = axes.text(0, 0, name, fontsize=FINE)
        width, height = drawn_name.get_window_extent().size
        drawn_name.remove()
        x, y = to_pixels(label[:2])
        corners = [
            (x + right * pixels - _BEFORE[side] * width, y + up * pixels - _BEFORE[vertical] * height)
            for side, vertical, right, up in _CANDIDATES
        ]
        boxes = [(x0, y0, x0 + width, y0 + height) for x0, y0 in corners]
        # The covered area in pixels, ten times the area outside the axes, and 2 per candidate.
        outside = width * height - _shared_areas(boxes, [frame.extents])[:, 0]
        costs = 2.0 * np.arange(len(boxes)) + _shared_areas(boxes, covered).sum(1) + 10 * outside
        best = int(costs.argmin())
        side, vertical, right, up = _CANDIDATES[best]
        leader = {
            "arrowstyle": "-",
            "color": "0.5",
            "linewidth": 0.5,
            "shrinkA": 0,
            "shrinkB": 3,
            "relpos": (_BEFORE[side], _BEFORE[vertical]),
        }
        axes.annotate(
            name,
            label[:2],
            (right, up),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment=vertical,
            fontsize=FINE,
            arrowprops=leader if best >= _BESIDE else None,
        )
        covered.append(boxes[best])


def _sample_lines(axes: Axes) -> Iterator[tuple[float, float]]:
    """Yield 40 points on each segment of each line, in pixels."""
    for line in axes.lines:
        if line.get_linestyle() != "None":
            for start, end in pairwise(axes.transData.transform(line.get_xydata())):
                yield from np.linspace(start, end, 40)


def _merge_overlapping(axes: Axes, labels: Sequence[Label]) -> list[Label]:
    """Return the labels with one for each group of points whose markers overlap, named from top to bottom."""
    groups: list[list[Label]] = []
    for label in sorted(labels, key=lambda label: -label.y):
        x, y = axes.transData.transform((label.x, label.y))
        for group in groups:
            first_x, first_y = axes.transData.transform((group[0].x, group[0].y))
            if math.hypot(x - first_x, y - first_y) < _OVERLAP:
                group.append(label)
                break
        else:
            groups.append([label])
    return [group[0]._replace(text=", ".join(label.text for label in group)) for group in groups]


def _shared_areas(boxes: ArrayLike, others: ArrayLike) -> NDArray[np.float64]:
    """Return the area that each box (x0, y0, x1, y1) shares with each of the others, [boxes, others]."""
    box, other = np.asarray(boxes)[:, np.newaxis], np.asarray(others)[np.newaxis]
    sides = np.minimum(box[..., 2:], other[..., 2:]) - np.maximum(box[..., :2], other[..., :2])
    return sides.clip(0).prod(axis=-1)


def label_ends(axes: Axes, labels: Sequence[Label], inches: float) -> None:
    """Write the names of lines to the right of the axes, at the height of their last points.

    A name that would cover the one above it moves down. A dotted line leads to a last point inside the axes.
    Call it before :meth:`Figure.finish`, which makes room, and after the axes have their limits.
    """
    frame, right = axes.get_window_extent(), axes.get_xlim()[1]
    line_height = 1.2 * FINE * axes.figure.dpi / 72 / frame.height  # as a share of the axes, like y below
    last_x = max(label.x for label in labels)
    y = math.inf
    for label in sorted(labels, key=lambda label: -label.y):
        _, pixel_y = axes.transData.transform((label.x, label.y))
        y = min(float(pixel_y - frame.y0) / frame.height, y - line_height)
        axes.annotate(
            fit(label.text, inches),
            (1, y),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            verticalalignment="center",
            fontsize=FINE,
            annotation_clip=False,
        )
        if label.x < last_x:
            axes.hlines(label.y, label.x, right, color="0.6", linewidth=0.6, linestyle=":", zorder=1.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """Draw an arrow to the edge of the axes: the value is infinite, or only its lower bound is known."""
    look = {"arrowstyle": "-|>", "color": color, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look, zorder=2)
