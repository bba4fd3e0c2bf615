"""What a study of the harness shows: each table's figures, worked out from the readings alone.

Every function here is a view of a :class:`esbench.studies.Study`; nothing is dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from esbench.records import Run
from esbench.statistics import Interval, interval
from esbench.studies import Question, Reading, Study

OURS = "esbench"
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
    for arms in _by_kernel(study, "agreement").values():
        ours = {reading.metric: reading for reading in arms if reading.arm == OURS}
        for theirs in (reading for reading in arms if reading.arm != OURS):
            cold = theirs.arm in COLD or "warm_latency_ns" not in ours
            mine = ours.get("latency_ns" if cold else "warm_latency_ns")
            if mine:
                found.append(_agreement(mine, theirs))
    return found


def _agreement(ours: Reading, theirs: Reading) -> Agreement:
    blocks = max(map(len, theirs.samples)) <= _BLOCK
    middle = np.mean if blocks else np.median
    pairs = zip(ours.samples, theirs.samples, strict=False)
    ratios = [float(middle(a) / middle(b)) for a, b in pairs]
    return Agreement(ours.kernel, theirs.arm, _median(ours), _median(theirs), _within(ratios), len(ratios))


def twins(study: Study, question: Question) -> list[Twins]:
    """Each kernel under two names, in the same rounds (``twins``) or one after the other (``sequence``)."""
    found = []
    for kernel, a, b in _pairs(study, question):
        shared = min(len(a.samples), len(b.samples))
        ratios = [float(np.median(a.samples[k]) / np.median(b.samples[k])) for k in range(shared)]
        # One after the other the first name is always visited first.
        firsts = (
            [x if mine < other else 1 / x for x, mine, other in zip(ratios, a.places, b.places, strict=False)]
            if question == "twins"
            else ratios
        )
        low, high = np.quantile(ratios, (0.2, 0.8))
        ratio = _within(ratios)
        found.append(
            Twins(
                kernel=kernel,
                median_ns=_median(a),
                ratio=ratio,
                half_range=float(high - low) / 2 / ratio.median,
                bias=float(np.median(firsts)) - 1,
                rounds=shared,
            )
        )
    return found


def lengths(study: Study) -> list[Length]:
    """Each wait of known length.

    How long a cycle takes a GPU does not tell: there the longest wait is taken to be right, and the others
    show whether the readings are proportional to the lengths.
    """
    readings = [
        (reading, reading.expected_ns)
        for reading in study.of("length")
        if reading.metric == "latency_ns" and reading.expected_ns
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
    return [_agreement(with_it, without) for _, without, with_it in _pairs(study, "sampler")]


def newest_quick_run(study: Study, runs: Sequence[Run]) -> Run | None:
    """The newest run of the suite quick on the study's device that says where its time went."""
    here = [run for run in runs if run.header.environment.slug == study.environment.slug]
    told = [
        run for run in here if run.header.suite == "quick" and run.end and sum(run.end.spent_s.values()) > 0
    ]
    return max(told, key=lambda run: run.header.run_id, default=None)


def outside(spent_s: Mapping[str, float]) -> float:
    """The share of the seconds that neither measured nor built what is measured."""
    return sum(s for activity, s in spent_s.items() if activity not in MEASURING) / sum(spent_s.values())


def _pairs(study: Study, question: Question) -> Iterator[tuple[str, Reading, Reading]]:
    """Each kernel with its two arms, where both were read."""
    for kernel, arms in _by_kernel(study, question).items():
        match [reading for reading in arms if reading.metric == "latency_ns"]:
            case [a, b]:
                yield kernel, a, b


def _by_kernel(study: Study, question: Question) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for reading in study.of(question):
        found.setdefault(reading.kernel, []).append(reading)
    return found


def _median(reading: Reading) -> float:
    return float(np.median([sample for samples in reading.samples for sample in samples]))


def _within(values: Sequence[float]) -> Interval:
    """The interval of the median; where they are too few for one, no bounds at all."""
    return interval(values) or Interval(-np.inf, float(np.median(values)), np.inf)
