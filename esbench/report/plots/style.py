"""The style that all plots share: sizes, colours, markers, axes, and the Figure that lays out its panels.

Plots read in greyscale (markers, line styles and hatches differ, and colours run from dark to light), fit the
column or the page of a paper, and are white cards on a dark page. The same data gives the same bytes.
"""

import math
import re
import textwrap
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib import figure, textpath
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.style import context
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from esbench.report import captions
from esbench.report.analysis import roofline
from esbench.report.analysis.pivot import Grid
from esbench.report.text import counted, one_line
from esbench.schema import Case, Environment, Measurement, Row

COLUMN, PAGE = 3.3, 6.9
"""Widths of a figure in inches."""
WIDTHS = {"column": COLUMN, "page": PAGE}

TITLE, LABEL, FINE = 8.0, 7.0, 6.0
"""Font sizes in points: of the title, of axes, of everything else; the last two also in the style file."""
_FAMILY = "DejaVu Sans"
_POINTS = 72
"""Points per inch."""
_EDGE, _GAP = 0.06, 0.05
"""Inches around the figure and between its parts."""
_OUTDENT = 0.16
"""Inches by which the legend of a panel begins left of its axes."""
_LEGEND_HANDLE = 2.7 * FINE / _POINTS
"""Inches of a line in a legend and the space after it."""

Line = Literal["-", "--", "-.", ":"]
Color = tuple[float, float, float, float]

MARKERS = ("o", "s", "^", "D", "v", "P", "*", "<", ">", "X")
LINES: tuple[Line, ...] = ("-", "--", "-.", ":")
BLACK: Color = (0.0, 0.0, 0.0, 1.0)
WHITE: Color = (1.0, 1.0, 1.0, 1.0)
GREY = "0.45"
"""The colour of bounds."""

_SMALLEST, _LARGEST = 1e-30, 1e30
_DECADE = 5.0
"""Axes that span less than this factor have evenly spaced ticks."""

METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""File suffix -> metadata that is left out, because it would differ between machines or days."""

_STYLE = Path(__file__).with_name("esbench.mplstyle")


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style, whatever the user's own matplotlib configuration says; also a decorator."""
    with context(["default", _STYLE]):
        yield


class Look(NamedTuple):
    """What distinguishes a series from its neighbours, in colour and in greyscale."""

    color: Color
    marker: str
    line: Line
    filled: bool = True

    @property
    def point(self) -> dict[str, Any]:
        """Arguments of ``Axes.plot`` for unconnected points."""
        return {
            "linestyle": "none",
            "marker": self.marker,
            "color": self.color,
            "markerfacecolor": self.color if self.filled else WHITE,
            "markeredgewidth": 0.7,
        }


