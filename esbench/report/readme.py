"""What README.md's cog blocks call, and the command that runs them.

Every figure in the README comes from a committed file through these functions. The README's first
block names the files, so a new run on somebody's machine changes nothing until it is named there.
"""

import difflib
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from html import unescape
from pathlib import Path
from urllib.parse import quote

import cogapp

from esbench.errors import UserError
from esbench.report import figures, published, roofline, tables
from esbench.report.beside import beside
from esbench.report.device_section import DeviceSection
from esbench.report.explanation import why_time_misleads
from esbench.report.formats import image
from esbench.report.glance import glance
from esbench.report.grid import operators
from esbench.report.headline import headline
from esbench.report.pages import console_tables
from esbench.report.ranking import DENSE, RankedVariant, rankings
from esbench.report.words import file_name, one_line
from esbench.schema import Phase, Run
from esbench.store import read_run, run_name

_SVG_CAPTION = re.compile(r"<dc:(title|description)>(.*?)</dc:\1>", re.DOTALL)


class ReadmeError(UserError):
    """The README cannot be generated; the message says where and why."""


@dataclass(frozen=True)
class Printing:
    """How blocks are printed, and all tables that they printed: so each figure can be followed back."""

    intervals: bool = False
    shown: list[tables.Section] = field(default_factory=list)


_PRINTING: ContextVar[Printing] = ContextVar("printing")
"""That of the README that is being rendered: its blocks make a page of their own, and know nothing of it."""


