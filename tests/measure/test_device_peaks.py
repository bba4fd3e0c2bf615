"""Device peaks, measured with a clock that computes times from the size of a product."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from esbench.measure import device_peaks as module
from esbench.measure.device_peaks import (
    LAST_SIDE,
    MAX_CALLS,
    PRODUCT_NS,
    buffer_bytes,
    cache_bytes,
    device_peaks,
)
from esbench.measure.timers import Call, HostClock, Visit, keep_inputs
from esbench.workload import UnavailableError

MIB = 2**20


class RatedClock(HostClock):
    """A clock by which the duration of a product follows from its size and a rate."""

    def __init__(self, flops_per_ns: float) -> None:
        self.flops_per_ns = flops_per_ns
        self.calls = 0

    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:  # noqa: ARG002  a clock's interface
        """Call once, and return as many equal times as requested."""
        result = call()
        assert isinstance(result, torch.Tensor)
        self.calls += calls
        took_ns = 2.0 * result.shape[0] ** 3 / self.flops_per_ns if result.ndim > 1 else 5e6
        return Visit({"latency_ns": tuple(took_ns + number for number in range(calls))})


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy small buffers: the fake clock's times do not depend on them."""
    monkeypatch.setitem(module.MAX_BUFFER, "cpu", MIB)


def test_a_product_is_large_enough_but_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of a device is found whether it is slow or fast, and all samples are kept."""
    for flops_per_ns in (0.1, 1.0, 10.0, 50.0):
        copy, product = device_peaks("cpu", ["float32"], RatedClock(flops_per_ns))
        assert PRODUCT_NS["cpu"] <= product.samples[0] < 8 * PRODUCT_NS["cpu"]
        assert product.amount / product.samples[0] == pytest.approx(flops_per_ns)
        assert (product.kind, product.dtype) == ("matmul", "float32")
        assert (copy.kind, copy.dtype, copy.amount) == ("copy", "uint8", 2 * MIB)
        assert all(5 <= len(peak.samples) <= MAX_CALLS for peak in (copy, product))
    # On a device that takes seconds at a usual size, the smallest product is enough.
    clock = RatedClock(1e-3)
    _, product = device_peaks("cpu", ["float16"], clock)
    assert product.amount == 2 * 64**3
    assert product.samples[0] > PRODUCT_NS["cpu"]
    assert clock.calls < 40
    # The size is bounded, however fast the device.
    monkeypatch.setattr(module, "LAST_SIDE", 256)
    assert LAST_SIDE > 256
    _, product = device_peaks("cpu", ["float32"], RatedClock(1e9))
    assert product.amount == 2 * 256**3


def test_each_supported_dtype_has_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtypes or sizes that the device lacks are left out; any other error is raised."""

    def measured_dtypes(*dtypes: str) -> list[str]:
        return [peak.dtype for peak in device_peaks("cpu", dtypes, RatedClock(1.0))]

    assert measured_dtypes("float64", "tfloat32", "bfloat16", "float64") == ["uint8", "float64", "bfloat16"]
    for error in (
        RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"),
        NotImplementedError("Could not run 'aten::mm', it is not implemented"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "mm", Mock(side_effect=error))
            assert measured_dtypes("float16") == ["uint8"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", Mock(side_effect=RuntimeError("can't allocate memory")))
        assert measured_dtypes("float32") == ["float32"]
    for name in ("mm", "ones"):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, Mock(side_effect=RuntimeError("an illegal memory access")))
            with pytest.raises(RuntimeError, match="illegal"):
                measured_dtypes("float32")


def test_a_peak_is_not_measured_after_the_deadline() -> None:
    """Peaks measured before the deadline are returned; without time for the first one there are none."""
    with pytest.raises(UnavailableError, match="time budget"):
        list(device_peaks("cpu", ["float32"], RatedClock(1.0), time.monotonic() + 0.5 * module.PEAK_S["cpu"]))


def test_a_copied_buffer_exceeds_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has eight times the largest cache, within bounds, and at most an eighth of the free memory."""
    monkeypatch.setitem(module.MAX_BUFFER, "cpu", 512 * MIB)
    for device, cache, free, expected in (
        ("cpu", 0, 2**40, 64 * MIB),
        ("cpu", 32 * MIB, 2**40, 256 * MIB),
        ("cpu", 400 * MIB, 2**40, 512 * MIB),
        ("cpu", 32 * MIB, 400 * MIB, 50 * MIB),
        ("cpu", 32 * MIB, 0, 1),
        ("cuda", 50 * MIB, 2**40, 1024 * MIB),
        ("cuda", 256 * MIB, 2**40, 2048 * MIB),
    ):
        assert buffer_bytes(device, cache, free) == expected
    monkeypatch.setattr(module, "CACHES", tmp_path)
    assert cache_bytes("cpu") == 0
    for number, size in enumerate(["48K\n", "2M\n", "32768K\n", "unknown\n"]):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        (folder / "size").write_text(size, encoding="ascii")
    assert cache_bytes("cpu") == 32 * MIB
