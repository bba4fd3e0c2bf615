"""The study of the gate: how often it raises a false alarm, and how small a slowdown it finds.

``esbench gate-study`` compares one revision with itself in many replicates, together with control work of
known slowdowns. Resampled suites of these replicates are decided by the rule of the gate, which gives the
false-alarm rate and the power. Log ratios and results are stored in ``<results>/<device>/gate/<id>.json`` and
shown on the page ``reports/gate.md``.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np
from scipy import stats

from esbench import store
from esbench.errors import UserError
from esbench.gate.decision import (
    FAILED,
    INVALID,
    MEAN,
    LogRatios,
    exit_code,
    names_to_confirm,
    round_log_ratios,
    screen,
    time_verdicts,
)
from esbench.gate.gate import Gate
from esbench.gate.records import ROUND_FACTOR, SAME, Opening, Settings, Timed, Verdict, split_method
from esbench.report.formats import write
from esbench.report.formats.markdown import image, join, table
from esbench.schema import Strict
from esbench.studies import newest_files, percent
from esbench.text import escape, pluralize
from esbench.units import ABSENT, format_number

FOLDER = "gate"
"""The folder of a device's results that holds its studies of the gate."""
PAGE, PICTURE = "gate.md", "gate-power"
SCHEMA = 2
SEED = 20261122
CONTROLS: Mapping[str, float] = {
    SAME: 0.0,
    **{f"control: {100 * more:g} % more work": more for more in (0.005, 0.01, 0.02, 0.03)},
}
"""Control -> additional work in head, as a share of the work in base."""
SLOWDOWNS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.10)
"""Slowdowns injected into one cell."""
SLOWDOWNS_OF_ALL = (0.007, 0.01)
"""Slowdowns injected into every cell at once."""
SUITES, TRIALS = 1000, 400
"""Number of resampled suites for the false-alarm rate, and for each slowdown."""
MAX_ALARM_RATE = 0.01
"""Goal: the share of unchanged suites with an alarm."""
MIN_POWER = {0.01: 0.8, 0.02: 0.99}
"""Goal: slowdown -> the share of suites in which it is found."""
MIN_SHARE = 0.9
"""The title of the plot names the smallest slowdown that at least this share of suites finds."""
ONE_CELL, ALL_CELLS, CONTROL_WORK = "one cell", "all cells, by the mean", "control work"


class CellLogs(Strict, frozen=True):
    """log(head / base) of a cell or control in each replicate.

    ``confirm`` uses all rounds, like a confirmation; ``screen`` uses the first third, like a screen.
    """

    name: str
    confirm: tuple[float, ...]
    screen: tuple[float, ...]


class Alarms(Strict, frozen=True, kw_only=True):
    """Counts over resampled suites without a slowdown.

    Attributes:
        cells: cells of each suite.
        alarmed: suites with a FAIL.
        by_mean: suites in which the geometric mean FAILs.
        failed: cells that FAIL, over all suites.
        inconclusive: cells that are INCONCLUSIVE, over all suites.
        inconclusive_suites: suites without a FAIL in which a cell or the mean is INCONCLUSIVE.
        confirmed: mean number of confirmed cells per suite.
    """

    suites: int
    cells: int
    alarmed: int
    by_mean: int
    failed: int
    inconclusive: int
    inconclusive_suites: int = msgspec.field(name="unclear")
    confirmed: float


class Power(Strict, frozen=True, kw_only=True):
    """Counts over resampled suites with a slowdown.

    Attributes:
        kind: ONE_CELL, ALL_CELLS or CONTROL_WORK.
        slower: the slowdown; 0.01 is 1 %.
        found: suites in which the slowed cell, control or mean FAILs.
        others: suites in which a cell other than the slowed one FAILs; of no use for ALL_CELLS.
        by_mean: suites in which the geometric mean FAILs.
    """

    kind: str
    slower: float
    suites: int
    found: int
    others: int
    by_mean: int

    @property
    def share(self) -> float:
        """The share of suites in which the slowdown was found."""
        return self.found / self.suites


