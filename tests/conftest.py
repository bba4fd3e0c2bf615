"""What holds for every test."""

import pytest


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither wait for a run of somebody else on this machine nor for each other."""
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
