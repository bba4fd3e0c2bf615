"""How often the gate raises a false alarm and how small a slowdown it finds, from repeated self-comparisons.

``esbench gate-study`` compares one revision with itself, replicate after replicate, beside control work with
a known slowdown. The study is stored as ``<results>/<device>/gate/<id>.json``: for each cell the log ratio
head / base of every replicate, once from all its rounds (as in a confirmation) and once from the first third
(as in a screen). Suites are then drawn from these replicates and decided by the gate's own rule, which gives
the false-alarm rate and the power on the page ``reports/gate.md``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tabulate import tabulate

from esbench import store
from esbench.gate.decision import (
    FAILED,
    INVALID,
    MEAN,
    control_verdicts,
    exit_code,
    round_log_ratios,
    screen,
    suspects,
    time_verdicts,
)
from esbench.gate.gate import Gate
from esbench.gate.records import ROUND_FACTOR, SAME, Opening, Settings, Timed, Verdict
from esbench.report.formats import write
from esbench.report.formats.markdown import NOT_MET, image
from esbench.report.text import counted, escape
from esbench.studies import newest_files
from esbench.units import ABSENT, format_number, format_value

FOLDER = "gate"
"""The folder of a device's results that holds its studies of the gate."""
PAGE, PICTURE = "gate.md", "gate-power"
SCHEMA = 1
SEED = 20261122
CONTROLS: Mapping[str, float] = {
    SAME: 0.0,
    **{f"control: {100 * more:g} % more work": more for more in (0.005, 0.01, 0.02, 0.03)},
}
"""Control -> additional share of work in head."""
SLOWDOWNS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.10)
"""Slowdowns injected into one cell."""
SLOWDOWNS_OF_ALL = (0.007, 0.01)
"""Slowdowns injected into every cell at once."""
SUITES, TRIALS = 1000, 400
"""Suites drawn for the false-alarm rate, and for each slowdown."""
MIN_COMPARISONS = 3000
"""A study of few cells draws more suites, until each rate rests on this many comparisons of a cell."""
MAX_ALARM_RATE = 0.01
"""Goal: the share of unchanged suites with an alarm."""
MIN_POWER = {0.01: 0.8, 0.02: 0.99}
"""Goal: slowdown -> the share of suites in which it is found."""

MIN_SHARE = 0.9
"""The title of the plot names the smallest slowdown that at least this share of suites finds."""

Floats = NDArray[np.float64]


# The stored study


class CellLogs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log ratios head / base of a cell or control, one per replicate: of all rounds, and of a screen's."""

    name: str
    confirm: tuple[float, ...]
    screen: tuple[float, ...]


