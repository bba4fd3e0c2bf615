"""The timer study: its records, figures and goals, and the page ``reports/accuracy.md``.

A study compares the harness with other timers, with itself and with known lengths. It is one JSON file,
``<results>/<device>/accuracy/<study id>.json``. Nothing here imports torch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from esbench import store
from esbench.report.formats import write
from esbench.report.formats.markdown import NO, NOT_MET, join, table
from esbench.report.text import escape
from esbench.schema import Environment, Sample
from esbench.stats import Interval, interval
from esbench.studies import newest_files, origin
from esbench.units import format_cell, format_number, format_value

SCHEMA = 2
FOLDER = "accuracy"
"""The folder of the studies in a device's results."""
PAGE = "accuracy.md"

OURS = "esbench"
TORCH, DO_BENCH = "torch.utils.benchmark", "triton.testing.do_bench"
JUDGED_NS = 100e3
"""The shortest kernel for which agreement with other timers is required."""
MAX_DISAGREEMENT = 0.01
MAX_HALF_RANGE = 0.005
MAX_BIAS = 0.001
MAX_LENGTH_ERROR = 0.002
MAX_VARIATION = 0.003

_LATENCY, _WARM = "latency_ns", "warm_latency_ns"
_WITHIN = f"within {100 * MAX_DISAGREEMENT:g} %"

# Records

Samples = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, le=1e24)], ...], msgspec.Meta(min_length=1)]
"""The nanoseconds of a round."""

