"""Invented runs, for tests of functions that read runs."""

from collections.abc import Iterable
from functools import partial
from typing import Literal

import msgspec

from esbench import schema
from esbench.schema import Case, Measurement, Mode, Phase, Row, Run, RunHeader, Scalar, Skipped, Variant

BASE = Variant(scheme="Base", mode="base", baseline=True)
NAIVE = Variant(scheme="Naive", mode="naive", baseline=True)
DENSE = Variant(scheme="Perturbed")


def variant(scheme: str, mode: Mode = "batched", **options: Scalar) -> Variant:
    """Return a variant with options in the given order."""
    return Variant(scheme=scheme, options=tuple(options.items()), mode=mode)


def linear(width: int = 256, members: int = 1024, repeats: int = 1, dtype: str = "float32") -> Case:
    """Return a square Linear case."""
    return Case(
        operator="Linear",
        out_channels=width,
        in_channels=width,
        members=members,
        repeats=repeats,
        dtype=dtype,
    )


def conv2d(width: int = 16, size: int = 64, members: int = 1024) -> Case:
    """Return a square 3x3 Conv2d case."""
    return Case(
        operator="Conv2d",
        out_channels=width,
        in_channels=width,
        kernel_size=(3, 3),
        input_size=(size, size),
        members=members,
    )


def changed(run: Run, **fields: object) -> Run:
    """Return the run with some of its fields, or fields of its header or environment, replaced."""
    environment, header, of_run = (
        {name: value for name, value in fields.items() if name in struct.__struct_fields__}
        for struct in (schema.Environment, RunHeader, Run)
    )
    here = msgspec.structs.replace(run.header.environment, **environment)
    return msgspec.structs.replace(
        run, header=msgspec.structs.replace(run.header, environment=here, **header), **of_run
    )


def environment(device_name: str = "Test CPU") -> schema.Environment:
    """Return an invented machine."""
    return schema.Environment(
        device="cpu",
        device_name=device_name,
        cpu=device_name,
        threads=2,
        memory_bytes=8 * 10**9,
        platform="Linux",
        python="3.12.0",
        torch="2.13.0",
        esbench="0.1.0",
        commit="0123456789abcdef",
        dirty=False,
    )


def header(
    run_id: str = "20260101T000000Z-quick-0001", suite: str = "quick", device_name: str = "Test CPU"
) -> RunHeader:
    """Return the header of a run on that machine."""
    return RunHeader(
        schema=schema.SCHEMA_VERSION,
        run_id=run_id,
        suite=suite,
        started="2026-01-01T00:00:00Z",
        seed=0,
        environment=environment(device_name),
    )


def time_row(  # noqa: PLR0913  one for each field that a test may want otherwise
    variant: Variant,
    case: Case,
    *milliseconds: float,
    phase: Phase = "forward",
    group: int = 0,
    method: str = "host",
    metric: str = "latency_ns",
) -> Measurement:
    """Return a row with a time for each round, in milliseconds."""
    return Measurement(
        variant=variant,
        case=case,
        phase=phase,
        metric=metric,
        method=method,
        samples=tuple((value * 1e6,) for value in milliseconds),
        group=group,
    )


def three(case: Case) -> list[Row]:
    """Return rows of a variant and its two baselines on a case."""
    return [time_row(BASE, case, 1, 10), time_row(NAIVE, case, 100, 1000), time_row(DENSE, case, 4, 40)]


def bytes_row(variant: Variant, case: Case, metric: str, count: int, phase: Phase = "forward") -> Measurement:
    """Return a row with a number of bytes, read once."""
    return Measurement(
        variant=variant, case=case, phase=phase, metric=metric, method="allocator", samples=((float(count),),)
    )


def clocks(row: Measurement, *megahertz: float, throttled: tuple[str, ...] = ()) -> Measurement:
    """Return the row with a clock for each of its visits, one visit per round."""
    visits = (schema.Conditions(clock_hz=value * 1e6, throttled=throttled) for value in megahertz)
    return msgspec.structs.replace(row, conditions=tuple((visit,) for visit in visits))


def working(row: Measurement, flops: float, moved_bytes: float, output_bytes: float = 1e6) -> Measurement:
    """Return the row with the minimum work of its call."""
    return msgspec.structs.replace(
        row, work=schema.Work(flops=flops, moved_bytes=moved_bytes, output_bytes=output_bytes)
    )


def peaks(dtype: str = "float32") -> tuple[schema.DevicePeak, ...]:
    """Return the peaks of a device with 1 GB/s and 10 GFLOP/s in one dtype."""
    return (
        schema.DevicePeak(kind="copy", dtype="float32", amount=1e6, samples=(1e6, 1e6, 2e6, 2e6, 3e6)),
        schema.DevicePeak(kind="matmul", dtype=dtype, amount=1e7, samples=(1e6,)),
    )


def skipped(  # noqa: PLR0913  # one for each field that a test may want otherwise
    variant: Variant,
    case: Case,
    reason: str,
    phase: Phase | None = None,
    method: str | None = None,
    *,
    status: Literal["unavailable", "failed"] = "unavailable",
) -> Skipped:
    """Return a row with the reason why it has no number."""
    return Skipped(variant=variant, case=case, phase=phase, status=status, reason=reason, method=method)


failed = partial(skipped, status="failed")
"""Return a row of a variant that failed."""


def replaced(rows: Iterable[Row], **fields: object) -> list[Row]:
    """Return the rows with some fields replaced."""
    return [msgspec.structs.replace(row, **fields) for row in rows]


def run(
    rows: Iterable[Row],
    device_peaks: tuple[schema.DevicePeak, ...] = (),
    invalid: tuple[str, ...] = (),
    **fields: str,
) -> Run:
    """Return a completed run."""
    end = schema.RunEnd(status="complete", wall_s=1.0, invalid=invalid)
    return Run(header=header(**fields), rows=tuple(rows), end=end, device_peaks=device_peaks)
