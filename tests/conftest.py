"""Fixtures for every test."""

import gc
from collections.abc import Iterator

import pytest

from esbench.measure import device_peaks
from esbench.registry import REGISTRY, load_installed


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own locks, so that it waits for no run on this machine and no other test."""
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))


@pytest.fixture(autouse=True)
def own_plugins() -> Iterator[None]:
    """Restore the registry after each test, so that variants and suites of its plug-ins are gone."""
    load_installed()
    entries, suites = dict(REGISTRY.entries), dict(REGISTRY.suites)
    yield
    REGISTRY.entries, REGISTRY.suites = entries, suites


@pytest.fixture(autouse=True)
def lasting_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep objects frozen between runs, because collecting garbage is slow with this heap."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the device's copy peak on a small buffer: on the usual one it takes a second in each run."""
    monkeypatch.setitem(device_peaks.MAX_BUFFER, "cpu", 2**20)


@pytest.fixture(autouse=True)
def unbroken_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not break messages on stderr into lines, as paths of tests have any length."""
    monkeypatch.setattr("esbench.text.COLUMNS", 10_000)
