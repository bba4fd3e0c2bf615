"""What a study of the harness is held to, and whether it holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from esbench.report import evidence
from esbench.report.evidence import JUDGED_NS
from esbench.schema import Run
from esbench.studies.timer_accuracy import Question, Study
from esbench.units import format_value

AGREEMENT = 0.01
HALF_RANGE = 0.005
BIAS = 0.001
LENGTH = 0.002
VARIATION = 0.003
OUTSIDE = 0.05
NOT_MET, NO = BAD = ("**not met**", "**no**")
"""Verdicts that stand out on the page: the only words of its tables that are marked up."""


@dataclass(frozen=True)
class Goal:
    """A goal, what was found, and whether it is met: ``None`` where ``found`` says why nothing was."""

    goal: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return "not shown" if self.met is None else "met" if self.met else NOT_MET


def goals(study: Study, quick: Run | None) -> list[Goal]:
    """Every goal of a study, in the order of the page's tables."""
    return [*_agreement(study), *_twins(study), _lengths(study), _replicates(study), _outside(quick)]


def verdict(agreement: evidence.Agreement) -> str:
    """Whether two timers agree as they should: unclear where the interval says neither."""
    ratio = agreement.ratio
    if abs(ratio.median - 1) <= AGREEMENT:
        return "yes"
    apart = ratio.low > 1 + AGREEMENT or ratio.high < 1 - AGREEMENT
    return NO if apart else "unclear"


def percent(share: float) -> str:
    """A share as a percentage with its unit."""
    return format_value("share_percent", 100 * share)


def reasons(study: Study, question: Question, arm: str = "") -> str:
    """Why something is missing, in words."""
    found = [one.reason for one in study.missing if one.question == question and arm in {"", one.arm}]
    return "; ".join(dict.fromkeys(found)) or "nothing was read"


def _agreement(study: Study) -> list[Goal]:
    every = evidence.agreements(study)
    found = []
    for timer, least_ns in JUDGED_NS.items():
        goal = f"within {percent(AGREEMENT)} of {timer} above {format_value('least_ns', least_ns)}"
        judged = [one for one in every if one.timer == timer and one.is_judged]
        if not judged:
            found.append(Goal(goal, reasons(study, "agreement", timer), None))
            continue
        verdicts = Counter(map(verdict, judged))
        worst = max(abs(one.ratio.median - 1) for one in judged)
        text = f"{verdicts['yes']} of {len(judged)} kernels, {verdicts['unclear']} unclear; "
        text += f"the furthest is {percent(worst)} off"
        found.append(Goal(goal, text, verdicts["yes"] == len(judged)))
    return found


def _twins(study: Study) -> list[Goal]:
    spread = f"one call under two names: ratios within ±{percent(HALF_RANGE)}, median over kernels"
    order = f"who is visited first is not slower or faster by more than {percent(BIAS)}, median over kernels"
    every = evidence.twins(study, "twins")
    if not every:
        why = reasons(study, "twins")
        return [Goal(spread, why, None), Goal(order, why, None)]
    half_range = median(one.half_range for one in every)
    bias = abs(median(one.bias for one in every))
    return [
        Goal(spread, f"±{percent(half_range)}", half_range <= HALF_RANGE),
        Goal(order, percent(bias), bias <= BIAS),
    ]


def _lengths(study: Study) -> Goal:
    goal = f"a wait of known length reads within {percent(LENGTH)}"
    every = sorted(evidence.lengths(study), key=lambda one: one.expected_ns)
    if not every:
        return Goal(goal, reasons(study, "length"), None)
    near = [abs(one.error) <= LENGTH for one in every]
    text = f"{sum(near)} of {len(every)} lengths"
    if not all(near):
        worst = max(every, key=lambda one: abs(one.error))
        text += f"; the worst is {worst.kernel}, {percent(abs(worst.error))} off"
    return Goal(goal, text, all(near))


def _replicates(study: Study) -> Goal:
    every = evidence.replicates(study)
    goal = f"medians of fresh processes vary by {percent(VARIATION)} at most"
    if not every:
        return Goal(goal, reasons(study, "replicates"), None)
    worst = max(every, key=lambda one: one.variation)
    return Goal(goal, f"{percent(worst.variation)} ({worst.kernel})", worst.variation <= VARIATION)


def _outside(quick: Run | None) -> Goal:
    goal = f"{percent(OUTSIDE)} of a quick run at most neither measures nor builds what is measured"
    if quick is None or quick.end is None:
        return Goal(goal, "no quick run on this device says where its time went", None)
    share = evidence.outside(quick.end.spent_s)
    return Goal(goal, percent(share), share <= OUTSIDE)


def missed(found: Sequence[Goal]) -> list[Goal]:
    """The goals that are not met."""
    return [goal for goal in found if goal.met is False]
