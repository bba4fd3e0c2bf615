"""How large a run's file is, and what happens to a large one when its run ends."""

import gzip
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from esbench import store
from esbench.measure import runner
from esbench.measure.plan import Plan
from esbench.registry import REGISTRY, load, suited
from esbench.report.analysis.run_selection import select_runs
from esbench.schema import Case, Conditions, Measurement, Phase, Request, Run, RunEnd, Work
from esbench.store import (
    LARGE_BYTES,
    ResumeError,
    Writer,
    read_results,
    read_run,
    read_unfinished,
    run_name,
)
from tests import synthetic
from tests.fakes import CASE, FakeScheme, World
from tests.synthetic import BASE

METHODS: tuple[tuple[Phase, str], ...] = (
    ("sample", "eager"),
    ("forward", "graph"),
    ("update", "graph"),
    ("step", "eager"),
)
ROUNDS = 20
"""As many as there can be."""
CALLS = {"Linear": 10, "Conv2d": 2}
"""How many calls fill a visit of 2 ms with three passes over each: few where a call takes longer."""


def gpu_rows(case: Case, rng: random.Random) -> Iterator[Measurement]:
    """The times of all variants of suite `readme` on a case, as a GPU gives them.

    Events tick every 32 ns and vary by 0.6 %, the host's clock ticks every nanosecond and varies by 3 %.
    """
    work = Work(flops=1e9, moved_bytes=1e8, output_bytes=1e6)
    entries = suited(list(REGISTRY.entries.values()), REGISTRY.find_suite("readme"), set())
    for entry in (entry for entry in entries if entry.supports(case)):
        for phase, method in METHODS:
            cold = rng.uniform(15e3, 400e3)
            host = rng.uniform(6e3, 8e3) if method == "graph" else rng.uniform(20e3, 200e3)
            places = tuple(rng.randrange(39) for _ in range(ROUNDS))
            conditions = tuple((_conditions(rng), _conditions(rng)) for _ in range(ROUNDS))
            for metric, mean, share, tick in (
                ("latency_ns", cold, 0.006, 32),
                ("warm_latency_ns", 0.8 * cold, 0.006, 32),
                ("host_latency_ns", host, 0.03, 1),
            ):
                calls = 2 * CALLS[case.operator]
                yield Measurement(
                    variant=entry.variant,
                    case=case,
                    phase=phase,
                    metric=metric,
                    method=method,
                    samples=tuple(
                        tuple(round(rng.gauss(mean, share * mean) / tick) * tick for _ in range(calls))
                        for _ in range(ROUNDS)
                    ),
                    stop="20 rounds",
                    warm_up="flat after 12 blocks, 0.03 s",
                    positions=places,
                    conditions=conditions if metric == "latency_ns" else (),
                    work=work,
                )


def _conditions(rng: random.Random) -> Conditions:
    return Conditions(
        clock_hz=rng.choice([1.98e9] * 8 + [1.965e9, 1.95e9]),
        temperature_c=float(rng.choice([44, 45, 46])),
        power_w=rng.randrange(250_000, 420_000) / 1000,
    )


def test_the_suite_of_the_readme_takes_4_mb_on_a_gpu(tmp_path: Path) -> None:
    """Eight cases, four of them convolutions: stored as a run stores them, then compressed."""
    load("impls")
    linear, conv = synthetic.linear(1024), synthetic.conv2d()
    rng = random.Random(0)  # noqa: S311  # made-up times
    with Writer(tmp_path, synthetic.header()) as writer:
        for case in (linear, conv):
            for members in range(1021, 1025):
                writer.write(*gpu_rows(msgspec.structs.replace(case, members=members), rng))
        plain = writer.path.stat().st_size
        writer.compress()
    assert writer.path.suffix == ".gz"
    assert plain < 12e6
    assert writer.path.stat().st_size < 3.5e6  # what is left is for memory, quality and launches
    run, problems = read_run(writer.path)
    assert not problems
    assert run is not None
    assert all(row.conditions for row in run.measurements)