class GateStudy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete study: where and what was measured, and the log ratios of cells and controls."""

    schema: int
    opening: Opening
    wall_s: float
    cells: tuple[CellLogs, ...]
    controls: tuple[CellLogs, ...]

    @property
    def replicates(self) -> int:
        """How many pairs of processes were measured."""
        return len(self.controls[0].confirm)


def measure(gate: Gate, replicates: int, results: Path) -> Path:
    """Measure replicates of all cells and controls, store the study, and return its file.

    Raises:
        UserError: the revision cannot be measured at all.
        WorkerError: a worker died, hangs or sent no valid answer.

    """
    opening = gate.survey()
    cells = gate.evidence.timed_cells()
    logs: dict[str, list[tuple[float, float]]] = {}
    wall_s = 0.0
    for replicate in gate.replicates("study", replicates, cells, CONTROLS):
        wall_s += replicate.wall_s
        for timed in replicate.cells:
            logs.setdefault(timed.cell, []).append(log_ratios(timed, gate.settings.trim))
    every = [
        CellLogs(name, tuple(confirm for confirm, _ in pairs), tuple(first for _, first in pairs))
        for name, pairs in sorted(logs.items())
    ]
    study = GateStudy(
        schema=SCHEMA,
        opening=opening,
        wall_s=round(wall_s, 3),
        cells=tuple(one for one in every if injected(one.name) is None),
        controls=tuple(one for one in every if injected(one.name) is not None),
    )
    folder = results / opening.environment.slug / FOLDER
    return store.write_document(study, folder / f"{opening.gate_id}.json")


def log_ratios(timed: Timed, trim: float) -> tuple[float, float]:
    """Return log(head / base) of a replicate from all rounds, and from as many as a screen has."""
    logs = round_log_ratios(timed)
    first = logs[: max(1, len(logs) * ROUND_FACTOR["screen"] // ROUND_FACTOR["study"])]
    confirm, at_screen = (round(float(stats.trim_mean(part, trim)), 7) for part in (logs, first))
    return confirm, at_screen


def injected(name: str) -> float | None:
    """Return the injected slowdown of a control, None for a cell."""
    return CONTROLS.get(name.rpartition(" | ")[0])


# Suites drawn from a study


@dataclass(frozen=True)
class Logs:
    """Log ratios of some cells as arrays [cells, replicates]."""

    names: tuple[str, ...]
    confirm: Floats
    screen: Floats

    @classmethod
    def of(cls, cells: Sequence[CellLogs]) -> "Logs":
        """Stack the log ratios of cells."""
        names = tuple(one.name for one in cells)
        return cls(names, np.array([one.confirm for one in cells]), np.array([one.screen for one in cells]))

    def of_stage(self, stage: str, replicates: NDArray[np.intp]) -> dict[str, list[float]]:
        """Return the log ratios of some replicates, by cell."""
        return dict(zip(self.names, getattr(self, stage)[:, replicates].tolist(), strict=True))


@dataclass(frozen=True)
class Draw:
    """The replicates of one suite; ``signs`` is -1 where the two arms of a replicate are swapped."""

    screen: NDArray[np.intp]
    confirm: NDArray[np.intp]
    signs: Floats


def needed(settings: Settings) -> int:
    """Return the number of replicates of one suite."""
    return settings.screen + settings.confirm


def draws(count: int, replicates: int, settings: Settings) -> Iterator[Draw]:
    """Yield suites drawn without replacement, with a fixed seed.

    Both arms are the same revision, so a replicate has its arms swapped with probability 1/2.
    """
    rng = np.random.default_rng(SEED)
    for _ in range(count):
        order = rng.permutation(replicates)
        signs = rng.choice((-1.0, 1.0), replicates)
        at_screen, confirm = order[: settings.screen], order[settings.screen : needed(settings)]
        yield Draw(at_screen, confirm, signs)


@dataclass(frozen=True)
class Decided:
    """The verdicts on one suite, of its cells and their mean, and how many cells were confirmed."""

    verdicts: Sequence[Verdict]
    confirmed: int

    @property
    def failing(self) -> set[str]:
        """The names of the cells that FAIL, and of their mean if it does."""
        return {one.cell for one in self.verdicts if one.status == "FAIL"}


def decide(
    draw: Draw, cells: Logs, settings: Settings, *, slower: Floats | float = 0.0, extra: Logs | None = None
) -> Decided:
    """Decide on one suite by the gate's rule.

    Args:
        draw: the replicates of the suite.
        cells: cells with the same work in both arms.
        settings: the rule.
        slower: log slowdown injected into head: a number, or [cells, 1].
        extra: cells with really different work, whose arms are therefore not swapped.

    """
    shifted = Logs(cells.names, cells.confirm * draw.signs + slower, cells.screen * draw.signs + slower)

    def taken(stage: str, replicates: NDArray[np.intp]) -> dict[str, list[float]]:
        found = shifted.of_stage(stage, replicates)
        return found | extra.of_stage(stage, replicates) if extra else found

    screened = screen(taken("screen", draw.screen), settings)
    suspected = suspects(screened, settings)
    confirm = {
        name: logs for name, logs in taken("confirm", draw.confirm).items() if {name, MEAN} & suspected
    }
    verdicts, mean = time_verdicts(screened, confirm, settings)
    return Decided((*verdicts, mean), len(confirm))


@dataclass(frozen=True)
class Alarms:
    """Counts over suites in which nothing differs."""

    suites: int
    cells: int
    alarmed: int
    by_mean: int
    failed: int
    inconclusive: int
    unclear: int
    confirmed: float

    @property
    def rate(self) -> float:
        """The share of suites with a FAIL."""
        return self.alarmed / self.suites

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the rate for independent suites (Clopper and Pearson, 1934)."""
        found = stats.binomtest(self.alarmed, self.suites).proportion_ci()
        return float(found.low), float(found.high)