class GateStudy(Strict, frozen=True, kw_only=True):
    """The log ratios of cells and controls; ``alarms`` and ``powers`` need enough replicates for a suite."""

    schema: int
    opening: Opening
    wall_s: float
    cells: Annotated[tuple[CellLogs, ...], msgspec.Meta(min_length=1)]
    controls: tuple[CellLogs, ...]
    alarms: Alarms | None = None
    powers: tuple[Power, ...] = ()

    @property
    def replicates(self) -> int:
        """The number of replicates: pairs of fresh processes."""
        return len(self.cells[0].confirm)


def measure(gate: Gate, replicates: int, results: Path) -> Path:
    """Measure replicates of all cells and controls, resample them, and return the file of the study.

    Raises:
        UserError: the revision cannot be measured at all, or none of its cells can.
        WorkerError: a worker died, hangs or sent an invalid answer.
    """
    opening = gate.survey()
    cells = gate.evidence.timed_cells()
    if not cells:
        raise UserError("no variant of the suite is computed correctly: `esbench check` shows the reasons")
    log_ratios: dict[str, list[tuple[float, float]]] = {}
    wall_s = 0.0
    for replicate in gate.replicates("study", replicates, cells, CONTROLS):
        wall_s += replicate.wall_s
        for timed in replicate.cells:
            log_ratios.setdefault(timed.cell, []).append(trimmed_log_ratios(timed, gate.settings.trim))
    rows = []
    for name, pairs in sorted(log_ratios.items()):
        confirm, screen_logs = zip(*pairs, strict=True)
        rows.append(CellLogs(name, confirm, screen_logs))
    study = GateStudy(
        schema=SCHEMA,
        opening=opening,
        wall_s=round(wall_s, 3),
        cells=tuple(row for row in rows if control_slowdown(row.name) is None),
        controls=tuple(row for row in rows if control_slowdown(row.name) is not None),
    )
    folder = results / opening.environment.slug / FOLDER
    return store.write_document(resample(study, gate.settings), folder / f"{opening.gate_id}.json")


def trimmed_log_ratios(timed: Timed, trim: float) -> tuple[float, float]:
    """Return log(head / base) of a cell in a replicate from all rounds, and from the rounds of a screen."""
    by_round = round_log_ratios(timed)
    screen_rounds = len(by_round) * ROUND_FACTOR["screen"] // ROUND_FACTOR["study"]
    of_all_rounds, of_screen = (
        round(float(stats.trim_mean(rounds, trim)), 7)  # 7 digits, for a small file
        for rounds in (by_round, by_round[:screen_rounds])
    )
    return of_all_rounds, of_screen


def control_slowdown(name: str) -> float | None:
    """Return the slowdown of a control by its name, None for a cell."""
    control, _ = split_method(name)
    return CONTROLS.get(control)


# Resampled suites


def resample(study: GateStudy, settings: Settings) -> GateStudy:
    """Add the false alarms and the power to a study that has enough replicates for a suite."""
    if study.replicates < settings.screen + settings.confirm:
        return study
    detections = partial(count_detections, study, settings)
    rng = np.random.default_rng([SEED, 1])
    targets = [study.cells[rng.integers(len(study.cells))].name for _ in range(TRIALS)]
    powers = [detections(ONE_CELL, slower, targets) for slower in SLOWDOWNS]
    powers += [detections(ALL_CELLS, slower, [MEAN] * TRIALS) for slower in SLOWDOWNS_OF_ALL]
    for control in study.controls:
        slower = control_slowdown(control.name) or 0.0
        powers.append(detections(CONTROL_WORK, slower, [control.name] * TRIALS))
    alarms = count_alarms(study, settings, SUITES)
    return msgspec.structs.replace(study, alarms=alarms, powers=tuple(powers))


