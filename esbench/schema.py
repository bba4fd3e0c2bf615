"""The records of a run, shared by measuring and reading.

Nothing here imports torch. Field names carry their unit; a metric's unit is the suffix of its
name (``latency_ns``, ``peak_bytes``, ``utilization_percent``), see :mod:`esbench.units`.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

SCHEMA_VERSION = 6
"""The version written into every run, and the only one that is read."""

Mode = Literal["base", "naive", "batched"]
Phase = Literal["sample", "forward", "update", "step", "quality"]
Scalar = bool | int | float | str

Count = Annotated[int, msgspec.Meta(ge=1)]
Sample = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
"""The range of readings; decoding a file checks it and names the place."""
Estimate = Annotated[float, msgspec.Meta(ge=-1e24, le=1e24)]
"""The range of quality figures: a correlation or a kappa may be below 0."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

PHASES: tuple[Phase, ...] = ("sample", "forward", "update", "step")
"""The phases that are timed."""
METHODS: Mapping[str, tuple[str, ...]] = {"cpu": ("host",), "cuda": ("eager", "graph")}
"""Device -> the methods by which it can be timed."""
QUALITY: Phase = "quality"
"""The phase of quality figures, which is computed and not timed."""
LAUNCHES = "launches"
"""The metric of a trace: the kernels, copies and fills that a call launches."""
OUT_OF_MEMORY = "out of memory"
"""The beginning of a reason if memory did not suffice."""
OUT_OF_TIME = "time budget of the run"
"""The reason of rows that a time budget left out."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoder refuses unknown fields."""


class _Line(_Strict, frozen=True, tag_field="record"):
    """One line of a run's file; the field ``record`` tells its kind."""


DENSE = "Perturbed"
"""The variant that others are compared with: an independent normal number per weight and member."""


class Case(_Strict, frozen=True, kw_only=True):
    """A case: the operator and its shape, the population and the dtype.

    Channels are weights' channels: a weight is [out, in / groups, *kernel]. ``kernel_size`` and
    ``input_size`` are empty for operators without spatial axes.
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
        """The column heading of the NESgpu tables: (out, in[, kernel, input size])."""
        parts: list[object] = [self.out_channels, self.in_channels]
        parts += [self.kernel_size] if self.kernel_size else []
        parts += [self.input_size] if self.input_size else []
        return f"({', '.join(map(str, parts))})"

    @property
    def label(self) -> str:
        """The label of the case, with every field that differs from its default."""
        shown = {"operator", "out_channels", "in_channels", "kernel_size", "input_size"}
        rest = _changed_fields(self, shown)
        return f"{self.operator}{self.shape}" + (f" {rest}" if rest else "")


class Variant(_Strict, frozen=True, kw_only=True):
    """A scheme with its options: one row of a table.

    ``options`` holds, in field order, the options that differ from the scheme's defaults.
    """

    scheme: str
    options: tuple[tuple[str, Scalar], ...] = ()
    mode: Mode = "batched"
    baseline: bool = False

    @property
    def name(self) -> str:
        """The label without an operator, as ``--variants`` matches it."""
        return self._label("")

    def label(self, operator: str) -> str:
        """Return the row heading: ``SparsePerturbedLinear(k=2)``; a baseline is just ``Base``."""
        return self._label("" if self.baseline else operator)

    def _label(self, operator: str) -> str:
        inner = ", ".join(f"{key}={_short(value)}" for key, value in self.options)
        return f"{self.scheme}{operator}" + (f"({inner})" if inner else "")


class Work(_Strict, frozen=True, kw_only=True):
    """The minimum work of a call, as its variant declares it.

    ``flops`` count a multiplication and an addition as two; ``moved_bytes`` are read or written once.
    ``output_bytes`` are what the call returns: no peak is below them.
    """

    flops: Sample
    moved_bytes: Sample
    output_bytes: Sample


class Conditions(_Strict, frozen=True, kw_only=True, omit_defaults=True):
    """The state of the device after a visit; None if the device does not report it."""

    clock_hz: Sample | None = None
    temperature_c: Sample | None = None
    power_w: Sample | None = None
    throttled: tuple[str, ...] = ()


class Request(_Strict, frozen=True, kw_only=True):
    """The options or ``shapes`` that a run was started with, as ``--resume`` needs them."""

    variants: tuple[str, ...] = ()
    cases: str = "*"
    phases: str = ""
    methods: str = ""
    dtype: str | None = None
    plugins: tuple[str, ...] = ()
    shapes: tuple[Case, ...] = ()


class Environment(_Strict, frozen=True, kw_only=True):
    """The machine and software of a run; None if the machine does not report a field.

    ``clocks`` says who sets the clock, ``load`` is the load average and ``foreign`` names other processes
    on the GPU, both at the start; ``idle_w`` is what the GPU draws when it does nothing.
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


