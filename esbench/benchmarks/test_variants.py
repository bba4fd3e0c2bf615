"""Every chosen variant, case and phase as one benchmark; correct first, then timed."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import pytest

from esbench.benchmarks.options import FRONT
from esbench.benchmarks.session import Cell, Front
from esbench.measure.failure import Failure, classify
from esbench.schema import Phase

UNLOADED = "load its options: pytest -p esbench.benchmarks --pyargs esbench.benchmarks"


class Benchmark(Protocol):
    """The part of pytest-benchmark's fixture that is used: it has no type hints."""

    group: str | None
    has_error: bool
    extra_info: dict[str, object]
    stats: Any

    @property
    def enabled(self) -> bool:
        """Whether it times, which it does not beside pytest-xdist or with --benchmark-disable."""

    def __call__(self, function: Callable[[], object]) -> object:
        """Time a function."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every cell.

    Raises:
        pytest.Collector.CollectError: the plugin with the options was not loaded.

    """
    if FRONT not in metafunc.config.stash:
        raise pytest.Collector.CollectError(UNLOADED)
    cells = metafunc.config.stash[FRONT].cells
    metafunc.parametrize(("variant", "case", "phase"), list(cells))


@pytest.fixture(scope="session")
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    """What was chosen; at the end nothing of it stays set up."""
    found = request.config.stash[FRONT]
    yield found
    found.close()


@pytest.fixture(scope="session")
def held_device(request: pytest.FixtureRequest, front: Front) -> Iterator[None]:
    """Lock the device until the end; while another run holds it, the terminal says which."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    with front.hold(reporter.write_line if reporter else lambda _: None):
        yield


@pytest.fixture
def cell(variant: str, case: str, phase: Phase) -> Cell:
    """One benchmark, by the three parts of its test's name."""
    return Cell(variant, case, phase)


def test_variant(benchmark: Benchmark, request: pytest.FixtureRequest, front: Front, cell: Cell) -> None:
    """A variant is correct and is timed."""
    if benchmark.enabled:
        request.getfixturevalue("held_device")
    benchmark.group = f"{cell.case}, {cell.phase}"
    benchmark.extra_info |= {"device": front.device, "suite": front.suite}
    fault = _benchmarked(benchmark, front, cell)
    if fault:
        benchmark.has_error = True  # so it is not stored
        if benchmark.stats is not None:  # nor shown: no time without correctness
            benchmark.stats.stats.data.clear()
        _end(fault)


def _benchmarked(benchmark: Benchmark, front: Front, cell: Cell) -> Failure | None:
    """Time a cell and put the rest of its figures beside it; return what is wrong, if anything."""
    try:
        with front.conditions(cell):
            member = front.prepare(cell)
            if isinstance(member, Failure):
                return member
            benchmark(front.call(member, cell.phase))
            benchmark.extra_info |= front.confirm(member, cell.phase)
            if benchmark.enabled:
                benchmark.extra_info |= front.rating(cell, member)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its test says it
        return classify(error)
    return None


def _end(fault: Failure) -> NoReturn:
    """End a test as a row without a number would: what cannot be had is skipped, what is wrong fails."""
    if fault.status == "unavailable":
        pytest.skip(fault.reason)
    pytest.fail(fault.reason, pytrace=False)
