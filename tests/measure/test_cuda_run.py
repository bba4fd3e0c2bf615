"""A whole run by both methods of a CUDA device, on a machine without one."""

import dataclasses
from functools import partial

import pytest
import torch

from esbench.measure import cuda
from esbench.measure.plan import Plan
from esbench.measure.runner import run_cases
from esbench.measure.timers import CudaClock
from esbench.report.site import console_tables
from esbench.schema import Conditions, Measurement, Phase, Record, Run, RunEnd, Skipped
from tests import synthetic
from tests.fake_cuda import FakeCuda
from tests.fakes import CASE, FakeScheme, World

KERNEL_NS = {"Base": 20_000.0, "A": 50_000.0, "Syncs": 30_000.0}


def act(device: FakeCuda, name: str, phase: Phase, number: int, turn: int) -> torch.Tensor:
    """Launch a variant's kernel; one synchronizes inside."""
    del phase, number
    device.launch(KERNEL_NS[name], launch_ns=5_000)
    if name == "Syncs":
        device.synchronize()
    return torch.full((2,), float((turn - 1) % 2))


def test_every_method_has_its_rows_and_none_changes_silently() -> None:
    """Cold, warm and host times of calls and of replays; what cannot be captured has a reason under graph."""
    world, device = World(), FakeCuda()
    schemes = [
        FakeScheme(name, world, phases=("forward",), act=partial(act, device, name)) for name in KERNEL_NS
    ]
    entries = [scheme.entry("base" if scheme.name == "Base" else "batched") for scheme in schemes]
    streak = cuda.Streak()
    tools = dataclasses.replace(
        world.tools,
        clocks=tuple(CudaClock(method, device, streak) for method in ("eager", "graph")),
        conditions=lambda: Conditions(clock_hz=1.7e9, power_w=300.0),
    )
    lines: list[Record] = []
    plan = Plan(entries=entries, cases=(CASE,), phases=("forward",), cell_s=0.5)
    run_cases(plan, lines.extend, lambda *_: None, tools)

    times = {
        (line.variant.scheme, line.method, line.metric): line
        for line in lines
        if isinstance(line, Measurement) and line.metric.endswith("latency_ns")
    }
    (skipped,) = (line for line in lines if isinstance(line, Skipped))
    assert (skipped.variant.scheme, skipped.phase, skipped.method) == ("Syncs", "forward", "graph")
    assert (skipped.status, skipped.reason[:20]) == ("unavailable", "graph capture failed")
    assert times.keys() == {
        (name, method, metric)
        for name in KERNEL_NS
        for method in ("eager", "graph")
        for metric in ("latency_ns", "warm_latency_ns", "host_latency_ns")
        if (name, method) != ("Syncs", "graph")
    }
    for (name, _, metric), row in times.items():
        if metric != "host_latency_ns" and name != "Syncs":
            samples = [sample for visits in row.samples for sample in visits]
            assert samples == pytest.approx([KERNEL_NS[name]] * len(samples), rel=0.002)
    row = times["A", "eager", "latency_ns"]
    assert row.warm_up.startswith("flat after")
    assert len(row.positions) == len(row.samples) == len(row.conditions)
    assert row.conditions[0][0].clock_hz == 1.7e9

    rows = tuple(line for line in lines if isinstance(line, Measurement | Skipped))
    text = console_tables(
        Run(header=synthetic.header(), rows=rows, end=RunEnd(status="complete", wall_s=1.0))
    )
    eager, graph = text.split("method eager")[1], text.split("method graph")[1]
    assert "graph capture failed" in graph
    assert "capture failed" not in eager.split("method graph")[0]
