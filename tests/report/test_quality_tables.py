"""Tables of quality: kappa beside its closed form, cosines over sigma; and where quality is not."""

import pytest

from esbench.report.analysis.comparison import compare
from esbench.report.analysis.pivot import grids
from esbench.report.analysis.quality import Estimate, agrees
from esbench.report.site import all_sections, console_tables
from esbench.report.tables.quality import quality_sections
from tests.report import ranking_cases
from tests.report.ranking_cases import (
    HADAMARD,
    SQUARE,
    cell,
    digits,
    figure,
    found_case,
    metric,
    named,
    rows,
    with_effective,
)
from tests.synthetic import DENSE, linear


@pytest.mark.parametrize(
    ("mean", "half", "closed", "verdict"),
    [
        (10.4, 0.1, 10.0, "yes"),
        (10.6, 0.05, 10.0, "NO"),
        (10.6, 0.2, 10.0, "unclear"),
        (0.019, 0.001, 0.0, "yes"),
        (0.021, None, 0.0, "NO"),
        (-0.03, 0.02, 0.0, "unclear"),
        (-0.9, 0.07, 0.0, "unclear"),
        (0.9, 0.07, 0.0, "NO"),
    ],
)
def test_fitted_kappa_beside_its_closed_form(
    mean: float, half: float | None, closed: float, verdict: str
) -> None:
    """It holds within 5 % or 0.02, fails where its whole interval is outside, and is unclear between."""
    assert agrees(Estimate(mean, half, 4), closed) == verdict


def test_what_was_not_met_hides_so_much_and_no_more() -> None:
    """A fit below its closed form contradicts it once the pairs that were met leave too little to hide."""
    below = Estimate(-0.9, 0.07, 5)
    assert [agrees(below, 0.0, unseen) for unseen in (1.0, 0.5)] == ["unclear", "NO"]


def test_fit_below_its_closed_form_has_a_footnote() -> None:
    """Where few members were looked at the table says what may be missing, where many were it says NO."""
    for pairs, verdict in ((300.0, "unclear ["), (0.01, "NO")):
        below = [
            figure(HADAMARD, SQUARE, "kappa", "linear fitness", -0.9, -0.85, -0.95),
            figure(HADAMARD, SQUARE, "kappa", "closed form", 0.0),
            figure(HADAMARD, SQUARE, "kappa", "unseen", pairs),
        ]
        other = [row for row in rows() if not (row.variant == HADAMARD and metric(row) == "kappa")]
        section = named(ranking_cases.run([*other, *below]), "quality of")
        assert cell(section, "HadamardLinear", "holds").startswith(verdict)
        assert any("rare pairs" in note for note in section.footnotes) == (verdict != "NO")


def test_law_table_flags_what_is_off() -> None:
    """The table has both kappas, their difference and whether it holds, or that there is no form."""
    off = figure(HADAMARD, SQUARE, "kappa", "linear fitness", 0.5, 0.5)
    found = [row for row in rows() if not (row.variant == HADAMARD and metric(row) == "kappa")]
    closed = figure(HADAMARD, SQUARE, "kappa", "closed form", 0.0)
    section = named(ranking_cases.run([*found, off, closed]), "quality of")
    assert list(section.blocks[0].frame.loc["HadamardLinear"])[:5] == ["0.500", "0", "0", "0.500", "NO"]
    section = named(ranking_cases.run([*found, off]), "quality of")
    assert list(section.blocks[0].frame.loc["HadamardLinear"])[2:5] == ["no form"] * 3
    assert list(section.blocks[0].frame.loc["FlippedLinear"])[:5] == ["65.000", "0.0184", "65.0", "0", "yes"]
    assert cell(section, "FlippedLinear", "dot variance") == "66.0"
    assert cell(section, "FlippedLinear", "correlation of layers") == "0"


def test_trained_network_has_a_cosine_for_each_sigma() -> None:
    """Sigmas stand in their order, and beside them n_eff at the case's own."""
    section = named(ranking_cases.run(digits(SQUARE)), "trained network", "DigitsMLP")
    frame = section.blocks[0].frame
    assert list(frame.columns) == [
        "sigma=0.02",
        "sigma=0.1",
        "n_eff at 0.02",
        "95 % interval",
        "n_eff / n (%)",
    ]
    assert list(frame.loc["FlippedDigitsMLP"]) == ["0.225", "0.125", "128", "128 to 128", "12.5"]
    assert section.blocks[0].note.endswith("95 % intervals of the cosines: ±0 at most.")


def test_quality_is_in_no_table_of_times() -> None:
    """A phase that no clock reads has no grid among the times, and every page says its figures once."""
    run = ranking_cases.run([*rows(), *digits(SQUARE)])
    for operator in ("Linear", "DigitsMLP"):
        assert all(grid.phase != "quality" for grid in grids(run, operator, ""))
        assert all(grid.phase != "quality" for grid in grids(run, operator, "_ns"))
    titles = [section.title for section in all_sections(run)]
    assert len(titles) == len(set(titles))
    assert titles.index("Linear (64, 64): n_eff per ms") < titles.index("Linear, step: time")
    assert "n_eff per ms" in console_tables(run)


def test_runs_with_quality_are_compared() -> None:
    """Two runs' qualities meet as figures that the same code repeats: what changed is listed."""
    other = [row for row in rows() if metric(row) != "stable_rank"]
    changed = figure(DENSE, SQUARE, "stable_rank", "one perturbation", 3.0)
    found = compare(ranking_cases.run(), ranking_cases.run([*other, changed]))
    assert [(pair.key.metric, pair.a, pair.b) for pair in found.counts] == [("stable_rank", 17.5, 3.0)]


def test_runs_are_compared_by_what_pages_show() -> None:
    """n_eff of a run is the page's, by reciprocals; another quality is its mean, no median."""
    here = with_effective(100.0, 100.0, 400.0)
    (pair,) = compare(ranking_cases.run(), here).counts
    assert pair.a == pytest.approx(1024)
    assert pair.b == pytest.approx(3 / (2 / 100 + 1 / 400))
    odd = figure(DENSE, SQUARE, "kappa", "linear fitness", 0.0, 0.0, 3.0)
    other = [row for row in rows() if not (row.variant == DENSE and metric(row) == "kappa")]
    assert [pair.b for pair in compare(ranking_cases.run(), ranking_cases.run([*other, odd])).counts] == [1.0]


def test_cases_of_one_shape_are_told_apart() -> None:
    """Rankings of one shape with several populations say which one they are of."""
    cases = [linear(64, members=members) for members in (256, 1024)]
    run = ranking_cases.run([row for case in cases for row in rows(case)])
    titles = [section.title for section in quality_sections(run, "Linear")]
    assert [title.partition(":")[0] for title in titles] == 2 * [
        "Linear (64, 64) members=256",
        "Linear (64, 64) members=1024",
    ]
    assert found_case(run).members == 256
