"""The timer study: its records, its goals, and the page ``reports/accuracy.md``.

A study compares the harness with ``torch.utils.benchmark``, with itself, and with waits of known length. It
is one JSON file, ``<results>/<device>/accuracy/<study id>.json``. Nothing here imports torch.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from esbench.report.formats import write
from esbench.report.formats.markdown import NOT_MET, join, table
from esbench.schema import Sample
from esbench.studies import StoredStudy, StudyFiles, origin, percent
from esbench.text import escape
from esbench.units import format_cell, format_number, format_value

PAGE = "accuracy.md"
MIN_JUDGED_NS = 100e3
"""The shortest kernel for which agreement with the other timer is required."""
LATENCY, WARM = "latency_ns", "warm_latency_ns"


class Question(NamedTuple):
    """A question of the study: the two arms to compare, and the goal.

    The goal is met if ``judged``, a field of :class:`Comparison`, is at most ``limit`` for each kernel that
    takes ``min_ns`` or longer.
    """

    title: str
    arms: tuple[str, str]
    goal: str
    limit: float
    judged: Literal["difference", "half_range"] = "difference"
    min_ns: float = 0.0


AGREEMENT, TWINS, LENGTH = "agreement", "twins", "length"
QUESTIONS = {
    AGREEMENT: Question(
        "Another timer",
        ("esbench", "torch.utils.benchmark"),
        f"kernels above {format_value(LATENCY, MIN_JUDGED_NS)} agree with torch.utils.benchmark",
        limit=0.01,
        min_ns=MIN_JUDGED_NS,
    ),
    TWINS: Question(
        "One call under two names",
        ("first name", "second name"),
        "half-range of one call under two names",
        limit=0.005,
        judged="half_range",
    ),
    LENGTH: Question("Known lengths", ("esbench", "length"), "known length", limit=0.002),
}

Samples = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, le=1e24)], ...], msgspec.Meta(min_length=1)]
"""The nanoseconds of a round."""
Rounds = Annotated[tuple[Samples, ...], msgspec.Meta(min_length=1)]


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The samples of one kernel by one arm.

    Attributes:
        question: AGREEMENT, TWINS or LENGTH; readings of other questions in older studies are ignored.
        kernel: name of the kernel or wait.
        arm: the timer, or the name under which the kernel was timed.
        metric: latency with warm or with cold caches.
        repetition: only arms of the same repetition share rounds.
        samples: one tuple of nanoseconds per round.
        expected_ns: the length of a wait.
    """

    question: str
    kernel: str
    arm: str
    metric: str = LATENCY
    repetition: int = msgspec.field(default=0, name="sitting")
    samples: Rounds
    expected_ns: Sample | None = None


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """An arm without samples, and the reason."""

    question: str
    arm: str
    reason: str
    kernel: str = ""


class Study(StoredStudy, frozen=True, kw_only=True):
    """All readings of a study and their environment."""

    wall_s: float
    readings: tuple[Reading, ...]
    missing: tuple[Missing, ...] = ()


FILES = StudyFiles(Study, 2, "accuracy", "timer study", again="measure again")


class Comparison(NamedTuple):
    """The medians of two arms on one kernel, and the ratios first / second of the means or medians of rounds.

    ``difference`` is the median ratio minus 1; ``half_range`` is half the distance between the 20 % and the
    80 % quantile of the ratios.
    """

    kernel: str
    first_ns: float
    second_ns: float
    difference: float
    half_range: float
    rounds: int


def comparisons(study: Study, question: str) -> list[Comparison]:
    """Compare the two arms of a question on each kernel.

    ``torch.utils.benchmark`` stores means, so for AGREEMENT the mean of each round is compared.
    """
    center = np.mean if question == AGREEMENT else np.median
    result = []
    for kernel, repetitions in _rounds_of_arms(study, question).items():
        ratios = [
            center(first) / center(second)
            for first_arm, second_arm in repetitions
            for first, second in zip(first_arm, second_arm, strict=False)  # a call may end before the other
        ]
        p20, median, p80 = map(float, np.quantile(ratios, (0.2, 0.5, 0.8)))
        first_ns = _median_ns(first_arm for first_arm, _ in repetitions)
        second_ns = _median_ns(second_arm for _, second_arm in repetitions)
        result.append(Comparison(kernel, first_ns, second_ns, median - 1, (p80 - p20) / 2, len(ratios)))
    return result


def _median_ns(repetitions: Iterable[Rounds]) -> float:
    return float(np.median(np.concatenate([samples for rounds in repetitions for samples in rounds])))


