"""A fixture for tests of what this process knows about its GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esbench.git import VARIABLE
from esbench.measure import gpu_monitor
from esbench.measure.gpu_monitor import own_pids


@pytest.fixture
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear what other tests cached about the GPU; read idle power once, and use separate locks."""
    own_pids.cache_clear()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_monitor, "IDLE_S", gpu_monitor.PACE.interval_s)
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    own_pids.cache_clear()