def alarms(cells: Logs, settings: Settings, suites: int) -> Alarms:
    """Decide on suites in which nothing differs."""
    every = draws(suites, cells.confirm.shape[1], settings)
    decided = [decide(draw, cells, settings) for draw in every]
    codes = [exit_code(one.verdicts, ()) for one in decided]
    of_cells = [verdict for one in decided for verdict in one.verdicts if verdict.cell != MEAN]
    return Alarms(
        suites=suites,
        cells=len(cells.names),
        alarmed=codes.count(FAILED),
        by_mean=sum(MEAN in one.failing for one in decided),
        failed=sum(one.status == "FAIL" for one in of_cells),
        inconclusive=sum(one.status == "INCONCLUSIVE" for one in of_cells),
        unclear=codes.count(INVALID),
        confirmed=fmean(one.confirmed for one in decided),
    )


@dataclass(frozen=True)
class Power:
    """In how many suites a slowdown was found, an unchanged cell failed, and the mean failed."""

    slower: float
    suites: int
    found: int
    others: int
    by_mean: int

    @property
    def share(self) -> float:
        """The share of suites in which it was found."""
        return self.found / self.suites


def _power(slower: float, decided: Sequence[tuple[str, Decided]]) -> Power:
    """Count over suites, each with the name of the cell that is slower, or of the mean."""
    return Power(
        slower=slower,
        suites=len(decided),
        found=sum(name in one.failing for name, one in decided),
        others=sum(bool(one.failing - {name, MEAN}) for name, one in decided),
        by_mean=sum(MEAN in one.failing for _, one in decided),
    )


def slower_cell(cells: Logs, settings: Settings, slower: float, suites: int) -> Power:
    """Inject a slowdown into one random cell of each suite."""
    rng = np.random.default_rng([SEED, 1])
    decided = []
    for draw in draws(suites, cells.confirm.shape[1], settings):
        place = int(rng.integers(len(cells.names)))
        shift = np.zeros((len(cells.names), 1))
        shift[place] = np.log1p(slower)
        decided.append((cells.names[place], decide(draw, cells, settings, slower=shift)))
    return _power(slower, decided)


def slower_everywhere(cells: Logs, settings: Settings, slower: float, suites: int) -> Power:
    """Inject a slowdown into every cell: it is found by the geometric mean over cells."""
    shift = float(np.log1p(slower))
    every = draws(suites, cells.confirm.shape[1], settings)
    return _power(slower, [(MEAN, decide(draw, cells, settings, slower=shift)) for draw in every])


def slower_control(cells: Logs, control: CellLogs, settings: Settings, suites: int) -> Power:
    """Decide on control work with an injected slowdown as one more cell of a suite."""
    every = draws(suites, cells.confirm.shape[1], settings)
    decided = [(control.name, decide(draw, cells, settings, extra=Logs.of([control]))) for draw in every]
    return _power(injected(control.name) or 0.0, decided)


def misbehaving_controls(controls: Logs, settings: Settings, suites: int) -> tuple[int, int]:
    """Count the suites that controls make invalid: more work not found, equal work that differs."""
    missed = differ = 0
    for draw in draws(suites, controls.confirm.shape[1], settings) if controls.names else ():
        _, reasons = control_verdicts(controls.of_stage("confirm", draw.confirm), settings)
        not_found = sum("not found" in reason for reason in reasons)
        missed += bool(not_found)
        differ += len(reasons) > not_found
    return missed, differ


# The page


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/gate.md`` and its plots from the newest study of each device; nothing without a study.

    Raises:
        UserError: a study cannot be read.

    """
    studies = [
        store.read_document(
            path,
            GateStudy,
            what="study of the gate",
            schema=SCHEMA,
            again="measure with `esbench gate-study`",
        )
        for path in newest_files(results, FOLDER)
    ]
    if not studies:
        return []
    path = write(out / PAGE, page(studies, out))
    return [path, *sorted(out.glob(f"{PICTURE}*.svg"))]


_INTRODUCTION = f"""\
How often `esbench gate` raises a false alarm, and how small a slowdown it finds. `esbench gate-study`
measures a study and writes this page from the newest one of each device; all resampling uses the seed {SEED}.

