"""The style of all plots: sizes, colors, markers, axes, and a figure with a title above and notes below.

Plots read in grayscale (markers and line styles differ), fit the column or the page of a paper, and are white
cards on a dark page. The same data gives the same bytes.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib import figure
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.style import context
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import Bbox

from esbench.report import captions
from esbench.report.analysis.pivot import Grid
from esbench.schema import Case, Measurement, Row
from esbench.text import one_line, pluralize

COLUMN, PAGE = 3.3, 6.9
"""Widths of a figure in inches."""
WIDTHS = {"column": COLUMN, "page": PAGE}
TITLE, LABEL, FINE = 8.0, 7.0, 6.0
"""Font sizes in points: of the title, of axes, of everything else; the last two also in the style file."""
BLACK, WHITE, GREY = "#000000", "#ffffff", "#737373"
_FAMILY = "DejaVu Sans"
_EDGE = 0.06
"""Inches around the figure and between its parts."""
_LEGEND_HANDLE = 0.35
"""Inches of a line in a legend and the space around it."""
_SMALLEST, _LARGEST = 1e-30, 1e30

METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""File suffix -> metadata that is left out, because it would differ between machines or days."""


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style, independent of the user's matplotlib configuration; also a decorator."""
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
_FAMILY_OF = {
    "Perturbed": "dense noise",
    "Regenerated": "dense noise",
    "RegeneratedSign": "dense noise",
    "NoiseTable": "dense noise",
    "LowRank": "low rank",
    "LowRankSign": "low rank",
    "Orthogonal": "low rank",
    "SparsePerturbed": "sparse",
    "Permuted": "shared core",
    "Flipped": "shared core",
    "FlippedSign": "shared core",
    "Hadamard": "shared core",
    "DropoutMask": "dropout",
    "DropConnect": "dropout",
    "DropoutBlocks": "dropout",
}
RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 8,
    "color": BLACK,
    "markeredgewidth": 0.7,
    "fillstyle": "none",
}
"""Arguments of ``Axes.plot`` for a ring around a point."""


def family(scheme: str) -> str:
    """Return the family of a scheme; a fused kernel belongs to that of the scheme that it computes."""
    return _FAMILY_OF.get(scheme.removeprefix("Fused"), "other")


def family_look(scheme: str) -> Look:
    """Return the look of the family of a scheme."""
    return FAMILIES[family(scheme)]


