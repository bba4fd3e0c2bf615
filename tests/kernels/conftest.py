"""What tests of compiled kernels share."""

import pytest


@pytest.fixture
def compiled_once(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into a cache of this test session, which its workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
