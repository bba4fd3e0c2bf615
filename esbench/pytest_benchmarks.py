"""Every chosen variant, case and phase as one benchmark, checked before it is timed."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from esbench.measure.device_lock import lock_device
from esbench.measure.failure import Failure, classify
from esbench.measure.validation import InputRenewal
from esbench.pytest_plugin import CHOSEN, Cell, ChosenBenchmarks
from esbench.schema import Phase

Benchmark = Any
"""The fixture of pytest-benchmark, which has no type hints."""
UNLOADED = "the plug-in is not loaded: run pytest -p esbench.pytest_plugin --pyargs esbench.pytest_benchmarks"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for every cell.

    Raises:
        pytest.Collector.CollectError: the plug-in with the options is not loaded.
    """
    if CHOSEN not in metafunc.config.stash:
        raise pytest.Collector.CollectError(UNLOADED)
    cells = metafunc.config.stash[CHOSEN].cells
    metafunc.parametrize(("variant", "case", "phase"), list(cells))


@pytest.fixture(scope="session")
def chosen(request: pytest.FixtureRequest) -> Iterator[ChosenBenchmarks]:
    """The chosen cells; the last workload is freed at the end."""
    benchmarks = request.config.stash[CHOSEN]
    yield benchmarks
    benchmarks.close()


@pytest.fixture(scope="session")
def held_device(request: pytest.FixtureRequest, chosen: ChosenBenchmarks) -> Iterator[None]:
    """Lock the device until the end of the session; report the run that holds it, if any."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    note = reporter.write_line if reporter else lambda _: None
    with lock_device(chosen.device, "pytest benchmarks", note):
        yield


@pytest.fixture
def cell(variant: str, case: str, phase: Phase) -> Cell:
    """The benchmark of a test."""
    return Cell(variant, case, phase)


def test_variant(
    benchmark: Benchmark, request: pytest.FixtureRequest, chosen: ChosenBenchmarks, cell: Cell
) -> None:
    """A variant is correct and is timed."""
    if benchmark.enabled:
        request.getfixturevalue("held_device")
    benchmark.group = f"{cell.case}, {cell.phase}"
    benchmark.extra_info |= {"device": chosen.device, "suite": chosen.suite}
    failure = _time(benchmark, chosen, cell, request.config)
    if failure is None:
        return
    benchmark.has_error = True  # so it is not stored
    if benchmark.stats is not None:  # and not shown, because a wrong result has no time
        benchmark.stats.stats.data.clear()
    if failure.status == "unavailable":
        pytest.skip(failure.reason)
    pytest.fail(failure.reason, pytrace=False)


def _time(
    benchmark: Benchmark, chosen: ChosenBenchmarks, cell: Cell, config: pytest.Config
) -> Failure | None:
    """Time a cell on new inputs and store its memory and quality; return the failure, if any."""
    try:
        with chosen.conditions(cell):
            prepared = chosen.prepare(cell)
            if isinstance(prepared, Failure):
                return prepared
            call, renew = chosen.call(prepared, cell.phase), InputRenewal(prepared.workload.inputs)
            rounds = _rounds(call, renew, config) if benchmark.enabled else 1
            benchmark.pedantic(call, setup=renew, rounds=rounds)
            benchmark.extra_info |= chosen.confirm(prepared, cell.phase)
            if benchmark.enabled:
                benchmark.extra_info |= chosen.quality(prepared)
    except BaseException as error:  # noqa: BLE001  # a variant may raise anything
        return classify(error)
    return None


def _rounds(call: Callable[[], object], renew: Callable[[], None], config: pytest.Config) -> int:
    """Return the number of calls on new inputs that fill pytest-benchmark's time for a benchmark."""
    start_s = time.perf_counter()
    renew()
    call()
    call_s = time.perf_counter() - start_s
    max_s, fewest = config.getoption("benchmark_max_time"), config.getoption("benchmark_min_rounds")
    return max(math.ceil(float(max_s) / call_s), fewest)