def count_alarms(study: GateStudy, settings: Settings, suites: int) -> Alarms:
    """Decide on resampled suites without a slowdown, and count their verdicts."""
    decided = list(decide_suites(study, settings, 0.0, [""] * suites))
    # Without reasons to be invalid, the exit code INVALID means that a cell or the mean is INCONCLUSIVE.
    codes = [exit_code(verdicts, invalid=()) for verdicts, _ in decided]
    statuses = [verdict.status for verdicts, _ in decided for verdict in verdicts if verdict.cell != MEAN]
    return Alarms(
        suites=suites,
        cells=len(study.cells),
        alarmed=codes.count(FAILED),
        by_mean=sum(MEAN in failed_names(verdicts) for verdicts, _ in decided),
        failed=statuses.count("FAIL"),
        inconclusive=statuses.count("INCONCLUSIVE"),
        inconclusive_suites=codes.count(INVALID),
        confirmed=fmean(confirmed for _, confirmed in decided),
    )


def count_detections(
    study: GateStudy, settings: Settings, kind: str, slower: float, targets: Sequence[str]
) -> Power:
    """Decide on one suite per target, in which the target is slower; see :func:`draw_suite`."""
    found = others = by_mean = 0
    decided = decide_suites(study, settings, slower, targets)
    for target, (verdicts, _) in zip(targets, decided, strict=True):
        failed = failed_names(verdicts)
        found += target in failed
        by_mean += MEAN in failed
        others += bool(failed - {target, MEAN})
    return Power(kind=kind, slower=slower, suites=len(targets), found=found, others=others, by_mean=by_mean)


def failed_names(verdicts: Sequence[Verdict]) -> set[str]:
    """Return the names of the cells that FAIL, and of their mean if it does."""
    return {verdict.cell for verdict in verdicts if verdict.status == "FAIL"}


def decide_suites(
    study: GateStudy, settings: Settings, slower: float, targets: Sequence[str]
) -> Iterator[tuple[list[Verdict], int]]:
    """Draw one suite per target, with a fixed seed, and decide on it by the rule of the gate.

    Yields:
        the verdicts on all cells and on their mean, and the number of confirmed cells.
    """
    rng = np.random.default_rng(SEED)
    for target in targets:
        suite = draw_suite(study, settings, slower, target, rng)
        screened = screen(suite["screen"], settings)
        confirmed = {name: suite["confirm"][name] for name in names_to_confirm(screened, settings)}
        verdicts, mean = time_verdicts(screened, confirmed, settings)
        yield [*verdicts, mean], len(confirmed)


def draw_suite(
    study: GateStudy, settings: Settings, slower: float, target: str, rng: np.random.Generator
) -> dict[str, LogRatios]:
    """Draw what one gate would have measured: log ratios of all cells at the screen and the confirmation.

    Replicates are chosen without replacement. Both arms are the same revision, so the arms of a replicate are
    swapped with probability 1/2. The arms of a control stay, because their work differs.

    Args:
        study: contains the cells of the suite.
        settings: the decision rule.
        slower: slowdown that is added to the target.
        target: the name of a cell; ``MEAN`` for all cells; the name of a control, which is added to the suite
            with its measured times; or "" for an unchanged suite.
        rng: chooses and swaps.
    """
    order = rng.permutation(study.replicates)
    signs = rng.choice((-1.0, 1.0), study.replicates)
    names = [cell.name for cell in study.cells]
    shifts = np.log1p(slower) * np.array([[target in {name, MEAN}] for name in names])
    drawn = {
        "screen": order[: settings.screen],
        "confirm": order[settings.screen : settings.screen + settings.confirm],
    }
    suite: dict[str, LogRatios] = {}
    for stage, replicates in drawn.items():
        log_ratios = np.array([getattr(cell, stage) for cell in study.cells])  # (cells, replicates)
        changed = log_ratios * signs + shifts
        suite[stage] = dict(zip(names, changed[:, replicates].tolist(), strict=True))
        for control in study.controls:
            if control.name == target:
                suite[stage][target] = [getattr(control, stage)[replicate] for replicate in replicates]
    return suite


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
    pictures = [_picture_path(study, out) for study in studies if study.alarms is not None]
    return [write(out / PAGE, page(studies, out)), *pictures]


