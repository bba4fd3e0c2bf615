"""How often the gate raises a false alarm and how small a slowdown it finds, from repeated self-comparisons.

``esbench gate-study`` compares one revision with itself, replicate after replicate, beside control work of a
known slowdown. A complete study is stored as ``<results>/<device>/gate/<id>.json``: for each cell the log
ratio head / base of every replicate, once from all its rounds (as a confirmation has them) and once from the
first third (as a screen has them). Suites are then drawn from these replicates and judged by the gate's own
rule, which gives false-alarm rates and power.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from esbench.errors import UserError
from esbench.gate.decision import (
    FAILED,
    INVALID,
    MEAN,
    bounds,
    control_verdicts,
    exit_code,
    round_log_ratios,
    screen_all,
    suspects,
    time_verdicts,
)
from esbench.gate.records import (
    ROUND_FACTOR,
    STUDY_CONTROLS,
    Line,
    Opening,
    Replicate,
    Settings,
    Timed,
    Verdict,
)

FOLDER = "gate"
"""The folder of a device's results that holds its studies of the gate."""
SCHEMA = 1
SEED = 20261122
SLOWDOWNS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.10)
"""Slowdowns injected into one cell."""
SLOWDOWNS_OF_ALL = (0.007, 0.01)
"""Slowdowns injected into every cell at once."""
SUITES, TRIALS = 1000, 400
"""Suites drawn for the false-alarm rate, and for each slowdown."""
LEAST_COMPARISONS = 3000
"""A study of few cells draws more suites, until each rate rests on this many comparisons of a cell."""
_DIGITS = 7

Floats = NDArray[np.float64]


class CellLogs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log ratios head / base of a cell or control, one per replicate: of all rounds, and of a screen's."""

    name: str
    confirm: tuple[float, ...]
    screen: tuple[float, ...]


