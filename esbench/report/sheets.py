"""A sheet: a picture with its title, panels, key, notes and the line that says where its figures come from.

Everything is measured before it is placed, so that nothing is clipped or overlaps at any width.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from esbench.records import Case, Environment, Measurement, Row, Run
from esbench.report import captions
from esbench.report.drawing import DPI, STORED, STORED_DPI, Color, Look, Paper, write
from esbench.report.grid import Grid
from esbench.report.lettering import fit_all, inches, printable, wrap

_EDGE = 0.06
"""Inches around everything."""
_GAP = 0.05
_POINTS = 72
_LEADING = 1.22
_HANDLE = 0.19
"""Inches of a key's line and the space behind it, for each 5 points of its letters."""
_LEFT = 0.16
"""Inches that a key may stand out to the left of its panel."""
_TITLE_LINES, _NOTE_LINES = 5, 6
_UNITS_FOR_HANDLES = 5.0
_GREY = "0.3"
_DIGITS = 6
"""Of a panel's place, as a part of the sheet."""


class Sheet(Figure):
    """A figure on a paper, whose height follows from what is on it."""

    def __init__(self, paper: Paper) -> None:
        """Begin with an empty sheet, inside :func:`~esbench.report.drawing.styled`."""
        super().__init__(figsize=(paper.inches, 1.0), layout="constrained")
        self.paper = paper
        self.heading = ""
        self.origin = ""
        self.notes: list[str] = []

    @property
    def room(self) -> float:
        """Inches between the edges."""
        return self.paper.inches - 2 * _EDGE

    def panels(self, count: int, across: int) -> list[Axes]:
        """So many panels, so many of them side by side where there are as many."""
        columns = max(1, min(count, across))
        rows = math.ceil(count / columns)
        grid = self.add_gridspec(rows, columns)
        return [self.add_subplot(grid[place // columns, place % columns]) for place in range(count)]

    def key_below(self, axes: Axes, handles: Sequence[Artist], room: float, *, labelled: bool = True) -> None:
        """Name what is in a panel below it, in lines of at most so many inches."""
        if not handles:
            return
        size = self.paper.fine
        names = fit_all([str(one.get_label()) for one in handles], room + _LEFT - self._handle, size)
        letters = self.paper.small * (2 * _LEADING if labelled else _LEADING) + 6
        below = ScaledTranslation(-_LEFT, -letters / _POINTS, self.dpi_scale_trans)
        axes.legend(
            list(handles),
            names,
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=axes.transAxes + below,
        )

    def key_inches(self, lines: int, *, labelled: bool = True) -> float:
        """How much a panel needs below its axes for its ticks, its label and a key of so many lines."""
        letters = self.paper.small * (2 * _LEADING if labelled else _LEADING) + 6
        return (letters + lines * (self.paper.fine * (1.16 + 0.3))) / _POINTS

    @property
    def title_inches(self) -> float:
        """How much the title of a panel needs."""
        return (self.paper.small * _LEADING + 4) / _POINTS

    def finish(
        self,
        body: float,
        title: str,
        origin: str,
        notes: Sequence[str] = (),
        handles: Sequence[Artist] = (),
    ) -> None:
        """Write the title above the panels, below them key, notes and origin, and make the sheet so high.

        Args:
            body: inches for the panels.
            title: what the picture shows.
            origin: where its figures come from.
            notes: what else must be said, a paragraph each.
            handles: what the panels share, for one key.

        """
        paper, width = self.paper, self.paper.inches
        self.heading, self.origin, self.notes = title, origin, list(notes)
        above = wrap(title, self.room, paper.text, _TITLE_LINES)
        below = [line for note in notes for line in wrap(note, self.room, paper.fine, _NOTE_LINES)]
        last = wrap(origin, self.room, paper.fine, _NOTE_LINES)
        top = _EDGE + self._height(len(above), paper.text) + _GAP
        foot = _EDGE + self._height(len(below) + len(last), paper.fine) + _GAP
        key = self._key(handles)
        held = key.get_window_extent().height / self.dpi if key else 0.0
        foot_and_key = foot + (held + 2 * _GAP if key else 0.0)
        height = top + body + foot_and_key
        self.set_figheight(height)
        if key:
            key.set_bbox_to_anchor((_EDGE / width, (foot + _GAP) / height))
        self.suptitle(
            "\n".join(above), x=_EDGE / width, y=1 - _EDGE / height, ha="left", va="top", fontsize=paper.text
        ).set_in_layout(False)
        words = self.text(
            _EDGE / width, _EDGE / height, "\n".join([*below, *last]), va="bottom", fontsize=paper.fine
        )
        words.set(color=_GREY, linespacing=_LEADING, in_layout=False)
        region = (_EDGE / width, foot_and_key / height, 1 - 2 * _EDGE / width, body / height)
        engine = ConstrainedLayoutEngine(rect=region, w_pad=0.02, h_pad=0.02, hspace=0, wspace=0.02)
        self.set_layout_engine(engine)
        engine.execute(self)
        self.set_layout_engine("none")  # once is enough for all files
        for axes in self.axes:
            # The solver's last digits are not the same in every process, and the names in an SVG hold them.
            axes.set_position(tuple(round(end, _DIGITS) for end in axes.get_position().bounds))

    def save(self, stem: Path, kinds: Sequence[str] = STORED) -> list[Path]:
        """Write the sheet as files of a report, one of each kind; the same sheet gives the same bytes."""
        paths = [stem.with_name(f"{stem.name}{kind}") for kind in kinds]
        for path in paths:
            self.write(path, STORED_DPI)
        return paths

    def write(self, path: Path, dpi: int = DPI) -> None:
        """Write the sheet as one file, of the kind that its name ends in."""
        write(self, path, printable(self.heading), printable(self.origin), dpi)

    @property
    def _handle(self) -> float:
        return _HANDLE * self.paper.fine / _UNITS_FOR_HANDLES

    def _height(self, lines: int, points: float) -> float:
        return lines * points * _LEADING / _POINTS

    def _key(self, handles: Sequence[Artist]) -> Legend | None:
        if not handles:
            return None
        size = self.paper.fine
        names = fit_all([str(one.get_label()) for one in handles], self.room - self._handle, size)
        widest = max(inches(name, size) for name in names) + self._handle + 1.2 * size / _POINTS
        columns = max(1, min(len(names), int((self.room + 1.2 * size / _POINTS) / widest)))
        key = self.legend(
            list(handles), names, loc="lower left", bbox_to_anchor=(0, 0), ncols=columns, handleheight=0.9
        )
        key.set_in_layout(False)
        return key


def mark(look: Look, name: str, size: float = 4.0, edge: Color | None = None) -> Line2D:
    """A mark for a key."""
    return Line2D(
        [],
        [],
        color=look.color,
        marker=look.mark,
        markersize=size,
        markerfacecolor=look.face,
        markeredgecolor=look.color if edge is None else edge,
        linestyle="none",
        label=name,
    )


def origin(grid: Grid, cases: Sequence[Case]) -> str:
    """Where the figures of a picture come from: device, commit, number format, batch, method and run."""
    said = [run_origin(grid.run), captions.conditions(grid, cases).rstrip(".")]
    said += [] if _is_published(grid.run) else [f"run {grid.run.header.run_id}"]
    return ", ".join(said)


def run_origin(run: Run) -> str:
    """The device of a run and the commit that it was taken of."""
    here = run.header.environment
    if _is_published(run):
        return captions.source(run)
    commit = f"commit {here.commit[:7]}{'+' if here.dirty else ''}" if here.commit else "commit unknown"
    return f"{device(here)}, {commit}"


def device(here: Environment) -> str:
    """A device by its name, a processor with its threads."""
    threads = f" ({here.threads} thread{'' if here.threads == 1 else 's'})" if here.device == "cpu" else ""
    return f"{here.device_name}{threads}"


def titled(grid: Grid, text: str) -> str:
    """A title; of a run that must not be used it says so."""
    return f"{captions.invalid(grid.run)}{text}"


def by_reason(reasons: Mapping[str, str], what: str = "No number") -> list[str]:
    """A note that names variants by the reason that they share, nothing where there are none."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return [f"{what}, {reason}: {', '.join(names)}" for reason, names in found.items()]


def short(row: Row | None, longest: int = 28) -> str:
    """Why a cell has no number, in so many characters."""
    if isinstance(row, Measurement):
        return "no usable samples"
    return captions.shorten(row.reason, longest) if row else "not measured"


def _is_published(run: Run) -> bool:
    return any(row.method == captions.PUBLISHED for row in run.measurements)
