"""Runs as a GPU would store them, made up from a formula: no figure here was measured.

They have what a CPU's run has not: two methods of timing, warm and host times, launches, utilisation, power
and energy, several number formats, ceilings for each, and reasons that hold for one method alone. Their run
ids and their platform say that they are synthetic, and nothing stores them outside of a test's own folder.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from esbench.registry import REGISTRY, Entry, load_installed, suited
from esbench.schema import (
    SCHEMA_VERSION,
    Case,
    Conditions,
    DevicePeak,
    Environment,
    Measurement,
    Phase,
    Row,
    Run,
    RunEnd,
    RunHeader,
    Skipped,
    Variant,
    Work,
)
from tests.report import ranking_cases
from tests.synthetic import bytes_row, skipped

DEVICE = "NVIDIA H200"
SLUG = "nvidia-h200"
ALL: Mapping[Phase, tuple[str, ...]] = dict.fromkeys(
    ("sample", "forward", "update", "step"), ("eager", "graph")
)
JITTER = (1.01, 0.99, 1.0, 1.02, 0.98, 1.005, 0.995, 1.0)
"""Each round's part of the median: eight rounds have an interval. Every variant has another order."""
SHARES: Mapping[Phase, float] = {"sample": 1.1, "forward": 1.0, "update": 1.2, "step": 3.5, "quality": 0.0}
"""The time of each phase as a part of a forward's."""
NO_MEMORY = "out of memory: tried to allocate 146.00 GiB"
NO_GRAPH = "graph capture failed: operation not permitted when stream is capturing"
FLOPS_PER_NS = {"float32": 5e4, "bfloat16": 7.9e5}
BYTES_PER_NS = 4200.0


def environment(**changes: object) -> Environment:
    """An H200 that does not exist."""
    return msgspec.structs.replace(
        Environment(
            device="cuda",
            device_name=DEVICE,
            cpu="Some CPU",
            threads=16,
            memory_bytes=2**37,
            platform="synthetic: not a machine",
            python="3.12.3",
            torch="2.11.0+cu130",
            esbench="0.1.0",
            cuda="13.0",
            driver="580.159.04",
            triton="3.6.0",
            device_memory_bytes=150_000_000_000,
            matmul_precision="highest",
            commit="5e1f" * 10,
            dirty=False,
            uuid="GPU-synthetic",
            clocks="unlocked, at most 1980 MHz",
            load=0.4,
            idle_w=75.0,
        ),
        **changes,
    )


def readme_run(
    day: int = 1,
    *,
    slower: float = 1.0,
    operators: Sequence[str] = ("Linear", "Conv2d"),
    methods: Mapping[Phase, tuple[str, ...]] = ALL,
) -> Run:
    """A run of some cases of the suite ``readme``, one of them also in bfloat16.

    Args:
        day: of January 2027; each day has its own commit.
        slower: by which factor all variants but the baselines are slower than the formula has it.
        operators: whose cases it has.
        methods: by which methods each phase is timed.

    """
    load_installed()
    found = REGISTRY.find_suite("readme")
    entries = suited(REGISTRY.select(), found, ())
    square = next(case for case in found.cases if case.label == "Linear(1024, 1024)")
    convolution = next(case for case in found.cases if case.operator == "Conv2d")
    cases = (square, msgspec.structs.replace(square, dtype="bfloat16"), convolution)
    chosen = (case for case in cases if case.operator in operators)
    rows = [row for case in chosen for row in _case(case, entries, slower, methods)]
    header = RunHeader(
        schema=SCHEMA_VERSION,
        run_id=f"202701{day:02d}T000000Z-readme-synthetic",
        suite="readme",
        started=f"2027-01-{day:02d}T00:00:00Z",
        seed=0,
        environment=environment(commit=f"{day:04d}" * 10),
        sources={entry.variant.name: entry.source for entry in entries if entry.source},
    )
    ceilings = (
        DevicePeak(kind="copy", dtype="float32", amount=8.6e9, samples=(8.6e9 / BYTES_PER_NS,) * 5),
        *(
            DevicePeak(kind="matmul", dtype=dtype, amount=1.1e12, samples=(1.1e12 / rate,) * 5)
            for dtype, rate in FLOPS_PER_NS.items()
        ),
    )
    end = RunEnd(status="complete", wall_s=270.0, spent_s={"rounds": 200.0, "set-up": 70.0})
    return Run(header=header, rows=tuple(rows), end=end, device_peaks=ceilings)


