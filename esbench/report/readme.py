"""What README.md's cog blocks call, and the command that runs them.

Every figure in the README comes from a committed file through these functions. The README's first
block names the files, so a new run on somebody's machine changes nothing until it is named there.
"""

import difflib
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import cogapp

from esbench.errors import UserError
from esbench.records import Phase, Run
from esbench.report import figures, published, roofline, tables
from esbench.report.beside import beside
from esbench.report.explanation import why_time_misleads
from esbench.report.grid import operators
from esbench.report.pages import console_tables
from esbench.report.quality import headline
from esbench.report.ranking import rankings
from esbench.store import read_run


class ReadmeError(UserError):
    """The README cannot be generated; the message says where and why."""


@dataclass(frozen=True)
class Page:
    """The tables of a page; files are named relative to its folder.

    In the first block: ``page = Page.of(cog.inFile)``.
    """

    root: Path

    @classmethod
    def of(cls, page: str) -> "Page":
        """The page that lies in this file."""
        return cls(Path(page).parent)

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

    def headline(self, file: str, case: str = "*", method: str = "*") -> str:
        """Effective members per millisecond: of the cases and methods of timing that match these globs."""
        run = self._run(file)
        found = [
            headline(one, each)
            for operator in operators(run)
            for one in rankings(run, operator)
            for each in one.cases
            if fnmatchcase(each.label, case) and fnmatchcase(one.grid.method, method)
        ]
        return self._markdown(file, found)

    def why_time_misleads(self, file: str, case: str = "*") -> str:
        """The quality law in ten lines, with the figures of a run's case that matches the glob."""
        return f"\n{why_time_misleads(self._run(file), case)}\n"

    def published_beside(self, file: str, published_file: str) -> str:
        """Measured multipliers beside published ones, for the cells that both have."""
        return self._markdown(file, beside(self._run(file), self._run(published_file)))

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
        return "\n" + "\n".join(section.markdown() for section in sections) + "\n"


def render(readme: Path, *, check: bool) -> str:
    """Run the cog blocks of a README; return what changes, as a unified diff, empty where nothing does.

    With ``check`` the file stays as it is.

    Raises:
        ReadmeError: the file cannot be read, or a block raises.

    """
    try:
        before = readme.read_text(encoding="utf-8")
        after = cogapp.Cog().process_string(before, fname=str(readme))
    except (OSError, UnicodeDecodeError) as error:
        message = f"{readme} cannot be read: {error}"
        raise ReadmeError(message) from error
    except cogapp.cogapp.CogError as error:
        raise ReadmeError(_in_one_line(str(error))) from error
    except SyntaxError as error:
        message = f"{readme}: a cog block is not Python: {error.msg}: {(error.text or '').strip()}"
        raise ReadmeError(message) from error
    if after != before and not check:
        readme.write_text(after, encoding="utf-8")
    names = (str(readme), f"{readme} as generated")
    return "".join(
        difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), *names)
    )


def _in_one_line(error: str) -> str:
    """Cog writes a stack of frames: keep the first, which is the block's, and what was raised."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    block = re.match(r'File "(.+)", line (\d+)', lines[0])
    raised = lines[-1].removeprefix(f"{ReadmeError.__name__}: ")
    return f"{block[1]}:{block[2]}: {raised}" if block else raised
