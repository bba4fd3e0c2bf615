"""A run on an 8 GB GPU of capability 7.5, without bfloat16, TF32 and triton."""

import importlib.util
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from esbench.measure import device_peaks
from esbench.measure.float32_precision import unsupported_reason
from esbench.measure.plan import Plan
from esbench.measure.runner import run_cases
from esbench.measure.timers import HostClock
from esbench.registry import REGISTRY, load
from esbench.schema import Record
from esbench.workload import UnavailableError
from impls.benchmark.training.rigl import SemiStructured
from impls.kernels.scheme import AbstractFused
from impls.schemes import Compiled
from tests import fake_nvml
from tests.fakes import CASE, FakeScheme, World
from tests.loop_cases import measurements, rows_of, skipped

load("impls")

TOO_OLD = "needs a GPU of capability 8.0 or more, this one has 7.5"
GIB = 2**30
FUSED = [entry.scheme for entry in REGISTRY.select(["Fused*"]) if isinstance(entry.scheme, AbstractFused)]


def layer(dtype: torch.dtype) -> nn.Linear:
    """Return a layer that claims to be on the GPU but cannot compute."""
    linear = nn.Linear(64, 32, bias=False, device="meta")
    with FakeTensorMode():
        linear.weight = nn.Parameter(torch.empty(32, 64, device="cuda", dtype=dtype))
    return linear


# Must come before torch is patched: it would initialize the GPU.
LAYERS = {dtype: layer(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the GPU's properties in torch and NVML."""
    fake_nvml.install(monkeypatch)
    card = SimpleNamespace(
        name="Small GPU", uuid="abc", total_memory=8 * GIB, L2_cache_size=2**22, major=7, minor=5
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (card.major, card.minor))


def test_kernels_are_refused_with_the_missing_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capability is named first, because installing triton would not help."""

    def reasons() -> set[str]:
        return {scheme.why_unsupported(layer) for scheme in FUSED for layer in LAYERS.values()}

    with pytest.raises(UnavailableError, match=r"no sparse tensor cores: capability 7\.5 < 8\.0$"):
        SemiStructured().layer(LAYERS[torch.float16], torch.Generator())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert reasons() == {f"its kernel {TOO_OLD}"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert reasons() == {f"its kernel {TOO_OLD}"}
    compiled = Compiled(of="Hadamard").why_unsupported(LAYERS[torch.float32])
    assert compiled == "torch.compile needs triton on a GPU, which is not installed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 9))
    assert reasons() == {"its kernel needs triton, which is not installed"}


def test_an_unsupported_dtype_has_rows_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported dtype has no set-up and no device peak, and the run continues with other cases."""
    lacking = {"bfloat16": f"bfloat16 {TOO_OLD}", "tfloat32": "this device does not multiply in TF32"}
    for dtype in ("float16", "float64", *lacking):
        reason = lacking.get(dtype, "")
        assert unsupported_reason(dtype, "cuda") == reason
        world, lines = World(), list[Record]()
        entries = [FakeScheme("Base", world).entry("base"), FakeScheme("A", world).entry()]
        cases = (msgspec.structs.replace(CASE, dtype=dtype), CASE)
        plan = Plan(entries=entries, cases=cases, phases=("forward",), cell_s=1.0, device="cuda")
        outcome = run_cases(plan, lines.extend, lambda *_: None, world.tools)
        rows = rows_of(lines)
        assert outcome.failed == 0
        assert skipped(rows) == [(name, None, "unavailable", reason) for name in ("Base", "A") if reason]
        assert {row.case.dtype for row in measurements(rows)} == {"float32", *([] if reason else [dtype])}
    assert not unsupported_reason("bfloat16", "cpu")  # slow, but measured
    monkeypatch.setattr(device_peaks, "_measure_copy", Mock(side_effect=torch.OutOfMemoryError))
    assert list(device_peaks.device_peaks("cuda", lacking, HostClock())) == []
