"""Generated parts of README.md: the functions that its cog blocks call, and the command that runs them.

Every figure in the README comes from a committed file. The README's first block names the files, so a new run
changes nothing until it is named there.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from html import unescape
from pathlib import Path
from urllib.parse import quote

import cogapp

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.analysis.pivot import PEAK, grids, operators
from esbench.report.analysis.published import read_published
from esbench.report.analysis.ranking import NOISE, RankedVariant, rankings
from esbench.report.formats.markdown import image
from esbench.report.tables import measured, quality
from esbench.report.tables.measured import TIME, figures_only, section, time_sections
from esbench.report.tables.published import beside
from esbench.report.tables.ranking import best_of_each_shape, headline, ranking_section
from esbench.report.tables.recommendation import advise, why_time_misleads
from esbench.report.tables.table import NOTHING, Section
from esbench.report.text import escape, file_name, listed, one_line
from esbench.schema import DENSE, Phase, Run
from esbench.store import read_run, run_name

_SVG_CAPTION = re.compile(r"<dc:(title|description)>(.*?)</dc:\1>", re.DOTALL)
DOCS = "docs"
"""Folder of the pages that README.md links to; their blocks are generated like the README's."""
_LAYERS = ("Linear", "Conv2d")
_PHASES: tuple[Phase, ...] = ("sample", "update")


class ReadmeError(UserError):
    """The README cannot be generated; the message says where and why."""


@dataclass(frozen=True)
class Printing:
    """How blocks are printed, and the tables that they printed, so that figures can be traced."""

    intervals: bool = False
    shown: list[Section] = field(default_factory=list)


_PRINTING: ContextVar[Printing] = ContextVar("printing")
"""That of the README that is being rendered: its blocks create their own page."""


