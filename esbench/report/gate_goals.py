"""What a study of the gate is held to, and whether it holds."""

from collections.abc import Sequence

from esbench.report.gate_findings import LEAST_COMPARISONS, Findings
from esbench.report.goals import Goal, percent
from esbench.report.resampling import Power

LEAST_SUITES = 300
RATE = 0.01
POWER = {0.01: 0.8, 0.02: 0.99}
"""By which share something is slower -> in which share of suites it is to be found at least."""

CELL, WORK = "a cell that takes longer by", "a surplus of work of"


def goals(found: Findings) -> list[Goal]:
    """Every goal, in the order of the page's sections."""
    resampled = found.resampled
    silent = f"no alarm in {LEAST_SUITES} suites and {LEAST_COMPARISONS} comparisons of a cell, or more"
    rare = f"an alarm in {percent(RATE)} of unchanged suites at most"
    if resampled is None:
        why = too_few(found)
        power = [_power(slower, what, (), why) for what in (CELL, WORK) for slower in POWER]
        return [Goal(silent, why, None), Goal(rare, why, None), *power]
    alarms = resampled.alarms
    counts = (
        f"{alarms.alarmed} in {alarms.suites} suites, {alarms.failed} in {alarms.comparisons} comparisons"
    )
    planted = [one.power for one in resampled.controls]
    return [
        Goal(silent, counts, alarms.alarmed == alarms.failed == 0),
        Goal(rare, percent(alarms.rate), alarms.rate <= RATE),
        *(_power(slower, CELL, resampled.shifted) for slower in POWER),
        *(_power(slower, WORK, planted, "no such work was measured") for slower in POWER),
    ]


def too_few(found: Findings) -> str:
    """Why no suite can be drawn."""
    cells, replicates = len(found.arrays.cells.names), found.arrays.cells.replicates
    if not cells:
        return "no cell stands in every replicate"
    return f"a gate takes {found.needed} replicates, and the study holds {replicates}"


def _power(slower: float, what: str, powers: Sequence[Power], why: str = "") -> Goal:
    """By several methods counts the one that finds least."""
    goal = f"{what} {percent(slower)} is found in {percent(POWER[slower])} of suites or more"
    shares = [one.share for one in powers if one.slower == slower]
    if not shares:
        return Goal(goal, why, None)
    return Goal(goal, percent(min(shares)), min(shares) >= POWER[slower])