def _case(
    case: Case, entries: Sequence[Entry], slower: float, methods: Mapping[Phase, tuple[str, ...]]
) -> Iterator[Row]:
    """Rows of two groups of variants, with the baselines measured again in the second."""
    able = [entry.variant for entry in entries if entry.supports(case)]
    baselines = [one for one in able if one.mode != "batched"]
    others = [one for one in able if one.mode == "batched"]
    for place, one in enumerate(others):
        if one.scheme == "Orthogonal" and case.operator == "Conv2d":
            yield skipped(one, case, NO_MEMORY)
        else:
            factor = slower * (50.0 if one.scheme == "Perturbed" else 1.3 + 0.1 * place)
            yield from _variant(one, case, factor, methods, group=place % 2)
    for group in (0, 1):
        for one in baselines:
            yield from _variant(one, case, 1.0 if one.mode == "base" else 800.0, methods, group)


def _variant(
    one: Variant, case: Case, factor: float, methods: Mapping[Phase, tuple[str, ...]], group: int
) -> Iterator[Row]:
    """Times, memory, launches and quality of a variant; of a baseline's its forward alone."""
    is_plain = one.mode != "batched"
    for phase, own in methods.items():
        # All phases are compared with the forward of base and naive, by the same method.
        names = dict.fromkeys(itertools.chain(*methods.values())) if is_plain else own
        if is_plain and phase != "forward":
            if group == 0:
                yield skipped(one, case, "a plain layer draws no noise", phase)
            continue
        for method in names:
            if method == "graph" and one.scheme == "DropoutMask":
                yield skipped(one, case, NO_GRAPH, phase, method)
            else:
                yield from _times(one, case, phase, method, factor, group)
        yield bytes_row(one, case, "peak_bytes", round(1e6 * factor), phase)
        yield bytes_row(one, case, "reserved_bytes", 2**21, phase)
        yield msgspec.structs.replace(bytes_row(one, case, "launches", 3, phase), method="profiler")
    if is_plain:
        if group == 0:
            yield skipped(one, case, "a plain layer draws no noise", "quality")
    else:
        yield msgspec.structs.replace(
            bytes_row(one, case, "noise_bytes", round(1e5 * factor), "sample"), method="state"
        )
        kappa = 0.0 if one.scheme in {"Perturbed", "LowRank"} else 2.0 + len(one.name)
        yield from ranking_cases.qualities(one, case, kappa, spread=0.01)
    if "Linear(1024, 1024)" in case.label:
        yield from _activity(one, case, group)


def _times(  # noqa: PLR0913, PLR0917  one for each field of a row
    one: Variant, case: Case, phase: Phase, method: str, factor: float, group: int
) -> Iterator[Measurement]:
    """Cold, warm and host times in the same rounds; eager calls wait for the host."""
    weights = case.out_channels * case.in_channels * math.prod(case.kernel_size)
    positions = math.prod(case.input_size)
    work = Work(
        flops=2.0 * weights * case.members * positions,
        moved_bytes=4.0 * (weights + case.members * (case.in_channels + case.out_channels) * positions),
        output_bytes=4.0 * case.members * case.out_channels,
    )
    ns = 1e4 + factor * SHARES[phase] * max(
        work.flops / FLOPS_PER_NS[case.dtype], work.moved_bytes / BYTES_PER_NS
    )
    turn = len(one.name) % len(JITTER)
    jitter = JITTER[turn:] + JITTER[:turn]
    visit = Conditions(clock_hz=1.98e9, temperature_c=45.0, power_w=350.0)
    cold = Measurement(
        variant=one,
        case=case,
        phase=phase,
        metric="latency_ns",
        method=method,
        samples=tuple((ns * part, ns * part * 1.001) for part in jitter),
        group=group,
        stop="budget of 1 s",
        warm_up="flat after 6 calls",
        positions=tuple(range(len(JITTER))),
        conditions=((visit, visit),) * len(JITTER),
        work=work,
    )
    host = 9e4 if method == "eager" else 6e3
    for metric, part in (("latency_ns", ns), ("warm_latency_ns", 0.9 * ns), ("host_latency_ns", host)):
        samples = tuple(tuple(value * part / ns for value in visits) for visits in cold.samples)
        yield msgspec.structs.replace(cold, metric=metric, samples=samples)


def _activity(one: Variant, case: Case, group: int) -> Iterator[Measurement | Skipped]:
    """What NVML reads while the forward is repeated."""
    figures = {
        "utilization_percent": (98.0, 99.0, 100.0),
        "power_w": (480.0, 500.0, 510.0),
        "clock_hz": (1.98e9, 1.95e9, 1.98e9),
        "temperature_c": (50.0, 51.0, 52.0),
        "throttled_percent": (0.0,),
        "energy_j": (0.012,),
        "net_energy_j": (0.010,),
    }
    for metric, samples in figures.items():
        yield Measurement(
            variant=one,
            case=case,
            phase="forward",
            metric=metric,
            method="nvml",
            samples=(samples,),
            group=group,
        )
