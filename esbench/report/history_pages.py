"""The pages of reports on the runs of each device over time, and the pictures of a history as files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from esbench.errors import UserError
from esbench.records import Case, Run
from esbench.report.history import History, devices, history
from esbench.report.history_tables import markdown
from esbench.report.illustrations import image
from esbench.report.words import cut, escape, file_name
from esbench.store import Problem

if TYPE_CHECKING:
    from esbench.report.timelines import Panel

PAGE = "history.md"

_FEWEST = 3
"""Two runs have no history: `esbench compare` shows them side by side."""
_PANELS = 24
"""More are no picture."""


def render_histories(runs: Iterable[Run], out: Path) -> tuple[list[Path], list[Problem]]:
    """Write ``<out>/<device>/history.md`` with its pictures, for each device with three runs of a same case.

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


def write_pictures(
    found: History, folder: Path, kinds: Sequence[str] = (".svg",)
) -> tuple[list[Path], list[str]]:
    """Write a picture for each case into a folder; a line for each that has no room for all its panels."""
    from esbench.report.timelines import panels  # noqa: PLC0415  # matplotlib is slow to import

    cases: dict[Case, list[Panel]] = {}
    for panel in panels(found):
        cases.setdefault(panel.key.case, []).append(panel)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    said: list[str] = []
    stems: set[str] = set()
    for number, (case, shown) in enumerate(cases.items()):
        stem = file_name(f"history {case.label}")
        stem = file_name(f"history {number} {case.label}") if stem in stems else stem
        stems.add(stem)
        paths, words = write_picture(found, shown, [folder / f"{stem}{kind}" for kind in kinds])
        written += paths
        said += words
    return written, said


def write_picture(
    found: History, panels: "Sequence[Panel]", paths: Sequence[Path]
) -> tuple[list[Path], list[str]]:
    """Write panels as one picture to files, of none to none; a line where it has no room for all of them."""
    from esbench.report import timelines  # noqa: PLC0415  # matplotlib is slow to import
    from esbench.report.drawing import STORED_DPI  # noqa: PLC0415  # the same

    shown = timelines.most_telling(panels, _PANELS)
    if not shown:
        return [], []
    sheet = timelines.timeline(found, shown)
    for path in paths:
        sheet.write(path, STORED_DPI)
    if len(shown) == len(panels):
        return list(paths), []
    words = f"{paths[0].name} shows {len(shown)} of {len(panels)} panels, those with change points first"
    return list(paths), [f"{words}: the table has all"]


def _page(found: History, folder: Path) -> list[Path]:
    drawn, said = write_pictures(found, folder, (".svg", ".png"))
    for old in folder.glob("history-*.[sp][vn]g"):
        if old not in drawn:
            old.unlink()  # a picture of a case that is no longer in enough runs
    name = found.runs[-1].header.environment.device_name
    parts = [f"# {escape(name)}: the forward over its runs"]
    parts += [image(path.name, path.stem) for path in drawn if path.suffix == ".svg"]
    parts += [escape(f"{words}.") for words in said]
    parts += ["\n".join(f"- {escape(words)}" for words in found.left_out)] if found.left_out else []
    page = folder / PAGE
    page.write_text("\n\n".join([*parts, markdown(found)]), encoding="utf-8", newline="\n")
    return [page, *drawn]
