"""Generated parts of README.md: the functions that its cog blocks call, and the command that runs them.

Every number in the README comes from a committed file. The README's first block names the files, so a new run
changes nothing until it is named there.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from html import unescape
from pathlib import Path

import cogapp

from esbench import compiled
from esbench.errors import UserError
from esbench.report import captions
from esbench.report.analysis.pivot import PEAK, grids, operators
from esbench.report.analysis.ranking import NOISE, rankings, recommend
from esbench.report.formats.markdown import image
from esbench.report.tables import measured, peers, quality, recommendation
from esbench.report.tables.measured import section, without_multipliers
from esbench.report.tables.published import published_sections
from esbench.report.tables.ranking import best_schemes, ranking_section
from esbench.report.tables.table import Section
from esbench.schema import Phase, Run
from esbench.store import read_run, run_files, run_name, summarize_problems
from esbench.studies import kernel_limits
from esbench.studies.convolution_limits import convolution_table
from esbench.studies.digits import trained_with
from esbench.studies.kernels import newest_runs
from esbench.text import escape, one_line

_SVG_CAPTION = re.compile(r"<dc:(title|description)>(.*?)</dc:\1>", re.DOTALL)
DOCS = "docs"
"""Folder of the pages that README.md links to; their blocks are generated like the README's."""
_LAYERS = ("Linear", "Conv2d")


