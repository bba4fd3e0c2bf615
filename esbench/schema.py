"""The stored records of a run, shared by measuring and reading; no torch.

Field names carry their unit; a metric's unit is the suffix of its name (``latency_ns``, ``peak_bytes``,
``utilization_percent``), see :mod:`esbench.units`.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Annotated, Literal

import msgspec

SCHEMA_VERSION = 6
"""The version written into every run, and the only one that is read."""

Mode = Literal["base", "naive", "batched"]
Phase = Literal["sample", "forward", "update", "step", "quality"]
Scalar = bool | int | float | str

Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Sample = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
"""A reading of an instrument; decoding checks the range."""
Estimate = Annotated[float, msgspec.Meta(ge=-1e24, le=1e24)]
"""A value of a quality metric; a correlation or a kappa may be below 0."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

PHASES: tuple[Phase, ...] = ("sample", "forward", "update", "step")
"""The phases that are timed."""
METHODS: Mapping[str, tuple[str, ...]] = {"cpu": ("host",), "cuda": ("eager", "graph")}
"""Device -> the methods by which it can be timed."""
QUALITY: Phase = "quality"
"""The phase of quality metrics, which are computed and not timed."""
LAUNCHES = "launches"
"""The metric of a trace: the kernels, copies and fills that a call launches."""
OUT_OF_MEMORY = "out of memory"
"""The beginning of the reason of a row that ran out of memory."""
WRONG_RESULT = "wrong result"
"""The beginning of the reason of a row whose result is not that of the reference."""
OUT_OF_TIME = "time budget of the run"
"""The reason of rows that were skipped because of the time budget."""
DENSE = "Perturbed"
"""The reference of other variants: an independent normal number per weight and member."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record; decoding rejects unknown fields."""


class _Line(Strict, frozen=True, tag_field="record"):
    """One line of a run's file; the field ``record`` is its tag."""


class Case(Strict, frozen=True, kw_only=True):
    """A computation to measure: the operator and its shape, the population and the dtype.

    A weight is [out_channels, in_channels / groups, *kernel_size]. ``kernel_size`` and ``input_size`` are
    empty for operators without spatial axes.
    """

    operator: str
    out_channels: Count
    in_channels: Count
    kernel_size: tuple[int, ...] = ()
    input_size: tuple[int, ...] = ()
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] | str = 0
    dilation: int | tuple[int, ...] = 1
    groups: Count = 1
    padding_mode: str = "zeros"
    bias: bool = False
    members: Count = 1024
    repeats: Count = 1
    dtype: str = "float32"
    antithetic: bool = False
    sigma: Annotated[float, msgspec.Meta(gt=0, le=1e24)] = 0.02

    @property
    def rows(self) -> int:
        """The number of input rows: ``repeats`` for each member."""
        return self.members * self.repeats

    @property
    def shape(self) -> str:
        """The column heading in tables, such as ``(out, in, kernel size, input size)``."""
        parts: list[object] = [self.out_channels, self.in_channels]
        parts += [self.kernel_size] if self.kernel_size else []
        parts += [self.input_size] if self.input_size else []
        return f"({', '.join(map(str, parts))})"

    @property
    def label(self) -> str:
        """The operator with its shape, then every other field that differs from its default."""
        changed = [
            f"{name}={_short(value)}"
            for name, default in _defaults_of_label().items()
            if (value := getattr(self, name)) != default
        ]
        return " ".join([f"{self.operator}{self.shape}", *changed])


@cache  # a report needs thousands of labels
def _defaults_of_label() -> Mapping[str, object]:
    """Return the defaults of the fields of a case that are not in its shape."""
    in_shape = {"operator", "out_channels", "in_channels", "kernel_size", "input_size"}
    return {field.name: field.default for field in msgspec.structs.fields(Case) if field.name not in in_shape}


class Variant(Strict, frozen=True, kw_only=True):
    """A scheme with the options that differ from its defaults, in field order: one row of a table."""

    scheme: str
    options: tuple[tuple[str, Scalar], ...] = ()
    mode: Mode = "batched"
    baseline: bool = False

    @property
    def name(self) -> str:
        """The label without an operator, as ``--variants`` matches it."""
        return self._label("")

    @property
    def unfused_scheme(self) -> str:
        """The scheme; for a fused kernel the one that it computes: ``Flipped`` for ``FusedFlipped``."""
        return self.scheme.removeprefix("Fused")

    def label(self, operator: str) -> str:
        """Return the row heading: ``SparsePerturbedLinear(k=2)``; a baseline is just ``Base``."""
        return self._label("" if self.baseline else operator)

    def matches(self, globs: Iterable[str], operator: str) -> bool:
        """Return whether the name, or the label on an operator, matches one of the globs."""
        names = (self.name, self.label(operator))
        return any(fnmatchcase(name, glob) for glob in globs for name in names)

    def _label(self, operator: str) -> str:
        inner = ", ".join(f"{key}={_short(value)}" for key, value in self.options)
        return f"{self.scheme}{operator}" + (f"({inner})" if inner else "")