class GateStudy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete study: where and what was measured, and the log ratios. ``left_out``: cells with gaps."""

    schema: int
    opening: Opening
    wall_s: float
    cells: tuple[CellLogs, ...]
    controls: tuple[CellLogs, ...]
    left_out: tuple[str, ...] = ()

    @property
    def replicates(self) -> int:
        """How many pairs of processes were measured."""
        return len((*self.cells, *self.controls)[0].confirm) if self.cells or self.controls else 0


def summarise(raw: Path, trim: float) -> Path:
    """Turn the raw replicates of a study (JSON Lines) into the stored study beside it; remove the raw file.

    Raises:
        UserError: the file is not a study of the gate; the message names file, line and field.

    """
    lines = list(_raw_lines(raw))
    if not lines or not isinstance(lines[0], Opening):
        message = f"{raw}: not a study of the gate"
        raise UserError(message)
    replicates = [line for line in lines if isinstance(line, Replicate)]
    counts = [Counter(timed.cell for timed in replicate.cells) for replicate in replicates]
    every = dict.fromkeys(name for count in counts for name in sorted(count))
    whole = [name for name in every if all(count[name] == 1 for count in counts)]
    timed = {name: [_timed(raw, one, name) for one in replicates] for name in whole}
    logs = [_cell_logs(name, timed[name], trim) for name in whole]
    study = GateStudy(
        schema=SCHEMA,
        opening=lines[0],
        wall_s=round(sum(one.wall_s for one in replicates), 3),
        cells=tuple(one for one in logs if _surplus(one.name) is None),
        controls=tuple(one for one in logs if _surplus(one.name) is not None),
        left_out=tuple(name for name in every if name not in timed),
    )
    path = raw.with_name(raw.name.removesuffix(".gz").removesuffix(".jsonl") + ".json")
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(study), indent=0) + b"\n")
    part.replace(path)
    raw.unlink()
    return path


def read(path: Path) -> GateStudy:
    """Read a stored study.

    Raises:
        UserError: the file holds none; the message names file and field.

    """
    try:
        study = msgspec.json.decode(path.read_bytes(), type=GateStudy)
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path}: cannot be read: {error}"
        raise UserError(message) from error
    if study.schema != SCHEMA:
        message = f"{path}: schema {study.schema}, expected {SCHEMA}: measure again with `esbench gate-study`"
        raise UserError(message)
    return study


def newest_of_each(results: Path) -> list[Path]:
    """Return the newest study of each device, ordered by device folder."""
    return list({path.parent: path for path in sorted(results.glob(f"*/{FOLDER}/*.json"))}.values())


@dataclass(frozen=True)
class Logs:
    """Log ratios of some cells as arrays [cells, replicates]."""

    names: tuple[str, ...]
    confirm: Floats
    screen: Floats

    @classmethod
    def of(cls, cells: Sequence[CellLogs]) -> "Logs":
        """Stack the log ratios of cells."""
        confirm, screen = (
            np.array([getattr(one, stage) for one in cells], dtype=np.float64)
            for stage in ("confirm", "screen")
        )
        return cls(tuple(one.name for one in cells), confirm, screen)


@dataclass(frozen=True)
class Draw:
    """The replicates of one suite; ``signs`` is -1 where the two arms of a replicate are swapped."""

    screen: NDArray[np.intp]
    confirm: NDArray[np.intp]
    signs: Floats


@dataclass(frozen=True)
class Alarms:
    """What the gate says of suites in which nothing differs."""

    suites: int
    cells: int
    alarmed: int
    by_mean: int
    failed: int
    inconclusive: int
    unclear: int
    confirmed: float

    @property
    def comparisons(self) -> int:
        """How many times a cell was judged."""
        return self.suites * self.cells

    @property
    def rate(self) -> float:
        """The share of suites with a FAIL."""
        return self.alarmed / self.suites

    @property
    def upper(self) -> float:
        """The 95 % upper bound of the rate, if suites were independent (Clopper and Pearson, 1934)."""
        if self.alarmed == self.suites:
            return 1.0
        return float(special.betaincinv(self.alarmed + 1, self.suites - self.alarmed, 0.95))


@dataclass(frozen=True)
class Power:
    """In how many suites an injected slowdown was found, and in how many an unchanged cell failed."""

    slower: float
    suites: int
    found: int
    others: int
    by_mean: int

    @property
    def share(self) -> float:
        """The share of suites in which it was found."""
        return self.found / self.suites


@dataclass(frozen=True)
class ControlPower:
    """A control: its log ratios, its least detectable slowdowns, and how often it is found."""

    logs: CellLogs
    screen_mde: float
    confirm_mde: float
    power: Power


@dataclass(frozen=True)
class Findings:
    """Everything the study shows; computed from the stored replicates with a fixed seed."""

    study: GateStudy
    settings: Settings
    alarms: Alarms
    alarms_as_measured: Alarms
    screen_mde: Sequence[float]
    confirm_mde: Sequence[float]
    one_cell: Sequence[Power]
    all_cells: Sequence[Power]
    controls: Sequence[ControlPower]
    deaf: int
    unlike: int


def needed(settings: Settings) -> int:
    """Return how many replicates one suite takes."""
    return settings.screen + settings.confirm


def findings(study: GateStudy, settings: Settings | None = None) -> Findings | None:
    """Resample suites from a study; None where it has no cell or too few replicates for a suite."""
    rule = settings or Settings()
    if not study.cells or study.replicates < needed(rule):
        return None
    cells, controls = Logs.of(study.cells), Logs.of(study.controls)
    suites = max(SUITES, -(-LEAST_COMPARISONS // len(cells.names)))
    deaf, unlike = _misbehaving_controls(controls, rule, suites)
    screen_mde, confirm_mde = _detectable(cells, rule)
    return Findings(
        study=study,
        settings=rule,
        alarms=alarms(cells, rule, suites),
        alarms_as_measured=alarms(cells, rule, TRIALS, swapped=False),
        screen_mde=screen_mde,
        confirm_mde=confirm_mde,
        one_cell=[slower_cell(cells, rule, slower, TRIALS) for slower in SLOWDOWNS],
        all_cells=[slower_everywhere(cells, rule, slower, TRIALS) for slower in SLOWDOWNS_OF_ALL],
        controls=[_control_power(cells, one, rule) for one in study.controls],
        deaf=deaf,
        unlike=unlike,
    )


def draws(count: int, replicates: int, settings: Settings, *, swapped: bool = True) -> Iterator[Draw]:
    """Yield suites drawn without replacement, the same ones each time.

    Both arms are the same revision, so a replicate has its arms swapped with probability 1/2.
    """
    rng = np.random.default_rng(SEED)
    for _ in range(count):
        order = rng.permutation(replicates)
        signs = rng.choice((-1.0, 1.0), replicates)
        screen, confirm = order[: settings.screen], order[settings.screen : needed(settings)]
        yield Draw(screen, confirm, signs if swapped else np.ones(replicates))


def judge(
    draw: Draw, cells: Logs, settings: Settings, *, slower: Floats | float = 0.0, beside: Logs | None = None
) -> tuple[list[Verdict], Verdict, int]:
    """Judge one suite by the gate's rule.

    Args:
        draw: the replicates of the suite.
        cells: cells with the same work in both arms.
        settings: the rule.
        slower: log slowdown added to head: a number, or [cells, 1].
        beside: cells with really different work, whose arms are therefore not swapped.

    Returns:
        The verdicts, that of the mean, and how many cells the screen passed on for confirmation.

    """

    def taken(stage: str, replicates: NDArray[np.intp]) -> dict[str, list[float]]:
        logs = getattr(cells, stage)[:, replicates] * draw.signs[replicates] + slower
        found = dict(zip(cells.names, logs.tolist(), strict=True))
        if beside:
            found |= dict(zip(beside.names, getattr(beside, stage)[:, replicates].tolist(), strict=True))
        return found

    screen = taken("screen", draw.screen)
    suspected = suspects(screen, settings)
    confirm = {
        name: logs
        for name, logs in taken("confirm", draw.confirm).items()
        if name in suspected or MEAN in suspected
    }
    verdicts, mean = time_verdicts(screen, confirm, settings)
    assert mean is not None  # noqa: S101  a complete screen always has one
    return verdicts, mean, len(confirm)


def failing(verdicts: Sequence[Verdict]) -> set[str]:
    """Return the names of the cells that FAIL."""
    return {one.cell for one in verdicts if one.status == "FAIL"}


def alarms(cells: Logs, settings: Settings, suites: int, *, swapped: bool = True) -> Alarms:
    """Judge suites in which nothing differs."""
    alarmed = by_mean = failed = inconclusive = unclear = confirmed = 0
    for draw in draws(suites, cells.confirm.shape[1], settings, swapped=swapped):
        verdicts, mean, kept = judge(draw, cells, settings)
        code = exit_code((*verdicts, mean), ())
        alarmed += code == FAILED
        unclear += code == INVALID
        by_mean += mean.status == "FAIL"
        failed += len(failing(verdicts))
        inconclusive += sum(one.status == "INCONCLUSIVE" for one in verdicts)
        confirmed += kept
    return Alarms(
        suites, len(cells.names), alarmed, by_mean, failed, inconclusive, unclear, confirmed / suites
    )


def slower_cell(cells: Logs, settings: Settings, slower: float, suites: int) -> Power:
    """Slow one randomly chosen cell down in each suite: is it found, and does another cell fail?"""
    rng = np.random.default_rng([SEED, 1])
    found = others = by_mean = 0
    for draw in draws(suites, cells.confirm.shape[1], settings):
        place = int(rng.integers(len(cells.names)))
        shift = np.zeros((len(cells.names), 1))
        shift[place] = np.log1p(slower)
        verdicts, mean, _ = judge(draw, cells, settings, slower=shift)
        names = failing(verdicts)
        found += cells.names[place] in names
        others += bool(names - {cells.names[place]})
        by_mean += mean.status == "FAIL"
    return Power(slower, suites, found, others, by_mean)


def slower_everywhere(cells: Logs, settings: Settings, slower: float, suites: int) -> Power:
    """Slow every cell down: does the geometric mean over cells find it, and does a single cell fail?"""
    found = named = 0
    for draw in draws(suites, cells.confirm.shape[1], settings):
        verdicts, mean, _ = judge(draw, cells, settings, slower=float(np.log1p(slower)))
        found += mean.status == "FAIL"
        named += bool(failing(verdicts))
    return Power(slower, suites, found, named, found)


def more_work(cells: Logs, control: CellLogs, settings: Settings, surplus: float, suites: int) -> Power:
    """Judge control work with a real surplus as one more cell of a suite."""
    beside = Logs.of([control])
    found = others = by_mean = 0
    for draw in draws(suites, cells.confirm.shape[1], settings):
        verdicts, mean, _ = judge(draw, cells, settings, beside=beside)
        names = failing(verdicts)
        found += control.name in names
        others += bool(names - {control.name})
        by_mean += mean.status == "FAIL"
    return Power(surplus, suites, found, others, by_mean)


def _control_power(cells: Logs, control: CellLogs, settings: Settings) -> ControlPower:
    screen_mde, confirm_mde = _detectable(Logs.of([control]), settings)
    power = more_work(cells, control, settings, _surplus(control.name) or 0.0, TRIALS)
    return ControlPower(control, screen_mde[0], confirm_mde[0], power)


def _misbehaving_controls(controls: Logs, settings: Settings, suites: int) -> tuple[int, int]:
    """Count the suites that the gate's own controls make invalid: planted work missed, same work unlike."""
    deaf = unlike = 0
    if not controls.names:
        return 0, 0
    for draw in draws(suites, controls.confirm.shape[1], settings):
        confirm = dict(zip(controls.names, controls.confirm[:, draw.confirm].tolist(), strict=True))
        _, reasons = control_verdicts(confirm, settings)
        missed = sum("not found" in reason for reason in reasons)
        deaf += bool(missed)
        unlike += len(reasons) > missed
    return deaf, unlike


