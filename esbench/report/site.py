"""Render the tables of a run for the terminal, and write the folder of reports."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.analysis.history import devices, history
from esbench.report.analysis.pivot import LARGEST, PEAK, grids, operators
from esbench.report.analysis.run_selection import RunSelection, select_runs
from esbench.report.formats import LATEX, MARKDOWN, Page, Style, latex, markdown, write, write_page
from esbench.report.formats.markdown import image
from esbench.report.tables import history as history_tables
from esbench.report.tables import measured, roofline
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import ranking_sections
from esbench.report.tables.table import Section
from esbench.report.web.render import page as web_page
from esbench.schema import Run
from esbench.store import PUBLISHED, Problem, read_run
from esbench.studies import digits, gate_power, kernels, peers, scaling, tasks, timer_accuracy
from esbench.text import escape, file_name, one_line, short_file_name

HISTORY, WEB_PAGE = "history.md", "index.html"
MIN_HISTORY_RUNS = 3
"""Runs of a case that is shown in a device's history; `esbench compare` shows two side by side."""
MIN_PLOTTED_RUNS = 20
"""Runs of a case whose history is plotted; fewer are easier to read in the table."""

_UNREAD = 20
"""Unread files and lines that the web page lists."""
_ON_CONSOLE = {PEAK, LARGEST, "noise_bytes", "launches", "utilization_percent", "energy_j"}
"""The metrics that a terminal shows besides times."""


def console_tables(run: Run, history: Iterable[Run] = ()) -> str:
    """Return the text for a terminal: rankings, times of the forward, other metrics."""
    parts = [one_line(captions.origin(run))]
    for operator in operators(run):
        # Without times there is no ranking: quality is shown instead.
        quality = ranking_sections(run, operator, history) or quality_sections(run, operator, history)
        forward = measured.time_sections(run, operator, "forward")
        others = measured.time_sections(run, operator, "sample", "update", "step")
        others += [measured.section(grid) for grid in grids(run, operator, "") if grid.metric in _ON_CONSOLE]
        sections = [*quality, *forward, *map(measured.without_multipliers, others)]
        parts += [section.text() for section in sections]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def all_sections(run: Run, history: Iterable[Run] = ()) -> list[Section]:
    """Return all tables of a run: quality, times, rooflines, memory, other metrics.

    Shapes on which base was much faster in a run of ``history`` are not ranked.
    """
    sections: list[Section] = []
    for operator in operators(run):
        sections += quality_sections(run, operator, history)
        sections += measured.time_sections(run, operator) + roofline.sections(run, operator)
        sections += measured.other_sections(run, operator)
    return sections


def selection(results: Path, out: Path) -> RunSelection:
    """Return the runs below ``results``, with the pages below ``out`` that they belong on."""
    return select_runs(results, lambda run: _folder(run, out))


def render(
    selected: RunSelection, results: Path, out: Path, style: Style
) -> tuple[list[Path], list[Problem]]:
    """Write the pages of a report; the same results give the same bytes.

    In every format there is a page ``<device>/<suite>/tables`` for each run (``<suite>-<dtype>`` for a run
    with ``--dtype``) and a page ``published``. LaTeX also has ``references.bib``. Markdown also has plots,
    ``<device>/history.md`` for devices with enough runs, the studies (``accuracy.md``, ``digits.md``,
    ``tasks.md``, ``gate.md``, ``peers.md``, and ``kernels.md`` with runs on a GPU) and the web page
    ``index.html``.

    Returns:
        The files written, and the problems of reading and writing.
    """
    written: list[Path] = []
    for folder, run in selected.pages.items():
        written += _render_run(run, selected.runs, folder, style)
    read = [read_run(path) for path in sorted((results / PUBLISHED).glob("*.jsonl"))]
    published = [run for run, _ in read if run]
    problems = [*selected.problems, *(problem for _, file_problems in read for problem in file_problems)]
    if published:
        sections = [section for run in published for section in all_sections(run)]
        page = Page(out / PUBLISHED, PUBLISHED, "Published by others", published, sections)
        written.append(write_page(page, style))
    if style.form == LATEX and written:
        written.append(write(out / latex.REFERENCES, latex.references()))
    if style.form != MARKDOWN:
        return written, problems
    for device, runs in devices(selected.runs).items():
        folder = out / short_file_name(device)
        try:
            written += _render_history(runs, folder)
        except UserError as error:
            problems.append(Problem(folder / HISTORY, f"is not written: {error}", lost=False))
    unread = [f"{problem.path.name}: {problem.within}" for problem in problems if problem.lost]
    left_out = [*selected.left_out, *unread[:_UNREAD]]
    accuracies = cache(partial(digits.trained_with, results))
    text = web_page([*selected.pages.values(), *published], left_out, accuracies)
    written.append(write(out / WEB_PAGE, text))
    studies: tuple[Callable[[], list[Path]], ...] = (
        lambda: timer_accuracy.render(results, out),
        lambda: digits.render(results, out),
        lambda: gate_power.render(results, out),
        lambda: kernels.render(out, selected.runs),
        lambda: peers.render(out, selected.runs),
        lambda: scaling.render(results, out),
        lambda: tasks.render(results, out),
    )
    for write_study in studies:
        try:
            written += write_study()
        except UserError as error:
            problems.append(Problem(results, str(error)))
    return written, problems


def _folder(run: Run, out: Path) -> Path:
    header = run.header
    dtype = header.request.dtype if header.request else None
    page = file_name("-".join(filter(None, [header.suite, dtype])))
    return out / short_file_name(header.environment.slug) / page


def _render_run(run: Run, history: Iterable[Run], folder: Path, style: Style) -> list[Path]:
    """Write the page of a run; in Markdown also its plots."""
    title = f"{run.header.environment.device_name}: suite {run.header.suite}"
    name = "-".join(folder.parts[-2:])  # device and suite
    page = Page(folder / "tables", name, title, [run], all_sections(run, history))
    if style.form != MARKDOWN:
        return [write_page(page, style)]
    from esbench.report.plots.catalog import standard_figures  # noqa: PLC0415  # matplotlib is slow to import

    for old_plot in folder.glob("*.svg"):
        old_plot.unlink()
    plots = {figure.write(folder / f"{stem}.svg"): figure.title for stem, figure in standard_figures(run)}
    images = "".join(f"{image(path.name, title)}\n\n" for path, title in plots.items())
    return [write_page(replace(page, above=images), style), *plots]


def _render_history(runs: Iterable[Run], folder: Path) -> list[Path]:
    """Write the history of a device if a case has enough runs, with a plot of the cases of many runs."""
    device_history = history(runs, fewest=MIN_HISTORY_RUNS)
    if not device_history.series:
        return []
    from esbench.report.plots.history import history as draw  # noqa: PLC0415  # matplotlib is slow to import
    from esbench.report.plots.history import panels  # noqa: PLC0415  # the same

    plot = folder / "history.svg"
    plot.unlink(missing_ok=True)  # of earlier runs
    shown = panels(device_history, MIN_PLOTTED_RUNS)
    drawn = [draw(device_history, shown).write(plot)] if shown else []
    name = device_history.runs[-1].header.environment.device_name
    above = [image(path.name, path.stem) for path in drawn]
    if device_history.left_out:
        above.append("\n".join(f"- {escape(line)}" for line in device_history.left_out))
    title, sections = f"{name}: the forward over its runs", history_tables.sections(device_history)
    text = markdown.page(title, sections, above="".join(f"{part}\n\n" for part in above))
    return [write(folder / HISTORY, text), *drawn]