class Work(Strict, frozen=True, kw_only=True):
    """The minimum work of a call, declared by its variant.

    ``flops`` count a multiplication and an addition as two; ``moved_bytes`` are read or written once;
    ``output_bytes`` is the size of the result, a lower bound of the peak.
    """

    flops: Sample
    moved_bytes: Sample
    output_bytes: Sample


class Conditions(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """The state of the device after a visit; None for values that the device does not report."""

    clock_hz: Sample | None = None
    temperature_c: Sample | None = None
    power_w: Sample | None = None
    throttled: tuple[str, ...] = ()


class Request(Strict, frozen=True, kw_only=True):
    """The options or ``shapes`` with which a run was started, for ``--resume``."""

    variants: tuple[str, ...] = ()
    cases: str = "*"
    phases: str = ""
    methods: str = ""
    dtype: str | None = None
    plugins: tuple[str, ...] = ()
    shapes: tuple[Case, ...] = ()


class Environment(Strict, frozen=True, kw_only=True):
    """The machine and software of a run; None for fields that the machine does not report.

    ``clocks`` is the setting of the clock, ``load`` the load average and ``foreign`` the names of other
    processes on the GPU, both at the start; ``idle_w`` is the power of the idle GPU.
    """

    device: Literal["cpu", "cuda"]
    device_name: str
    cpu: str
    threads: int
    memory_bytes: int
    platform: str
    python: str
    torch: str
    esbench: str
    cuda: str | None = None
    driver: str | None = None
    triton: str | None = None
    device_memory_bytes: int | None = None
    matmul_precision: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    uuid: str | None = None
    clocks: str | None = None
    load: float | None = None
    foreign: tuple[str, ...] = ()
    idle_w: float | None = None

    @property
    def slug(self) -> str:
        """The name of this device's folder under ``results/``."""
        return slug(self.device_name)


class SchemeDoc(Strict, frozen=True, kw_only=True):
    """A scheme's docstring, and the module to import the scheme from."""

    module: str
    text: str = ""


class RunHeader(_Line, frozen=True, kw_only=True, tag="run"):
    """A run's first line.

    ``code``: variant -> hash of the file defining it; ``sources``: variant -> its origin; ``docs``: scheme ->
    its docstring.
    """

    schema: int
    run_id: str
    suite: str
    started: str
    seed: int
    environment: Environment
    request: Request | None = None
    code: dict[str, str] = {}
    sources: dict[str, str] = {}
    docs: dict[str, SchemeDoc] = {}


class Measurement(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="measurement"):
    """All samples of one (case, variant, phase, metric, method), unchanged.

    In phase ``quality`` there is one round, its samples are replicates, and they may be below 0.

    Attributes:
        samples: one tuple for each round. The variants of a co-resident group are measured in the same
            rounds, so that a ratio can be taken within a round.
        group: number of the co-resident group of the case.
        stop: why sampling ended.
        warm_up: how the warm-up ended.
        labels: other remarks on the samples.
        positions: for each round, how many calls were visited before this one in the first half of the round;
            in the second half the order is reversed.
        conditions: for each round those of its visits. In a file they are stored with ``latency_ns`` alone;
            the reader copies them to the other times of the same visits.

    Raises:
        ValueError: a sample of a timed phase is below 0; the message has its index.
    """

    variant: Variant
    case: Case
    phase: Phase
    metric: str
    method: str
    samples: tuple[tuple[Estimate, ...], ...]
    group: int = 0
    stop: str = ""
    warm_up: str = ""
    labels: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    conditions: tuple[tuple[Conditions, ...], ...] = ()
    work: Work | None = None

    def __post_init__(self) -> None:
        """Check that no sample is negative, except for quality metrics; the error has the decoder's words."""
        if self.phase == QUALITY:
            return
        for round_index, visits in enumerate(self.samples):
            for index, sample in enumerate(visits):
                if sample < 0:
                    raise ValueError(f"Expected `float` >= 0.0 - at `$.samples[{round_index}][{index}]`")


class Skipped(_Line, frozen=True, kw_only=True, tag="skipped"):
    """A row without samples, and the reason.

    ``unavailable``: the variant cannot run here, or has no such phase. ``failed``: it raised an error, or its
    result is wrong; the run then ends with exit code 1. ``phase`` or ``method`` is None if the reason applies
    to all of them.
    """

    variant: Variant
    case: Case
    phase: Phase | None
    status: Literal["unavailable", "failed"]
    reason: str
    method: str | None = None


class DevicePeak(_Line, frozen=True, kw_only=True, tag="device_peak"):
    """A peak rate of the device, measured at the start of a run.

    ``samples`` are ns for ``amount``: the bytes that ``copy`` reads plus those that it writes, or the flops
    of ``matmul`` in ``dtype``.
    """

    kind: Literal["copy", "matmul"]
    dtype: str
    amount: Sample
    samples: tuple[Sample, ...]


class Checkpoint(_Line, frozen=True, kw_only=True, tag="checkpoint"):
    """The end of the rows of a phase of a co-resident group; without a phase, of all rows of the case.

    A run that was cut off is resumed after its last checkpoint.

    Attributes:
        wall_s: duration of the run so far.
        spent_s: activity -> seconds.
        costs_s: variant -> its seconds on this case.
        traced: whether the launches of the case are stored; they may be counted after all timing.
    """

    case: Case
    group: int
    phase: Phase | None
    wall_s: float
    spent_s: dict[str, float] = {}
    costs_s: dict[str, float] = {}
    traced: bool = False


class RunEnd(_Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a run that was not killed.

    ``invalid``: reasons not to use its measurements; ``spent_s``: activity -> seconds.
    """

    status: Literal["complete", "interrupted", "failed"]
    wall_s: float
    invalid: tuple[str, ...] = ()
    spent_s: dict[str, float] = {}


Row = Measurement | Skipped
Record = RunHeader | DevicePeak | Measurement | Skipped | Checkpoint | RunEnd


class Run(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A stored run; ``end`` is None if the run was killed."""

    header: RunHeader
    rows: tuple[Row, ...]
    end: RunEnd | None = None
    device_peaks: tuple[DevicePeak, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()

    @cached_property
    def measurements(self) -> tuple[Measurement, ...]:
        """The rows with samples."""
        return tuple(row for row in self.rows if isinstance(row, Measurement))

    @cached_property
    def skipped(self) -> tuple[Skipped, ...]:
        """The rows with a reason instead of samples."""
        return tuple(row for row in self.rows if isinstance(row, Skipped))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The variants in the order of their first rows."""
        return tuple(dict.fromkeys(row.variant for row in self.rows))


class Recipe(Strict, frozen=True, kw_only=True):
    """The training settings of the digits study, the same for every variant.

    Sampling is antithetic, so ``members`` counts pairs. Every member sees the same ``batch`` images in a
    step. The optimizer is Adam with a cosine schedule of the learning rate.
    """

    network: str
    members: Count = 128
    steps: Count = 150
    batch: Count = 32
    sigma: Positive = 0.05
    learning_rate: Positive = 0.02


class Task(Strict, frozen=True, kw_only=True):
    """A task of the study of tasks, with the same settings for every variant.

    Attributes:
        name: its name.
        members: antithetic pairs of the population.
        batch: episodes or rows that each member sees, with its noise and minus it, in a step.
        sigma: scale of the noise.
        learning_rate: the first one of Adam; it falls to zero as a cosine.
        steps: training ends after this many steps, if the goal is not reached before.
        every: steps from one test to the next.
        score: what is tested, with its unit.
        goal: the score to be reached in two tests in a row.
        rises: whether a higher score is better.
        tests: what the network is and how it is tested, in a sentence.
    """

    name: str
    members: Count
    batch: Count
    sigma: Positive
    learning_rate: Positive
    steps: Count
    every: Count
    score: str
    goal: float
    rises: bool
    tests: str

    @property
    def evaluations(self) -> int:
        """The evaluations of a step, each of a whole batch."""
        return 2 * self.members

    def reached(self, score: float) -> bool:
        """Return whether a score is at least as good as the goal."""
        return score >= self.goal if self.rises else score <= self.goal


class Outcome(Strict, frozen=True, kw_only=True):
    """The result of a training run of the digits study.

    ``accuracy`` is the share of test images classified correctly. ``unbiased``: the entries of E_m are
    uncorrelated with variance 1, so that the expected estimate is the gradient of a linear fitness.
    ``effective_members`` is n_eff of the pairs, if kappa has a closed form.
    """

    accuracy: Share
    unbiased: bool
    effective_members: Positive | None = None


def slug(device_name: str) -> str:
    """Return the folder name of a device: lower case, dashes, at most 80 characters."""
    words = "".join(char.lower() if char.isalnum() else " " for char in device_name).split()
    return "-".join(words)[:80].rstrip("-") or "unknown"


def _short(value: Scalar) -> str:
    """Return a value for a label, a float with at most six digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)
