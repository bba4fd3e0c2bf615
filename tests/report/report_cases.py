"""A README and invented runs, for tests of the texts generated from them."""

import shutil
from pathlib import Path

from esbench.report.formats import Style
from esbench.report.site import render, selection
from esbench.schema import Run
from esbench.store import Problem, Writer
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, conv2d, linear, time_row, working

ROOT = Path(__file__).parents[2]


GTX = "results/published/nesgpu_gtx1080ti.jsonl"
RTX = "results/published/nesgpu_rtx2070.jsonl"


def a_run(
    run_id: str = "20260101T000000Z-quick-0001",
    factor: float = 3.0,
    suite: str = "quick",
    device_name: str = "Test CPU",
) -> Run:
    """Return a run of both operators with all phases and memory."""
    rows = [
        row
        for case in (linear(), linear(512), *(linear(512, members=n) for n in (64, 128)), conv2d())
        for row in (
            working(time_row(BASE, case, 1, 2), 1e6, 1e6),
            time_row(NAIVE, case, 10, 20),
            time_row(DENSE, case, factor, 2 * factor),
            time_row(DENSE, case, 2, 4, phase="update"),
            bytes_row(DENSE, case, "peak_bytes", 10**7),
            bytes_row(DENSE, case, "launches", 3),
        )
    ]
    return synthetic.run(rows, synthetic.peaks(), run_id=run_id, suite=suite, device_name=device_name)


def store(folder: Path, run: Run) -> str:
    """Write a run; return the name that a README uses for it."""
    with Writer(folder / "results", run.header) as writer:
        for record in (*run.device_peaks, *run.rows, *([run.end] if run.end else [])):
            writer.write(record)
    return str(writer.path.relative_to(folder))


def render_reports(results: Path, out: Path, style: Style | None = None) -> tuple[list[Path], list[Problem]]:
    """Render the reports of a folder of results; return the files written and the problems."""
    return render(selection(results, out), results, out, style or Style())


def readme(folder: Path, *calls: str) -> Path:
    """Return a README in a folder with a measured run and the published figures."""
    shutil.copytree(ROOT / "results" / "published", folder / "results" / "published")
    file = store(folder, a_run())
    first = (
        f"from esbench.report.readme import Page\npage = Page.of(cog.inFile)\nrun = {file!r}\n"
        f"gtx = {GTX!r}\nrtx = {RTX!r}"
    )
    blocks = [first, *(f"cog.out({call})" for call in calls)]
    path = folder / "README.md"
    text = "\n".join(f"<!-- [[[cog\n{block}\n]]] -->\n<!-- [[[end]]] -->\n" for block in blocks)
    path.write_text(f"# Title\n\n{text}", encoding="utf-8")
    return path
