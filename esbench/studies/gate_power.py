"""The study of the gate: how often it raises a false alarm, and how small a slowdown it finds.

``esbench gate-study`` compares one revision with itself in many replicates. Suites drawn from them are judged
by the gate's own rule, look by look, which gives the false-alarm rate and the power. Log ratios and results
are stored in ``<results>/<device>/gate/<id>.json`` and shown on the page ``reports/gate.md``.
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from scipy import stats

from esbench import store
from esbench.errors import UserError
from esbench.gate.decision import (
    FAILED,
    INVALID,
    MEAN,
    ROUND_TRIM,
    exit_code,
    open_names,
    round_log_ratios,
    time_verdicts,
    trimmed,
)
from esbench.gate.gate import Gate
from esbench.gate.records import Opening, Settings, Verdict
from esbench.report.formats import write
from esbench.report.formats.markdown import image, join, table
from esbench.schema import Strict
from esbench.studies import newest_files, percent
from esbench.text import escape, pluralize
from esbench.units import ABSENT, format_number

FOLDER = "gate"
"""The folder of a device's results that holds its studies of the gate."""
PAGE, PICTURE = "gate.md", "gate-power"
SCHEMA = 3
SEED = 20261128
SLOWDOWNS = (0.01, 0.02, 0.03, 0.05)
"""Slowdowns injected into one cell."""
SLOWDOWN_OF_ALL = 0.01
"""The slowdown injected into every cell at once."""
SUITES, TRIALS = 1000, 400
"""Number of drawn suites for the false-alarm rate, and for each slowdown."""
MAX_ALARM_RATE = 0.01
"""Goal: the share of unchanged suites with an alarm."""
MIN_POWER = {0.02: 0.8, 0.03: 0.95}
"""Goal: slowdown of one cell -> the share of suites in which it is found."""
MIN_POWER_OF_ALL = 0.95
"""Goal: the share of suites in which a slowdown of all cells is found."""
MIN_SHARE = 0.8
"""The title of the plot names the smallest slowdown that at least this share of suites finds."""
ONE_CELL, ALL_CELLS = "one cell", "all cells, by the mean"


class CellLogs(Strict, frozen=True):
    """log(head / base) of the replicates of a cell in each process.

    ``rounds_variance``: the squared standard error of a replicate from its rounds, mean over replicates.
    """

    name: str
    log_ratios: Annotated[tuple[tuple[float, ...], ...], msgspec.Meta(min_length=2)]
    rounds_variance: float


class Alarms(Strict, frozen=True, kw_only=True):
    """Counts over drawn suites without a slowdown.

    Attributes:
        cells: cells of each suite.
        alarmed: suites with a FAIL.
        by_mean: suites in which the geometric mean FAILs.
        failed: cells that FAIL, over all suites.
        inconclusive: cells that are INCONCLUSIVE, over all suites.
        inconclusive_suites: suites without a FAIL in which a cell or the mean is INCONCLUSIVE.
        replicates: mean number of replicates per suite.
    """

    suites: int
    cells: int
    alarmed: int
    by_mean: int
    failed: int
    inconclusive: int
    inconclusive_suites: int
    replicates: float


class Power(Strict, frozen=True, kw_only=True):
    """Counts over drawn suites with a slowdown.

    Attributes:
        kind: ONE_CELL or ALL_CELLS.
        slower: the slowdown; 0.01 is 1 %.
        found: suites in which the slowed cell or the mean FAILs.
        others: suites in which a cell other than the slowed one FAILs; of no use for ALL_CELLS.
        by_mean: suites in which the geometric mean FAILs.
        replicates: mean number of replicates per suite.
    """

    kind: str
    slower: float
    suites: int
    found: int
    others: int
    by_mean: int
    replicates: float

    @property
    def share(self) -> float:
        """The share of suites in which the slowdown was found."""
        return self.found / self.suites


class GateStudy(Strict, frozen=True, kw_only=True):
    """The log ratios of cells, and what suites drawn from them find."""

    schema: int
    opening: Opening
    settings: Settings
    wall_s: float
    cells: Annotated[tuple[CellLogs, ...], msgspec.Meta(min_length=1)]
    alarms: Alarms
    powers: tuple[Power, ...]


