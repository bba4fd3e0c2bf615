"""The study of the gate: how often it raises a false alarm, and how small a slowdown it finds.

``esbench gate-study`` compares one revision with itself in many replicates. Suites drawn from them are judged
by the gate's own rule, look by look, which gives the false-alarm rate and the power. Log ratios and results
are stored in ``<results>/<device>/gate/<id>.json`` and shown on the page ``reports/gate.md``.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Annotated

import msgspec
import numpy as np
from scipy import stats

from esbench import store
from esbench.errors import UserError
from esbench.gate.decision import mean_verdict, open_names, replicate_log_ratio, time_verdicts, trimmed
from esbench.gate.gate import Gate
from esbench.gate.records import MEAN, Opening, Settings, control_of
from esbench.gate.worker_process import WorkerError
from esbench.report.formats import write
from esbench.report.formats.markdown import join, table
from esbench.schema import Strict
from esbench.studies import newest_files, origin, percent
from esbench.text import escape
from esbench.units import ABSENT, format_number

FOLDER = "gate"
"""The folder of a device's results that holds its studies of the gate."""
PAGE = "gate.md"
SCHEMA = 4
PROCESSES, REPLICATES = 8, 36
"""The processes of a study, and the replicates of a cell in each; a gate makes at most 27 in one."""
SEED = 20261128
NOTHING, ONE_CELL, ALL_CELLS = "nothing", "one cell", "all cells, by the mean"
PLANTED = (
    (NOTHING, 0.0, 1000),
    *((ONE_CELL, slower, 400) for slower in (0.01, 0.02, 0.03, 0.05)),
    (ALL_CELLS, 0.01, 400),
)
"""What is slower, by how much, and the number of suites to draw."""
GOALS = {
    (NOTHING, 0.0): "at most 1.00 %",
    (ONE_CELL, 0.02): "at least 80.0 %",
    (ONE_CELL, 0.03): "at least 95.0 %",
    (ALL_CELLS, 0.01): "at least 95.0 %",
}
"""The share of suites in which something should be found; for nothing, in which there is a false alarm."""


class CellLogs(Strict, frozen=True):
    """log(head / base) of the replicates of a cell in each process."""

    name: str
    log_ratios: Annotated[tuple[tuple[float, ...], ...], msgspec.Meta(min_length=2)]


class Result(Strict, frozen=True, kw_only=True):
    """Counts over drawn suites in which nothing, one cell or every cell is slower.

    Attributes:
        kind: NOTHING, ONE_CELL or ALL_CELLS.
        slower: the slowdown; 0.01 is 1 %.
        found: suites in which the slowed cell or the mean FAILs; without a slowdown, in which anything does.
        others: suites in which another cell FAILs.
        inconclusive: suites in which a cell or the mean is INCONCLUSIVE.
        replicates: mean number of replicates per suite.
    """

    kind: str
    slower: float
    suites: int
    found: int
    others: int
    inconclusive: int
    replicates: float


class GateStudy(Strict, frozen=True, kw_only=True):
    """The log ratios of cells, and what suites drawn from them find."""

    schema: int
    opening: Opening
    settings: Settings
    wall_s: float
    cells: Annotated[tuple[CellLogs, ...], msgspec.Meta(min_length=1)]
    results: tuple[Result, ...]


def measure(gate: Gate, results: Path, processes: int = PROCESSES, replicates: int = REPLICATES) -> Path:
    """Measure replicates of all timed cells in each process, draw suites, and return the file of the study.

    Raises:
        UserError: the revision cannot be measured, or none of its cells can.
    """
    evidence, settings = gate.survey(), gate.settings
    names = [name for name in evidence.log_ratios if not control_of(name)]
    if not names:
        raise UserError("no variant of the suite is computed correctly: `esbench check` shows the reasons")
    start_s = time.monotonic()
    log_ratios: dict[str, list[list[float]]] = {name: [[] for _ in range(processes)] for name in names}
    gate.settings = msgspec.structs.replace(settings, processes=processes)
    try:
        for replicate in gate.replicates(0, processes * replicates, names):
            # Five digits, for a small file.
            log_ratios[replicate.cell][replicate.process].append(round(replicate_log_ratio(replicate), 5))
    except WorkerError as error:
        raise UserError(str(error)) from error
    cells = tuple(CellLogs(name, tuple(map(tuple, by_process))) for name, by_process in log_ratios.items())
    opening = evidence.opening
    study = GateStudy(
        schema=SCHEMA,
        opening=opening,
        settings=settings,
        wall_s=round(time.monotonic() - start_s, 3),
        cells=cells,
        results=tuple(judge_suites(cells, settings, *planted) for planted in PLANTED),
    )
    folder = results / opening.environment.slug / FOLDER
    return store.write_document(study, folder / f"{opening.gate_id}.json")


def variances(cells: Sequence[CellLogs], trim: float) -> tuple[float, float]:
    """Return the variance between replicates of a process, and that between processes, means over cells.

    They are split by analysis of variance, from trimmed means and their errors. The latter is a difference,
    so chance can make it negative.
    """
    replicates, processes = [], []
    for cell in cells:
        estimates = [trimmed(log_ratios, trim) for log_ratios in cell.log_ratios]
        error = fmean(estimate.variance for estimate in estimates)
        replicates.append(error * len(cell.log_ratios[0]))
        processes.append(variance(estimate.mean for estimate in estimates) - error)
    return fmean(replicates), fmean(processes)