@dataclass(frozen=True)
class Page:
    """The tables of a page; files are named relative to its folder.

    In the first block: ``page = Page.of(cog.inFile)``.
    """

    root: Path
    printing: Printing = field(default_factory=Printing)

    @classmethod
    def of(cls, page: str) -> "Page":
        """The page that lies in this file."""
        return cls(Path(page).parent, _PRINTING.get(Printing()))

    def device(self, file: str, *published_files: str, brief: bool = False) -> str:
        """The section of a device: NESgpu's tables, published figures beside them, the rest of a step.

        Args:
            file: a run of the suite readme.
            published_files: what others published.
            brief: whether the forward is all there is; the page of the run has the rest.

        """
        run, others = self._run(file), [self._run(other) for other in published_files]
        return DeviceSection(run, others, self._page_of(run), self._printed, brief=brief).text()

    def glance(self, *files: str) -> str:
        """Of each shape that one of these runs ranks the best variant, and what it costs."""
        found = glance([self._run(file) for file in files])
        return self._markdown(", ".join(files), [found] if found else [])

    def picture(self, file: str, run: str) -> str:
        """A figure of the reports, with its title and origin as its alternative text.

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
        return f"\n{image(file, f'{title} - {origin}')}\n\n"

    def linear(self, file: str) -> str:
        """The three blocks of the forward of Linear."""
        return self._markdown(file, tables.time_sections(self._run(file), "Linear", "forward"))

    def conv2d(self, file: str) -> str:
        """The three blocks of the forward of Conv2d."""
        return self._markdown(file, tables.time_sections(self._run(file), "Conv2d", "forward"))

    def phases(self, file: str, operator: str, *phases: Phase) -> str:
        """The time tables of other phases: sample, update and step where none is named."""
        chosen = phases or ("sample", "update", "step")
        return self._markdown(file, tables.time_sections(self._run(file), operator, *chosen))

    def figures(self, file: str, operator: str) -> str:
        """What training workloads say of themselves: accuracy, bytes of gradients, graphs, what is alive."""
        return self._markdown(file, figures.sections(self._run(file), operator))

    def memory(self, file: str, operator: str) -> str:
        """The memory tables of an operator."""
        return self._markdown(file, tables.memory_sections(self._run(file), operator))

    def roofline(self, file: str, operator: str) -> str:
        """The percent of the floor of each phase, with bandwidth and arithmetic."""
        return self._markdown(file, roofline.sections(self._run(file), operator))

    def others(self, file: str, operator: str) -> str:
        """What else was measured: launches, utilisation, power, energy."""
        return self._markdown(file, tables.other_sections(self._run(file), operator))

    def headline(self, file: str, case: str = "*", method: str = "*", best: int | None = None) -> str:
        """Effective members per millisecond: of the cases and methods of timing that match these globs.

        With ``best`` only so many rows are shown, and those that they are compared with.
        """
        run = self._run(file)
        found = [
            headline(one, each, None if best is None else leading(one.of(each), best))
            for operator in operators(run)
            for one in rankings(run, operator)
            for each in one.cases
            if fnmatchcase(each.label, case) and fnmatchcase(one.grid.method, method)
        ]
        more = (
            "" if best is None else f"The {best} best and what they are compared with; {self._all_rows(run)}"
        )
        return self._markdown(file, found) + (f"{more}\n\n" if more else "")

    def why_time_misleads(self, file: str, case: str = "*") -> str:
        """The quality law in ten lines, with the figures of a run's case that matches the glob."""
        return f"\n{why_time_misleads(self._run(file), case)}\n"

    def published_beside(self, file: str, *published_files: str) -> str:
        """Measured multipliers beside published ones, for the cells that both have."""
        return self._markdown(file, beside(self._run(file), *map(self._run, published_files)))

    def excerpt(self, file: str, heading: str) -> str:
        """The first table below a heading of a page that is generated itself.

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

    def console(self, file: str) -> str:
        """What the terminal shows after a run."""
        return f"```text\n{console_tables(self._run(file))}```\n"

    def _run(self, file: str) -> Run:
        path = self.root / file
        run, problems = published.read_published(path) if path.suffix == ".csv" else read_run(path)
        if run is None or problems:
            raise ReadmeError("; ".join(map(str, problems)))
        return run

    def _markdown(self, file: str, sections: list[tables.Section]) -> str:
        if not sections:
            message = f"{self.root / file} holds no such table; name another file, operator or phase"
            raise ReadmeError(message)
        return "\n" + "\n".join(map(self._printed, sections)) + "\n"

    def _printed(self, section: tables.Section) -> str:
        self.printing.shown.append(section)
        return section.markdown(style=tables.COMPACT, intervals=self.printing.intervals)

    def _page_of(self, run: Run) -> str:
        """Where the reports have all tables of a run's device and suite, nothing where they have none."""
        page = f"reports/{run.header.environment.slug}/{file_name(run.header.suite)}/tables.md"
        return page if (self.root / page).is_file() else ""

    def _all_rows(self, run: Run) -> str:
        page = self._page_of(run)
        return f"[all rows]({quote(page)})." if page else "`esbench report` writes all rows."


def leading(standings: Sequence[RankedVariant], best: int) -> list[RankedVariant]:
    """The first of a ranking, and of the rest what they are compared with: dense noise and base."""
    rest = [one for one in standings[best:] if one.variant.name == DENSE or one.variant.mode == "base"]
    return [*standings[:best], *rest]


def shown(readme: Path) -> list[tables.Section]:
    """All tables that the blocks of a README print, with where each of their figures comes from."""
    printing = Printing()
    _generated(readme, printing)
    return printing.shown


def render(readme: Path, *, check: bool, intervals: bool = False, out: Path | None = None) -> str:
    """Run the cog blocks of a README; return what changes, as a unified diff, empty where nothing does.

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
    """The README as its blocks write it."""
    before = _read(readme)
    token = _PRINTING.set(printing)
    try:
        return cogapp.Cog().process_string(before, fname=str(readme))
    except cogapp.cogapp.CogError as error:
        raise ReadmeError(_in_one_line(str(error))) from error
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


def _in_one_line(error: str) -> str:
    """Cog writes a stack of frames: keep the first, which is the block's, and what was raised."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    block = re.match(r'File "(.+)", line (\d+)', lines[0])
    raised = lines[-1].removeprefix(f"{ReadmeError.__name__}: ")
    return f"{block[1]}:{block[2]}: {raised}" if block else raised