class SchemeDoc(_Strict, frozen=True, kw_only=True):
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
    """All samples of one (case, variant, phase, metric, method), as they were read.

    ``samples`` holds one tuple for each round, so that a ratio can be taken inside a round:
    the variants of a case are measured in the same rounds, round k of one beside round k of
    another. ``group`` numbers the co-resident groups of a case: only measurements of the
    same case, phase and group share their rounds.
    ``stop`` says why sampling ended, ``warm_up`` how it began, ``labels`` what else must be said of the
    samples. ``positions`` holds for each round how many calls were visited before this one on the way
    forth; on the way back the order is reversed. ``conditions`` holds for each round those of its visits. In
    a file they are stored with ``latency_ns`` alone; the reader copies them to the other times of the same
    visits.

    In phase ``quality`` there is one round, its samples are replicates, and they may be below 0.

    Raises:
        ValueError: a sample of a timed phase is below 0; the message names its place.

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
        """Check that no reading is below 0."""
        if self.phase == QUALITY:
            return
        for place, visits in enumerate(self.samples):
            for turn, sample in enumerate(visits):
                if sample < 0:
                    # The same words as those of the decoder.
                    message = f"Expected `float` >= 0.0 - at `$.samples[{place}][{turn}]`"
                    raise ValueError(message)


class Skipped(_Line, frozen=True, kw_only=True, tag="skipped"):
    """A row without a number, and why.

    ``unavailable``: this machine, or this variant by its nature, cannot (memory, device, dtype,
    no such phase). ``failed``: it raised, or its check found it wrong; a run with one of these
    ends with exit code 1. ``phase`` or ``method`` is None where the reason holds for all of them.
    """

    variant: Variant
    case: Case
    phase: Phase | None
    status: Literal["unavailable", "failed"]
    reason: str
    method: str | None = None


class DevicePeak(_Line, frozen=True, kw_only=True, tag="device_peak"):
    """A peak rate of the device, measured at the start of a run: ``samples`` are ns for ``amount``.

    ``copy`` moves bytes, half of them read and half written; ``matmul`` does flops in ``dtype``.
    """

    kind: Literal["copy", "matmul"]
    dtype: str
    amount: Sample
    samples: tuple[Sample, ...]


class Checkpoint(_Line, frozen=True, kw_only=True, tag="checkpoint"):
    """All rows of a phase of a co-resident group are above this line; without a phase, all of the case.

    A run that was cut off is resumed after the last such line: ``wall_s`` is how long it took so far,
    ``spent_s`` where that time went, ``costs_s`` what each variant took on this case. ``traced``: the
    launches of the case are above, too, where they are counted after all timing.
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

    ``invalid`` says why its figures must not be used, ``spent_s`` where its time went.
    """

    status: Literal["complete", "interrupted", "failed"]
    wall_s: float
    invalid: tuple[str, ...] = ()
    spent_s: dict[str, float] = {}


Row = Measurement | Skipped
Record = RunHeader | DevicePeak | Measurement | Skipped | Checkpoint | RunEnd


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it was read back: its header, its rows, its end if it came to one."""

    header: RunHeader
    rows: tuple[Row, ...]
    end: RunEnd | None = None
    device_peaks: tuple[DevicePeak, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The rows that hold samples."""
        return tuple(row for row in self.rows if isinstance(row, Measurement))

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The rows that hold a reason."""
        return tuple(row for row in self.rows if isinstance(row, Skipped))


class Recipe(_Strict, frozen=True, kw_only=True):
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


class Outcome(_Strict, frozen=True, kw_only=True):
    """The result of a training of the digits study.

    ``accuracy`` is the share of test images classified correctly. ``unbiased``: the entries of E_m are
    uncorrelated with variance 1, so that the expected estimate is the gradient of a linear fitness.
    ``effective_members`` is n_eff of the pairs, if kappa has a closed form.
    """

    accuracy: Share
    unbiased: bool
    effective_members: Positive | None = None


def slug(device_name: str) -> str:
    """Return a device's name as that of a folder: lower case, dashes, not too long for one."""
    words = "".join(c.lower() if c.isalnum() else " " for c in device_name).split()
    return "-".join(words)[:80].rstrip("-") or "unknown"


def _short(value: Scalar) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed_fields(record: msgspec.Struct, shown: set[str]) -> str:
    changed = [
        f"{field.name}={_short(value)}"
        for field in msgspec.structs.fields(record)
        if field.name not in shown and (value := getattr(record, field.name)) != field.default
    ]
    return " ".join(changed)