def family_legend(schemes: Iterable[str], prefix: str = "") -> list[Line2D]:
    """Return legend entries of the families of these schemes."""
    shown = {family(scheme) for scheme in schemes}
    return [legend_point(look, prefix + name) for name, look in FAMILIES.items() if name in shown]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look per name: colors from dark to light, and different markers and line styles."""
    unique = list(dict.fromkeys(names))
    colors = mpl.colormaps["viridis"]
    lines: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
    return {
        name: Look(
            mpl.colors.to_hex(colors(0.85 * place / max(1, len(unique) - 1))),
            "os^DvP*<>X"[place % 10],
            lines[place % 4],
        )
        for place, name in enumerate(unique)
    }


def legend_point(look: Look, name: str, size: float = 4.0) -> Line2D:
    """Return a legend entry for points of this look."""
    return Line2D([], [], **look.point, markersize=size, label=name)


# The figure


class Figure(figure.Figure):
    """A figure of a given width, with a title above its panels, and legend, notes and origin below.

    Draw in its :meth:`panels`, then call :meth:`finish`, all inside :func:`styled`. Title and notes lie
    outside the figure of matplotlib, whose height is that of the panels; :meth:`write` includes them.
    """

    def __init__(self, width: float) -> None:
        """Create an empty figure; ``width`` is in inches."""
        super().__init__(figsize=(width, 1.0), layout="constrained")
        self.title = self.origin = ""
        self.notes: list[str] = []
        self.panel_width = 0.0

    def panels(self, count: int, columns: int, height: float) -> list[Axes]:
        """Add axes in rows of at most ``columns``; a row is ``height`` inches high with its labels."""
        rows = math.ceil(count / columns)
        columns = math.ceil(count / rows)
        self.set_figheight(rows * height)
        self.panel_width = self.get_figwidth() / columns - 0.5  # less the labels of the y axis
        every = list(self.subplots(rows, columns, squeeze=False).flat)
        for unused in every[count:]:
            unused.remove()
        return every[:count]

    def finish(
        self, title: str, origin: str, notes: Sequence[str] = (), handles: Sequence[Artist] = ()
    ) -> None:
        """Lay out the panels, and add title, legend, notes and origin.

        Args:
            title: what the figure shows.
            origin: the run that its numbers come from.
            notes: remarks, one paragraph each.
            handles: entries of the legend below all panels.

        """
        self.title, self.origin, self.notes = printable(title), printable(origin), list(notes)
        if engine := self.get_layout_engine():
            engine.execute(self)
        self.set_layout_engine("none")
        for axes in self.axes:
            # The solver's last digits differ between processes, and the ids in an SVG depend on them.
            axes.set_position(tuple(round(end, 6) for end in axes.get_position().bounds))
        width, height = self.get_size_inches()
        room, left, gap = width - 2 * _EDGE, _EDGE / width, _EDGE / height
        self.text(left, 1 + gap, "\n".join(wrap(title, room, TITLE)), va="bottom", fontsize=TITLE)
        bottom = -gap
        if handles:
            names = [fit(str(handle.get_label()), room - _LEGEND_HANDLE) for handle in handles]
            columns = int(room / (_LEGEND_HANDLE + max(map(len, names)) * _character_inches(FINE)))
            legend = self.legend(
                list(handles),
                names,
                loc="upper left",
                bbox_to_anchor=(left, bottom),
                ncols=max(1, min(columns, len(names))),
            )
            bottom = legend.get_window_extent().y0 / self.bbox.height - gap
        lines = [line for text in (*notes, origin) for line in wrap(text, room, FINE)]
        self.text(left, bottom, "\n".join(lines), va="top", fontsize=FINE, color="0.3")

    def write(self, path: Path) -> Path:
        """Write the figure in the format of the file's suffix, with title and origin in its metadata."""
        suffix = path.suffix.lower()
        subject = "Subject" if suffix == ".pdf" else "Description"
        metadata = METADATA[suffix] | ({"Title": self.title, subject: self.origin} if self.title else {})
        tight = self.get_tightbbox()
        ends = round(tight.y0 - _EDGE, 2), round(tight.y1 + _EDGE, 2)
        box = Bbox.from_extents(0, ends[0], self.get_figwidth(), ends[1])
        with styled():
            self.savefig(path, format=suffix[1:], metadata=metadata, bbox_inches=box)
        if suffix == ".svg":
            path.write_text(_compact(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
        return path


def _compact(svg: str) -> str:
    """Return an SVG without comments, indentation and decimals beyond a hundredth of a point.

    Where the font of its text is missing, one of nearly the same widths replaces it.
    """
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace(f"font-family: '{_FAMILY}'; ", "")
    begin = '<style type="text/css">'
    svg = svg.replace(begin, f"{begin}text{{font-family: '{_FAMILY}', Verdana, sans-serif}}", 1)

    def rounded(number: re.Match[str]) -> str:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", rounded, tag[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


# Text


def printable(text: str) -> str:
    """Return a text on one line, with a replacement mark for each character that the font lacks."""
    return "".join(char if ord(char) in _glyphs() else "\ufffd" for char in one_line(text))


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=_FAMILY))).get_charmap())


def _character_inches(points: float) -> float:
    """Return the width of a character in a font of this size, a little more than the mean."""
    return 0.57 * points / 72


