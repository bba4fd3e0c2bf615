"""Selects a short run of the GPU tests: the cases that it leaves out are marked ``slow``.

A test over variants keeps one case per variant, any other test at most MAX_CASES. Tests that need the GPU to
themselves are marked ``alone``.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

MAX_CASES = 8
"""Most cases of a test in the short selection, evenly spaced; a test over variants keeps one for each."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that are not in the short selection as slow."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        calls = [getattr(item, "callspec", None) for item in cases]
        kept = short([call.params if call else None for call in calls])
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker("slow")


def short(cases: Sequence[dict[str, Any] | None]) -> set[int]:
    """Return the indices of the cases in the short selection, given the parameters of each case.

    Each variant keeps one case, and the next variant a different one, so that all dtypes and shapes occur.
    """
    places: defaultdict[object, list[int]] = defaultdict(list)
    for index, params in enumerate(cases):
        places[params and params.get("entry")].append(index)
    if len(places) > 1:
        return {indices[turn % len(indices)] for turn, indices in enumerate(places.values())}
    count = min(len(cases), MAX_CASES)
    return {index * len(cases) // count for index in range(count)}
