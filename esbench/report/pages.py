"""What a person opens: the tables of a run on the terminal, and the folder of reports."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from esbench.errors import UserError
from esbench.records import Run
from esbench.report import captions, details, roofline, runs_page, tables
from esbench.report.accuracy import render_accuracy
from esbench.report.digits import render_digits
from esbench.report.formats import Page, Style, write, write_bibliography, write_page
from esbench.report.gate_study import render_gate
from esbench.report.grid import LARGEST, LATENCY, PEAK, UNMEASURED, Grid, grids, operators, quality_grids
from esbench.report.headline import headlines
from esbench.report.history_pages import render_histories
from esbench.report.inventory import Inventory, take
from esbench.report.kernels import render_kernels
from esbench.report.page.rendering import render_page
from esbench.report.published import read_all_published
from esbench.report.quality import quality_sections
from esbench.report.ranking import rankings
from esbench.report.words import cut, escape, file_name, one_line
from esbench.store import PUBLISHED, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 100
"""More rows or columns than this are no picture."""
_ON_CONSOLE = {PEAK, LARGEST, "noise_bytes", "launches", "utilization_percent", "energy_j"}
"""What a terminal shows beside times; the report has everything."""


def console_tables(run: Run) -> str:
    """Return what most people ask for as text for a terminal: the headline, the forward, other figures."""
    parts = [one_line(captions.origin(run))]
    for operator in operators(run):
        others = tables.time_sections(run, operator, "sample", "update", "step")
        others += [tables.section(grid) for grid in grids(run, operator, "") if grid.metric in _ON_CONSOLE]
        sections = tables.time_sections(run, operator, "forward") + list(map(tables.figures_only, others))
        # Without times there is nothing to rank, and quality stands for itself.
        quality = headlines(run, operator) or quality_sections(run, operator)
        parts += [section.text() for section in [*quality, *sections]]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def all_sections(run: Run) -> list[tables.Section]:
    """Everything that a run holds: quality first, then forward times, the other phases, and memory."""
    found: list[tables.Section] = []
    for operator in operators(run):
        found += quality_sections(run, operator)
        found += tables.time_sections(run, operator) + roofline.sections(run, operator)
        found += tables.other_time_sections(run, operator) + tables.memory_sections(run, operator)
        found += tables.other_sections(run, operator)
    return found


def render_reports(
    results: Path, out: Path, style: Style | None = None, device: str | None = None
) -> tuple[list[Path], list[Problem]]:
    """Render the newest whole run of each suite on each device, and what others published: :func:`render`.

    ``device`` is the folder of the only device to render, None for all.
    """
    return render(inventory(results, out, device), results, out, style or Style())


def inventory(results: Path, out: Path, device: str | None = None) -> Inventory:
    """What lies under the results, and on which pages under ``out`` it goes."""
    return take(results, lambda run: _folder(run, out), device)


def render(found: Inventory, results: Path, out: Path, style: Style) -> tuple[list[Path], list[Problem]]:
    """Write the pages of these runs, and of what else lies under the results.

    Writes ``<out>/<device>/<suite>/tables.md`` with its plots and ``times.csv``,
    ``<out>/<device>/history.md`` where there are runs enough, ``<out>/runs.md``, which says which runs these
    are and why others are not, and ``<out>/published.md``, ``<out>/accuracy.md``, ``<out>/digits.md``,
    ``<out>/gate.md`` and ``<out>/kernels.md``; and ``<out>/index.html``, the page for a browser. In another
    format than Markdown there are the tables of runs, those of others and ``runs``, and for LaTeX
    ``references.bib``. The same results give the same bytes. A run in a number format that was asked for has
    the page ``<suite>-<dtype>``. A newer run that was passed over is a problem by which nothing is lost.
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
    if not style.is_whole:
        return written, problems + more
    histories, not_written = render_histories(found.runs, out)
    written += histories
    problems += not_written
    written += render_page([*found.runs, *others], results, out)
    rest: tuple[Callable[[], list[Path]], ...] = (
        lambda: render_accuracy(results, out, found.runs),
        lambda: render_digits(results, out),
        lambda: render_gate(results, out),
        lambda: render_kernels(results, out, found.runs),
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
    """The tables of one run, and where the page is to have them its plots."""
    title = f"{run.header.environment.device_name}: suite {run.header.suite}"
    page = Page(folder / "tables", "-".join(folder.parts[-2:]), title, [run], all_sections(run))
    if not style.is_whole:
        return [write_page(page, style)]
    pictures, paths = _pictures(run, folder)
    times = write(folder / "times.csv", details.times_csv(run))
    return [write_page(replace(page, above=pictures), style), times, *paths]


def _pictures(run: Run, folder: Path) -> tuple[str, list[Path]]:
    """The plots of a run: what its page shows of them, and their files."""
    from esbench.report import drawing  # noqa: PLC0415  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {stem: drawing.save(figure, folder / stem) for stem, figure in _figures(run)}
    kept = {path for paths in drawn.values() for path in paths}
    for old in folder.glob("*.[sp][vn]g"):
        if old not in kept:
            old.unlink()  # a picture of an earlier run that this one has not
    shown = "".join(f"![{stem}]({stem}.svg)\n\n" for stem in drawn)
    shown += "".join(f"{escape(words)}\n\n" for words in dict.fromkeys(_not_drawn(run)))
    return shown, [path for paths in drawn.values() for path in paths]


def _figures(run: Run) -> "Iterator[tuple[str, Figure]]":
    """The pictures under their names: those of quality, then of times for each operator and method."""
    from esbench.report import plots, sweeps  # noqa: PLC0415  # matplotlib is slow to import

    yield from _quality_figures(run)
    for found in _pictured(run):
        for grid in found:
            if _size(grid) > _MOST:
                continue
            kind = "memory" if grid.metric == PEAK else "time"
            pictures = {f"{kind}-{sweep.name}": sweeps.against(grid, sweep) for sweep in sweeps.SWEEPS}
            if grid.metric == LATENCY:
                pictures = {"multipliers": plots.multipliers(grid), **pictures}
            for name, figure in pictures.items():
                if figure:
                    yield file_name("-".join([grid.operator, name, *_apart(grid, found[0])])), figure


def _quality_figures(run: Run) -> "Iterator[tuple[str, Figure]]":
    from esbench.report import pareto, spectra, sweeps  # noqa: PLC0415  # matplotlib is slow to import

    for operator in operators(run):
        spectral = quality_grids(run, operator, spectra.SPECTRUM, spectra.ONE)
        found: dict[str, list[tuple[Grid, Figure | None]]] = {
            "pareto": [(one.grid, pareto.pareto(one)) for one in rankings(run, operator)],
            "kept-population": [
                (grid, sweeps.against(grid, sweeps.POPULATION)) for grid in spectra.kept_grids(run, operator)
            ],
            "spectrum": [(grid, spectra.spectrum(grid)) for grid in spectral],
        }
        for name, pictures in found.items():
            for grid, figure in pictures:
                if figure and _size(grid) <= _MOST:
                    yield file_name("-".join([operator, name, *_apart(grid, pictures[0][0])])), figure


def _pictured(run: Run) -> Iterator[list[Grid]]:
    """The grids that have pictures: for each operator and quantity, one for each number format and method.

    Of layers it is the forward; of work that has none and draws no noise, whatever was timed.
    """
    for operator in operators(run):
        for metric in (LATENCY, PEAK):
            found = [
                grid
                for grid in grids(run, operator, metric)
                if grid.metric == metric and grid.method != UNMEASURED
            ]
            is_layer = any(grid.phase in {"sample", "forward"} for grid in found)
            yield [grid for grid in found if grid.phase == "forward" or not is_layer]


def _not_drawn(run: Run) -> Iterator[str]:
    """What stands in place of a picture that nobody could read."""
    for grid in itertools.chain.from_iterable(_pictured(run)):
        if _size(grid) > _MOST:
            name = captions.short_metric(grid.metric)
            yield (
                f"No picture of {grid.operator}'s {name}: {len(grid.variants)} rows and {len(grid.cases)} "
                f"columns, one shows at most {_MOST} of each. The tables hold all of them."
            )


def _size(grid: Grid) -> int:
    return max(len(grid.variants), len(grid.cases))


def _apart(grid: Grid, first: Grid) -> list[str]:
    """What tells a grid from the first of its kind, which has the short name."""
    parts = [(grid.phase, first.phase), (grid.method, first.method), (grid.dtype, first.dtype)]
    antithetic = ["antithetic"] if grid.antithetic != first.antithetic else []
    return [own for own, other in parts if own != other] + antithetic
