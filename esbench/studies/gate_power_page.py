"""The page ``reports/gate.md``: false alarms and power of the gate, from the stored studies."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from scipy import stats
from tabulate import tabulate

from esbench.report.text import escape
from esbench.studies.gate_power import (
    SEED,
    Alarms,
    Findings,
    GateStudy,
    Power,
    findings,
    needed,
    newest_of_each,
    read,
)
from esbench.units import ABSENT, format_number, format_value

PAGE = "gate.md"
RATE = 0.01
"""The share of unchanged suites in which an alarm is acceptable."""
GOALS = {0.01: 0.8, 0.02: 0.99}
"""Slowdown -> the share of suites in which it should be found."""

_INTRODUCTION = f"""\
How often `esbench gate` raises a false alarm, and how small a slowdown it finds. `esbench gate-study`
measures a study and writes this page from the newest one of each device; all resampling uses the seed {SEED}.

A replicate is a pair of fresh processes of the same revision, one per arm, which take turns on every cell in
ABBA or BAAB rounds; the order of the cells is shuffled. It gives one number per cell, the log of head / base:
from all its rounds as in a confirmation, from the first third as in a screen. A suite is what one gate would
have measured; it is drawn from the replicates without replacement and judged by the gate's own rule, with the
arms of each replicate swapped at random because both are the same revision."""


def render(results: Path, out: Path) -> Path | None:
    """Write the page from the newest study of each device; nothing where there is no study.

    Raises:
        UserError: a study cannot be read.

    """
    studies = [read(path) for path in newest_of_each(results)]
    if not studies:
        return None
    path = out / PAGE
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(page(studies), encoding="utf-8")
    return path


def page(studies: Sequence[GateStudy]) -> str:
    """Return the page as Markdown."""
    parts = ["# False alarms and power of the gate", _INTRODUCTION]
    for study in studies:
        found = findings(study)
        parts += [f"## {escape(study.opening.environment.device_name)}", _origin(study)]
        parts += _sections(found) if found else [_too_few(study)]
    return "\n\n".join(parts) + "\n"


def _sections(found: Findings) -> list[str]:
    return [
        _verdicts(found),
        "### False alarms",
        _alarms(found),
        (
            f"Suites share replicates ({found.study.replicates} are enough for "
            f"{found.study.replicates // needed(found.settings)} without overlap), so the upper bound is "
            "what it would be for independent suites. With the arms as measured, head / base is "
            f"{_offset(found)} (geometric mean over cells). The gate's own controls would have made "
            f"{found.deaf} of {found.alarms.suites} suites invalid because 2 % more work was not found, "
            f"and {found.unlike} because equal work differed between the arms."
        ),
        "### Smallest slowdown that is found",
        _detectable(found),
        (
            "The slowdown of a cell that would have been found with 80 % probability, median over suites: "
            f"its distribution over {len(found.study.cells)} cells."
        ),
        "### Power: times made longer",
        _power(found),
        (
            "In each suite one randomly chosen cell, or all cells, take longer in head by the given share. A "
            f"slowdown within the margin of {_percent(found.settings.margin)} is not reported by design. "
            "*Another cell fails*: suites in which an unchanged cell FAILs."
        ),
        "### Power: more work",
        _controls(found),
        (
            "Control work with a real surplus in head, measured like every cell and judged as one more cell "
            "of a suite. *Measured*: geometric mean over all replicates with its 95 % interval."
        ),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    align = ["left", *["right"] * (len(header) - 1)]
    return tabulate(cells, header, tablefmt="pipe", disable_numparse=True, colalign=align)


def _verdicts(found: Findings) -> str:
    alarms = found.alarms
    rows = [
        (
            f"alarms in unchanged suites: at most {_percent(RATE)}",
            (
                f"{alarms.alarmed} in {alarms.suites} suites, "
                f"{alarms.failed} in {alarms.comparisons} comparisons"
            ),
            _met(met=alarms.rate <= RATE),
        )
    ]
    controls = [one.power for one in found.controls]
    for what, powers in (("a cell slower by", found.one_cell), ("more work by", controls)):
        for slower, least in GOALS.items():
            shares = [one.share for one in powers if one.slower == slower]
            goal = f"{what} {_percent(slower)} is found in at least {_percent(least)} of suites"
            rows.append(
                (goal, _percent(min(shares)), _met(met=min(shares) >= least))
                if shares
                else (goal, ABSENT, "not measured")
            )
    return _table(("goal", "found", "verdict"), rows).replace(escape("not met"), "**not met**")


def _met(*, met: bool) -> str:
    return "met" if met else "not met"


def _alarms(found: Findings) -> str:
    both = (found.alarms, found.alarms_as_measured)
    rows: list[tuple[object, ...]] = [
        ("suites", *(one.suites for one in both)),
        ("comparisons of a cell", *(one.comparisons for one in both)),
        ("suites with a FAIL", *(one.alarmed for one in both)),
        ("share of suites with a FAIL", *(_percent(one.rate) for one in both)),
        ("its 95 % upper bound", *(_percent(one.upper) for one in both)),
        ("suites in which the geometric mean FAILs", *(one.by_mean for one in both)),
        ("comparisons that FAIL", *(one.failed for one in both)),
        ("comparisons that are INCONCLUSIVE", *(_share(one.inconclusive, one) for one in both)),
        ("suites that end INCONCLUSIVE", *(one.unclear for one in both)),
        ("cells confirmed per suite, mean", *(format_number(one.confirmed) for one in both)),
    ]
    return _table(("", "arms swapped at random", "as measured"), rows)


def _share(count: int, alarms: Alarms) -> str:
    return _percent(count / alarms.comparisons)


def _detectable(found: Findings) -> str:
    rows = [
        ("at the screen", *_quantiles(found.screen_mde)),
        ("after confirmation", *_quantiles(found.confirm_mde)),
    ]
    return _table(("", "p20", "median", "p80", "max"), rows)


def _power(found: Findings) -> str:
    rows = [("one cell", *_found(one), one.others, one.by_mean) for one in found.one_cell]
    rows += [("all cells, by the mean", *_found(one), ABSENT, one.by_mean) for one in found.all_cells]
    return _table(("", "slower by", "suites", "found in", "another cell fails", "the mean fails"), rows)


def _found(power: Power) -> tuple[object, ...]:
    return _percent(power.slower), power.suites, _percent(power.share)


def _controls(found: Findings) -> str:
    if not found.controls:
        return "Not measured in this study."
    rows = [
        (
            one.logs.name,
            _percent(one.power.slower),
            _effect(one.logs.confirm),
            _percent(one.screen_mde),
            _percent(one.confirm_mde),
            _percent(one.power.share),
        )
        for one in found.controls
    ]
    header = (
        "control",
        "more work",
        "measured",
        "screen detects",
        "confirmation detects",
        "found in",
        "another cell fails",
    )
    return _table(header, rows)


def _offset(found: Findings) -> str:
    return _effect(np.mean([one.confirm for one in found.study.cells], axis=0).tolist())


def _effect(logs: Sequence[float]) -> str:
    """Format the geometric mean of some ratios with its 95 % interval by Student's t."""
    mean = fmean(logs)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (f"{100 * math.expm1(value):+.3f} %" for value in (mean - half, mean, mean + half))
    return f"{middle} ({low} to {high})"


def _quantiles(values: Sequence[float]) -> list[str]:
    return [_percent(float(one)) for one in np.quantile(values, (0.2, 0.5, 0.8, 1.0))]


def _percent(share: float) -> str:
    return format_value("share_percent", 100 * share)


def _too_few(study: GateStudy) -> str:
    return f"No suite can be drawn: {len(study.cells)} complete cells, {study.replicates} replicates."


def _origin(study: GateStudy) -> str:
    """Say where and how a study was measured."""
    opening = study.opening
    here = opening.environment
    commits = sorted({one.commit[:7] for one in opening.revisions.values()})
    return (
        f"Study {opening.gate_id}, started {opening.started}: suite {opening.suite}, seed {opening.seed}, "
        f"{study.replicates} replicates of {len(study.cells)} cells and {len(study.controls)} controls in "
        f"{study.wall_s:.0f} s; commit {' and '.join(commits)} in both arms; torch {here.torch}, "
        f"Python {here.python}, {here.threads} thread{'s' if here.threads > 1 else ''}."
    )
