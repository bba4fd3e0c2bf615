"""Schemes compiled to machine code on a CPU; the first compilation takes half a minute."""

from pathlib import Path

import pytest
import torch
from torch import nn

from esbench.registry import load
from impls import Compiled, perturb
from impls.schemes import compiled
from impls.verify.reference import check_forward, check_update

load("impls")

# torch loads parts of itself that it warns of when it compiles first.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


def test_compiled_code_agrees_with_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled forward and update are within the error budget of the dtype."""
    if reason := compiled.missing_compiler_reason(torch.device("cpu")):
        pytest.skip(reason)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled.program.cache_clear()
    for of in ("LowRankSign", "SparsePerturbed(k=1)"):
        for dtype, antithetic in ((torch.float64, False), (torch.float32, True)):
            model, x = nn.Linear(7, 5, dtype=dtype), torch.randn(12, 7, dtype=dtype)
            population = perturb(model, Compiled(of=of), members=6, sigma=0.1, antithetic=antithetic)
            check_forward(population, x, range(6))
            check_update(population, x, range(6))
    compiled.program.cache_clear()
    torch.compiler.reset()