A replicate is a pair of fresh processes of the same revision, one per arm, which take turns on every cell in
ABBA or BAAB rounds; the order of the cells is shuffled. It gives one number per cell, the log of head / base:
from all its rounds as in a confirmation, from the first third as in a screen. A suite is what one gate would
have measured; it is drawn from the replicates without replacement and judged by the gate's own rule, with the
arms of each replicate swapped at random because both are the same revision."""


def page(studies: Sequence[GateStudy], out: Path) -> str:
    """Return the page as Markdown; its plots are written to ``out``."""
    parts = ["# False alarms and power of the gate", _INTRODUCTION]
    for study in studies:
        parts += [f"## {escape(study.opening.environment.device_name)}", _origin(study)]
        parts += _sections(study, Settings(), out)
    return "\n\n".join(parts) + "\n"


def _origin(study: GateStudy) -> str:
    """Return where and how a study was measured."""
    opening = study.opening
    here, commit = opening.environment, opening.revisions["head"].commit
    return (
        f"Study {opening.gate_id}, started {opening.started}: suite {opening.suite}, seed {opening.seed}, "
        f"{study.replicates} replicates of {len(study.cells)} cells and {len(study.controls)} controls in "
        f"{study.wall_s:.0f} s; commit {commit[:7]} in both arms; torch {here.torch}, "
        f"Python {here.python}, {counted(here.threads, 'thread')}."
    )


def _sections(study: GateStudy, settings: Settings, out: Path) -> list[str]:
    """Resample suites from a study; return what they show, with a plot of the power."""
    if not study.cells or study.replicates < needed(settings):
        return [f"No suite can be drawn: {len(study.cells)} cells, {study.replicates} replicates."]
    cells, controls = Logs.of(study.cells), Logs.of(study.controls)
    suites = max(SUITES, -(-MIN_COMPARISONS // len(cells.names)))
    random = alarms(cells, settings, suites)
    one_cell = [slower_cell(cells, settings, slower, TRIALS) for slower in SLOWDOWNS]
    all_cells = [slower_everywhere(cells, settings, slower, TRIALS) for slower in SLOWDOWNS_OF_ALL]
    more_work = [slower_control(cells, one, settings, TRIALS) for one in study.controls]
    missed, differ = misbehaving_controls(controls, settings, suites)
    offset = _effect(np.mean([one.confirm for one in study.cells], axis=0).tolist())
    powers = {"one cell": one_cell, "all cells": all_cells, "control work": more_work}
    return [
        _picture(study, random, powers, out),
        _goals(random, {"a cell slower by": one_cell, "more work by": more_work}),
        "### False alarms",
        _alarm_table(random),
        (
            f"Suites share replicates ({study.replicates} are enough for "
            f"{study.replicates // needed(settings)} without overlap), so the interval is what it would "
            f"be for independent suites. With the arms as measured, head / base is {offset} (geometric mean "
            f"over cells). The gate's own controls would have made {missed} of {suites} suites invalid "
            f"because 2 % more work was not found, and {differ} because equal work differed between the arms."
        ),
        "### Power: times made longer",
        _power_table(one_cell, all_cells),
        (
            "In each suite one randomly chosen cell, or all cells, take longer in head by the given share. A "
            f"slowdown within the margin of {_percent(settings.margin)} is not reported by design. "
            "*Another cell fails*: suites in which an unchanged cell FAILs."
        ),
        "### Power: more work",
        _control_table(study.controls, more_work),
        (
            "Control work of which head does more, measured like every cell and judged as one more cell of "
            "a suite. *Measured*: geometric mean over all replicates with its 95 % interval."
        ),
    ]


def _picture(study: GateStudy, random: Alarms, powers: Mapping[str, Sequence[Power]], out: Path) -> str:
    """Draw the power; return the image as Markdown."""
    from esbench.report.plots.gate_power import gate_power  # noqa: PLC0415  # matplotlib is slow to import

    found = {
        name: [
            (one.slower, one.found, one.suites)
            for one in sorted(rows, key=lambda one: one.slower)
            if one.slower
        ]
        for name, rows in powers.items()
    }
    sure = next((one for one in powers["one cell"] if one.share >= MIN_SHARE), None)
    finding = (
        f"The gate finds a cell that is {_percent(sure.slower)} slower in {_percent(sure.share)} of suites"
        if sure
        else "The gate finds no slowdown of a single cell reliably"
    )
    title = f"{finding}; false alarms: {random.alarmed} of {random.suites}"
    here = study.opening.environment
    figure = gate_power(found, MIN_POWER, title, f"{here.device_name}, study {study.opening.gate_id}")
    path = out / f"{PICTURE}-{here.slug}.svg"
    out.mkdir(parents=True, exist_ok=True)
    return image(figure.write(path).name, title)


def _goals(random: Alarms, powers: Mapping[str, Sequence[Power]]) -> str:
    def row(goal: str, found: str, *, is_met: bool) -> tuple[str, str, str]:
        return goal, found, "met" if is_met else NOT_MET

    interval = " to ".join(map(_percent, random.interval))
    count = f"{random.alarmed} of {random.suites} suites: {_percent(random.rate)} (95 % interval {interval})"
    goal = f"alarms in unchanged suites: at most {_percent(MAX_ALARM_RATE)}"
    rows = [row(goal, count, is_met=random.rate <= MAX_ALARM_RATE)]
    for what, found_at in powers.items():
        for slower, least in MIN_POWER.items():
            share = min(one.share for one in found_at if one.slower == slower)
            goal = f"{what} {_percent(slower)} is found in at least {_percent(least)} of suites"
            rows.append(row(goal, _percent(share), is_met=share >= least))
    return _table(("goal", "found", "verdict"), rows)


def _alarm_table(found: Alarms) -> str:
    comparisons = found.suites * found.cells
    rows = [
        ("suites", found.suites),
        ("comparisons of a cell", comparisons),
        ("suites with a FAIL", found.alarmed),
        ("share of suites with a FAIL", _percent(found.rate)),
        ("its 95 % interval", " to ".join(map(_percent, found.interval))),
        ("suites in which the geometric mean FAILs", found.by_mean),
        ("comparisons that FAIL", found.failed),
        ("comparisons that are INCONCLUSIVE", _percent(found.inconclusive / comparisons)),
        ("suites that end INCONCLUSIVE", found.unclear),
        ("cells confirmed per suite, mean", format_number(found.confirmed)),
    ]
    return _table(("", "arms swapped at random"), rows)


def _power_table(one_cell: Sequence[Power], all_cells: Sequence[Power]) -> str:
    def row(what: str, one: Power, others: object) -> tuple[object, ...]:
        return what, _percent(one.slower), one.suites, _percent(one.share), others, one.by_mean

    rows = [row("one cell", one, one.others) for one in one_cell]
    rows += [row("all cells, by the mean", one, ABSENT) for one in all_cells]
    return _table(("", "slower by", "suites", "found in", "another cell fails", "the mean fails"), rows)


def _control_table(controls: Sequence[CellLogs], powers: Sequence[Power]) -> str:
    rows = [
        (control.name, _percent(power.slower), _effect(control.confirm), _percent(power.share))
        for control, power in zip(controls, powers, strict=True)
    ]
    return _table(("control", "more work", "measured", "found in"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with all columns but the first aligned to the right."""
    cells = [[cell if cell == NOT_MET else escape(str(cell)) for cell in row] for row in rows]
    align = ["left", *["right"] * (len(header) - 1)]
    return tabulate(cells, header, tablefmt="pipe", disable_numparse=True, colalign=align)


def _effect(logs: Sequence[float]) -> str:
    """Format the geometric mean of some ratios with its 95 % interval by Student's t."""
    mean = fmean(logs)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (f"{100 * math.expm1(value):+.3f} %" for value in (mean - half, mean, mean + half))
    return f"{middle} ({low} to {high})"


def _percent(share: float) -> str:
    return format_value("share_percent", 100 * share)
