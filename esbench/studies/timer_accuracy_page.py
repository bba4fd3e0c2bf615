"""The page ``reports/accuracy.md``: the goals and tables of the timer study."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from esbench.report.formats import write
from esbench.report.formats.markdown import NO, NOT_MET, join, table
from esbench.report.text import escape
from esbench.studies.timer_accuracy import (
    JUDGED_NS,
    Agreement,
    Question,
    Study,
    agreements,
    lengths,
    newest_studies,
    replicates,
    twins,
)
from esbench.units import ABSENT, format_cell, format_number, format_value

PAGE = "accuracy.md"

MAX_DISAGREEMENT = 0.01
MAX_HALF_RANGE = 0.005
MAX_BIAS = 0.001
MAX_LENGTH_ERROR = 0.002
MAX_VARIATION = 0.003

_INTRODUCTION = (
    "Written by `nox -s accuracy` from the newest study of each device under `results/<device>/accuracy/`. A "
    "missed goal is reported and fails nothing."
)


@dataclass(frozen=True)
class Goal:
    """A goal and what was found; ``met`` is None if nothing was measured."""

    goal: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The verdict as a cell of a table."""
        return "not shown" if self.met is None else "met" if self.met else NOT_MET


def goals(study: Study) -> list[Goal]:
    """Return the goals of a study with their verdicts."""
    found = []
    every = agreements(study)
    for timer, least_ns in JUDGED_NS.items():
        goal = f"within {_percent(MAX_DISAGREEMENT)} of {timer} above {format_value('least_ns', least_ns)}"
        judged = [one for one in every if one.timer == timer and one.is_judged]
        verdicts = Counter(map(agreement_verdict, judged))
        worst = max((abs(one.ratio.median - 1) for one in judged), default=math.nan)
        text = f"{verdicts['yes']} of {len(judged)} kernels, {verdicts['unclear']} unclear"
        text += f"; worst {_percent(worst)}"
        found.append(
            _goal(study, "agreement", judged, Goal(goal, text, verdicts["yes"] == len(judged)), timer)
        )
    pairs = twins(study)
    half_range = median([one.half_range for one in pairs] or [math.nan])
    bias = abs(median([one.bias for one in pairs] or [math.nan]))
    goal = f"one call under two names: ratios within ±{_percent(MAX_HALF_RANGE)}, median over kernels"
    found.append(
        _goal(study, "twins", pairs, Goal(goal, f"±{_percent(half_range)}", half_range <= MAX_HALF_RANGE))
    )
    goal = f"the first visit of a round differs by at most {_percent(MAX_BIAS)}, median over kernels"
    found.append(_goal(study, "twins", pairs, Goal(goal, _percent(bias), bias <= MAX_BIAS)))
    waits = lengths(study)
    near = sum(abs(one.error) <= MAX_LENGTH_ERROR for one in waits)
    text = f"{near} of {len(waits)} lengths"
    if near < len(waits):
        worst_wait = max(waits, key=lambda one: abs(one.error))
        text += f"; worst: {worst_wait.kernel}, {_percent(abs(worst_wait.error))}"
    goal = f"a wait of known length is within {_percent(MAX_LENGTH_ERROR)}"
    found.append(_goal(study, "length", waits, Goal(goal, text, near == len(waits))))
    processes = replicates(study)
    variation, kernel = max(((one.variation, one.kernel) for one in processes), default=(math.nan, ""))
    goal = f"medians of fresh processes vary by at most {_percent(MAX_VARIATION)}"
    text = f"{_percent(variation)} ({kernel})"
    return [*found, _goal(study, "replicates", processes, Goal(goal, text, variation <= MAX_VARIATION))]