def measure(gate: Gate, processes: int, replicates: int, results: Path) -> Path:
    """Measure replicates of all timed cells in each process, draw suites, and return the file of the study.

    Raises:
        UserError: the revision cannot be measured at all, or none of its cells can.
        WorkerError: a worker died, hangs or sent an invalid message.
    """
    opening, settings = gate.survey(), gate.settings
    names = [cell.name for cell in gate.evidence.timed_cells()]
    if not names:
        raise UserError("no variant of the suite is computed correctly: `esbench check` shows the reasons")
    start_s = time.monotonic()
    log_ratios: dict[str, list[list[float]]] = {name: [[] for _ in range(processes)] for name in names}
    round_variances: dict[str, list[float]] = {name: [] for name in names}
    gate.settings = msgspec.structs.replace(settings, processes=processes)
    for replicate in gate.replicates(0, processes * replicates, names):
        estimate = trimmed(round_log_ratios(replicate), ROUND_TRIM)
        log_ratios[replicate.cell][replicate.process].append(round(estimate.mean, 5))  # for a small file
        round_variances[replicate.cell].append(estimate.variance)
    cells = tuple(
        CellLogs(name, tuple(map(tuple, by_process)), fmean(round_variances[name]))
        for name, by_process in log_ratios.items()
    )
    study = GateStudy(
        schema=SCHEMA,
        opening=opening,
        settings=settings,
        wall_s=round(time.monotonic() - start_s, 3),
        cells=cells,
        alarms=count_alarms(cells, settings, SUITES),
        powers=tuple(
            count_detections(cells, settings, kind, slower, TRIALS)
            for kind, slower in (*((ONE_CELL, slower) for slower in SLOWDOWNS), (ALL_CELLS, SLOWDOWN_OF_ALL))
        ),
    )
    folder = results / opening.environment.slug / FOLDER
    return store.write_document(study, folder / f"{opening.gate_id}.json")


class Shares(NamedTuple):
    """The parts of the variance of log ratios, mean over cells."""

    rounds: float
    set_ups: float
    processes: float


def shares_of_variance(cells: Sequence[CellLogs], trim: float) -> Shares:
    """Split the variance of a replicate by analysis of variance, from trimmed means and their errors."""
    set_ups, processes = [], []
    for cell in cells:
        estimates = [trimmed(log_ratios, trim) for log_ratios in cell.log_ratios]
        error = fmean(estimate.variance for estimate in estimates)
        set_ups.append(error * len(cell.log_ratios[0]))
        processes.append(variance(estimate.mean for estimate in estimates) - error)
    rounds = fmean(cell.rounds_variance for cell in cells)
    return Shares(rounds, fmean(set_ups) - rounds, fmean(processes))


# Drawn suites


def count_alarms(cells: Sequence[CellLogs], settings: Settings, suites: int) -> Alarms:
    """Decide on drawn suites without a slowdown, and count their verdicts."""
    decided = list(decide_suites(cells, settings, 0.0, [""] * suites))
    # Without reasons to be invalid, the exit code INVALID means that a cell or the mean is INCONCLUSIVE.
    codes = [exit_code(verdicts, invalid=()) for verdicts, _ in decided]
    statuses = [verdict.status for verdicts, _ in decided for verdict in verdicts if verdict.cell != MEAN]
    return Alarms(
        suites=suites,
        cells=len(cells),
        alarmed=codes.count(FAILED),
        by_mean=sum(MEAN in failed_names(verdicts) for verdicts, _ in decided),
        failed=statuses.count("FAIL"),
        inconclusive=statuses.count("INCONCLUSIVE"),
        inconclusive_suites=codes.count(INVALID),
        replicates=fmean(replicates for _, replicates in decided),
    )


def count_detections(
    cells: Sequence[CellLogs], settings: Settings, kind: str, slower: float, suites: int
) -> Power:
    """Decide on drawn suites in which a cell chosen at random, or every cell, is slower."""
    rng = np.random.default_rng([SEED, 1])
    chosen = rng.integers(len(cells), size=suites)
    targets = [MEAN if kind == ALL_CELLS else cells[index].name for index in chosen]
    decided = list(decide_suites(cells, settings, slower, targets))
    failed = [failed_names(verdicts) for verdicts, _ in decided]
    return Power(
        kind=kind,
        slower=slower,
        suites=suites,
        found=sum(target in names for target, names in zip(targets, failed, strict=True)),
        others=sum(bool(names - {target, MEAN}) for target, names in zip(targets, failed, strict=True)),
        by_mean=sum(MEAN in names for names in failed),
        replicates=fmean(replicates for _, replicates in decided),
    )