@dataclass(frozen=True)
class Page:
    """The generated blocks of README.md or of a page of the folder docs.

    In the first block: ``page = Page.of(cog.inFile)``.

    Attributes:
        root: folder of the repository, which all file names are relative to.
        to_root: path from the page to that folder, for links.

    """

    root: Path
    to_root: str = ""
    printing: Printing = field(default_factory=Printing)

    @classmethod
    def of(cls, page: str) -> "Page":
        """Return the page in this file."""
        folder, printing = Path(page).parent, _PRINTING.get(Printing())
        return cls(folder.parent, "../", printing) if folder.name == DOCS else cls(folder, "", printing)

    def device(self, file: str, *published_files: str) -> str:
        """Return the section of a device: NESgpu's tables, published figures beside them, the rest of a step.

        Args:
            file: a run of the suite readme.
            published_files: what others published.

        """
        run, published = self._run(file), [self._run(other) for other in published_files]
        kind = "a CPU" if run.header.environment.device == "cpu" else "a GPU"
        parts = [f"## On {kind}: {escape(captions.device(run))}"]
        for operator in _LAYERS:
            parts += self._layer(run, published, operator)
        page = self._page_of(run)
        parts.append(f"[All tables of this run]({self.to_root}{quote(page)})." if page else "")
        return "\n" + "\n\n".join(part.strip() for part in parts if part.strip()) + "\n\n"

    def best_of_each_shape(self, *files: str) -> str:
        """Return the best variant of each shape that these runs rank, and its cost."""
        found = best_of_each_shape([self._run(file) for file in files])
        return self._markdown(", ".join(files), [found] if found else [])

    def picture(self, file: str, run: str) -> str:
        """Return a figure of the reports, with its title and origin as its alternative text.

        Raises:
            ReadmeError: there is no such figure, or it was not drawn from that run.

        """
        try:
            text = (self.root / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{file}: {error}: write it with `esbench report`"
            raise ReadmeError(one_line(message)) from error
        caption = {name: unescape(words) for name, words in _SVG_CAPTION.findall(text)}
        title, origin = caption.get("title"), caption.get("description", "")
        if title is None:
            message = f"{file} has no title: write it with `esbench report`"
            raise ReadmeError(message)
        if run_name(Path(run)) not in origin:
            message = (
                f"{file} is not a figure of run {run_name(Path(run))}, but of: {origin or 'an unknown run'}"
            )
            raise ReadmeError(one_line(message))
        return f"\n{image(self.to_root + file, f'{title} - {origin}')}\n\n"

    def recommendation(self, file: str, case: str) -> str:
        """Return what `esbench recommend --offline` prints for a case of a run.

        Raises:
            ReadmeError: the run does not rank the case.

        """
        run = self._run(file)
        known = (one for operator in operators(run) for one in rankings(run, operator))
        ranking = next((one for one in known if any(case == each.label for each in one.cases)), None)
        chosen = next((each for each in ranking.cases if each.label == case), None) if ranking else None
        advice = advise([run], chosen)[0] if chosen else None
        if advice is None:
            message = f"{file} ranks no case {case!r}"
            raise ReadmeError(message)
        return f"\n```text\n{advice.text().rstrip()}\n```\n\n"

    def headline(self, *files: str) -> str:
        """Return a row per layer: the best scheme of its largest population, beside dense noise and base."""
        found = headline([self._run(file) for file in files])
        if found is None:
            message = f"{', '.join(files)}: no shape has a rate beside that of dense noise"
            raise ReadmeError(message)
        self.printing.shown.append(found)
        table = found.blocks[0].table.markdown(intervals=self.printing.intervals)
        notes = "<br>\n".join(map(escape, found.footnotes))
        return "\n" + "\n\n".join(filter(None, [table, notes, escape(found.origin)])) + "\n\n"

    def nesgpu(self, file: str, published: str) -> str:
        """NESgpu's tables of a run, folded: each multiplier, measured beside published."""
        run, other = self._run(file), self._run(published)
        found = [one for one in beside(run, other) if ", forward:" in one.title]
        names = f"{captions.device(run)} / {captions.device(other)}"
        if not found:
            message = f"{file} and {published} have no shape in common"
            raise ReadmeError(message)
        folded = [
            self._folded(f"{one.title.partition(',')[0]}: {names}", [replace(one, origin="", conditions="")])
            for one in found
        ]
        return "\n" + "\n\n".join(folded) + "\n\n"

    def phases(self, file: str, operator: str, *phases: Phase) -> str:
        """Return the time tables of these phases, by default sample, update and step."""
        chosen = phases or ("sample", "update", "step")
        return self._markdown(file, measured.time_sections(self._run(file), operator, *chosen))

    def figures(self, file: str, operator: str) -> str:
        """Other figures of workloads: accuracy, bytes of gradients, graphs, tensors alive."""
        return self._markdown(file, quality.figure_sections(self._run(file), operator))

    def ranking(self, file: str, case: str = "*", method: str = "*", best: int | None = None) -> str:
        """Return the rankings by n_eff per ms of the cases and timing methods that match these globs.

        With ``best`` only the first ``best`` rows are shown, and those that they are compared with.
        """
        run = self._run(file)
        found = [
            ranking_section(one, each, None if best is None else leading(one.of(each), best))
            for operator in operators(run)
            for one in rankings(run, operator)
            for each in one.cases
            if fnmatchcase(each.label, case) and fnmatchcase(one.grid.method, method)
        ]
        more = (
            "" if best is None else f"The {best} best and what they are compared with; {self._all_rows(run)}"
        )
        return self._markdown(file, found) + (f"{more}\n\n" if more else "")

    def why_time_misleads(self, file: str, case: str) -> str:
        """Return the quality law in ten lines, with the figures of a run's case."""
        return f"\n{why_time_misleads(self._run(file), case)}\n"

    def excerpt(self, file: str, heading: str) -> str:
        """Return the first table below a heading of a generated page.

        Raises:
            ReadmeError: there is no such page, heading or table.

        """
        try:
            _, _, below = (self.root / file).read_text(encoding="utf-8").partition(f"# {heading}\n")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{file}: {error}"
            raise ReadmeError(message) from error
        tables = re.findall(r"(?:^\|.*\n)+", below.partition("\n#")[0], re.MULTILINE)
        if not tables:
            message = f"{file}: there is no table below {heading!r}"
            raise ReadmeError(message)
        return f"\n{tables[0]}\n"

    def _run(self, file: str) -> Run:
        path = self.root / file
        if path.suffix == ".csv":
            return read_published(path)
        run, problems = read_run(path)
        if run is None or problems:
            raise ReadmeError("; ".join(map(str, problems)))
        return run

    def _markdown(self, file: str, sections: list[Section]) -> str:
        if not sections:
            message = f"{self.root / file} has no such table; name another file, operator or phase"
            raise ReadmeError(message)
        return "\n" + "\n".join(map(self._printed, sections)) + "\n"

    def _printed(self, section: Section) -> str:
        self.printing.shown.append(section)
        return section.markdown(intervals=self.printing.intervals)

    def _layer(self, run: Run, published: Sequence[Run], operator: str) -> Iterator[str]:
        """Yield the cost of a forward; folded, its times, what others published, other phases and memory."""
        forward = time_sections(run, operator, "forward")
        if not forward:
            return
        costs, times = (_only(forward[0], is_multiple=found) for found in (True, False))
        yield self._printed(costs if costs.blocks else forward[0])
        if costs.blocks:
            yield self._folded(f"{operator}: times in milliseconds, and speed against naive", [times])
        near = [one for one in beside(run, *published) if one.title.startswith(f"{operator}, forward")]
        names = listed([captions.device(run) for run in published])
        yield self._folded(f"{operator}: beside what others published for {names}", near)
        phases = [one for phase in _PHASES for one in time_sections(run, operator, phase)[:1]]
        shown = [_of_cells(figures_only(one)) for one in phases]
        yield self._folded(f"{operator}: drawing the noise, and the update", shown)
        yield self._folded(f"{operator}: memory", _memory(run, operator))

    def _folded(self, summary: str, sections: Sequence[Section]) -> str:
        if not sections:
            return ""
        shown = "\n".join(map(self._printed, sections))
        return f"<details>\n<summary>{escape(summary)}</summary>\n\n{shown}\n</details>"

    def _page_of(self, run: Run) -> str:
        """Where the reports have all tables of a run's device and suite, nothing where they have none."""
        page = f"reports/{run.header.environment.slug}/{file_name(run.header.suite)}/tables.md"
        return page if (self.root / page).is_file() else ""

    def _all_rows(self, run: Run) -> str:
        page = self._page_of(run)
        return f"[all rows]({self.to_root}{quote(page)})." if page else "`esbench report` writes all rows."


def leading(standings: Sequence[RankedVariant], best: int) -> list[RankedVariant]:
    """Return the first few of a ranking, and dense noise and base, which they are compared with."""
    rest = [one for one in standings[best:] if one.variant.name == DENSE or one.variant.mode == "base"]
    return [*standings[:best], *rest]


def shown(readme: Path) -> list[Section]:
    """Return all tables that the blocks of a README print, with the traces of their figures."""
    printing = Printing()
    _generated(readme, printing)
    return printing.shown


def render(readme: Path, *, check: bool, intervals: bool = False, out: Path | None = None) -> str:
    """Run the cog blocks of a README; return the changes as a unified diff.

    With ``check`` the file stays as it is. With ``intervals`` numbers stand with theirs. ``out`` is the file
    to write, and to compare with, the README itself where none is named.

    Raises:
        ReadmeError: the file cannot be read, or a block raises.

    """
    after = _generated(readme, Printing(intervals))
    target = out or readme
    before = _read(target) if target.exists() else ""
    if after != before and not check:
        target.write_text(after, encoding="utf-8", newline="\n")
    names = (str(target), f"{target} as generated")
    return "".join(
        difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), *names)
    )