Question = Literal["agreement", "twins", "length", "replicates"]
"""What a reading belongs to.

``agreement``: the harness and other timers. ``twins``: one call under two names in the same rounds.
``length``: a wait of known length. ``replicates``: one call in fresh processes.
"""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoding rejects unknown fields."""


class Reading(_Strict, frozen=True, kw_only=True, omit_defaults=True):
    """The samples of one kernel by one arm: a timer, a name or a process.

    ``samples`` has one tuple of nanoseconds per round; ``places`` is the order of visits in each round.
    ``expected_ns`` is the length of a wait. Only arms of the same ``sitting`` share rounds.
    """

    question: Question
    kernel: str
    arm: str
    metric: str = _LATENCY
    sitting: int = 0
    samples: Annotated[tuple[Samples, ...], msgspec.Meta(min_length=1)]
    places: tuple[int, ...] = ()
    expected_ns: Sample | None = None


class Missing(_Strict, frozen=True, kw_only=True):
    """An arm without samples, and the reason."""

    question: Question
    arm: str
    reason: str
    kernel: str = ""


class Study(_Strict, frozen=True, kw_only=True):
    """All readings of a study and their environment; ``load_after`` is the load average at the end."""

    schema: int
    study_id: str
    started: str
    seed: int
    wall_s: float
    environment: Environment
    load_after: float | None
    readings: tuple[Reading, ...]
    missing: tuple[Missing, ...] = ()

    def by_kernel(self, question: Question) -> dict[str, list[Reading]]:
        """Return the readings for a question, by kernel."""
        found: dict[str, list[Reading]] = {}
        for reading in self.readings:
            if reading.question == question:
                found.setdefault(reading.kernel, []).append(reading)
        return found


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


# Figures: one row per kernel, a dictionary of the columns of the page's table

Row = dict[str, Any]
_SIGNED = {"in-round difference (%)", "ratio - 1 (%)", "first visited (%)", "error (%)"}


def agreements(study: Study) -> Iterator[Row]:
    """Compare the harness with every other timer on every kernel.

    On a GPU, timers that flush the cache are compared with the cold latency and others with the warm one. The
    ratio within rounds is of means if the other timer reports means of blocks, otherwise of medians.
    """
    for kernel, readings in study.by_kernel("agreement").items():
        ours = {(one.metric, one.sitting): one for one in readings if one.arm == OURS}
        has_warm = any(metric == _WARM for metric, _ in ours)
        for timer in dict.fromkeys(one.arm for one in readings if one.arm != OURS):
            metric = _WARM if has_warm and timer != DO_BENCH else _LATENCY
            theirs = [one for one in readings if one.arm == timer and (metric, one.sitting) in ours]
            if not theirs:
                continue
            pairs = [(ours[metric, one.sitting], one) for one in theirs]
            # A timer with one sample per visit, which is two per round, reports the mean of a block.
            is_block = max(len(samples) for one in theirs for samples in one.samples) <= 2  # noqa: PLR2004  # see above
            ratios = [ratio for a, b in pairs for ratio in _ratios(a, b, np.mean if is_block else np.median)]
            ratio, theirs_ns = _interval(ratios), _median(*theirs)
            yield {
                "kernel": kernel,
                "timer": timer,
                "esbench (ms)": _median(*(a for a, _ in pairs)),
                "timer (ms)": theirs_ns,
                "in-round difference (%)": ratio.median - 1,
                "± (%)": ratio.relative,
                "rounds": len(ratios),
                _WITHIN: _verdict(ratio) if theirs_ns >= JUDGED_NS else "",
            }


def _verdict(ratio: Interval) -> str:
    """Return whether two timers agree; unclear if the interval of the ratio includes the limit."""
    if abs(ratio.median - 1) <= MAX_DISAGREEMENT:
        return "yes"
    return NO if ratio.low > 1 + MAX_DISAGREEMENT or ratio.high < 1 - MAX_DISAGREEMENT else "unclear"


def twins(study: Study) -> Iterator[Row]:
    """Compare each kernel with itself under another name."""
    for kernel, readings in study.by_kernel("twins").items():
        sittings: dict[int, list[Reading]] = {}
        for one in readings:
            if one.metric == _LATENCY:
                sittings.setdefault(one.sitting, []).append(one)
        pairs = [(arms[0], arms[1]) for arms in sittings.values() if len(arms) == 2]  # noqa: PLR2004  # both names
        if not pairs:
            continue
        ratios = [ratio for a, b in pairs for ratio in _ratios(a, b)]
        first_by_second = [
            ratio if place < other else 1 / ratio
            for a, b in pairs
            for ratio, place, other in zip(_ratios(a, b), a.places, b.places, strict=False)
        ]
        low, high = np.quantile(ratios, (0.2, 0.8))
        ratio = _interval(ratios)
        yield {
            "kernel": kernel,
            "time (ms)": _median(*(a for a, _ in pairs)),
            "ratio - 1 (%)": ratio.median - 1,
            "± (%)": ratio.relative,
            "half-range (%)": float(high - low) / 2 / ratio.median,
            "first visited (%)": float(np.median(first_by_second)) - 1,
            "rounds": len(ratios),
        }


def lengths(study: Study) -> Iterator[Row]:
    """Compare waits with their known lengths.

    The duration of a GPU's cycle is unknown, so there the longest wait defines the scale and the others show
    whether latencies are proportional to lengths.
    """
    waits = [
        (one.kernel, one.expected_ns, _median(one))
        for one in study.readings
        if one.question == "length" and one.metric == _LATENCY and one.expected_ns
    ]
    scale = 1.0
    if study.environment.device == "cuda" and waits:
        _, expected_ns, median_ns = max(waits, key=lambda wait: wait[1])
        scale = median_ns / expected_ns
    for kernel, unscaled_ns, median_ns in waits:
        expected_ns = scale * unscaled_ns
        yield {
            "wait": kernel,
            "length (ms)": expected_ns,
            "measured (ms)": median_ns,
            "excess (ns)": median_ns - expected_ns,
            "error (%)": median_ns / expected_ns - 1,
        }


def replicates(study: Study) -> Iterator[Row]:
    """Compare the medians of fresh processes, for each kernel that at least two of them measured."""
    for kernel, arms in study.by_kernel("replicates").items():
        medians_ns = list(map(_median, arms))
        if len(arms) > 1:
            yield {
                "kernel": kernel,
                "processes": len(arms),
                "lowest median (ms)": min(medians_ns),
                "highest median (ms)": max(medians_ns),
                "variation (%)": float(np.std(medians_ns, ddof=1) / np.mean(medians_ns)),
            }


def _ratios(a: Reading, b: Reading, middle: Callable[[Samples], np.floating] = np.median) -> list[float]:
    """Return a / b in each round that has both."""
    return [float(middle(x) / middle(y)) for x, y in zip(a.samples, b.samples, strict=False)]


def _median(*readings: Reading) -> float:
    return float(np.median([sample for one in readings for samples in one.samples for sample in samples]))


def _interval(values: Sequence[float]) -> Interval:
    """Return the interval of the median, infinite for too few values."""
    return interval(values) or Interval(-np.inf, float(np.median(values)), np.inf)


# Goals


class Goal(NamedTuple):
    """A goal and what was found; ``met`` is None if nothing was measured."""

    goal: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The verdict as a cell of a table."""
        return "not shown" if self.met is None else "met" if self.met else NOT_MET