def _rounds_of_arms(study: Study, question: str) -> dict[str, list[tuple[Rounds, Rounds]]]:
    """Return kernel -> for each repetition, the rounds of the first and of the second arm.

    The second arm of a wait is its known length. ``torch.utils.benchmark`` does not flush the caches, so it
    is compared with the warm latency where there is one.
    """
    readings = [reading for reading in study.readings if reading.question == question]
    rounds = {
        (reading.kernel, reading.repetition, reading.arm, reading.metric): reading.samples
        for reading in readings
    }
    first_arm, second_arm = QUESTIONS[question].arms
    ns_per_length = _ns_per_length(study.environment.device, readings)
    repetitions = dict.fromkeys(
        (reading.kernel, reading.repetition, reading.expected_ns) for reading in readings
    )
    pairs: dict[str, list[tuple[Rounds, Rounds]]] = {}
    for kernel, repetition, length in repetitions:
        first = rounds.get((kernel, repetition, first_arm, LATENCY))
        if question == AGREEMENT:
            first = rounds.get((kernel, repetition, first_arm, WARM), first)
        second = rounds.get((kernel, repetition, second_arm, LATENCY))
        if question == LENGTH and first and length:
            second = ((ns_per_length * length,),) * len(first)
        if first and second:
            pairs.setdefault(kernel, []).append((first, second))
    return pairs


def _ns_per_length(device: str, waits: Sequence[Reading]) -> float:
    """Return ns per unit of a wait's length: 1 on a CPU; on a GPU the longest wait defines it."""
    measured_ns = {
        wait.expected_ns: float(np.median(np.concatenate(wait.samples)))
        for wait in waits
        if wait.metric == LATENCY and wait.expected_ns
    }
    if device != "cuda" or not measured_ns:
        return 1.0
    longest = max(measured_ns)
    return measured_ns[longest] / longest


class Goal(NamedTuple):
    """A goal, the result, and the verdict."""

    goal: str
    result: str
    verdict: str


def goals(study: Study) -> list[Goal]:
    """Return the goals of a study with their verdicts."""
    return [_goal(study, name) for name in QUESTIONS]


def _goal(study: Study, name: str) -> Goal:
    """Return the goal of a question: how many kernels meet it, and the worst of them."""
    question = QUESTIONS[name]
    goal = f"{question.goal} within {percent(question.limit)}"
    errors = [
        (abs(getattr(row, question.judged)), row.kernel)
        for row in comparisons(study, name)
        if row.second_ns >= question.min_ns
    ]
    if not errors:
        return Goal(goal, "not measured", "")
    within = sum(error <= question.limit for error, _ in errors)
    worst, kernel = max(errors)
    result = f"{within} of {len(errors)}; worst: {percent(worst)}, {kernel}"
    return Goal(goal, result, "met" if within == len(errors) else NOT_MET)


# The page


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/accuracy.md`` from the newest study of each device; nothing if there is no study.

    Raises:
        UserError: a study is invalid; the message names the file and the field.
    """
    studies = FILES.newest(results)
    return [write(out / PAGE, page(studies))] if studies else []


_INTRODUCTION = """\
Written by `nox -s accuracy` from the newest study of each device under `results/<device>/accuracy/`. A missed
goal is reported and fails nothing; a CPU shares its cores with other programs.

The difference is the median over rounds of the ratio of both columns, minus 1. The half-range is half the
range of the middle 60 % of these ratios.

- **Another timer**: both timers measure every kernel in each round, in ABBA order, and means are compared. On
  a GPU the warm latency is compared, because the other timer does not flush the cache.
- **One call under two names**: the same call takes part twice in the harness's rounds, so every ratio should
  be 1.
- **Known lengths**: a loop reads the host's clock until a length is over, and the difference is the overhead
  of the harness. On a GPU a kernel spins for a number of cycles of unknown duration, so the longest spin
  defines the scale."""


def page(studies: Sequence[Study]) -> str:
    """Return the page as Markdown."""
    parts = ["# Accuracy of the harness", _INTRODUCTION]
    for study in studies:
        here = study.environment
        facts = [f"load average {format_number(here.load)} before", f"{format_number(study.wall_s)} s"]
        parts += [f"## {escape(here.device_name)}", origin(study.study_id, study.started, here, facts)]
        parts += [table(("goal", "result", "verdict"), goals(study))]
        for name, question in QUESTIONS.items():
            parts += [f"### {question.title}", _comparison_table(study, name)]
        if study.missing:
            absent = [escape(f"{arm.arm} {arm.kernel}: {arm.reason}") for arm in study.missing]
            parts.append("\n".join(f"- not measured: {reason}" for reason in absent))
    return join(parts)


def _comparison_table(study: Study, name: str) -> str:
    rows = [
        (
            row.kernel,
            format_cell(LATENCY, row.first_ns),
            format_cell(LATENCY, row.second_ns),
            f"{'-' if row.difference < 0 else '+'}{format_number(100 * abs(row.difference))}",
            format_number(100 * row.half_range),
            row.rounds,
        )
        for row in comparisons(study, name)
    ]
    arms = [f"{arm} (ms)" for arm in QUESTIONS[name].arms]
    return table(("kernel", *arms, "difference (%)", "half-range (%)", "rounds"), rows)
