"""A whole run by both methods of a CUDA device, on a machine without one."""

import dataclasses
from collections.abc import Callable

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


def measured(*, syncs: bool = False) -> list[Record]:
    """Measure base and variants whose calls launch one kernel; one may synchronise inside."""
    world, device = World(), FakeCuda()

    def kernel(name: str) -> Callable[[Phase, int, int], object]:
        def act(phase: Phase, number: int, turn: int) -> torch.Tensor:
            del phase, number
            device.launch(KERNEL_NS[name], launch_ns=5_000)
            if name == "Syncs":
                device.synchronize()
            return torch.full((2,), float((turn - 1) % 2))

        return act

    names = ["A", "Syncs"] if syncs else ["A"]
    entries = [FakeScheme("Base", world, phases=("forward",), act=kernel("Base")).entry("base")]
    entries += [FakeScheme(name, world, phases=("forward",), act=kernel(name)).entry() for name in names]
    streak = cuda.Streak()
    clocks = tuple(CudaClock(method, device, streak) for method in ("eager", "graph"))
    tools = dataclasses.replace(
        world.tools, clocks=clocks, conditions=lambda: Conditions(clock_hz=1.7e9, power_w=300.0)
    )
    lines: list[Record] = []
    plan = Plan(entries=entries, cases=(CASE,), phases=("forward",), cell_s=0.5)
    run_cases(plan, lines.extend, lambda *_: None, tools)
    return lines


def test_every_method_has_its_rows_with_device_and_host_side_by_side() -> None:
    """Cold, warm and host times of eager calls and of replays; the device's are the kernel's own."""
    lines = measured()
    times = {
        (line.variant.scheme, line.method, line.metric): line
        for line in lines
        if isinstance(line, Measurement) and line.metric.endswith("latency_ns")
    }
    assert {key[1:] for key in times} == {
        (method, metric)
        for method in ("eager", "graph")
        for metric in ("latency_ns", "warm_latency_ns", "host_latency_ns")
    }
    for (name, _, metric), row in times.items():
        if metric != "host_latency_ns":
            samples = [sample for visits in row.samples for sample in visits]
            assert samples == pytest.approx([KERNEL_NS[name]] * len(samples), rel=0.002)
    row = times["A", "eager", "latency_ns"]
    assert row.warm_up.startswith("flat after")
    assert len(row.positions) == len(row.samples) == len(row.conditions)
    assert row.conditions[0][0].clock_hz == 1.7e9


def test_what_cannot_be_captured_has_a_row_that_says_so_and_is_timed_by_the_other_method() -> None:
    """The method never changes silently: there is no time of it under ``graph``."""
    lines = measured(syncs=True)
    (reason,) = (line for line in lines if isinstance(line, Skipped))
    assert (reason.variant.scheme, reason.phase, reason.method) == ("Syncs", "forward", "graph")
    assert (reason.status, reason.reason[:20]) == ("unavailable", "graph capture failed")
    methods = {
        line.method
        for line in lines
        if isinstance(line, Measurement)
        and line.variant.scheme == "Syncs"
        and line.metric.endswith("latency_ns")
    }
    assert methods == {"eager"}


def test_the_tables_keep_the_methods_apart() -> None:
    """One block for each; the reason stands in the graph's alone."""
    rows = tuple(line for line in measured(syncs=True) if isinstance(line, Measurement | Skipped))
    text = console_tables(
        Run(header=synthetic.header(), rows=rows, end=RunEnd(status="complete", wall_s=1.0))
    )
    eager, graph = text.split("method eager")[1], text.split("method graph")[1]
    assert "graph capture failed" in graph
    assert "capture failed" not in eager.split("method graph")[0]