def _generated(readme: Path, printing: Printing) -> str:
    """Return the README with the output of its blocks."""
    before = _read(readme)
    token = _PRINTING.set(printing)
    try:
        return cogapp.Cog().process_string(before, fname=str(readme))
    except cogapp.cogapp.CogError as error:
        raise ReadmeError(_error_line(str(error))) from error
    except SyntaxError as error:
        message = f"{readme}: a cog block is not Python: {error.msg}: {(error.text or '').strip()}"
        raise ReadmeError(message) from error
    finally:
        _PRINTING.reset(token)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read: {error}"
        raise ReadmeError(message) from error


def _error_line(error: str) -> str:
    """Of cog's traceback, keep the first frame, which is the block's, and the error."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    block = re.match(r'File "(.+)", line (\d+)', lines[0])
    raised = lines[-1].removeprefix(f"{ReadmeError.__name__}: ")
    return f"{block[1]}:{block[2]}: {raised}" if block else raised


def _memory(run: Run, operator: str) -> list[Section]:
    """Return the peak of a forward and the noise of a step, of the first number format."""
    every = grids(run, operator, "")
    peak = [grid for grid in every if (grid.phase, grid.metric) == ("forward", PEAK)][:1]
    noise = [grid for grid in every if grid.metric == NOISE][:1]
    return [_of_cells(figures_only(section(grid))) for grid in (*peak, *noise)]


def _only(found: Section, *, is_multiple: bool) -> Section:
    """Return only the multiples of base of a section, or only the rest, with its footnotes."""
    blocks = tuple(block for block in found.blocks if (block.title == TIME.title) == is_multiple)
    return replace(found, blocks=blocks) if is_multiple else _of_cells(replace(found, blocks=blocks))


def _of_cells(found: Section) -> Section:
    """Return a section without warnings on its samples; those on single samples stay."""
    kept = tuple(note for note in found.footnotes if note.startswith(("[", NOTHING, "one sample")))
    return replace(found, footnotes=kept)