def goals(study: Study) -> list[Goal]:
    """Return the goals of a study with their verdicts; one without figures has the reason instead."""
    found = []

    def judge(goal: str, values: Sequence[object], text: str, *, met: bool, arm: str = "") -> None:
        reasons = dict.fromkeys(one.reason for one in study.missing if one.arm == arm)
        found.append(
            Goal(goal, text, met) if values else Goal(goal, "; ".join(reasons) or "not measured", None)
        )

    for timer in (TORCH, DO_BENCH):
        goal = f"within {_percent(MAX_DISAGREEMENT)} of {timer} above {format_value('least_ns', JUDGED_NS)}"
        judged = [row for row in agreements(study) if row["timer"] == timer and row[_WITHIN]]
        verdicts = Counter(row[_WITHIN] for row in judged)
        text = f"{verdicts['yes']} of {len(judged)} kernels, {verdicts['unclear']} unclear; worst "
        text += _percent(max((abs(row["in-round difference (%)"]) for row in judged), default=0.0))
        judge(goal, judged, text, met=verdicts["yes"] == len(judged), arm=timer)
    pairs = list(twins(study))
    half_range = float(np.median([row["half-range (%)"] for row in pairs] or [0.0]))
    goal = f"one call under two names: ratios within ±{_percent(MAX_HALF_RANGE)}, median over kernels"
    judge(goal, pairs, f"±{_percent(half_range)}", met=half_range <= MAX_HALF_RANGE)
    bias = abs(float(np.median([row["first visited (%)"] for row in pairs] or [0.0])))
    goal = f"the first visit of a round differs by at most {_percent(MAX_BIAS)}, median over kernels"
    judge(goal, pairs, _percent(bias), met=bias <= MAX_BIAS)
    errors = [(abs(row["error (%)"]), row["wait"]) for row in lengths(study)]
    near = sum(error <= MAX_LENGTH_ERROR for error, _ in errors)
    worst, wait = max(errors, default=(0.0, ""))
    text = f"{near} of {len(errors)} lengths"
    text += f"; worst: {wait}, {_percent(worst)}" if near < len(errors) else ""
    goal = f"a wait of known length is within {_percent(MAX_LENGTH_ERROR)}"
    judge(goal, errors, text, met=near == len(errors))
    varied = [(row["variation (%)"], row["kernel"]) for row in replicates(study)]
    variation, kernel = max(varied, default=(0.0, ""))
    goal = f"medians of fresh processes vary by at most {_percent(MAX_VARIATION)}"
    judge(goal, varied, f"{_percent(variation)} ({kernel})", met=variation <= MAX_VARIATION)
    return found


# The page


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
        parts += [table(("goal", "found", "verdict"), rows), *_sections(study)]
    return join(parts)


def _machine(study: Study) -> str:
    here = study.environment
    load = f"load average {format_number(here.load)} before and {format_number(study.load_after)} after"
    text = origin(study.study_id, study.started, here, [load, f"{format_number(study.wall_s)} s"])
    shared = " A CPU shares its cores with other programs: compare a missed goal with the half-ranges below."
    return text + (shared if here.device == "cpu" else "")


_INTRODUCTION = (
    "Written by `nox -s accuracy` from the newest study of each device under `results/<device>/accuracy/`. A "
    "missed goal is reported and fails nothing."
)
_OTHER_TIMERS = (
    "All timers measure every kernel in each round, in ABBA order. The in-round difference compares means "
    "with a timer that reports means of blocks and medians with others; ± is half its 95 % interval, and a "
    "difference above the limit is unclear if that interval includes the limit. On a GPU, timers that flush "
    "the cache are compared with the cold latency and others with the warm one."
)
_TWINS = (
    "The same call takes part twice in the harness's rounds, so every ratio should be 1. The half-range is "
    "half the range of the middle 60 % of the rounds' ratios; `first visited` is the excess of the call that "
    "a round starts with."
)
_WAITS = "A loop reads the host's clock until a length is over: the excess is the overhead of the harness."
_SPINS = (
    "A kernel spins for a number of cycles. The duration of a cycle is unknown, so the longest spin defines "
    "the scale."
)
_PROCESSES = "The variation is the coefficient of variation of the medians; the goal is for a quiet H200."


def _sections(study: Study) -> Iterator[str]:
    """Yield a table for each question, and what was not measured."""
    waits = _SPINS if study.environment.device == "cuda" else _WAITS
    sections: tuple[tuple[str, Question, str, Iterator[Row]], ...] = (
        ("Other timers", "agreement", _OTHER_TIMERS, agreements(study)),
        ("One call under two names", "twins", _TWINS, twins(study)),
        ("Known lengths", "length", waits, lengths(study)),
        ("Fresh processes", "replicates", _PROCESSES, replicates(study)),
    )
    for title, question, text, found in sections:
        yield from (f"### {title}", text)
        if rows := list(found):
            cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
            yield table(list(rows[0]), cells)
        lines = [
            f"- {escape(f'{one.arm} {one.kernel}'.strip())}: {escape(one.reason)}"
            for one in study.missing
            if one.question == question
        ]
        if lines:
            yield "\n".join(["Not measured:", "", *dict.fromkeys(lines)])


def _cell(column: str, value: Any) -> object:  # noqa: ANN401  # a text or a number
    """Format a value in the unit that the column names: times are in ns, percentages are shares."""
    if column.endswith("(ms)"):
        return format_cell("latency_ns", value)
    if column.endswith("(ns)"):
        return format_number(value)
    if not column.endswith("(%)"):
        return value
    if column not in _SIGNED or not math.isfinite(value):
        return format_number(100 * value)
    return f"{'-' if value < 0 else '+'}{format_number(100 * abs(value))}"


def _percent(share: float) -> str:
    return format_value("share_percent", 100 * share)
