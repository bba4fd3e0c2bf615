"""The page on suite ``peers``: generations of esbench beside those of other libraries."""

from collections.abc import Iterable
from pathlib import Path

from esbench.report.analysis.peers import Generations
from esbench.report.analysis.run_selection import select_newest
from esbench.report.formats import write
from esbench.report.formats.markdown import image, join
from esbench.report.tables.peers import peer_sections
from esbench.schema import Run
from esbench.text import escape

PAGE = "peers.md"
SUITE = "peers"

_INTRODUCTION = (
    "A generation draws a population, evaluates each member's mean loss on the same batch, shapes the losses "
    "and takes a step. Times come from the newest run of suite `peers`; docs/peers.md of the repository has "
    "what is measured, and how each library is used."
)


def render(out: Path, measured: Iterable[Run]) -> list[Path]:
    """Write ``<out>/peers.md`` and a plot of each device from all runs; nothing without a run."""
    by_device: dict[str, list[Run]] = {}
    for run in measured:
        if run.header.suite == SUITE and Generations.of(run):
            by_device.setdefault(run.header.environment.slug, []).append(run)
    if not by_device:
        return []
    parts, plots = ["# Compared with other libraries", _INTRODUCTION], []
    for _, runs in sorted(by_device.items()):
        run = select_newest(runs)
        parts.append(f"## {escape(run.header.environment.device_name)}")
        for title, path in _picture(run, out).items():
            plots.append(path)
            parts.append(image(path.name, title))
        parts += [section.markdown() for section in peer_sections(run)]
    return [write(out / PAGE, join(parts)), *plots]


def _picture(run: Run, out: Path) -> dict[str, Path]:
    """Draw a run; return the title of its plot with its file, nothing if there is too little to draw."""
    from esbench.report.plots.peers import generation_times  # noqa: PLC0415  # matplotlib is slow to import

    generations = Generations.of(run)
    figure = generation_times(generations) if generations else None
    return {figure.title: figure.write(out / f"peers-{run.header.environment.slug}.svg")} if figure else {}
