"""The short selection of the tests for a GPU, collected on a machine without one."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from esbench.registry import load
from tests.gpu.conftest import MOST, short
from tests.workload_cases import NUMBERS

load("impls")

ROOT = Path(__file__).parents[2]
KERNEL_S = 2.4
"""One and a half kernels, each compiled in 1.6 s for a GPU that no test has run on."""
PROCESSES, START_S, MOST_S = 14, 40.0, 200.0


def collected(marks: str) -> list[str]:
    """Return the names of the tests for a GPU that are selected."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-W", "default", "-m", marks)
    result = subprocess.run(
        [*command, "tests/gpu", "tests/kernels/launched"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # some ask for a device while they are imported
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in result.stdout.splitlines() if "::" in line]


def test_of_many_cases_some_are_selected_spread_evenly() -> None:
    """All of few, the first of many; where a test is over variants, one of each, not always the same."""
    assert short([None]) == {0}
    assert short([{"size": size} for size in range(5)]) == {0, 1, 2, 3, 4}
    many = short([{"size": size} for size in range(100)])
    assert len(many) == MOST
    assert 0 in many
    assert max(many) > 80
    grid = [{"entry": entry, "dtype": dtype} for dtype in "xyz" for entry in "ABCDE"]
    found = [grid[place] for place in sorted(short(grid))]
    assert sorted(case["entry"] for case in found) == list("ABCDE")
    assert {case["dtype"] for case in found} == set("xyz")


@pytest.mark.skipif(sys.platform != "linux", reason="triton, which the tests of kernels load, is for Linux")
def test_the_short_selection_has_every_test_and_every_variant_and_fits_its_time() -> None:
    """By an estimate: it was never run. Nothing in it needs the GPU to itself."""
    chosen, every = collected("not alone and not slow"), collected("not alone")
    tests, whole = (Counter(name.partition("[")[0] for name in names) for names in (chosen, every))
    assert tests.keys() == whole.keys()
    oracle = [name for name in chosen if "agrees_with_its_members_own_weights" in name]
    assert all(any(f"[{entry.variant.name}" in name for name in oracle) for entry in NUMBERS)
    assert START_S + len(chosen) * KERNEL_S / PROCESSES < MOST_S
    alone = {name.partition("::")[0] for name in collected("alone and not slow")}
    assert alone == {f"tests/gpu/test_{name}.py" for name in ("footprint", "front_door", "measuring")}
