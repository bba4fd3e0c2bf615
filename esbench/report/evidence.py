"""What a study of the harness shows: each table's figures, worked out from the readings alone.

Every function here is a view of a :class:`esbench.studies.Study`; nothing is dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from esbench.report.analysis.run_selection import newest_whole
from esbench.schema import Run
from esbench.stats import Interval, interval
from esbench.studies.timer_accuracy import Question, Reading, Samples, Study

OURS = "esbench"
LATENCY, WARM = "latency_ns", "warm_latency_ns"
COLD = ("triton.testing.do_bench", "cuda-bench", "CUPTI by torch.profiler")
"""Timers that flush the cache before each call, as our ``latency_ns`` does on a GPU."""
JUDGED_NS = {
    "torch.utils.benchmark": 100e3,
    "torch.utils.benchmark, call by call": 100e3,
    "triton.testing.do_bench": 100e3,
    "cuda-bench": 10e3,
}
"""The timers that a goal names -> from which length on a kernel counts."""
MEASURING = ("set-up", "inputs", "warm-up", "rounds", "memory", "activity", "ceilings", "capacity")
"""Activities of a run that measure, or build what is measured."""

_BLOCK = 2
"""A timer with a sample for each of a round's two visits reads means of blocks."""

Pair = tuple[Reading, Reading]
"""Two arms that share their rounds."""


@dataclass(frozen=True)
class Agreement:
    """Our figure of a kernel beside another timer's.

    ``ours_ns`` and ``theirs_ns`` are medians over all samples. ``ratio`` is ours by theirs inside rounds,
    means against a timer that reads means of blocks and medians against others: like with like.
    """

    kernel: str
    timer: str
    ours_ns: float
    theirs_ns: float
    ratio: Interval
    rounds: int

    @property
    def difference(self) -> float:
        """How much longer ours is."""
        return self.ours_ns / self.theirs_ns - 1

    @property
    def is_judged(self) -> bool:
        """Whether the goal speaks of a kernel of this length by this timer."""
        return self.theirs_ns >= JUDGED_NS.get(self.timer, np.inf)


@dataclass(frozen=True)
class Twins:
    """One call under two names: what the ratio of the two says of the harness.

    ``half_range`` is half the range that holds the middle 60 % of the rounds' ratios, in units of their
    median; ``bias`` is how much longer took who was visited first.
    """

    kernel: str
    median_ns: float
    ratio: Interval
    half_range: float
    bias: float
    rounds: int


@dataclass(frozen=True)
class Length:
    """What was read of a wait of known length."""

    kernel: str
    expected_ns: float
    median_ns: float

    @property
    def excess_ns(self) -> float:
        """How much more than asked for was read."""
        return self.median_ns - self.expected_ns

    @property
    def error(self) -> float:
        """The excess in units of the length."""
        return self.excess_ns / self.expected_ns


@dataclass(frozen=True)
class Replicates:
    """The medians of fresh processes."""

    kernel: str
    medians_ns: tuple[float, ...]

    @property
    def variation(self) -> float:
        """The coefficient of variation: standard deviation (n - 1) by mean."""
        return float(np.std(self.medians_ns, ddof=1) / np.mean(self.medians_ns))


def agreements(study: Study) -> list[Agreement]:
    """Each kernel by each other timer."""
    found = []
    for kernel, readings in _by_kernel(study, "agreement").items():
        ours = {(one.metric, one.sitting): one for one in readings if one.arm == OURS}
        is_warm = any(metric == WARM for metric, _ in ours)
        for timer in dict.fromkeys(one.arm for one in readings if one.arm != OURS):
            metric = WARM if is_warm and timer not in COLD else LATENCY
            theirs = [one for one in readings if one.arm == timer]
            pairs = [(ours[metric, one.sitting], one) for one in theirs if (metric, one.sitting) in ours]
            if pairs:
                found.append(_agreement(kernel, timer, pairs))
    return found


def _agreement(kernel: str, timer: str, pairs: Sequence[Pair]) -> Agreement:
    """Compare the first of each pair with the second."""
    blocks = max(len(samples) for _, theirs in pairs for samples in theirs.samples) <= _BLOCK
    ratios = [ratio for pair in pairs for ratio in _ratios(pair, np.mean if blocks else np.median)]
    ours_ns, theirs_ns = (_median(*arm) for arm in zip(*pairs, strict=True))
    return Agreement(kernel, timer, ours_ns, theirs_ns, _within(ratios), len(ratios))


