"""The timer study: its records, its goals, and the page ``reports/accuracy.md``.

A study compares the harness with ``torch.utils.benchmark``, with itself, and with waits of known length. It
is one JSON file, ``<results>/<device>/accuracy/<study id>.json``. Nothing here imports torch.
"""

import math
from collections.abc import Iterator, Sequence
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
MIN_JUDGED_NS = 100e3
"""The shortest kernel for which agreement with the other timer is required."""
LATENCY, WARM = "latency_ns", "warm_latency_ns"

AGREEMENT, TWINS, LENGTH = "agreement", "twins", "length"
ARMS = {
    AGREEMENT: ("esbench", "torch.utils.benchmark"),
    TWINS: ("first name", "second name"),
    LENGTH: ("esbench", "length"),
}
"""Question -> the two arms that are compared; the second arm of a wait is its known length."""
TITLES = {AGREEMENT: "Another timer", TWINS: "One call under two names", LENGTH: "Known lengths"}
GOALS = {
    AGREEMENT: (
        f"kernels above {format_value(LATENCY, MIN_JUDGED_NS)} agree with {ARMS[AGREEMENT][1]}",
        0.01,
    ),
    TWINS: ("half-range of one call under two names", 0.005),
    LENGTH: ("known length", 0.002),
}
"""Question -> its goal and the largest difference that meets it."""

Samples = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, le=1e24)], ...], msgspec.Meta(min_length=1)]
"""The nanoseconds of a round."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The samples of one kernel by one arm.

    Attributes:
        question: AGREEMENT, TWINS or LENGTH; readings of other questions in older studies are ignored.
        kernel: name of the kernel or wait.
        arm: the timer, or the name under which the kernel was timed.
        metric: latency with warm or with cold caches.
        sitting: number of the repetition; only arms of the same sitting share rounds.
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


class Comparison(NamedTuple):
    """The medians of two arms on one kernel, and the interval of the median ratio within rounds.

    ``half_range`` is half the distance between the 20 % and the 80 % quantile of the rounds' ratios.
    """

    kernel: str
    first_ns: float
    second_ns: float
    ratio: Interval
    half_range: float
    rounds: int

    @property
    def difference(self) -> float:
        """The median ratio minus 1."""
        return self.ratio.median - 1


def comparisons(study: Study, question: str) -> list[Comparison]:
    """Compare the two arms of a question on each kernel.

    ``torch.utils.benchmark`` stores means, so for AGREEMENT the mean of each round is compared.
    """
    pairs: dict[str, list[tuple[Reading, Reading]]] = {}
    for first, second in _pairs(study, question):
        pairs.setdefault(first.kernel, []).append((first, second))
    center = np.mean if question == AGREEMENT else np.median
    result = []
    for kernel, sittings in pairs.items():
        ratios = [
            float(center(x) / center(y))
            for a, b in sittings
            for x, y in zip(a.samples, b.samples, strict=False)
        ]
        low, median, high = map(float, np.quantile(ratios, (0.2, 0.5, 0.8)))
        first_ns, second_ns = map(_median, zip(*sittings, strict=True))
        ratio = interval(ratios) or Interval(-math.inf, median, math.inf)
        result.append(Comparison(kernel, first_ns, second_ns, ratio, (high - low) / 2, len(ratios)))
    return result


def _pairs(study: Study, question: str) -> Iterator[tuple[Reading, Reading]]:
    """Yield the readings of both arms for each kernel and sitting."""
    readings = [reading for reading in study.readings if reading.question == question]
    if question == LENGTH:
        scale = _length_scale(study.environment.device, readings)
        for reading in readings:
            if reading.metric == LATENCY and reading.expected_ns:
                lengths = ((scale * reading.expected_ns,),) * len(reading.samples)
                yield reading, msgspec.structs.replace(reading, samples=lengths)
        return
    by_key = {(reading.kernel, reading.sitting, reading.arm, reading.metric): reading for reading in readings}
    first_arm, second_arm = ARMS[question]
    for (kernel, sitting, arm, metric), second in by_key.items():
        if (arm, metric) == (second_arm, LATENCY):
            # The other timer does not flush the caches, so it is compared with the warm latency.
            warm = by_key.get((kernel, sitting, first_arm, WARM)) if question == AGREEMENT else None
            if first := warm or by_key.get((kernel, sitting, first_arm, LATENCY)):
                yield first, second


def _length_scale(device: str, waits: Sequence[Reading]) -> float:
    """Return ns per unit of a wait's length: 1 on a CPU; on a GPU the longest wait defines it."""
    latencies = [wait for wait in waits if wait.metric == LATENCY and wait.expected_ns]
    if device != "cuda" or not latencies:
        return 1.0
    longest = max(latencies, key=lambda wait: wait.expected_ns or 0.0)
    return _median([longest]) / (longest.expected_ns or 1.0)


def _median(readings: Sequence[Reading]) -> float:
    return float(np.median([ns for reading in readings for samples in reading.samples for ns in samples]))


class Goal(NamedTuple):
    """A goal, the result, and the verdict."""

    goal: str
    result: str
    verdict: str


def goals(study: Study) -> list[Goal]:
    """Return the goals of a study with their verdicts."""
    return [_goal(study, question) for question in GOALS]


def _goal(study: Study, question: str) -> Goal:
    text, limit = GOALS[question]
    goal = f"{text} within {_percent(limit)}"
    errors = [
        (pair.half_range if question == TWINS else abs(pair.difference), pair.kernel)
        for pair in comparisons(study, question)
        if question != AGREEMENT or pair.second_ns >= MIN_JUDGED_NS
    ]
    if not errors:
        return Goal(goal, "not measured", "")
    within = sum(error <= limit for error, _ in errors)
    worst, kernel = max(errors)
    result = f"{within} of {len(errors)}; worst: {_percent(worst)}, {kernel}"
    return Goal(goal, result, "met" if within == len(errors) else NOT_MET)


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
        for question, title in TITLES.items():
            parts += [f"### {title}", _comparison_table(study, question)]
        missing = [escape(f"{absent.arm} {absent.kernel}: {absent.reason}") for absent in study.missing]
        parts += ["\n".join(f"- not measured: {reason}" for reason in missing)] if missing else []
    return join(parts)


def _comparison_table(study: Study, question: str) -> str:
    rows = [
        (
            pair.kernel,
            format_cell(LATENCY, pair.first_ns),
            format_cell(LATENCY, pair.second_ns),
            f"{'-' if pair.difference < 0 else '+'}{format_number(100 * abs(pair.difference))}",
            format_number(100 * pair.ratio.relative),
            format_number(100 * pair.half_range),
            pair.rounds,
        )
        for pair in comparisons(study, question)
    ]
    arms = [f"{arm} (ms)" for arm in ARMS[question]]
    return table(("kernel", *arms, "difference (%)", "± (%)", "half-range (%)", "rounds"), rows)


def _percent(share: float) -> str:
    return format_value("share_percent", 100 * share)
