"""Runs the tests in ``launched/`` in two processes with Triton's interpreter, and imports without triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


FILES = sorted(HERE.glob("launched/test_*.py"), key=lambda path: path.stat().st_size)
"""Test files sorted by size, so that both halves take about the same time."""


@pytest.mark.parametrize("half", [0, 1])
def test_kernels_are_right_in_the_interpreter(half: int) -> None:
    """The tests of every second file pass when kernels are interpreted on the CPU."""
    paths = map(str, FILES[half::2])
    # The interpreter of triton 3.6 uses an array as a number: numpy warns, and from 2.4 on raises.
    warning = "ignore::DeprecationWarning:triton.runtime.interpreter"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", warning, *paths],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def test_without_triton_a_kernel_is_refused_with_the_reason() -> None:
    """Without triton the package can be imported, and a fused scheme is refused with the reason."""
    program = (
        "import sys; sys.modules['triton'] = None; import torch, impls, impls.kernels.lowrank\n"
        "print(impls.FusedLowRank(1).supports(torch.nn.Linear(2, 2, device='meta')))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert ended.stdout == "its kernel needs triton, which is not installed\n"
