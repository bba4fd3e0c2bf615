"""Runs the tests in ``launched/`` in two processes with Triton's interpreter, and imports without triton.

Tests marked as slow are left out: `nox -s kernels` runs all of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


HALVES = (("test_products.py", "test_drawn_noise.py"), ("test_fused.py", "test_binary.py", "test_updates.py"))
"""Files that take about the same time, so that two workers share them."""


def test_every_file_is_in_a_half() -> None:
    """No file of ``launched/`` is left out."""
    files = [file for half in HALVES for file in half]
    assert sorted(files) == sorted(path.name for path in HERE.glob("launched/test_*.py"))


@pytest.mark.parametrize("files", HALVES, ids=", ".join)
def test_kernels_are_right_in_the_interpreter(files: tuple[str, ...]) -> None:
    """Tests pass when kernels are interpreted on the CPU."""
    paths = [str(HERE / "launched" / file) for file in files]
    # The interpreter of triton 3.6 uses an array as a number: numpy warns, and from 2.4 on raises.
    warning = "ignore::DeprecationWarning:triton.runtime.interpreter"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            warning,
            "-m",
            "not slow",
            *paths,
        ],
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
        "print(impls.FusedLowRank(1).why_unsupported(torch.nn.Linear(2, 2, device='meta')))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert ended.stdout == "its kernel needs triton, which is not installed\n"
