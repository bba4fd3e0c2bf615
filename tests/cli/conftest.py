"""A fixture for tests that measure through the command line."""

import pytest

from esbench.measure import device_peaks, interleave


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure six rounds, the fewest that have an interval, and a short matrix product as the peak."""
    monkeypatch.setattr(interleave, "MAX_ROUNDS", 6)
    monkeypatch.setitem(device_peaks.PRODUCT_NS, "cpu", 1e5)