def _detectable(logs: Logs, settings: Settings) -> tuple[list[float], list[float]]:
    """Return each cell's least detectable slowdown, by screen and by confirmation: medians over suites."""
    suites = list(draws(TRIALS, logs.confirm.shape[1], settings))
    at_screen = [
        screen_all(dict(zip(logs.names, logs.screen[:, draw.screen].tolist(), strict=True)), settings)
        for draw in suites
    ]
    rule = partial(bounds, null=settings.margin, alpha=settings.alpha, power=settings.power)
    return (
        [median(found[name].mde for found in at_screen) for name in logs.names],
        [median(rule(row[draw.confirm].tolist()).mde for draw in suites) for row in logs.confirm],
    )


def _surplus(name: str) -> float | None:
    """Return the share of additional work of a control, None for a cell."""
    return STUDY_CONTROLS.get(name.rpartition(" | ")[0])


def _raw_lines(path: Path) -> Iterator[Line]:
    """Decode the raw file of a study; half a last line, where it was interrupted, is left out."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            yield msgspec.json.decode(line, type=Line)
        except (ValueError, RecursionError) as error:
            message = f"{path}:{number}: {error}"
            raise UserError(message) from error


def _timed(path: Path, replicate: Replicate, name: str) -> Timed:
    """Return a cell's visits in a replicate.

    Raises:
        UserError: an arm was not visited twice in each round.

    """
    timed = next(one for one in replicate.cells if one.cell == name)
    visits = (*timed.base, *timed.head)
    if not len(timed.base) == len(timed.head) == 2 * len(timed.first) > 0 or not all(visits):
        message = f"{path}: replicate {replicate.number} of {name}: an arm was not visited twice a round"
        raise UserError(message)
    return timed


def _cell_logs(name: str, replicates: Sequence[Timed], trim: float) -> CellLogs:
    every = [round_log_ratios(timed) for timed in replicates]
    first = [logs[: max(1, len(logs) * ROUND_FACTOR["screen"] // ROUND_FACTOR["study"])] for logs in every]
    confirm, screen = (
        tuple(round(float(stats.trim_mean(logs, trim)), _DIGITS) for logs in part) for part in (every, first)
    )
    return CellLogs(name, confirm, screen)