def twins(study: Study, question: Question) -> list[Twins]:
    """Each kernel under two names, in the same rounds (``twins``) or one after the other (``sequence``)."""
    found = []
    for kernel, pairs in _pairs(study, question).items():
        ratios = [ratio for pair in pairs for ratio in _ratios(pair)]
        low, high = np.quantile(ratios, (0.2, 0.8))
        ratio = _within(ratios)
        found.append(
            Twins(
                kernel=kernel,
                median_ns=_median(*(first for first, _ in pairs)),
                ratio=ratio,
                half_range=float(high - low) / 2 / ratio.median,
                # One after the other the first name is always visited first.
                bias=float(np.median([*_firsts(pairs)] if question == "twins" else ratios)) - 1,
                rounds=len(ratios),
            )
        )
    return found


def _firsts(pairs: Sequence[Pair]) -> Iterator[float]:
    """Yield for each round how many times who was visited second goes into who was first."""
    for pair in pairs:
        for ratio, mine, other in zip(_ratios(pair), pair[0].places, pair[1].places, strict=False):
            yield ratio if mine < other else 1 / ratio


def lengths(study: Study) -> list[Length]:
    """Each wait of known length.

    How long a cycle takes a GPU does not tell: there the longest wait is taken to be right, and the others
    show whether the readings are proportional to the lengths.
    """
    readings = [
        (reading, reading.expected_ns)
        for reading in study.of("length")
        if reading.metric == LATENCY and reading.expected_ns
    ]
    scale = 1.0
    if study.environment.device == "cuda" and readings:
        longest, expected_ns = max(readings, key=lambda one: one[1])
        scale = _median(longest) / expected_ns
    return [
        Length(reading.kernel, expected_ns * scale, _median(reading)) for reading, expected_ns in readings
    ]


def replicates(study: Study) -> list[Replicates]:
    """Each kernel over the fresh processes."""
    found = {kernel: tuple(map(_median, arms)) for kernel, arms in _by_kernel(study, "replicates").items()}
    return [Replicates(kernel, medians) for kernel, medians in found.items() if len(medians) > 1]


def sampled(study: Study) -> list[Agreement]:
    """The kernel with the sampling thread, by itself without."""
    return [
        _agreement(kernel, without.arm, [(with_it, without)])
        for kernel, pairs in _pairs(study, "sampler").items()
        for without, with_it in pairs
    ]


def newest_quick_run(study: Study, runs: Sequence[Run]) -> Run | None:
    """The newest whole run of the suite quick on the study's device that says where its time went."""
    here = [run for run in runs if run.header.environment.slug == study.environment.slug]
    told = [
        run for run in here if run.header.suite == "quick" and run.end and sum(run.end.spent_s.values()) > 0
    ]
    return newest_whole(told)[0] if told else None


def outside(spent_s: Mapping[str, float]) -> float:
    """The share of the seconds that neither measured nor built what is measured."""
    return sum(s for activity, s in spent_s.items() if activity not in MEASURING) / sum(spent_s.values())


def _pairs(study: Study, question: Question) -> dict[str, list[Pair]]:
    """Each kernel with its two arms in each sitting in which both were read."""
    found: dict[str, list[Pair]] = {}
    for kernel, readings in _by_kernel(study, question).items():
        for sitting in dict.fromkeys(one.sitting for one in readings):
            match [one for one in readings if (one.metric, one.sitting) == (LATENCY, sitting)]:
                case [first, second]:
                    found.setdefault(kernel, []).append((first, second))
    return found


def _ratios(pair: Pair, middle: Callable[[Samples], np.floating] = np.median) -> list[float]:
    """How many times the second goes into the first, in each round that both took part in."""
    return [float(middle(a) / middle(b)) for a, b in zip(pair[0].samples, pair[1].samples, strict=False)]


def _by_kernel(study: Study, question: Question) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for reading in study.of(question):
        found.setdefault(reading.kernel, []).append(reading)
    return found


def _median(*readings: Reading) -> float:
    return float(np.median([sample for one in readings for samples in one.samples for sample in samples]))


def _within(values: Sequence[float]) -> Interval:
    """The interval of the median; where they are too few for one, no bounds at all."""
    return interval(values) or Interval(-np.inf, float(np.median(values)), np.inf)
