"""The study of the timers: its records, its goals, and the page ``reports/accuracy.md``.

A study compares the harness with ``torch.utils.benchmark``, with itself, and with waits of known length. It
is one JSON file, ``<results>/<device>/accuracy/<study id>.json``. Nothing here imports torch.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from esbench import store
from esbench.report.formats import write
from esbench.report.formats.markdown import NOT_MET, join, table
from esbench.schema import Environment, Sample
from esbench.stats import Interval, interval
from esbench.studies import newest_files, origin
from esbench.text import escape
from esbench.units import format_cell, format_number, format_value

SCHEMA = 2
FOLDER = "accuracy"
"""The folder of the studies in a device's results."""
PAGE = "accuracy.md"

AGREEMENT, TWINS, LENGTH = "agreement", "twins", "length"
ARMS = {AGREEMENT: ("esbench", "torch.utils.benchmark"), TWINS: ("first name", "second name")}
"""What is compared within rounds -> its two arms."""
LATENCY, WARM = "latency_ns", "warm_latency_ns"

JUDGED_NS = 100e3
"""The shortest kernel for which agreement with the other timer is required."""
MAX_DISAGREEMENT = 0.01
MAX_HALF_RANGE = 0.005
MAX_LENGTH_ERROR = 0.002

Samples = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, le=1e24)], ...], msgspec.Meta(min_length=1)]
"""The nanoseconds of a round."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The samples of one kernel by one arm.

    Attributes:
        question: AGREEMENT, TWINS or LENGTH; others are of earlier studies and not shown.
        kernel: its name.
        arm: the timer, or the name under which the kernel was timed.
        metric: latency with warm or with cold caches.
        sitting: only arms of the same sitting share rounds.
        samples: one tuple of nanoseconds per round.
        expected_ns: the length of a wait.

    """

    question: str
    kernel: str
    arm: str
    metric: str = LATENCY
    sitting: int = 0
    samples: Annotated[tuple[Samples, ...], msgspec.Meta(min_length=1)]
    expected_ns: Sample | None = None


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """An arm without samples, and the reason."""

    question: str
    arm: str
    reason: str
    kernel: str = ""


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """All readings of a study and their environment."""

    schema: int
    study_id: str
    started: str
    seed: int
    wall_s: float
    environment: Environment
    readings: tuple[Reading, ...]
    missing: tuple[Missing, ...] = ()


def write_study(study: Study, results: Path) -> Path:
    """Write a study atomically and return its file."""
    return store.write_document(study, results / study.environment.slug / FOLDER / f"{study.study_id}.json")


def newest_studies(results: Path) -> list[Study]:
    """Read the newest study of each device.

    Raises:
        UserError: a file is invalid; the message names the file and the field.

    """
    return [
        store.read_document(path, Study, what="timer study", schema=SCHEMA, again="measure again")
        for path in newest_files(results, FOLDER)
    ]


# Figures


class Comparison(NamedTuple):
    """Two arms on one kernel: their medians, and the ratios of the two within rounds.

    ``half_range`` is half the range of the middle 60 % of the ratios.
    """

    kernel: str
    first_ns: float
    second_ns: float
    ratio: Interval
    half_range: float
    rounds: int

    @property
    def difference(self) -> float:
        """The median ratio, less 1."""
        return self.ratio.median - 1


def comparisons(study: Study, question: str) -> list[Comparison]:
    """Compare the two arms of a question on each kernel.

    Rounds are compared by their means for AGREEMENT, because the samples of the other timer are means of
    blocks of calls, and otherwise by their medians. The other timer does not flush the cache: on a GPU it is
    compared with the warm latency.
    """
    readings = {
        (reading.kernel, reading.sitting, reading.arm, reading.metric): reading for reading in study.readings
    }
    first_arm, second_arm = ARMS[question]
    pairs: dict[str, list[tuple[Reading, Reading]]] = {}
    for (kernel, sitting, arm, metric), reading in readings.items():
        if (arm, metric) == (second_arm, LATENCY):
            warm = readings.get((kernel, sitting, first_arm, WARM)) if question == AGREEMENT else None
            if ours := warm or readings.get((kernel, sitting, first_arm, LATENCY)):
                pairs.setdefault(kernel, []).append((ours, reading))
    return [_comparison(kernel, of_kernel, question) for kernel, of_kernel in pairs.items()]


def _comparison(kernel: str, pairs: Sequence[tuple[Reading, Reading]], question: str) -> Comparison:
    middle: Callable[[Samples], np.floating] = np.mean if question == AGREEMENT else np.median
    ratios = [
        float(middle(x) / middle(y)) for a, b in pairs for x, y in zip(a.samples, b.samples, strict=False)
    ]
    low, median, high = np.quantile(ratios, (0.2, 0.5, 0.8))
    return Comparison(
        kernel,
        _median([a for a, _ in pairs]),
        _median([b for _, b in pairs]),
        interval(ratios) or Interval(-math.inf, float(median), math.inf),
        float(high - low) / 2,
        len(ratios),
    )


class Wait(NamedTuple):
    """A wait with its length and its measured length."""

    kernel: str
    expected_ns: float
    measured_ns: float

    @property
    def difference(self) -> float:
        """The error as a share of the length."""
        return self.measured_ns / self.expected_ns - 1


