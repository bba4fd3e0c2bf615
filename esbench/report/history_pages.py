"""The pages of reports on the runs of each device over time."""

from collections.abc import Iterable
from pathlib import Path

from esbench.errors import UserError
from esbench.report.analysis.history import History, devices, history
from esbench.report.formats import image
from esbench.report.history_tables import markdown
from esbench.report.text import cut, escape
from esbench.schema import Run
from esbench.store import Problem

PAGE = "history.md"

_FEWEST = 3
"""Runs of a case in the tables: `esbench compare` shows two side by side."""
_FEWEST_PLOTTED = 20
"""Runs of a case that has a plot: fewer are read more easily in the tables."""


def render_histories(runs: Iterable[Run], out: Path) -> tuple[list[Path], list[Problem]]:
    """Write ``<out>/<device>/history.md`` with its plots, for each device with three runs of a same case.

    The same runs give the same bytes.
    """
    written: list[Path] = []
    problems: list[Problem] = []
    for device, of_device in devices(runs).items():
        folder = out / cut(device)
        try:
            found = history(of_device, fewest=_FEWEST)
        except UserError as error:
            problems.append(Problem(folder / PAGE, f"is not written: {error}", lost=False))
        else:
            written += _page(found, folder) if found.series else []
    return written, problems


def _page(found: History, folder: Path) -> list[Path]:
    from esbench.report.plots.history import write  # noqa: PLC0415  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    drawn = write(found, folder, _FEWEST_PLOTTED)
    for old in folder.glob("history-*.[sp][vn]g"):
        if old not in drawn:
            old.unlink()  # of a case that too few runs have
    name = found.runs[-1].header.environment.device_name
    parts = [f"# {escape(name)}: the forward over its runs"]
    parts += [image(path.name, path.stem) for path in drawn]
    parts += ["\n".join(f"- {escape(words)}" for words in found.left_out)] if found.left_out else []
    page = folder / PAGE
    page.write_text("\n\n".join([*parts, markdown(found)]), encoding="utf-8", newline="\n")
    return [page, *drawn]
