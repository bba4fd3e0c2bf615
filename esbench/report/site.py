"""The tables of a run on the terminal, and the folder of reports."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from esbench.errors import UserError
from esbench.report import captions, details, runs_page
from esbench.report.accuracy import render_accuracy
from esbench.report.analysis.pivot import LARGEST, PEAK, grids, operators
from esbench.report.analysis.published import read_all_published
from esbench.report.analysis.run_selection import RunSelection, select_runs
from esbench.report.digits import render_digits
from esbench.report.formats import Page, Style, image, write, write_bibliography, write_page
from esbench.report.history_pages import render_histories
from esbench.report.kernels import render_kernels
from esbench.report.tables import measured, roofline
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import ranking_sections
from esbench.report.tables.table import Section
from esbench.report.text import cut, file_name, one_line
from esbench.report.web.render import render_page
from esbench.schema import Run
from esbench.store import PUBLISHED, Problem
from esbench.studies import gate_power

if TYPE_CHECKING:
    from collections.abc import Callable

_ON_CONSOLE = {PEAK, LARGEST, "noise_bytes", "launches", "utilization_percent", "energy_j"}
"""The metrics that a terminal shows besides times."""


def console_tables(run: Run) -> str:
    """The text for a terminal: rankings, times of the forward, other figures."""
    parts = [one_line(captions.origin(run))]
    for operator in operators(run):
        others = measured.time_sections(run, operator, "sample", "update", "step")
        others += [measured.section(grid) for grid in grids(run, operator, "") if grid.metric in _ON_CONSOLE]
        sections = measured.time_sections(run, operator, "forward") + list(map(measured.figures_only, others))
        # Without times there is no ranking: quality is shown instead.
        quality = ranking_sections(run, operator) or quality_sections(run, operator)
        parts += [section.text() for section in [*quality, *sections]]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def all_sections(run: Run) -> list[Section]:
    """All tables of a run: quality, times, rooflines, memory, other metrics."""
    found: list[Section] = []
    for operator in operators(run):
        found += quality_sections(run, operator)
        found += measured.time_sections(run, operator) + roofline.sections(run, operator)
        found += measured.other_time_sections(run, operator) + measured.memory_sections(run, operator)
        found += measured.other_sections(run, operator)
    return found


def render_reports(
    results: Path, out: Path, style: Style | None = None, device: str | None = None
) -> tuple[list[Path], list[Problem]]:
    """Render the newest whole run of each suite on each device, and what others published: :func:`render`.

    ``device`` is the only device to render, by its short name, None for all.
    """
    return render(selection(results, out, device), results, out, style or Style())


def selection(results: Path, out: Path, device: str | None = None) -> RunSelection:
    """The runs below ``results``, with the pages below ``out`` that they belong on."""
    return select_runs(results, lambda run: _folder(run, out), device)


def render(found: RunSelection, results: Path, out: Path, style: Style) -> tuple[list[Path], list[Problem]]:
    """Write the pages of these runs, and of what else lies under the results.

    Writes ``<out>/<device>/<suite>/tables.md`` with its plots and ``times.csv`` where it has times,
    ``<out>/<device>/history.md`` where there are runs enough, ``<out>/runs.md``, which says which runs these
    are and why others are not, and ``<out>/published.md``, ``<out>/accuracy.md``, ``<out>/digits.md``,
    ``<out>/gate.md`` and ``<out>/kernels.md``; and ``<out>/index.html``, the page for a browser. In another
    format than Markdown these are the same pages but for histories, pictures, ``times.csv`` and
    ``index.html``, and for LaTeX there is ``references.bib``. The same results give the same bytes. A run in
    a number format that was asked for has the page ``<suite>-<dtype>``. A newer run that was passed over is a
    problem by which nothing is lost.
    """
    problems = found.problems
    written: list[Path] = []
    for folder, run in found.pages.items():
        written += _render_run(run, folder, style)
    if found.pages:
        behind = Page(out / runs_page.NAME, runs_page.NAME, runs_page.TITLE, [], runs_page.sections(found))
        written.append(write_page(behind, style))
    others, more = read_all_published(results / PUBLISHED)
    if others:
        sections = [section for run in others for section in all_sections(run)]
        written.append(
            write_page(Page(out / PUBLISHED, PUBLISHED, "Published by others", others, sections), style)
        )
    written += write_bibliography([*found.pages.values(), *others], out, style)
    if style.is_whole:
        histories, not_written = render_histories(found.runs, out)
        written += histories
        problems += not_written
        written += render_page([*found.pages.values(), *others], results, out)
    rest: tuple[Callable[[], list[Path]], ...] = (
        lambda: render_accuracy(results, out, found.runs, style),
        lambda: render_digits(results, out, style),
        lambda: list(filter(None, [gate_power.render(results, out)])),
        lambda: render_kernels(results, out, found.runs, style),
    )
    for write_rest in rest:
        try:
            written += write_rest()
        except UserError as error:
            more.append(Problem(results, str(error)))
    return written, problems + more


def _folder(run: Run, out: Path) -> Path:
    """The folder of a run's page."""
    header = run.header
    dtype = header.request.dtype if header.request else None
    return out / cut(header.environment.slug) / file_name("-".join(filter(None, [header.suite, dtype])))


def _render_run(run: Run, folder: Path, style: Style) -> list[Path]:
    """Write the page of a run; in Markdown also its plots and times.csv."""
    title = f"{run.header.environment.device_name}: suite {run.header.suite}"
    page = Page(folder / "tables", "-".join(folder.parts[-2:]), title, [run], all_sections(run))
    if not style.is_whole:
        return [write_page(page, style)]
    figures, paths = _figures(run, folder)
    times, text = folder / "times.csv", details.times_csv(run)
    if text:
        paths.append(write(times, text))
    else:
        times.unlink(missing_ok=True)  # of an earlier run, or empty
    return [write_page(replace(page, above=figures), style), *paths]


def _figures(run: Run, folder: Path) -> tuple[str, list[Path]]:
    """Draw the figures of a run; return their images for its page, and their files."""
    from esbench.report.plots.catalog import standard_figures  # noqa: PLC0415  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    shown: list[str] = []
    for stem, figure in standard_figures(run):
        written.append(figure.write(folder / f"{stem}.svg"))
        shown.append(image(f"{stem}.svg", figure.title))
    for old in folder.glob("*.[sp][vn]g"):
        if old not in written:
            old.unlink()  # of an earlier run
    return "".join(f"{text}\n\n" for text in shown), written
