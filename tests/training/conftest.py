"""A fixture for every test of training."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fast_collections() -> Iterator[None]:
    """Keep the many objects of earlier imports and tests out of explicit garbage collections."""
    gc.freeze()
    yield
    gc.unfreeze()
