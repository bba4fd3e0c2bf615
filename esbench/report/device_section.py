"""A device's section of the README: NESgpu's tables, published figures beside them, the rest of a step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from esbench.report import captions
from esbench.report.beside import beside
from esbench.report.footnotes import NOTHING
from esbench.report.grid import PEAK, grids
from esbench.report.ranking import NOISE
from esbench.report.tables import TIME, Section, figures_only, section, time_sections
from esbench.report.words import escape, listed
from esbench.schema import Phase, Run

_LAYERS = ("Linear", "Conv2d")
_PHASES: tuple[Phase, ...] = ("sample", "update")


@dataclass(frozen=True)
class DeviceSection:
    """The section of one device.

    Attributes:
        run: a run of the suite readme, whose figures these are.
        published: what others published of the same layers.
        page: where all tables of the run are, empty where they are nowhere.
        show: what prints a section of tables.
        brief: whether the forward is all there is, beside others' figures of it.

    """

    run: Run
    published: Sequence[Run]
    page: str
    show: Callable[[Section], str]
    brief: bool = False

    def text(self) -> str:
        """The section: what a forward costs, by operator, and folded away the times and the other phases."""
        here = self.run.header.environment
        kind = "a CPU" if here.device == "cpu" else "a GPU"
        parts = [f"## On {kind}: {escape(captions.device(self.run))}"]
        for operator in _LAYERS:
            parts += self._operator(operator)
        parts.append(f"[All tables of this run]({quote(self.page)})." if self.page else "")
        return "\n" + "\n\n".join(part.strip() for part in parts if part.strip()) + "\n\n"

    def _operator(self, operator: str) -> Iterable[str]:
        forward = time_sections(self.run, operator, "forward")
        if not forward:
            return
        costs, times = (_only(forward[0], is_multiple=found) for found in (True, False))
        yield self.show(costs if costs.blocks else forward[0])
        if costs.blocks:
            yield self._folded(f"{operator}: times in milliseconds, and speed against naive", [times])
        near = beside(self.run, *self.published)
        near = [one for one in near if one.title.startswith(f"{operator}, forward")]
        names = listed([captions.device(run) for run in self.published])
        yield self._folded(f"{operator}: beside what others published for {names}", near)
        if self.brief:
            return
        phases = [time_sections(self.run, operator, phase)[:1] for phase in _PHASES]
        shown = [_of_cells(figures_only(one)) for found in phases for one in found]
        yield self._folded(f"{operator}: drawing the noise, and the update", shown)
        yield self._folded(f"{operator}: memory", self._memory(operator))

    def _memory(self, operator: str) -> list[Section]:
        """The peak of a forward and the noise of a step, of the first number format."""
        every = grids(self.run, operator, "")
        peak = [grid for grid in every if (grid.phase, grid.metric) == ("forward", PEAK)][:1]
        noise = [grid for grid in every if grid.metric == NOISE][:1]
        return [_of_cells(figures_only(section(grid))) for grid in (*peak, *noise)]

    def _folded(self, summary: str, sections: Sequence[Section]) -> str:
        if not sections:
            return ""
        shown = "\n".join(map(self.show, sections))
        return f"<details>\n<summary>{escape(summary)}</summary>\n\n{shown}\n</details>"


def _only(found: Section, *, is_multiple: bool) -> Section:
    """The multiples of base of a section with all its footnotes, or the rest with those of its cells."""
    blocks = tuple(block for block in found.blocks if (block.title == TIME.title) == is_multiple)
    return replace(found, blocks=blocks) if is_multiple else _of_cells(replace(found, blocks=blocks))


def _of_cells(found: Section) -> Section:
    """A section without remarks on its samples, but on those that are single: its page has all of them."""
    kept = tuple(note for note in found.footnotes if note.startswith(("[", NOTHING, "one sample")))
    return replace(found, footnotes=kept)
