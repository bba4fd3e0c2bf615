"""Which scheme at which shape: the first of each, and who cannot be told apart from it."""

import msgspec

from esbench.report.tables.ranking import best_of_each_shape
from esbench.schema import Row, Skipped
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, LOW_RANK, rows


def test_who_comes_next_is_marked_where_intervals_do_not_tell_the_two_apart() -> None:
    """A tie is no victory: the sign of near equality stands before the first of another scheme."""
    near = ranking_cases.without_forms(rows(steps={**ranking_cases.STEPS, LOW_RANK: 5.0005, CORES: 4.5}))
    for found, then in ((near, "≈ LowRank(rank=1)"), (rows(), "LowRank(rank=1)")):
        section = best_of_each_shape([ranking_cases.run(found)])
        assert section is not None
        assert list(section.blocks[0].frame["then"]) == [then]
        assert "≈ if the two are tied within their intervals" in section.blocks[0].note


def test_methods_of_timing_are_told_apart() -> None:
    """A run with two of them has a row for each, and says which is which."""
    graphs: list[Row] = [
        msgspec.structs.replace(row, method="graph")
        for row in rows()
        if row.phase == "step" and not isinstance(row, Skipped)
    ]
    section = best_of_each_shape([ranking_cases.run([*rows(), *graphs])])
    assert section is not None
    assert section.blocks[0].table.labels == ("Linear (64, 64), host", "Linear (64, 64), graph")
