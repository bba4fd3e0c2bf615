"""The short selection of the GPU tests, collected on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esbench.registry import load
from tests.gpu.conftest import MOST, short
from tests.workload_cases import NUMBERS

load("impls")

ROOT = Path(__file__).parents[2]
KERNEL_S = 2.4
"""Time of a test: one and a half kernels, each compiled in 1.6 s if no earlier test did."""
PROCESSES, START_S, MOST_S = 14, 40.0, 200.0
ALONE = [f"tests/gpu/test_{name}.py" for name in ("footprint", "front_door", "kernels", "measuring")]
"""Files whose tests need the GPU to themselves."""


def test_of_many_cases_some_are_selected_spread_evenly() -> None:
    """All of a few cases are selected, the first of many; of variants one per test, not always the same."""
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
def test_the_short_selection_has_every_variant_and_fits_its_time() -> None:
    """The selection fits by an estimated time, and contains no test that needs the GPU to itself."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-W", "default")
    result = subprocess.run(
        [*command, "-m", "not alone and not slow", "tests/gpu", "tests/kernels/launched"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # some modules query a device at import
        capture_output=True,
        text=True,
        check=True,
    )
    chosen = [line for line in result.stdout.splitlines() if "::" in line]
    checked = [name for name in chosen if "agrees_with_its_members_own_weights" in name]
    assert all(any(f"[{entry.variant.name}" in name for name in checked) for entry in NUMBERS)
    assert START_S + len(chosen) * KERNEL_S / PROCESSES < MOST_S
    count = re.search(r"(\d+)/(\d+) tests collected", result.stdout)
    assert count
    assert int(count[1]) < 0.6 * int(count[2])  # most cases are slow
    assert not [name for name in chosen if name.startswith(tuple(ALONE))]
