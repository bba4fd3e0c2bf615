"""The short selection of the tests for a GPU: of a test with many cases some, of each variant one.

A test that is left out of it is marked ``slow``. Tests that need the GPU to themselves are marked ``alone``.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

MOST = 8
"""So many cases of a test are in the short selection, spread evenly; of one over variants, a case of each."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the short selection leaves out."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        calls = [getattr(item, "callspec", None) for item in cases]
        kept = short([call.params if call else None for call in calls])
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker("slow")


def short(cases: Sequence[dict[str, Any] | None]) -> set[int]:
    """Return the places of the cases in the short selection, by the parameters of each.

    Each variant has one case, the next variant another one of its own: all types and shapes come up.
    """
    places: defaultdict[object, list[int]] = defaultdict(list)
    for place, params in enumerate(cases):
        places[params and params.get("entry")].append(place)
    if len(places) > 1:
        return {found[turn % len(found)] for turn, found in enumerate(places.values())}
    count = min(len(cases), MOST)
    return {place * len(cases) // count for place in range(count)}