def looks(count: int) -> list[Look]:
    """Return looks for series of one panel: from dark to light, with different markers and line styles."""
    return [
        Look(color, MARKERS[place % len(MARKERS)], LINES[place % len(LINES)], place // len(MARKERS) % 2 == 0)
        for place, color in enumerate(shades(count, 0.0, 0.85))
    ]


def scheme_looks(schemes: Iterable[str]) -> dict[str, Look]:
    """Return one look per scheme, independent of their order."""
    names = sorted(set(schemes))
    return dict(zip(names, looks(len(names)), strict=True))


def shades(count: int, darkest: float, lightest: float) -> list[Color]:
    """Return evenly spaced colours between two positions of the colour map viridis (0 dark, 1 light)."""
    colors = mpl.colormaps["viridis"]
    return [colors(darkest + (lightest - darkest) * k / max(1, count - 1)) for k in range(count)]


def legend_point(look: Look, name: str, size: float = 4.0, edge: Color | None = None) -> Line2D:
    """Return a legend entry for points of this look."""
    return Line2D(
        [], [], **look.point | {"markersize": size, "markeredgecolor": edge or look.color, "label": name}
    )


class Figure(figure.Figure):
    """A figure of a given width, whose height follows from what it shows.

    Draw in its :meth:`panels`, then call :meth:`finish`, all inside :func:`styled`.
    """

    def __init__(self, width: float) -> None:
        """Create an empty figure; ``width`` is in inches."""
        super().__init__(figsize=(width, 1.0), layout="constrained")
        self.title = self.origin = ""
        self.notes: list[str] = []
        self.columns = 0
        self.panel_width = self._panel_height = 0.0

    def panels(self, count: int, columns: int, height: float) -> list[Axes]:
        """Add axes of this height in inches, row by row, in at most ``columns`` columns."""
        rows = math.ceil(count / columns)
        self.columns = columns = math.ceil(count / rows)
        self._panel_height = height
        self.panel_width = (self.get_figwidth() - 2 * _EDGE) / columns - 0.45  # less the labels of the y axis
        self.set_figheight(1.3 * rows * height)
        grid = self.add_gridspec(rows, columns)
        return [self.add_subplot(grid[divmod(place, columns)]) for place in range(count)]

    def panel_title(self, axes: Axes, text: str) -> None:
        """Write a title above a panel, on one line."""
        axes.set_title(fit(text, self.panel_width, LABEL))

    def panel_legend(self, axes: Axes, handles: Sequence[Artist]) -> None:
        """Add a legend below a panel, one entry per line; call it after the x axis has its labels."""
        room = self.panel_width + _OUTDENT - _LEGEND_HANDLE
        labels = (axes.get_window_extent().y0 - _extent(axes.xaxis).y0) / self.dpi
        below = ScaledTranslation(-_OUTDENT, -labels - _GAP, self.dpi_scale_trans)
        axes.legend(
            list(handles),
            [fit(str(one.get_label()), room) for one in handles],
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=axes.transAxes + below,
        )

    def finish(
        self, title: str, origin: str, notes: Sequence[str] = (), handles: Sequence[Artist] = ()
    ) -> None:
        """Add title, legend, notes and origin, choose the height, and lay everything out.

        Args:
            title: what the figure shows.
            origin: where its figures come from.
            notes: remarks, one paragraph each.
            handles: what the panels share, for a legend below all of them.

        """
        self.title, self.origin, self.notes = printable(title), printable(origin), list(notes)
        width = self.get_figwidth()
        room = width - 2 * _EDGE
        left = _EDGE / width
        head = self.suptitle("\n".join(wrap(title, room, TITLE)), x=left, ha="left", va="top", fontsize=TITLE)
        lines = [line for text in (*notes, origin) for line in wrap(text, room, FINE)]
        foot = self.text(left, 0, "\n".join(lines), va="bottom", fontsize=FINE, color="0.3")
        parts: list[Artist] = [head, foot]
        legend = self._shared_legend(handles, room) if handles else None
        parts += [legend] if legend else []
        tall = {part: _extent(part).height / self.dpi for part in parts}
        body = sum(map(self._row_inches, self._rows()))
        height = body + sum(tall.values()) + 2 * _EDGE + 2 * len(parts) * _GAP
        self.set_figheight(height)
        head.set_y(1 - _EDGE / height)
        foot.set_y(_EDGE / height)
        if legend:
            legend.set_bbox_to_anchor((left, (_EDGE + tall[foot] + 2 * _GAP) / height))
        for part in parts:
            part.set_in_layout(False)
        low = height - _EDGE - tall[head] - _GAP - body
        engine = ConstrainedLayoutEngine(
            rect=(left, low / height, room / width, body / height), w_pad=0.02, h_pad=0.02
        )
        engine.execute(self)
        self.set_layout_engine("none")
        for axes in self.axes:
            # The solver's last digits differ between processes, and the ids in an SVG depend on them.
            axes.set_position(tuple(round(end, 6) for end in axes.get_position().bounds))

    def write(self, path: Path) -> Path:
        """Write the figure in the format of the file's suffix, with title and origin in its metadata."""
        suffix = path.suffix.lower()
        subject = "Subject" if suffix == ".pdf" else "Description"
        metadata = METADATA[suffix] | ({"Title": self.title, subject: self.origin} if self.title else {})
        with styled():
            small: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if suffix == ".png" else {}
            self.savefig(path, format=suffix[1:], metadata=metadata, **small)
        if suffix == ".svg":
            path.write_text(_compact(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
        return path

    def _rows(self) -> list[list[Axes]]:
        rows: dict[int, list[Axes]] = {}
        for axes in self.axes:
            spec = axes.get_subplotspec()
            rows.setdefault(spec.rowspan.start if spec else 0, []).append(axes)
        return list(rows.values())

    def _row_inches(self, row: Sequence[Axes]) -> float:
        """Return the height of a row of panels with its titles, labels and legends."""
        around = max(_extent(axes).height - axes.get_window_extent().height for axes in row)
        return self._panel_height + around / self.dpi + 2 * _GAP

    def _shared_legend(self, handles: Sequence[Artist], room: float) -> Legend:
        names = [fit(str(one.get_label()), room - _LEGEND_HANDLE) for one in handles]
        space = 1.2 * FINE / _POINTS
        column = max(text_inches(name, FINE) for name in names) + _LEGEND_HANDLE + space
        columns = max(1, min(len(names), int((room + space) / column)))
        return self.legend(
            list(handles), names, loc="lower left", bbox_to_anchor=(0, 0), ncols=columns, handleheight=0.9
        )


def _compact(svg: str) -> str:
    """Return an SVG without matplotlib's comments, indentation and decimals beyond a hundredth of a point.

    Its text, which stays text, is set in the font that it was measured in or one of nearly the same widths.
    """
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = svg.replace(f"font-family: '{_FAMILY}'; ", "")
    svg = svg.replace(
        '<style type="text/css">',
        f"<style type=\"text/css\">text{{font-family: '{_FAMILY}', Verdana, sans-serif}}",
        1,
    )
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _hundredths, tag[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _hundredths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _extent(artist: Artist) -> Any:  # noqa: ANN401  # matplotlib declares that there may be none
    return artist.get_tightbbox()


@cache
def text_inches(text: str, points: float) -> float:
    """Return the width of a printable line in a font of this size."""
    font = FontProperties(family=_FAMILY, size=points)
    return float(textpath.TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]) / _POINTS


def printable(text: str) -> str:
    """Return a text on one line, with a replacement mark for each character that the font lacks."""
    return "".join(one if ord(one) in _glyphs() else "\ufffd" for one in one_line(text))


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=_FAMILY))).get_charmap())