def failed_names(verdicts: Sequence[Verdict]) -> set[str]:
    """Return the names of the cells that FAIL, and of their mean if it does."""
    return {verdict.cell for verdict in verdicts if verdict.status == "FAIL"}


def decide_suites(
    cells: Sequence[CellLogs], settings: Settings, slower: float, targets: Sequence[str]
) -> Iterator[tuple[list[Verdict], int]]:
    """Draw one suite per target, with a fixed seed, and decide on it by the rule of the gate, look by look.

    A look draws processes of the study, and from each of them replicates of the cells that are still open.
    Both are drawn without replacement, as far as they suffice: else suites would vary more than gates, by the
    error of the study's own means. Both arms are the same revision, so the arms of a process are swapped with
    probability 1/2.

    Args:
        cells: the cells of a suite; each has as many replicates in each process.
        settings: the decision rule.
        slower: slowdown that is added to the target.
        targets: the name of a cell, ``MEAN`` for all cells, or "" for none.

    Yields:
        the verdicts on all cells and on their mean, and the number of replicates.
    """
    rng = np.random.default_rng(SEED)
    measured = {cell.name: np.array(cell.log_ratios) for cell in cells}
    processes = len(cells[0].log_ratios)
    for target in targets:
        looks: dict[str, list[list[float]]] = {name: [] for name in measured}
        order = np.resize(rng.permutation(processes), (len(settings.looks), settings.processes))
        for drawn, count in zip(order, settings.new_replicates, strict=True):
            signs = rng.choice((-1.0, 1.0), (settings.processes, 1))
            for name in open_names(looks, settings):
                shuffled = rng.permuted(measured[name][drawn], axis=1)
                logs = signs * np.resize(shuffled.T, (count // settings.processes, settings.processes)).T
                shift = math.log1p(slower) * (target in {name, MEAN})
                looks[name].append((logs.ravel() + shift).tolist())
        verdicts, mean = time_verdicts(looks, settings)
        yield [*verdicts, mean], sum(len(new) for by_look in looks.values() for new in by_look)


# The page


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/gate.md`` and its plots from the newest study of each device; nothing without a study.

    Raises:
        UserError: a study cannot be read.
    """
    studies = [
        store.read_document(
            path, GateStudy, what="study of the gate", schema=SCHEMA, again="run `esbench gate-study` again"
        )
        for path in newest_files(results, FOLDER)
    ]
    if not studies:
        return []
    return [write(out / PAGE, page(studies, out)), *(_picture_path(study, out) for study in studies)]


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
    "In each suite one randomly chosen cell, or all cells, take longer in head by the given share. *Another "
    "cell fails*: suites in which an unchanged cell FAILs."
)
_SHARES = (
    "Standard deviations of the log of head / base, root mean square over cells: of a replicate from the "
    "scatter of its rounds, between set-ups in a process beyond that, and between processes beyond both. "
    "The last is a difference of variances, so chance can make it negative."
)


def page(studies: Sequence[GateStudy], out: Path) -> str:
    """Return the page as Markdown; its plots are written to ``out``."""
    parts = ["# False alarms and power of the gate", _INTRODUCTION]
    for study in studies:
        parts += [f"## {escape(study.opening.environment.device_name)}", _origin(study)]
        parts += [_picture(study, out), "### False alarms", _alarm_table(study.alarms)]
        parts += ["### Power", _power_table(study.powers), _POWER]
        parts += ["### Shares of the variance", _shares_table(study), _SHARES]
    return join(parts)


def _origin(study: GateStudy) -> str:
    opening, settings = study.opening, study.settings
    here, commit = opening.environment, opening.revisions["head"].commit
    by_process = study.cells[0].log_ratios
    looks = ", ".join(map(str, settings.looks))
    return (
        f"Study {opening.gate_id}, started {opening.started}: suite {opening.suite}, seed {opening.seed}, "
        f"{len(study.cells)} cells with {len(by_process[0])} replicates in each of {len(by_process)} "
        f"processes in {study.wall_s:.0f} s; commit {commit[:7]} in both arms; torch {here.torch}, "
        f"Python {here.python}, {pluralize(here.threads, 'thread')}. The gate looks after {looks} "
        f"replicates; its margin is {percent(settings.margin)}, and its family-wise level "
        f"{percent(settings.alpha)}."
    )


def _picture(study: GateStudy, out: Path) -> str:
    """Draw the power; return the image as Markdown."""
    from esbench.report.plots.gate_power import gate_power  # noqa: PLC0415  # matplotlib is slow to import

    points: dict[str, list[tuple[float, int, int]]] = {}
    for power in study.powers:
        points.setdefault(power.kind, []).append((power.slower, power.found, power.suites))
    reliable = (power for power in study.powers if power.kind == ONE_CELL and power.share >= MIN_SHARE)
    smallest = next(reliable, None)
    finding = (
        f"The gate finds a {100 * smallest.slower:.3g} % slowdown of one cell in "
        f"{100 * smallest.share:.3g} % of suites"
        if smallest
        else "The gate finds no slowdown of a single cell reliably"
    )
    alarms = study.alarms
    alarm = f"a false alarm in {alarms.alarmed} of" if alarms.alarmed else "no false alarm in"
    title = f"{finding} and raises {alarm} {alarms.suites:,} unchanged suites"
    here = study.opening.environment
    figure = gate_power(points, MIN_POWER, title, f"{here.device_name}, study {study.opening.gate_id}")
    return image(figure.write(_picture_path(study, out)).name, title)


def _picture_path(study: GateStudy, out: Path) -> Path:
    return out / f"{PICTURE}-{study.opening.environment.slug}.svg"


def _alarm_table(alarms: Alarms) -> str:
    comparisons = alarms.suites * alarms.cells
    rate = alarms.alarmed / alarms.suites
    goal = f"{percent(rate)}: {'met' if rate <= MAX_ALARM_RATE else 'not met'}"
    ends = stats.binomtest(alarms.alarmed, alarms.suites).proportion_ci()  # Clopper and Pearson, 1934
    rows = [
        ("suites", alarms.suites),
        ("comparisons of a cell", comparisons),
        ("suites with a FAIL", alarms.alarmed),
        (f"share of suites with a FAIL; goal: at most {percent(MAX_ALARM_RATE)}", goal),
        ("its 95 % interval", f"{percent(ends.low)} to {percent(ends.high)}"),
        ("suites in which the geometric mean FAILs", alarms.by_mean),
        ("comparisons that FAIL", alarms.failed),
        ("comparisons that are INCONCLUSIVE", percent(alarms.inconclusive / comparisons)),
        ("suites that end INCONCLUSIVE", alarms.inconclusive_suites),
        ("replicates per suite, mean", format_number(alarms.replicates)),
    ]
    return table(("", "nothing differs"), rows)


def _power_table(powers: Sequence[Power]) -> str:
    rows = []
    for power in powers:
        all_cells = power.kind == ALL_CELLS
        goal = MIN_POWER_OF_ALL if all_cells else MIN_POWER.get(power.slower)
        rows.append(
            (
                power.kind,
                percent(power.slower),
                power.suites,
                percent(power.share),
                "" if goal is None else percent(goal),
                ABSENT if all_cells else power.others,
                power.by_mean,
                format_number(power.replicates),
            )
        )
    header = (
        *("", "slower by", "suites", "found in", "goal: at least", "another cell fails", "the mean fails"),
        "replicates per suite",
    )
    return table(header, rows)


def _shares_table(study: GateStudy) -> str:
    shares = shares_of_variance(study.cells, study.settings.trim)
    total = sum(shares)
    rows = [
        (name, f"{100 * math.copysign(math.sqrt(abs(share)), share):.2f} %", percent(share / total))
        for name, share in zip(("rounds", "set-ups", "processes"), shares, strict=True)
    ]
    return table(("between", "standard deviation", "share of the variance"), rows)