@dataclass(frozen=True)
class Page:
    """The generated blocks of README.md or of a page of the folder docs.

    In the first block: ``page = Page.of(cog.inFile)``. A method raises a UserError if its file has no such
    figure, table or numbers.

    Attributes:
        root: folder of the repository, which all file names are relative to.
        to_root: path from the page to that folder, for links.
    """

    root: Path
    to_root: str = ""

    @classmethod
    def of(cls, page: str) -> "Page":
        """Return the page in this file: README.md in the root of the repository, or a file in docs/."""
        folder = Path(page).parent
        return cls(folder.parent, "../") if folder.name == DOCS else cls(folder)

    def picture(self, file: str, run: str) -> str:
        """Return a figure of ``run`` in the reports; its title and origin are the alternative text."""
        try:
            text = (self.root / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{file}: {error}: write it with `esbench report`"
            raise UserError(one_line(message)) from error
        caption = {name: unescape(words) for name, words in _SVG_CAPTION.findall(text)}
        title, origin = caption.get("title"), caption.get("description", "")
        if title is None:
            raise UserError(f"{file} has no title: write it with `esbench report`")
        if run_name(Path(run)) not in origin:
            message = (
                f"{file} is not a figure of run {run_name(Path(run))}, but of {origin or 'an unknown run'}: "
                "write it again with `esbench report`"
            )
            raise UserError(one_line(message))
        return f"\n{image(self.to_root + file, f'{title} - {origin}')}\n\n"

    def recommendation(self, file: str, label: str) -> str:
        """Return what `esbench recommend --offline` prints for a layer: ``Linear(64, 64) members=16384``."""
        run = self._run(file)
        cases = [case for name in operators(run) for ranking in rankings(run, name) for case in ranking.cases]
        answer = next((recommend([run], case) for case in cases if case.label == label), None)
        if answer is None or not answer.recommended:
            ranked = ", ".join(difflib.get_close_matches(label, [case.label for case in cases], cutoff=0))
            raise UserError(f"{file} has no n_eff per ms for {label!r}: use one of {ranked or 'another run'}")
        best = answer.recommended[0]
        doc = run.header.docs.get(best.variant.scheme)
        modules = {best.variant: doc.module} if doc else {}  # to import its scheme from
        code = recommendation.training_code({"": best}, modules)
        trained = partial(trained_with, self.root / "results")
        text = f"{recommendation.answer(answer)}\n{code}\n\n{recommendation.figures([answer], trained)}"
        return f"\n```text\n{text}\n```\n\n"

    def best_schemes(self, *files: str, largest_only: bool = True) -> str:
        """Return the best scheme of each shape, compared with dense noise and the plain layer.

        Raises:
            UserError: no run ranks dense noise.
        """
        table_section = best_schemes([self._run(file) for file in files], _LAYERS, largest_only=largest_only)
        if table_section is None:
            raise UserError(f"{', '.join(files)}: dense noise has no n_eff per ms on any case")
        return _table_and_notes(table_section)

    def published(self, file: str, *published_files: str, operator: str = "*") -> str:
        """Return the forward's multipliers of a run next to published ones, folded for each operator.

        ``operator`` is a glob over their names.
        """
        run, published = self._run(file), [self._run(name) for name in published_files]
        all_sections = published_sections(run, *published)
        forward = [part for part in all_sections if ", forward:" in part.title]
        sections = [part for part in forward if fnmatchcase(part.title.partition(",")[0], operator)]
        if not sections:
            raise UserError(
                f"no variant has a time of its forward on the same shape in {file} and in "
                f"{', '.join(published_files)}"
            )
        names = " / ".join(map(captions.device, (run, *published)))
        parts = []
        for table_section in sections:
            summary = escape(f"{table_section.title.partition(',')[0]}: {names}")
            table = replace(table_section, origin="", conditions="").markdown()
            parts.append(f"<details>\n<summary>{summary}</summary>\n\n{table}\n</details>")
        return "\n" + "\n\n".join(parts) + "\n\n"

    def memory(self, file: str, operator: str) -> str:
        """Return the tables of the peak memory of a forward, and of the noise of a step."""
        wanted = {("forward", PEAK), ("sample", NOISE)}
        all_grids = grids(self._run(file), operator, "")
        chosen = [grid for grid in all_grids if (grid.phase, grid.metric) in wanted]
        return self._markdown(file, [without_multipliers(section(grid)) for grid in chosen])

    def phases(self, file: str, operator: str, *phases: Phase) -> str:
        """Return the time tables of these phases, by default sample, update and step."""
        chosen = phases or ("sample", "update", "step")
        return self._markdown(file, measured.time_sections(self._run(file), operator, *chosen))

    def metrics(self, file: str, operator: str) -> str:
        """Return the other metrics of workloads: accuracy, bytes of gradients, graphs, tensors alive."""
        return self._markdown(file, quality.metric_sections(self._run(file), operator))

    def ranking(self, file: str, case: str = "*", variants: Sequence[str] = ("*",)) -> str:
        """Return the rankings by n_eff per ms of the cases and variants that match globs."""
        run, sections = self._run(file), []
        all_rankings = [ranking for operator in operators(run) for ranking in rankings(run, operator)]
        for ranking in all_rankings:
            for ranked_case in ranking.cases:
                if fnmatchcase(ranked_case.label, case):
                    operator, every = ranked_case.operator, ranking.of(ranked_case)
                    chosen = [ranked for ranked in every if ranked.variant.matches(variants, operator)]
                    sections.append(ranking_section(ranking, ranked_case, chosen))
        return self._markdown(file, sections)

    def peers(self, file: str) -> str:
        """Return the variant of each library that is fastest with the most evaluations, of suite peers.

        Raises:
            UserError: the run has no generations.
        """
        run = self._run(file)
        table_section = peers.summary(run)
        if table_section is None:
            raise UserError(f"{file} has no generations: name a run of suite peers")
        return _table_and_notes(table_section)

    def generations(self, file: str) -> str:
        """Return all tables of a run of suite peers."""
        return self._markdown(file, peers.peer_sections(self._run(file)))

    def kernel_limits(self, device: str) -> str:
        """Return the floors and estimates of fused kernels, with the newest runs in a folder of results.

        Raises:
            UserError: the record of compiled kernels or a run cannot be read.
        """
        record = compiled.read(self.root / compiled.FILE)
        results = self.root / "results"
        files = [path for path in run_files(results) if path.parent.name == device]
        runs = [self._run(str(path.relative_to(self.root))) for path in files]
        origin = f"Compiled by triton {record.triton} for compute capability 9.0."
        return f"\n{origin}\n\n{kernel_limits.tables(record, newest_runs(runs))}\n"

    def convolution_limits(self) -> str:
        """Return the floors of convolutions with noise.

        Raises:
            UserError: the record of compiled kernels cannot be read.
        """
        return f"\n{convolution_table(compiled.read(self.root / compiled.FILE))}\n\n"

    def excerpt(self, file: str, heading: str) -> str:
        """Return the first table below a heading of a generated page.

        Raises:
            UserError: there is no such page, heading or table.
        """
        try:
            _, _, below = (self.root / file).read_text(encoding="utf-8").partition(f"# {heading}\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: {error}") from error
        tables = re.findall(r"(?:^\|.*\n)+", below.partition("\n#")[0], re.MULTILINE)
        if not tables:
            raise UserError(f"{file}: there is no table below {heading!r}")
        return f"\n{tables[0]}\n"

    def _run(self, file: str) -> Run:
        run, problems = read_run(self.root / file)
        if run is None or problems:
            raise UserError("; ".join(summarize_problems(problems)))
        return run

    def _markdown(self, file: str, sections: list[Section]) -> str:
        if not sections:
            raise UserError(
                f"{self.root / file} has no results for a block: change the file, operator or phase that "
                "the block names"
            )
        return "\n" + "\n".join(section.markdown() for section in sections) + "\n"


def render(readme: Path, *, check: bool) -> str:
    """Run the cog blocks of a README; return the changes as a unified diff. ``check`` writes nothing.

    Raises:
        UserError: the file cannot be read, or a block raises.
    """
    try:
        before = readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{readme} cannot be read: {error}") from error
    try:
        after = cogapp.Cog().process_string(before, fname=str(readme))
    except cogapp.cogapp.CogError as error:
        raise UserError(_error_line(str(error))) from error
    except SyntaxError as error:
        raise UserError(
            f"{readme}: a cog block is not valid Python: {error.msg}: {(error.text or '').strip()}"
        ) from error
    if after != before and not check:
        readme.write_text(after, encoding="utf-8", newline="\n")
    names = (str(readme), f"{readme} as generated")
    return "".join(
        difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), *names)
    )


def _table_and_notes(section: Section) -> str:
    """Return a section of one table as Markdown without a heading: the table, its footnotes, its origin."""
    table, notes = section.blocks[0].table.markdown(), "<br>\n".join(map(escape, section.footnotes))
    return "\n" + "\n\n".join(filter(None, [table, notes, escape(section.origin)])) + "\n\n"


def _error_line(error: str) -> str:
    """Return the file and line of the failed block, and the last line of cog's traceback."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    block = re.match(r'File "(.+)", line (\d+)', lines[0])
    raised = lines[-1].removeprefix(f"{UserError.__name__}: ")
    return f"{block[1]}:{block[2]}: {raised}" if block else raised
