"""What holds for every test."""

import gc
from collections.abc import Iterator

import pytest

from esbench.registry import REGISTRY, load_installed


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither wait for another run on this machine nor for each other."""
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))


@pytest.fixture(autouse=True)
def own_plugins() -> Iterator[None]:
    """A plug-in that one test loads registers no variants and suites for the tests after it."""
    load_installed()
    entries, suites = dict(REGISTRY.entries), dict(REGISTRY.suites)
    yield
    REGISTRY.entries, REGISTRY.suites = entries, suites


@pytest.fixture(autouse=True)
def lasting_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run froze stays frozen for the next: to collect garbage is slow with this heap."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