def fit(text: str, inches: float, points: float = FINE) -> str:
    """Return a text on one line of this width; an ellipsis replaces the middle of a longer one.

    The end is kept because options stand there, in which variants of a scheme differ.
    """
    whole = printable(text)
    if text_inches(whole, points) <= inches:
        return whole

    def cut(half: int) -> str:
        return f"{whole[:half]}…{whole[len(whole) - half :]}"

    halves = range(1, (len(whole) + 1) // 2)
    return cut(bisect(halves, inches, key=lambda half: text_inches(cut(half), points)))


def wrap(text: str, inches: float, points: float, most: int = 6) -> list[str]:
    """Return a text wrapped to this width, on at most ``most`` lines."""
    whole = printable(text)
    characters = int(len(whole) * inches / max(inches, text_inches(whole, points))) + 2
    while True:
        lines = textwrap.wrap(whole, characters, max_lines=most, placeholder=" …")
        if all(text_inches(line, points) <= inches for line in lines):
            return lines
        characters -= 1


class _PlainLogLocator(LogLocator):
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, or at fewer where they have no room.

    An axis that spans less than a factor of five has evenly spaced ticks.
    """

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return the ticks between two ends."""
        room = max(3, self.axis.get_tick_space()) if isinstance(self.axis, Axis) else 3
        if vmax < _DECADE * vmin:
            even = MaxNLocator(min(room, 5), steps=[1, 2, 2.5, 5, 10]).tick_values(vmin, vmax)
            return [float(tick) for tick in even if vmin <= tick <= vmax]
        powers = range(math.floor(math.log10(vmin)), math.ceil(math.log10(vmax)))
        for steps in ((1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0**power for power in powers for step in steps]
            ticks = [tick for tick in ticks if vmin <= tick <= vmax]
            if len(ticks) <= room:
                break
        return ticks[:: -(-len(ticks) // room)]


def log_axis(axes: Axes, name: Literal["x", "y"], values: Iterable[float], margin: float = 1.3) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks and some space around these values."""
    ends = [value for value in values if value]
    low, high = min(ends), max(ends)
    room = max(margin, (high / low) ** 0.08)
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low / room, high * room)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(_PlainLogLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def drawable(*values: float) -> bool:
    """Return whether a logarithmic axis has room for all of these."""
    return all(_SMALLEST <= value <= _LARGEST for value in values)


def origin(grid: Grid, cases: Sequence[Case]) -> str:
    """Where the figures of a plot come from: device, commit, dtype, batch, method and run."""
    run, conditions = grid.run, captions.conditions(grid, cases).rstrip(".")
    if captions.is_published(run):
        return f"{captions.source(run)}, {conditions}"
    here = run.header.environment
    commit = f"commit {here.commit[:7]}{'+' if here.dirty else ''}" if here.commit else "commit unknown"
    return f"{device(here)}, {commit}, {conditions}, run {run.header.run_id}"


def device(here: Environment) -> str:
    """Return the name of a device; of a CPU with the number of threads."""
    return here.device_name + (f" ({counted(here.threads, 'thread')})" if here.device == "cpu" else "")


def titled(grid: Grid, text: str) -> str:
    """Return a title, with a warning in front where the run is invalid."""
    return f"{captions.invalid(grid.run)}{grid.operator}{text}"


def part_of(
    shown: Sequence[object], every: Sequence[object], what: str, rest: str = "the table has all"
) -> list[str]:
    """Return a note where only a part is shown."""
    return [f"{len(shown)} of {len(every)} {what}: {rest}"] if len(shown) < len(every) else []


def by_reason(reasons: Mapping[str, str], what: str = "No number") -> list[str]:
    """Return one note per reason, with the names of the variants that share it."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return [f"{what}, {reason}: {', '.join(names)}" for reason, names in found.items()]


def reason_of(row: Row | None, longest: int = 60) -> str:
    """Return why a cell has no number, in at most ``longest`` characters."""
    if isinstance(row, Measurement):
        return "no usable samples"
    return captions.shorten(row.reason, longest) if row else "not measured"


def bound_note(grid: Grid, text: str) -> str:
    """Return a note on the roofline bound, with a warning if calls are faster than the measured peak."""
    beaten = any(roofline.beats_arithmetic(grid.run, row) for _, _, row in grid.cells)
    note = f"Roofline bound: {text} at the measured peaks of the device"
    return f"{note}; some calls are faster: {roofline.DISTURBED}" if beaten else note


FAMILIES = {
    "dense noise": Look(mpl.colors.to_rgba("#202020"), "o", "-"),
    "low rank": Look(mpl.colors.to_rgba("#0072B2"), "s", "--"),
    "sparse": Look(mpl.colors.to_rgba("#009E73"), "^", "-."),
    "shared core": Look(mpl.colors.to_rgba("#D55E00"), "D", ":"),
    "dropout": Look(mpl.colors.to_rgba("#CC79A7"), "v", "--"),
    "other": Look(mpl.colors.to_rgba("#7F7F7F"), "X", "-"),
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


def family(scheme: str) -> str:
    """Return the family of a scheme; a fused kernel belongs to that of the scheme that it computes."""
    return _FAMILY_OF.get(scheme.removeprefix("Fused"), "other")


class Label(NamedTuple):
    """The name of a point or a line, and where it is in data coordinates."""

    x: float
    y: float
    text: str


def label_points(axes: Axes, labels: Sequence[Label]) -> None:
    """Write names beside points, where they cover neither another point nor another name if there is room.

    Call it after ``finish``, when the axes have their final size.
    """
    pixels = axes.figure.dpi / _POINTS
    points = [tuple(axes.transData.transform((label.x, label.y)) / pixels) for label in labels]
    frame = axes.get_window_extent()
    inside = Box(frame.x0 / pixels, frame.y0 / pixels, frame.x1 / pixels, frame.y1 / pixels)
    taken = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    for label, (x, y) in sorted(zip(labels, points, strict=True), key=lambda pair: -pair[1][1]):
        text = fit(label.text, 2.0)
        wide, high = text_inches(text, FINE) * _POINTS, 1.1 * FINE
        offsets = [(5.0, -high / 2), (-5.0 - wide, -high / 2)]
        offsets += [
            (side, up) for up in (5.0, -5.0 - high, 11.0, -11.0 - high) for side in (-wide / 2, 2.0, -wide)
        ]
        boxes = [Box(x + dx, y + dy, x + dx + wide, y + dy + high) for dx, dy in offsets]
        best = min(
            boxes, key=lambda box: (sum(map(box.overlap, taken)) + box.outside(inside), boxes.index(box))
        )
        taken.append(best)
        offset = (best.left - x, best.bottom - y)
        card = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
        axes.annotate(text, (label.x, label.y), offset, textcoords="offset points", fontsize=FINE, bbox=card)


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write the names of lines to the right of the axes, each beside its end and below the one above it.

    The axes shrink to make room. Call it after ``finish``.
    """
    figure_inches = axes.figure.get_figwidth()  # type: ignore[union-attr]  # a panel is in no sub-figure
    texts = {label: fit(label.text, 0.3 * figure_inches) for label in labels}
    room = max(text_inches(text, FINE) for text in texts.values()) + 8 / _POINTS
    left, bottom, width, height = axes.get_position().bounds
    axes.set_position((left, bottom, round(width - room / figure_inches, 6), height))
    pixels, line = axes.figure.dpi / _POINTS, 1.15 * FINE
    frame, above = axes.get_window_extent(), float("inf")
    for label in sorted(labels, key=lambda label: -label.y):
        at = float(axes.transData.transform((label.x, label.y))[1]) / pixels
        above = min(at, above - line)
        axes.annotate(
            texts[label],
            (1, 0),
            (4, above - frame.y0 / pixels),
            xycoords="axes fraction",
            textcoords="offset points",
            verticalalignment="center",
            fontsize=FINE,
        )


class Box(NamedTuple):
    """A rectangle, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """Return the area that two rectangles share."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, wide) * max(0.0, high)

    def outside(self, frame: "Box") -> float:
        """Return the area of this rectangle outside a frame."""
        return (self.right - self.left) * (self.top - self.bottom) - self.overlap(frame)


def warning(grid: Grid) -> str:
    """Return a warning for the front of a title if the run is invalid."""
    return captions.invalid(grid.run)
