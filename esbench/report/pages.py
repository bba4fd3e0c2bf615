"""What a person opens: the tables of a run on the terminal, and the folder of reports."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from esbench.errors import UserError
from esbench.records import Run
from esbench.report import captions, details, roofline, tables
from esbench.report.accuracy import render_accuracy
from esbench.report.grid import LARGEST, LATENCY, PEAK, UNMEASURED, Grid, grids, operators
from esbench.report.published import read_all_published
from esbench.store import PUBLISHED, Problem, read_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ON_CONSOLE = {PEAK, LARGEST, "noise_bytes", "launches", "utilization_percent", "energy_j"}
"""What a terminal shows beside times; the report has everything."""


def console_tables(run: Run) -> str:
    """Return the forward's blocks, and figures of what else most people ask for, as text for a terminal."""
    parts = [captions.origin(run)]
    for operator in operators(run):
        others = tables.time_sections(run, operator, "sample", "update", "step")
        others += [tables.section(grid) for grid in grids(run, operator, "") if grid.metric in _ON_CONSOLE]
        sections = tables.time_sections(run, operator, "forward") + list(map(tables.figures_only, others))
        parts += [section.text() for section in sections]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def all_sections(run: Run) -> list[tables.Section]:
    """Everything that a run holds: forward times first, then the other phases, then memory."""
    found: list[tables.Section] = []
    for operator in operators(run):
        found += tables.time_sections(run, operator) + roofline.sections(run, operator)
        found += tables.other_time_sections(run, operator) + tables.memory_sections(run, operator)
        found += tables.other_sections(run, operator)
    return found


def render_reports(results: Path, out: Path) -> tuple[list[Path], list[Problem]]:
    """Render the newest run of each suite on each device, and what others published.

    Writes ``<out>/<device>/<suite>/tables.md`` with its plots and ``times.csv``, and
    ``<out>/published.md`` and ``<out>/accuracy.md``. The same results give the same bytes.
    """
    runs, problems = read_results(results)
    newest = {
        (run.header.environment.slug, _file_name(run.header.suite)): run
        for run in sorted(runs, key=lambda run: run.header.run_id)
        if run.rows
    }
    written: list[Path] = []
    for (device, suite), run in sorted(newest.items(), key=lambda item: item[0]):
        written += _render_run(run, out / device / suite)
    others, more = read_all_published(results / PUBLISHED)
    if others:
        written.append(_write(out / "published.md", _markdown("Published by others", others)))
    try:
        written += render_accuracy(results, out)
    except UserError as error:
        more.append(Problem(results, str(error)))
    return written, problems + more


def _render_run(run: Run, folder: Path) -> list[Path]:
    """The tables and plots of one run."""
    from esbench.report import drawing  # noqa: PLC0415  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {stem: drawing.save(figure, folder / stem) for stem, figure in _figures(run)}
    title = f"{run.header.environment.device_name}: suite {run.header.suite}"
    pictures = "".join(f"![{stem}]({stem}.svg)\n\n" for stem in drawn)
    kept = {path for paths in drawn.values() for path in paths}
    for old in folder.glob("*.[sp][vn]g"):
        if old not in kept:
            old.unlink()  # a picture of an earlier run that this one has not
    page = _write(folder / "tables.md", _markdown(title, [run], pictures))
    times = _write(folder / "times.csv", details.times_csv(run))
    return [page, times, *(path for paths in drawn.values() for path in paths)]


def _figures(run: Run) -> "Iterator[tuple[str, Figure]]":
    """The pictures of the forward under their names: for each operator, number format and method."""
    from esbench.report import plots, sweeps  # noqa: PLC0415  # matplotlib is slow to import

    for operator in operators(run):
        for kind, metric in (("time", LATENCY), ("memory", PEAK)):
            found = [
                grid
                for grid in grids(run, operator, metric)
                if grid.phase == "forward" and grid.metric == metric and grid.method != UNMEASURED
            ]
            for grid in found:
                pictures = {f"{kind}-{sweep.name}": sweeps.against(grid, sweep) for sweep in sweeps.SWEEPS}
                if metric == LATENCY:
                    pictures = {"multipliers": plots.multipliers(grid), **pictures}
                for name, figure in pictures.items():
                    if figure:
                        yield _file_name("-".join([operator, name, *_apart(grid, found[0])])), figure


def _apart(grid: Grid, first: Grid) -> list[str]:
    """What tells a grid from the first of its kind, which has the short name."""
    parts = [(grid.method, first.method), (grid.dtype, first.dtype)]
    antithetic = ["antithetic"] if grid.antithetic != first.antithetic else []
    return [own for own, other in parts if own != other] + antithetic


def _markdown(title: str, runs: Iterable[Run], pictures: str = "") -> str:
    sections = [section for run in runs for section in all_sections(run)]
    return f"# {' '.join(title.split())}\n\n{pictures}" + "\n".join(
        section.markdown(level=2) for section in sections
    )


def _file_name(words: str) -> str:
    """Lower case and dashes: a foreign run must not choose where files are written."""
    return re.sub(r"[^a-z0-9_]+", "-", words.lower()).strip("-") or "unnamed"


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