def fit(text: str, inches: float, points: float = FINE) -> str:
    """Return a text on one line of about this width; an ellipsis replaces the middle of a longer one.

    The end is kept because options stand there, in which variants of a scheme differ.
    """
    whole, most = printable(text), int(inches / _character_inches(points))
    half = max(1, (most - 1) // 2)
    return whole if len(whole) <= most else f"{whole[:half]}…{whole[-half:]}"


def wrap(text: str, inches: float, points: float) -> list[str]:
    """Return a text wrapped to about this width, on at most six lines."""
    characters = int(inches / _character_inches(points))
    return textwrap.wrap(printable(text), characters, max_lines=6, placeholder=" …")


def origin(grid: Grid, cases: Sequence[Case]) -> str:
    """Return the origin of the numbers of a plot: device, commit, dtype, batch, method and run."""
    run, conditions = grid.run, captions.conditions(grid, cases).rstrip(".")
    if captions.is_published(run):
        return f"{captions.source(run)}, {conditions}"
    here = run.header.environment
    device = here.device_name + (f" ({pluralize(here.threads, 'thread')})" if here.device == "cpu" else "")
    commit = f"commit {here.commit[:7]}{'+' if here.dirty else ''}" if here.commit else "commit unknown"
    return f"{device}, {commit}, {conditions}, run {run.header.run_id}"


def part_of(
    shown: Sequence[object], every: Sequence[object], what: str, rest: str = "the table has all"
) -> list[str]:
    """Return a note where only a part is shown."""
    return [f"{len(shown)} of {len(every)} {what}: {rest}"] if len(shown) < len(every) else []


def by_reason(reasons: Mapping[str, str], what: str = "No number") -> list[str]:
    """Return one note per reason, with the names of the variants that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"{what}, {reason}: {', '.join(sharing)}" for reason, sharing in names.items()]


def reason_of(row: Row | None, longest: int = 60) -> str:
    """Return why a cell has no number, in at most ``longest`` characters."""
    if isinstance(row, Measurement):
        return "no usable samples"
    return captions.shorten(row.reason, longest) if row else "not measured"


# Axes and labels


def log_axis(axes: Axes, name: Literal["x", "y"], values: Iterable[float], margin: float = 1.3) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks and some space around these values."""
    ends = [value for value in values if value]
    low, high = min(ends), max(ends)
    room = max(margin, (high / low) ** 0.08)
    low, high = low / room, high * room
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    if high / low < 5:  # noqa: PLR2004  # too few powers of ten and their multiples
        axis.set_major_locator(MaxNLocator(3, steps=[1, 2, 2.5, 5, 10]))
    else:
        steps = next((steps for most, steps in ((30, (1, 2, 5)), (1e3, (1, 3))) if high / low < most), (1,))
        axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def drawable(*values: float) -> bool:
    """Return whether a logarithmic axis has room for all of these."""
    return all(_SMALLEST <= value <= _LARGEST for value in values)


_BEFORE = {"left": 0.0, "bottom": 0.0, "center": 0.5, "right": 1.0, "top": 1.0}
"""Alignment -> the share of a text that lies before its anchor."""


class Label(NamedTuple):
    """The name of a point or a line, and its place in data coordinates."""

    x: float
    y: float
    text: str


def label_points(axes: Axes, labels: Sequence[Label]) -> None:
    """Write names next to points, where they cover neither another point nor another name if there is room.

    Call it after ``finish``, when the axes have their final size.
    """
    places = [("left", "center", 5, 0), ("right", "center", -5, 0)]
    places += [
        (side, vertical, 0, sign * up)
        for up in (5, 11, 17)
        for vertical, sign in (("bottom", 1), ("top", -1))
        for side in ("center", "left", "right")
    ]
    frame = axes.get_window_extent()
    points = [axes.transData.transform((label.x, label.y)) for label in labels]
    covered = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points]
    card = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
    pixels = axes.figure.dpi / 72  # of a point
    for label in sorted(labels, key=lambda label: -label.y):
        text = axes.annotate(
            fit(label.text, 2.0),
            (label.x, label.y),
            (0, 0),
            textcoords="offset points",
            horizontalalignment="left",
            verticalalignment="bottom",
            fontsize=FINE,
            bbox=card,
        )
        size = text.get_window_extent()
        boxes = {
            (side, vertical, right, up): size.translated(
                right * pixels - _BEFORE[side] * size.width, up * pixels - _BEFORE[vertical] * size.height
            )
            for side, vertical, right, up in places
        }

        def cost(box: Bbox) -> float:
            return sum(_shared(box, other) for other in covered) + 10 * (_area(box) - _shared(box, frame))

        side, vertical, *offset = min(boxes, key=lambda place: cost(boxes[place]))
        text.set(horizontalalignment=side, verticalalignment=vertical, position=offset)
        covered.append(text.get_window_extent())


def _area(box: Bbox) -> float:
    return float(box.width * box.height)


def _shared(box: Bbox, other: Bbox) -> float:
    """Return the area that two boxes share."""
    both = Bbox.intersection(box, other)
    return _area(both) if both else 0.0


def label_ends(axes: Axes, labels: Sequence[Label], inches: float) -> None:
    """Write the names of lines to the right of the axes, each at its end or below the name above it.

    Call it before ``finish``, which makes room, and after the y axis has its limits.
    """
    frame = axes.get_window_extent()
    line = 1.2 * FINE * axes.figure.dpi / 72 / frame.height
    above = math.inf
    for label in sorted(labels, key=lambda label: -label.y):
        at = (axes.transData.transform((label.x, label.y))[1] - frame.y0) / frame.height
        above = min(float(at), above - line)
        axes.annotate(
            fit(label.text, inches),
            (1, above),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            verticalalignment="center",
            fontsize=FINE,
            annotation_clip=False,
        )