def test_what_a_visit_tells_is_stored_once_and_read_beside_each_of_its_times(tmp_path: Path) -> None:
    """The rows of another group, method or phase, and what is no time, keep their own."""
    told = synthetic.clocks(synthetic.time_row(BASE, CASE, 1.0), 1000)
    others: list[dict[str, Any]] = [
        {"metric": "warm_latency_ns"},
        {"metric": "warm_latency_ns", "group": 1},
        {"metric": "warm_latency_ns", "method": "graph"},
        {"metric": "warm_latency_ns", "phase": "update"},
        {"metric": "peak_bytes"},
    ]
    silent = msgspec.structs.replace(told, conditions=())
    with Writer(tmp_path, synthetic.header()) as writer:
        writer.write(*(msgspec.structs.replace(silent, **changed) for changed in others), told)
    run, _ = read_run(writer.path)
    assert run is not None
    assert [bool(row.conditions) for row in run.measurements] == [True, False, False, False, False, True]
    assert run.measurements[0].conditions == told.conditions


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """The plain file of a large run that has come to its end."""
    header = msgspec.structs.replace(synthetic.header(), request=Request())
    rng = random.Random(0)  # noqa: S311  # made-up times
    row = synthetic.time_row(BASE, CASE, *(rng.random() + 1 for _ in range(100_000)))
    with Writer(tmp_path / "results", header) as writer:
        writer.write(row, RunEnd(status="complete", wall_s=1.0))
    assert writer.path.stat().st_size > LARGE_BYTES
    return writer.path


def reopened(path: Path) -> Writer:
    """The writer of a run's file, as it is when the run ends."""
    run, _ = read_run(path)
    assert run is not None
    return Writer(path.parent.parent, run.header, kept_bytes=path.stat().st_size)


def compressed(path: Path) -> Path:
    """Compress a run's file as its writer does; return the new one."""
    writer = reopened(path)
    writer.compress()
    return writer.path


def test_a_large_file_is_compressed_when_its_run_ends_and_read_by_either_name(large: Path) -> None:
    """The same run, under the same id; a small file stays as it is."""
    before = read_run(large)
    path = compressed(large)
    assert sorted(path.parent.iterdir()) == [path]
    assert path.name == large.name + ".gz"
    assert (run_name(path), run_name(large)) == (before[0] and before[0].header.run_id,) * 2
    assert read_run(path) == read_run(large) == before
    assert read_results(large.parent.parent) == ([before[0]], [])
    with Writer(large.parent.parent, synthetic.header("small")) as small:
        small.write(RunEnd(status="complete", wall_s=1.0))
        small.compress()
    assert small.path.name == "small.jsonl"


def test_every_reader_takes_a_compressed_run(large: Path) -> None:
    """The report and `--resume` read a compressed run."""
    path = compressed(large)
    results = path.parent.parent

    def page(_: Run) -> Path:
        return Path("page")

    found = select_runs(results, page)
    assert found.devices == ["test-cpu"]
    stored = {one.path.name: one for one in found.stored}
    run, _ = read_run(path)
    assert run is not None
    ends = stored[path.name].run
    assert ends is not None
    assert (ends.header, ends.end) == (run.header, run.end)
    with pytest.raises(ResumeError, match="came to its end"):
        read_unfinished(path)


@pytest.mark.parametrize("moment", ["fsync", "replace", "unlink"])
def test_a_run_that_is_killed_while_it_is_compressed_loses_nothing(
    large: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the new file is whole, before it has its name, and before the old one is deleted."""
    before = read_run(large)[0]
    content = large.read_bytes()

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> NoReturn:
        raise Killed

    writer = reopened(large)
    monkeypatch.setattr(os if moment == "fsync" else Path, moment, killed)
    with pytest.raises(Killed):
        writer.compress()
    monkeypatch.undo()
    assert read_results(large.parent.parent) == ([before], [])
    assert large.read_bytes() == content


def test_a_full_disk_leaves_the_plain_file(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is complete: it must not fail by this."""

    def full(_: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert compressed(large) == large
    assert list(large.parent.iterdir()) == [large]


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:20] + b"x" * 99])
def test_a_damaged_compressed_file_is_said(large: Path, damage: Any) -> None:
    """In one line, as every file that cannot be read."""
    path = compressed(large)
    path.write_bytes(damage(path.read_bytes()))
    run, (problem,) = read_run(path)
    assert run is None
    assert str(problem).startswith(f"{path}: cannot be read: ")


def test_a_run_is_compressed_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what conducts it: the writer then tells the new name."""
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])
    monkeypatch.setattr("esbench.store.LARGE_BYTES", 100)
    world = World()
    plan = Plan(entries=(FakeScheme("A", world).entry(),), cases=(CASE,), phases=("forward",), cell_s=1.0)
    with runner.begin("quick", synthetic.environment(), 0, tmp_path) as writer:
        runner.run(plan, writer, lambda *_: None, world.tools)
    assert writer.path.name.endswith(".jsonl.gz")
    assert gzip.decompress(writer.path.read_bytes()).count(b"\n") > 3
    assert list(tmp_path.glob("*/*")) == [writer.path]


def test_a_compressed_file_of_any_size_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file that unpacks to more than a run can hold is not unpacked whole."""
    monkeypatch.setattr(store, "MOST_BYTES", 1000)
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(10_000)))
    run, problems = read_run(path)
    assert run is None
    assert "holds more than" in str(problems[0])
