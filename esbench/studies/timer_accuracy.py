"""Records of the timer study, and the figures computed from them.

A study compares the harness with other timers, with itself and with known lengths. It is one JSON file,
``<results>/<device>/accuracy/<study id>.json``. Nothing here imports torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from esbench import store
from esbench.schema import Environment, Sample
from esbench.stats import Interval, interval

SCHEMA = 2
FOLDER = "accuracy"
"""The folder of the studies in a device's results."""

OURS = "esbench"
TORCH, DO_BENCH, NVBENCH = "torch.utils.benchmark", "triton.testing.do_bench", "cuda-bench"
JUDGED_NS = {TORCH: 100e3, DO_BENCH: 100e3, NVBENCH: 10e3}
"""Timer -> the shortest kernel for which agreement is required."""

_LATENCY, _WARM = "latency_ns", "warm_latency_ns"

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
        """The readings that belong to a question, by kernel."""
        found: dict[str, list[Reading]] = {}
        for reading in self.readings:
            if reading.question == question:
                found.setdefault(reading.kernel, []).append(reading)
        return found


def write_study(study: Study, results: Path) -> Path:
    """Write a study atomically and return its file."""
    return store.write_document(study, results / study.environment.slug / FOLDER / f"{study.study_id}.json")


def newest_studies(results: Path) -> list[Study]:
    """Read the newest study of each device, sorted by the devices' folders.

    Raises:
        UserError: a file is invalid; the message names the file and the field.

    """
    newest = {path.parent: path for path in sorted(results.glob(f"*/{FOLDER}/*.json"))}
    return [
        store.read_document(path, Study, what="timer study", schema=SCHEMA, again="measure again")
        for path in newest.values()
    ]


@dataclass(frozen=True)
class Agreement:
    """The latency of a kernel by the harness and by another timer.

    ``ours_ns`` and ``theirs_ns`` are medians over all samples. ``ratio`` is ours / theirs within rounds, of
    means if the other timer reports means of blocks, otherwise of medians.
    """

    kernel: str
    timer: str
    ours_ns: float
    theirs_ns: float
    ratio: Interval
    rounds: int

    @property
    def is_judged(self) -> bool:
        """Whether the kernel is long enough for the goal."""
        return self.theirs_ns >= JUDGED_NS.get(self.timer, np.inf)


@dataclass(frozen=True)
class Twins:
    """The ratio of one call under two names.

    ``half_range`` is half the range of the middle 60 % of the rounds' ratios, relative to their median;
    ``bias`` is the relative excess of the name that is visited first.
    """

    kernel: str
    median_ns: float
    ratio: Interval
    half_range: float
    bias: float
    rounds: int


@dataclass(frozen=True)
class Length:
    """The latency of a wait of known length."""

    kernel: str
    expected_ns: float
    median_ns: float

    @property
    def error(self) -> float:
        """The relative excess."""
        return self.median_ns / self.expected_ns - 1


@dataclass(frozen=True)
class Replicates:
    """The medians of fresh processes."""

    kernel: str
    medians_ns: tuple[float, ...]

    @property
    def variation(self) -> float:
        """The coefficient of variation."""
        return float(np.std(self.medians_ns, ddof=1) / np.mean(self.medians_ns))


def agreements(study: Study) -> list[Agreement]:
    """Compare the harness with every other timer on every kernel.

    On a GPU, timers that flush the cache are compared with the cold latency and others with the warm one.
    """
    found = []
    for kernel, readings in study.by_kernel("agreement").items():
        ours = {(one.metric, one.sitting): one for one in readings if one.arm == OURS}
        has_warm = any(metric == _WARM for metric, _ in ours)
        for timer in dict.fromkeys(one.arm for one in readings if one.arm != OURS):
            metric = _WARM if has_warm and timer not in {DO_BENCH, NVBENCH} else _LATENCY
            pairs = [
                (ours[metric, one.sitting], one)
                for one in readings
                if one.arm == timer and (metric, one.sitting) in ours
            ]
            if not pairs:
                continue
            # A timer with one sample per visit reports the mean of a block.
            is_block = max(len(samples) for _, theirs in pairs for samples in theirs.samples) <= 2  # noqa: PLR2004  a round has two visits
            ratios = [ratio for a, b in pairs for ratio in _ratios(a, b, np.mean if is_block else np.median)]
            ours_ns, theirs_ns = (_median(*arm) for arm in zip(*pairs, strict=True))
            found.append(Agreement(kernel, timer, ours_ns, theirs_ns, _interval(ratios), len(ratios)))
    return found


def twins(study: Study) -> list[Twins]:
    """Compare each kernel with itself under another name."""
    found = []
    for kernel, readings in study.by_kernel("twins").items():
        sittings: dict[int, list[Reading]] = {}
        for one in readings:
            if one.metric == _LATENCY:
                sittings.setdefault(one.sitting, []).append(one)
        pairs = [(arms[0], arms[1]) for arms in sittings.values() if len(arms) == 2]  # noqa: PLR2004  both names
        if not pairs:
            continue
        ratios = [ratio for a, b in pairs for ratio in _ratios(a, b)]
        low, high = np.quantile(ratios, (0.2, 0.8))
        ratio = _interval(ratios)
        firsts = [ratio for a, b in pairs for ratio in _first_by_second(a, b)]
        found.append(
            Twins(
                kernel=kernel,
                median_ns=_median(*(a for a, _ in pairs)),
                ratio=ratio,
                half_range=float(high - low) / 2 / ratio.median,
                bias=float(np.median(firsts)) - 1,
                rounds=len(ratios),
            )
        )
    return found


def lengths(study: Study) -> list[Length]:
    """Compare waits with their known lengths.

    The duration of a GPU's cycle is unknown, so there the longest wait defines the scale and the others show
    whether latencies are proportional to lengths.
    """
    readings = [
        (one, one.expected_ns)
        for found in study.by_kernel("length").values()
        for one in found
        if one.metric == _LATENCY and one.expected_ns
    ]
    scale = 1.0
    if study.environment.device == "cuda" and readings:
        longest, expected_ns = max(readings, key=lambda one: one[1])
        scale = _median(longest) / expected_ns
    return [Length(one.kernel, expected_ns * scale, _median(one)) for one, expected_ns in readings]


def replicates(study: Study) -> list[Replicates]:
    """Compare the medians of fresh processes, for each kernel that at least two of them measured."""
    found = study.by_kernel("replicates").items()
    return [Replicates(kernel, tuple(map(_median, arms))) for kernel, arms in found if len(arms) > 1]


def _ratios(a: Reading, b: Reading, middle: Callable[[Samples], np.floating] = np.median) -> list[float]:
    """A / b in each round that both took part in."""
    return [float(middle(x) / middle(y)) for x, y in zip(a.samples, b.samples, strict=False)]


def _first_by_second(a: Reading, b: Reading) -> Iterator[float]:
    """Yield the latency visited first / the one visited second, for each round."""
    for ratio, place, other in zip(_ratios(a, b), a.places, b.places, strict=False):
        yield ratio if place < other else 1 / ratio


def _median(*readings: Reading) -> float:
    return float(np.median([sample for one in readings for samples in one.samples for sample in samples]))


def _interval(values: Sequence[float]) -> Interval:
    """The interval of the median, infinite for too few values."""
    return interval(values) or Interval(-np.inf, float(np.median(values)), np.inf)