# Drawn suites


def judge_suites(
    cells: Sequence[CellLogs], settings: Settings, kind: str, slower: float, suites: int
) -> Result:
    """Draw suites in which nothing, a cell chosen at random, or every cell is slower, and decide on them.

    A look draws processes of the study, and from each of them replicates of the cells that are still open.
    Both are drawn without replacement, as far as they suffice: else suites would vary more than gates, by the
    error of the study's own means. Both arms are the same revision, so the arms of a process are swapped with
    probability 1/2. The rule is that of the gate, look by look.
    """
    rng = np.random.default_rng(SEED)
    measured = {cell.name: np.array(cell.log_ratios) for cell in cells}
    totals: Counter[str] = Counter()
    for _ in range(suites):
        target = {NOTHING: "", ALL_CELLS: MEAN}.get(kind) or str(rng.choice([*measured]))
        looks: dict[str, list[list[float]]] = {name: [] for name in measured}
        order = rng.permutation(len(cells[0].log_ratios))
        drawn = np.resize(order, (len(settings.looks), settings.processes))
        for processes, count in zip(drawn, settings.new_replicates, strict=True):
            signs = rng.choice((-1.0, 1.0), (settings.processes, 1))
            for name in open_names(looks, settings):
                shuffled = rng.permuted(measured[name][processes], axis=1)
                logs = signs * np.resize(shuffled.T, (count // settings.processes, settings.processes)).T
                shift = math.log1p(slower) * (target in {name, MEAN})
                looks[name].append((logs.ravel() + shift).tolist())
        verdicts = [*time_verdicts(looks, settings), mean_verdict(looks, settings)]
        failed = {verdict.cell for verdict in verdicts if verdict.status == "FAIL"}
        totals["found"] += target in failed if target else bool(failed)
        totals["others"] += bool(failed - {target, MEAN})
        totals["inconclusive"] += any(verdict.status == "INCONCLUSIVE" for verdict in verdicts)
        totals["replicates"] += sum(len(new) for by_look in looks.values() for new in by_look)
    return Result(
        kind=kind,
        slower=slower,
        suites=suites,
        found=totals["found"],
        others=totals["others"],
        inconclusive=totals["inconclusive"],
        replicates=totals["replicates"] / suites,
    )


# The page


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/gate.md`` from the newest study of each device; nothing without a study.

    Raises:
        UserError: a study cannot be read.
    """
    studies = [
        store.read_document(
            path, GateStudy, what="study of the gate", schema=SCHEMA, again="run `esbench gate-study` again"
        )
        for path in newest_files(results, FOLDER)
    ]
    return [write(out / PAGE, page(studies))] if studies else []


_INTRODUCTION = f"""\
How often `esbench gate` raises a false alarm, and how small a slowdown it finds. `esbench gate-study`
measures a study, and this page shows the newest one of each device.

Each process imports the same revision twice. A replicate is one set-up of a cell in both arms, which take
turns in ABBA or BAAB rounds; it gives one number, the log of head / base. A suite is what one gate would have
measured: at each look it draws processes of the study, from each of them replicates of the cells that are
still open, without replacement, and swaps the arms of a process at random. It is judged by the gate's own
rule. Suites share replicates, so intervals are what they would be for independent suites. All draws use the
seed {SEED}."""
_POWER = (
    "In each suite nothing, one randomly chosen cell, or all cells take longer in head by the given share. "
    "*Found in*: suites in which that FAILs, for nothing those with any FAIL, which are false alarms, with "
    "the interval of Clopper and Pearson (1934)."
)


def page(studies: Sequence[GateStudy]) -> str:
    """Return the page as Markdown."""
    parts = ["# False alarms and power of the gate", _INTRODUCTION]
    for study in studies:
        parts += [f"## {escape(study.opening.environment.device_name)}", _facts(study)]
        parts += ["### Power", _power_table(study.results), _POWER]
    return join(parts)


def _facts(study: GateStudy) -> str:
    opening, settings, by_process = study.opening, study.settings, study.cells[0].log_ratios
    looks = ", ".join(map(str, settings.looks))
    replicates, processes = variances(study.cells, settings.trim)
    facts = (
        f"suite {opening.suite}",
        f"{len(study.cells)} cells, {len(by_process[0])} replicates in each of {len(by_process)} processes",
        f"{study.wall_s:.0f} s",
        f"revision {opening.revisions['head'].commit[:7]} in both arms",
        f"the gate looks after {looks} replicates",
        f"its margin is {percent(settings.margin)}, and its family-wise level {percent(settings.alpha)}",
        f"replicates of a cell in a process have a standard deviation of {percent(math.sqrt(replicates))}",
        f"processes add {percent(processes / (replicates + processes))} of all variance",
    )
    return origin(opening.gate_id, opening.started, opening.environment, facts)


def _power_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        ends = stats.binomtest(result.found, result.suites).proportion_ci()
        rows.append(
            {
                "slower": result.kind,
                "by": percent(result.slower),
                "suites": result.suites,
                "found in": percent(result.found / result.suites),
                "95 % interval": f"{percent(ends.low)} to {percent(ends.high)}",
                "goal": GOALS.get((result.kind, result.slower), ""),
                "another cell fails": ABSENT if result.kind == ALL_CELLS else result.others,
                "inconclusive": result.inconclusive,
                "replicates per suite": format_number(result.replicates),
            }
        )
    return table([*rows[0]], [[*row.values()] for row in rows])
