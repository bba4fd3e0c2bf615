"""The families of training are measured, tabled and drawn by the code of the layers, and by no other."""

import ast
from pathlib import Path
from typing import get_type_hints

import pytest

from esbench.plugins import load
from esbench.registry import REGISTRY, Entry, Workload, build
from esbench.schema import PHASES, QUALITY
from tests.floors import ROOT

load("impls")

FAMILIES = ("rigl", "backward", "hygiene", "compile")
TRAINING = sorted(ROOT.glob("impls/training/**/*.py"))
HARNESS = sorted(ROOT.glob("esbench/**/*.py"))

OTHERS = {
    *("esbench.measure", "esbench.report", "esbench.cli", "esbench.store", "esbench.stats"),
    *("matplotlib", "pandas", "seaborn", "plotly", "tabulate", "jinja2", "csv", "timeit"),
}
"""What measures, keeps, tables and draws."""

CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "monotonic", "monotonic_ns"}

EARNED = {
    "impls/training/sparsity.py": {"tabulate"},  # the summary that RigLScheduler prints for whoever trains
    "impls/training/watchdog.py": {"monotonic"},  # a thread that ticks every 0.1 s
    "impls/benchmark/training/compile_trial.py": {"perf_counter_ns"},  # a fresh process, which says its times
    "impls/benchmark/training/hygiene_trial.py": {"perf_counter_ns"},  # the same
}
"""What a module may have all the same, each with the reason beside it."""


def second_harness(source: str, path: str) -> list[str]:
    """Places where a family measures, tables or draws by itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [one.name for one in names]
            case ast.ImportFrom(module=str(module), names=names):
                found += [f"{module}.{one.name}" for one in names]
            case ast.Attribute(attr=name) if name in CLOCKS:
                found.append(f"time.{name}")
    clocks = {f"time.{name}" for name in CLOCKS}
    wrong = {one for one in found if one in clocks or any(f"{one}.".startswith(f"{o}.") for o in OTHERS)}
    return [f"{path} has {one}" for one in wrong if EARNED.get(path, set()).isdisjoint(one.split("."))]


def named(source: str, names: set[str]) -> set[str]:
    """Which of these names a source uses: as an identifier, an import or a whole string."""
    if not any(name in source for name in names):  # most have none, and parsing takes long
        return set()
    used = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name)
            ):
                used.add(name)
    return names & used


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: str(path.relative_to(ROOT)))
def test_training_families_have_no_second_loop_table_or_plot_code(path: Path) -> None:
    """No module of theirs imports what measures, tables or draws, or reads a clock, without a reason."""
    assert second_harness(path.read_text(), str(path.relative_to(ROOT))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import matplotlib.pyplot as plt",
        "from esbench import report",
        "from esbench.measure.loop import measure",
        "def late():\n    import pandas",
        "import time\nstart = time.perf_counter()",
        "from time import monotonic",
    ],
)
def test_a_second_harness_is_found(source: str) -> None:
    """An import of what measures or draws, anywhere in a module, and a clock; that of a trial is allowed."""
    assert len(second_harness(source, "impls/training/rigl.py")) == 1
    assert not second_harness(
        "import time\ntime.perf_counter_ns()", "impls/benchmark/training/hygiene_trial.py"
    )
    assert not second_harness("from esbench.registry import suite", "impls/training/rigl.py")


def entries(family: str) -> list[Entry]:
    """Return the variants of a family."""
    return REGISTRY.select(REGISTRY.find_suite(family).variants)


def test_the_harness_names_no_family() -> None:
    """Whatever loops, tables and draws knows neither their operators nor their variants."""
    names = {case.operator for family in FAMILIES for case in REGISTRY.find_suite(family).cases}
    names |= {entry.variant.scheme for family in FAMILIES for entry in entries(family)}
    assert names > {"StepInBackward", "TopologyUpdate", "Architectures", "SharedLayer"}
    assert {str(path): found for path in HARNESS if (found := named(path.read_text(), names))} == {}
    assert named("if case.operator == 'TopologyUpdate': ...", names) == {"TopologyUpdate"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_a_suite_of_workloads(family: str) -> None:
    """Base, naive and batched variants of ordinary phases, which the registry builds as it builds layers."""
    assert set(REGISTRY.find_suite(family).phases) <= {*PHASES, QUALITY}
    assert {entry.variant.mode for entry in entries(family)} == {"base", "naive", "batched"}
    for entry in entries(family):
        maker = build.dispatch(type(entry.scheme))
        assert maker is not build.dispatch(object)
        assert get_type_hints(maker)["return"] is Workload
