"""A run under load is not ranked as if it were quiet."""

import msgspec
import pytest

from esbench.report.analysis.load import reasons_unreliable
from esbench.report.analysis.ranking import rankings, recommend
from esbench.report.site import all_sections, console_tables
from esbench.report.tables.console import run_summary, warnings
from esbench.report.tables.ranking import best_schemes, ranking_section
from esbench.report.tables.recommendation import answer, details
from esbench.report.web.views import views
from esbench.schema import Run, Work
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import SQUARE, rows
from tests.synthetic import BASE, time_row

WORK = Work(flops=0, moved_bytes=50_000, output_bytes=1)
"""Its bound is 0.05 ms at the peaks of the fake device."""


def with_base(
    milliseconds: float, work: Work | None = None, run_id: str = "20260303T000000Z-quick-0003"
) -> Run:
    """Return the usual run with this time of base."""
    base = msgspec.structs.replace(time_row(BASE, SQUARE, milliseconds), work=work)
    others = [row for row in rows() if row.variant != BASE]
    return synthetic.run([*others, base], device_peaks=synthetic.peaks(), run_id=run_id)


@pytest.mark.parametrize(
    ("milliseconds", "is_loaded"), [(15.0, True), (12.0, False), (0.06, False)], ids=["far", "near", "quiet"]
)
def test_base_far_from_its_roofline_is_load(milliseconds: float, is_loaded: bool) -> None:
    """A base of 300 times its bound is; one of 240 times, or a call of a few microseconds, is not."""
    reasons = reasons_unreliable(with_base(milliseconds, WORK))
    reason = "unreliable: load: the forward of base took 15.0 ms, 300 times its roofline bound"
    assert reasons == ({SQUARE: reason} if is_loaded else {})
    tiny = msgspec.structs.replace(WORK, moved_bytes=20)
    assert reasons_unreliable(with_base(0.05, tiny)) == {}


def test_base_twice_as_slow_as_in_an_earlier_run_is_load() -> None:
    """Only finished, valid runs of the same device count."""
    earlier = with_base(1.0, run_id="20260101T000000Z-quick-0001")
    environment = msgspec.structs.replace(earlier.header.environment, cpu="B")
    header = msgspec.structs.replace(earlier.header, environment=environment)
    elsewhere = msgspec.structs.replace(earlier, header=header)
    broken = msgspec.structs.replace(
        earlier, end=msgspec.structs.replace(earlier.end, invalid=("throttled",)) if earlier.end else None
    )
    for milliseconds, history, is_loaded in (
        (2.0, [earlier], True),
        (1.9, [earlier], False),
        (2.0, [elsewhere, broken], False),
        (2.0, [], False),
    ):
        run = with_base(milliseconds, run_id="20260202T000000Z-quick-0002")
        assert (SQUARE in reasons_unreliable(run, [run, *history])) == is_loaded
        texts = [run_summary(run, history), console_tables(run, history)]
        texts += [section.text() for section in all_sections(run, history)]
        assert any("as long as in an earlier run" in text for text in texts[2:]) == is_loaded
        assert all(("as long as in an earlier run" in text) == is_loaded for text in texts[:2])


def test_load_is_shown_in_place_of_the_numbers_of_a_ranking() -> None:
    """Console, tables, page and recommendation give the reason; `recommend` prefers a quiet run."""
    loaded, quiet = with_base(15.0, WORK, run_id="20260202T000000Z-quick-0002"), ranking_cases.run()
    reason = "unreliable: load: the forward of base took 15.0 ms, 300 times its roofline bound"
    assert run_summary(loaded).splitlines()[1:3] == ["Linear 64 -> 64, 1024 members", reason]
    assert warnings(loaded) == []
    (ranking,) = rankings(loaded, "Linear")
    text = ranking_section(ranking, SQUARE).text()
    assert "unreliable: load [" in text
    assert f"] unavailable: {reason}\n" in text
    assert best_schemes([loaded], ["Linear"], largest_only=True) is None
    (view, *_) = views(loaded, "Linear")
    assert {row.reason for row in view.rows if row.variant.mode == "batched"} >= {f"unavailable: {reason}"}
    assert not any(row.bounds for row in view.rows)
    recommendation = recommend([loaded], SQUARE)
    assert recommendation
    assert (
        answer(recommendation).replace("\n", " ")
        == f"Linear 64 -> 64, 1024 members: no recommendation, {reason}."
    )
    assert reason in details(recommendation)
    best = recommend([loaded, quiet], SQUARE)
    assert best
    assert (best.run, bool(best.recommended)) == (quiet, True)
