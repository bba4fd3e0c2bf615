"""The short selection of the GPU tests, collected on a machine without a GPU."""

from tests.gpu.conftest import MOST, short


def test_of_many_cases_some_are_selected_spread_evenly() -> None:
    """All of a few cases are selected, the first of many; of variants one per test, not always the same."""
    assert short([None]) == {0}
    assert short([{"size": size} for size in range(5)]) == {0, 1, 2, 3, 4}
    many = short([{"size": size} for size in range(100)])
    assert len(many) == MOST
    assert 0 in many
    assert max(many) > 80
    grid = [{"entry": entry, "dtype": dtype} for dtype in "xyz" for entry in "ABCDE"]
    found = [grid[place] for place in sorted(short(grid))]
    assert sorted(case["entry"] for case in found) == list("ABCDE")
    assert {case["dtype"] for case in found} == set("xyz")
