"""The page on how far the gate can be trusted: a pure function of the stored studies and a fixed seed."""

from collections.abc import Sequence
from pathlib import Path

from esbench.gate.study import newest_of_each, read
from esbench.report import gate_exhibits
from esbench.report.formats import Style, image, write_document
from esbench.report.gate_arrays import replicates
from esbench.report.gate_findings import Findings, findings
from esbench.report.gate_goals import goals
from esbench.report.passages import Document, table
from esbench.report.resampling import SEED
from esbench.report.words import escape, listed
from esbench.units import format_number

PAGE = "gate"
PICTURE = "gate-power"

_INTRODUCTION = (
    "How often `esbench gate` cries wolf, and how small a slowdown it finds. Written by `esbench gate-study` "
    "and `esbench report` from the newest study of each device under `results/<device>/gate/`, with the seed "
    f"{SEED} for all that is drawn. A goal that is missed is shown as missed.\n\n"
    "A replicate is two fresh processes of the same revision, one for each arm of the gate, which take turns "
    "on every cell: rounds ABBA or BAAB, the order of the cells shuffled anew. It gives one number a cell, "
    "the log of by how many times head takes longer than base: from all of its rounds where a gate would "
    "confirm, from the first third of them where it would screen. Beside the cells stands the gate's own "
    "work, with a known surplus in head."
)
_COMMIT_DIGITS = 7


def render_gate(results: Path, out: Path, style: Style | None = None) -> list[Path]:
    """Write ``<out>/gate.md`` and its picture, or its tables in another format, of each device.

    Nothing without one. The same results give the same bytes.

    Raises:
        UserError: a study cannot be read.

    """
    every = [findings(read(path)) for path in newest_of_each(results)]
    if not every:
        return []
    style = style or Style()
    if not style.is_whole:
        return [write_document(out / PAGE, gate_page(every, pictured=False), style)]
    from esbench.report.plots.gate_power import gate_power  # noqa: PLC0415  # matplotlib is slow to import

    out.mkdir(parents=True, exist_ok=True)
    figure = gate_power(every)
    drawn = [figure.write(out / f"{PICTURE}.svg")] if figure else []
    return [write_document(out / PAGE, gate_page(every, pictured=bool(drawn)), style), *drawn]


def gate_page(every: Sequence[Findings], *, pictured: bool) -> Document:
    """Return the page: for each study where it was taken, its verdicts and a table for each question."""
    parts = ["# How far the gate can be trusted", _INTRODUCTION]
    parts += [image(f"{PICTURE}.svg", "How often a rule flags a slowdown")] if pictured else []
    for found in every:
        parts += _study(found)
    return Document(parts)


def _study(found: Findings) -> list[str]:
    verdicts = goals(found)
    return [
        f"## {escape(found.study.opening.environment.device_name)}",
        _taken(found),
        table(("goal", "found", "verdict"), [(goal.goal, goal.found, goal.verdict) for goal in verdicts]),
        *gate_exhibits.false_alarms(found),
        *gate_exhibits.power(found),
        *gate_exhibits.planted(found),
        *gate_exhibits.variance(found),
        *gate_exhibits.beside(found),
    ]


def _taken(found: Findings) -> str:
    """Say how a study was taken."""
    first, here = found.study.opening, found.study.opening.environment
    commits = {one.commit[:_COMMIT_DIGITS] for one in first.revisions.values()}
    versions = {"CUDA": here.cuda, "driver": here.driver, "triton": here.triton}
    held = replicates(found.study)
    controls = sum(len(one.names) for one in found.arrays.controls.values())
    words = [
        f"Study {first.gate_id}, begun {first.started}",
        f"suite {first.suite}, seed {first.seed}",
        f"{len(held)} replicates of {len(found.arrays.cells.names)} cells and {controls} controls",
        f"{here.threads} thread{'' if here.threads == 1 else 's'} on {here.cpu}",
        f"commit {' and '.join(sorted(commits)) or 'unknown'} in both arms",
        f"esbench {here.esbench}, torch {here.torch}, Python {here.python}",
        *(f"{name} {version}" for name, version in versions.items() if version),
        f"load average {format_number(here.load)} at its start",
        f"the replicates took {format_number(sum(one.wall_s for one in held))} s",
    ]
    left_out = found.arrays.left_out
    lost = f" Left out, as not once in every replicate: {listed(left_out)}." if left_out else ""
    return escape("; ".join(words) + "." + lost)