def agreement_verdict(one: Agreement) -> str:
    """Whether two timers agree; unclear if the interval of the difference includes the limit."""
    if abs(one.ratio.median - 1) <= MAX_DISAGREEMENT:
        return "yes"
    differs = one.ratio.low > 1 + MAX_DISAGREEMENT or one.ratio.high < 1 - MAX_DISAGREEMENT
    return NO if differs else "unclear"


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/accuracy.md`` from the newest study of each device; nothing if there is no study.

    Raises:
        UserError: a study is invalid.

    """
    studies = newest_studies(results)
    return [write(out / PAGE, page(studies))] if studies else []


def page(studies: Sequence[Study]) -> str:
    """Return the page as Markdown."""
    parts = ["# Accuracy of the harness", _INTRODUCTION]
    for study in studies:
        rows = [(goal.goal, goal.found, goal.verdict) for goal in goals(study)]
        parts += [f"## {escape(study.environment.device_name)}", _machine(study)]
        parts.append(table(("goal", "found", "verdict"), rows))
        for show in (_agreement, _twins, _lengths, _replicates):
            parts += show(study)
    return join(parts)


def _goal(study: Study, question: Question, found: Sequence[object], goal: Goal, arm: str = "") -> Goal:
    """The goal, or why it is not shown if nothing was found."""
    if found:
        return goal
    reasons = [one.reason for one in study.missing if one.question == question and arm in {"", one.arm}]
    return Goal(goal.goal, "; ".join(dict.fromkeys(reasons)) or "not measured", None)


def _machine(study: Study) -> str:
    here = study.environment
    facts = [
        f"Study {study.study_id}, started {study.started}",
        f"{here.threads} threads on {escape(here.cpu)}",
        (f"commit {here.commit[:7]}" if here.commit else "commit unknown")
        + (" with uncommitted changes" if here.dirty else ""),
        f"esbench {here.esbench}, torch {here.torch}, Python {here.python}",
        *(f"{name} {version}" for name, version in (("CUDA", here.cuda), ("driver", here.driver)) if version),
        f"load average {format_number(here.load)} before and {format_number(study.load_after)} after",
        f"{format_number(study.wall_s)} s",
    ]
    text = "; ".join(facts) + "."
    if here.device == "cpu":
        text += (
            " A CPU shares its cores with other programs: compare a missed goal with the half-ranges below."
        )
    return text


def _agreement(study: Study) -> list[str]:
    header = (
        *("kernel", "timer", "esbench (ms)", "timer (ms)", "in-round difference (%)", "± (%)", "rounds"),
        f"within {100 * MAX_DISAGREEMENT:g} %",
    )
    rows = [
        (
            one.kernel,
            one.timer,
            format_cell("ours_ns", one.ours_ns),
            format_cell("theirs_ns", one.theirs_ns),
            _signed(one.ratio.median - 1),
            format_number(100 * one.ratio.relative),
            one.rounds,
            agreement_verdict(one) if one.is_judged else "",
        )
        for one in agreements(study)
    ]
    text = (
        "All timers measure every kernel in each round, in ABBA order. The in-round difference compares "
        "means with a timer that reports means of blocks and medians with others; ± is half its 95 % "
        "interval, and a difference above the limit is unclear if that interval includes the limit. On a "
        "GPU, timers that flush the cache are compared with the cold latency and others with the warm one."
    )
    return ["### Other timers", text, table(header, rows), *_missing(study, "agreement")]


def _twins(study: Study) -> list[str]:
    header = (
        "kernel",
        "time (ms)",
        "ratio - 1 (%)",
        "± (%)",
        "half-range (%)",
        "first visited (%)",
        "rounds",
    )
    rows = [
        (
            one.kernel,
            format_cell("median_ns", one.median_ns),
            _signed(one.ratio.median - 1),
            format_number(100 * one.ratio.relative),
            format_number(100 * one.half_range),
            _signed(one.bias),
            one.rounds,
        )
        for one in twins(study)
    ]
    text = (
        "The same call takes part twice in the harness's rounds, so every ratio should be 1. The half-range "
        "is half the range of the middle 60 % of the rounds' ratios; `first visited` is the excess of the "
        "call that a round starts with."
    )
    return ["### One call under two names", text, table(header, rows), *_missing(study, "twins")]


def _lengths(study: Study) -> list[str]:
    rows = [
        (
            one.kernel,
            format_cell("expected_ns", one.expected_ns),
            format_cell("median_ns", one.median_ns),
            format_number(one.median_ns - one.expected_ns),
            _signed(one.error),
        )
        for one in lengths(study)
    ]
    text = "A loop reads the host's clock until a length is over: the excess is the overhead of the harness."
    if study.environment.device == "cuda":
        text = (
            "A kernel spins for a number of cycles. The duration of a cycle is unknown, so the longest spin "
            "defines the scale."
        )
    header = ("wait", "length (ms)", "measured (ms)", "excess (ns)", "error (%)")
    return ["### Known lengths", text, table(header, rows), *_missing(study, "length")]


def _replicates(study: Study) -> list[str]:
    rows = [
        (
            one.kernel,
            len(one.medians_ns),
            format_cell("median_ns", min(one.medians_ns)),
            format_cell("median_ns", max(one.medians_ns)),
            format_number(100 * one.variation),
        )
        for one in replicates(study)
    ]
    header = ("kernel", "processes", "lowest median (ms)", "highest median (ms)", "variation (%)")
    text = "The variation is the coefficient of variation of the medians; the goal is for a quiet H200."
    return ["### Fresh processes", text, table(header, rows), *_missing(study, "replicates")]


def _missing(study: Study, question: Question) -> list[str]:
    lines = [
        f"- {escape(f'{one.arm} {one.kernel}'.strip())}: {escape(one.reason)}"
        for one in study.missing
        if one.question == question
    ]
    return ["\n".join(["Not measured:", "", *dict.fromkeys(lines)])] if lines else []


def _percent(share: float) -> str:
    return format_value("share_percent", 100 * share)


def _signed(share: float) -> str:
    return f"{'-' if share < 0 else '+'}{format_number(100 * abs(share))}" if math.isfinite(share) else ABSENT