def waits(study: Study) -> list[Wait]:
    """Compare waits with their known lengths.

    The duration of a GPU's cycle is unknown, so there the longest wait defines the scale and the others show
    whether latencies are proportional to lengths.
    """
    measured = [
        Wait(reading.kernel, reading.expected_ns, _median([reading]))
        for reading in study.readings
        if reading.question == LENGTH and reading.metric == LATENCY and reading.expected_ns
    ]
    if study.environment.device != "cuda" or not measured:
        return measured
    longest = max(measured, key=lambda wait: wait.expected_ns)
    scale = longest.measured_ns / longest.expected_ns
    return [wait._replace(expected_ns=scale * wait.expected_ns) for wait in measured]


def _median(readings: Sequence[Reading]) -> float:
    return float(
        np.median([sample for reading in readings for samples in reading.samples for sample in samples])
    )


# Goals


class Goal(NamedTuple):
    """A goal, the result, and the verdict."""

    goal: str
    result: str
    verdict: str


def goals(study: Study) -> list[Goal]:
    """Return the goals of a study with their verdicts."""
    judged = [pair for pair in comparisons(study, AGREEMENT) if pair.second_ns >= JUDGED_NS]
    agree = f"kernels above {format_value('min_ns', JUDGED_NS)} agree with {ARMS[AGREEMENT][1]}"
    half_ranges = [(pair.kernel, pair.half_range) for pair in comparisons(study, TWINS)]
    return [
        _goal(agree, MAX_DISAGREEMENT, [(pair.kernel, pair.difference) for pair in judged]),
        _goal("half-range of one call under two names", MAX_HALF_RANGE, half_ranges),
        _goal("known length", MAX_LENGTH_ERROR, [(wait.kernel, wait.difference) for wait in waits(study)]),
    ]


def _goal(what: str, limit: float, errors: Sequence[tuple[str, float]]) -> Goal:
    goal = f"{what} within {_percent(limit)}"
    if not errors:
        return Goal(goal, "not measured", "")
    near = sum(abs(error) <= limit for _, error in errors)
    name, worst = max(errors, key=lambda pair: abs(pair[1]))
    result = f"{near} of {len(errors)}; worst: {_percent(abs(worst))}, {name}"
    return Goal(goal, result, "met" if near == len(errors) else NOT_MET)


# The page


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/accuracy.md`` from the newest study of each device; nothing if there is no study.

    Raises:
        UserError: a study is invalid.

    """
    studies = newest_studies(results)
    return [write(out / PAGE, page(studies))] if studies else []


_INTRODUCTION = """\
Written by `nox -s accuracy` from the newest study of each device under `results/<device>/accuracy/`. A missed
goal is reported and fails nothing; a CPU shares its cores with other programs.

- **Another timer**: both timers measure every kernel in each round, in ABBA order. The difference is the
  median over rounds of the ratio of means; ± is half its 95 % interval. On a GPU the warm latency is
  compared, because the other timer does not flush the cache.
- **One call under two names**: the same call takes part twice in the harness's rounds, so every ratio should
  be 1. The half-range is half the range of the middle 60 % of the rounds' ratios.
- **Known lengths**: a loop reads the host's clock until a length is over, and the excess is the overhead of
  the harness. On a GPU a kernel spins for a number of cycles of unknown duration, so the longest spin defines
  the scale."""


def page(studies: Sequence[Study]) -> str:
    """Return the page as Markdown."""
    parts = ["# Accuracy of the harness", _INTRODUCTION]
    for study in studies:
        here = study.environment
        facts = [f"load average {format_number(here.load)} before", f"{format_number(study.wall_s)} s"]
        parts += [f"## {escape(here.device_name)}", origin(study.study_id, study.started, here, facts)]
        parts += [table(("goal", "result", "verdict"), goals(study))]
        for question, title in ((AGREEMENT, "Another timer"), (TWINS, "One call under two names")):
            parts += [f"### {title}", _comparison_table(study, question)]
        parts += ["### Known lengths", _wait_table(study)]
        missing = [escape(f"{missed.arm} {missed.kernel}: {missed.reason}") for missed in study.missing]
        parts += ["\n".join(f"- not measured: {reason}" for reason in missing)] if missing else []
    return join(parts)


def _comparison_table(study: Study, question: str) -> str:
    rows = [
        (
            pair.kernel,
            format_cell("latency_ns", pair.first_ns),
            format_cell("latency_ns", pair.second_ns),
            _signed(pair.difference),
            format_number(100 * pair.ratio.relative),
            format_number(100 * pair.half_range),
            pair.rounds,
        )
        for pair in comparisons(study, question)
    ]
    arms = [f"{arm} (ms)" for arm in ARMS[question]]
    return table(("kernel", *arms, "difference (%)", "± (%)", "half-range (%)", "rounds"), rows)


def _wait_table(study: Study) -> str:
    rows = [
        (
            wait.kernel,
            format_cell("latency_ns", wait.expected_ns),
            format_cell("latency_ns", wait.measured_ns),
            format_number(wait.measured_ns - wait.expected_ns),
            _signed(wait.difference),
        )
        for wait in waits(study)
    ]
    return table(("wait", "length (ms)", "measured (ms)", "excess (ns)", "difference (%)"), rows)


def _signed(share: float) -> str:
    return f"{'-' if share < 0 else '+'}{format_number(100 * abs(share))}"


def _percent(share: float) -> str:
    return format_value("share_percent", 100 * share)