_INTRODUCTION = f"""\
How often `esbench gate` raises a false alarm, and how small a slowdown it finds. `esbench gate-study`
measures a study, and this page shows the newest one of each device.

A replicate is a pair of fresh processes of the same revision, one per arm, which take turns on every cell in
ABBA or BAAB rounds; the order of the cells is shuffled. It gives one number per cell, the log of head / base:
from all its rounds as in a confirmation, from the first third as in a screen. A suite is what one gate would
have measured; it is drawn from the replicates without replacement and judged by the gate's own rule, with the
arms of each replicate swapped at random because both are the same revision. Suites share replicates, so
intervals are what they would be for independent suites. All resampling uses the seed {SEED}."""
_POWER = (
    "In each suite one randomly chosen cell, or all cells, take longer in head by the given share; or control"
    " work, of which head does more, is judged as one more cell. *Another cell fails*: suites in which an "
    "unchanged cell FAILs."
)


def page(studies: Sequence[GateStudy], out: Path) -> str:
    """Return the page as Markdown; its plots are written to ``out``."""
    parts = ["# False alarms and power of the gate", _INTRODUCTION]
    for study in studies:
        parts += [f"## {escape(study.opening.environment.device_name)}", _origin(study)]
        if study.alarms is None:
            size = f"{len(study.cells)} cells with {study.replicates} replicates"
            parts.append(f"No results: {size} are too few to draw random suites from.")
            continue
        parts += [_picture(study, study.alarms, out), "### False alarms", _alarm_table(study.alarms)]
        parts += ["### Power", _power_table(study.powers), _POWER]
    return join(parts)


def _origin(study: GateStudy) -> str:
    opening = study.opening
    here, commit = opening.environment, opening.revisions["head"].commit
    return (
        f"Study {opening.gate_id}, started {opening.started}: suite {opening.suite}, seed {opening.seed}, "
        f"{study.replicates} replicates of {len(study.cells)} cells and {len(study.controls)} controls in "
        f"{study.wall_s:.0f} s; commit {commit[:7]} in both arms; torch {here.torch}, "
        f"Python {here.python}, {pluralize(here.threads, 'thread')}."
    )


def _picture(study: GateStudy, alarms: Alarms, out: Path) -> str:
    """Draw the power; return the image as Markdown."""
    from esbench.report.plots.gate_power import gate_power  # noqa: PLC0415  # matplotlib is slow to import

    points: dict[str, list[tuple[float, int, int]]] = {}
    for power in study.powers:
        if power.slower:
            points.setdefault(power.kind, []).append((power.slower, power.found, power.suites))
    reliable = (power for power in study.powers if power.kind == ONE_CELL and power.share >= MIN_SHARE)
    smallest = next(reliable, None)
    finding = (
        f"The gate finds a {100 * smallest.slower:.3g} % slowdown of one cell in "
        f"{100 * smallest.share:.3g} % of suites"
        if smallest
        else "The gate finds no slowdown of a single cell reliably"
    )
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
        ("cells confirmed per suite, mean", format_number(alarms.confirmed)),
    ]
    return table(("", "nothing differs"), rows)


def _power_table(powers: Sequence[Power]) -> str:
    rows = []
    for power in powers:
        all_cells = power.kind == ALL_CELLS
        goal = None if all_cells else MIN_POWER.get(power.slower)
        rows.append(
            (
                power.kind,
                percent(power.slower),
                power.suites,
                percent(power.share),
                "" if goal is None else percent(goal),
                ABSENT if all_cells else power.others,
                power.by_mean,
            )
        )
    header = ("", "slower by", "suites", "found in", "goal: at least", "another cell fails", "the mean fails")
    return table(header, rows)
