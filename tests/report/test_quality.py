"""Estimates of kappa and n_eff from replicates, and the tables of quality."""

import math
import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from esbench.report.analysis.comparison import compare
from esbench.report.analysis.pivot import grids
from esbench.report.analysis.quality import (
    LARGEST_GAIN,
    Estimate,
    agrees,
    estimate,
    n_eff_by_law,
    n_eff_of_replicates,
    percent_of_members,
    size_of,
)
from esbench.report.readme import Page, ReadmeError
from esbench.report.site import all_sections
from esbench.report.tables.quality import quality_sections
from esbench.schema import Case
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
from tests.report.report_cases import store
from tests.synthetic import DENSE, linear, skipped, variant

DIGITS = Case(operator="SparseDigits", out_channels=10, in_channels=64, members=1)
PLAIN, RIGL, ABSENT = variant("DenseDigits"), variant("Trained", rule="rigl"), variant("Trained", rule="set")


def test_interval_of_a_mean() -> None:
    """Student's t times the standard error; a single value has none, and what is not finite no estimate."""
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.replicates) == (2.0, 3)
    assert found.half == found.reach == pytest.approx(4.3027 / 3**0.5, rel=1e-4)  # Student's t in print
    assert estimate([5.0]) == Estimate(5.0, None, 1)
    assert Estimate(5.0, None, 1).reach == 0.0
    assert estimate([0.925] * 3) == Estimate(0.925, 0.0, 3)
    for values in ([], [math.nan], [1.0, math.inf]):
        assert estimate(values) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=20))
def test_n_eff_is_averaged_by_its_reciprocals(shares: list[float]) -> None:
    """Its value is n over the mean of 1 + kappa n / d, and its ends are those of that mean."""
    found, here = n_eff_of_replicates([100 / share for share in shares], 100), estimate(shares)
    assert here is not None
    assert found.value == pytest.approx(100 / statistics.mean(shares))
    assert found.low == pytest.approx(100 / (here.mean + here.reach))
    if here.mean - here.reach > 0.01:
        assert found.high == pytest.approx(100 / (here.mean - here.reach))


def test_n_eff_of_noisy_replicates() -> None:
    """Negative replicates count; if the cosine is 1 within its error only the lower end is known."""
    found = n_eff_of_replicates([100 / share for share in (-0.1, 0.5, 0.3, 0.2, 0.1)], 100)
    assert found.value == pytest.approx(500)
    assert 100 < found.low < found.value
    assert found.high == math.inf
    found = n_eff_of_replicates([50.0], 100)
    assert (found.value, found.low, found.high, found.replicates) == (50.0, 50.0, 50.0, 1)
    error = float(student.ppf(0.975, 3)) * (1 / 120) ** 0.5
    for values, least in (
        ([100 / share for share in (0.2, -0.2, 0.1, -0.1)], 100 / error),
        ([1.01 * LARGEST_GAIN * 100] * 3, LARGEST_GAIN * 100),
    ):
        found = n_eff_of_replicates(values, 100)
        assert (found.is_bound, found.is_exact, found.high) == (True, False, math.inf)
        assert found.value == found.low == pytest.approx(least)
        assert percent_of_members(found, 100).startswith("at least ")
    for values, words in (
        ([-50.0, -60.0, -55.0], "below 0 by more than its error, which is impossible"),
        ([-50.0], "is impossible"),
        ([0.0, 1.0], "a replicate that is 0 or not finite"),
        ([math.nan, 1.0], "a replicate that is 0 or not finite"),
        ([], "no replicate"),
    ):
        with pytest.raises(ValueError, match=words):
            n_eff_of_replicates(values, 100)


def test_n_eff_by_the_closed_form() -> None:
    """The value of the law without an interval; exact if nothing is left of d, None below."""
    found = n_eff_by_law(3.0, 100, 1000)
    assert found is not None
    assert found.value == found.low == found.high == pytest.approx(100 / 1.3)
    assert found.replicates == 0
    for kappa, members in ((-1.0, 4096), (-4095 / 16383, 16384), (-4095 / 65535, 65536)):
        found = n_eff_by_law(kappa, members, 4096)
        assert found is not None
        assert found.is_exact
        assert percent_of_members(found, members) == "exact"
    assert n_eff_by_law(-1.0, 8192, 4096) is None
    found = n_eff_by_law(-1.0, 4095, 4096)
    assert found is not None
    assert found.value == pytest.approx(4095 * 4096)


def test_size_follows_from_replicates() -> None:
    """Kappas and their n_eff determine d, unless all kappas are 0; a network's d scales kappa n / d."""
    kappas = [0.5, -0.25, 0.01]
    sizes = [100 / (1 + kappa * 100 / 4096) for kappa in kappas]
    assert size_of(kappas, sizes, 100) == pytest.approx(4096)
    assert size_of([0.0, 0.0], [100.0, 100.0], 100) is None
    assert size_of([], [], 100) is None
    alone = [100 / (1 + kappa * 100 / 50) for kappa in (2.9, 3.1)]
    assert n_eff_of_replicates(alone, 100, share=0.1).value == pytest.approx(100 / (1 + 3 * 100 / 500))


def test_fitted_kappa_beside_its_closed_form() -> None:
    """It agrees within 5 % or 0.02; NO if its interval, and what unseen pairs may add, are outside."""
    for mean, half, closed, verdict in (
        (10.4, 0.1, 10.0, "yes"),
        (10.6, 0.05, 10.0, "NO"),
        (10.6, 0.2, 10.0, "unclear"),
        (0.019, 0.001, 0.0, "yes"),
        (0.021, None, 0.0, "NO"),
        (-0.03, 0.02, 0.0, "unclear"),
        (-0.9, 0.07, 0.0, "unclear"),
        (0.9, 0.07, 0.0, "NO"),
    ):
        assert agrees(Estimate(mean, half, 4), closed) == verdict, (mean, half, closed)
    below = Estimate(-0.9, 0.07, 5)
    assert [agrees(below, 0.0, unseen) for unseen in (1.0, 0.5)] == ["unclear", "NO"]


def test_law_table() -> None:
    """Both kappas, their difference and whether it holds; a footnote on unseen pairs."""
    other = [row for row in rows() if not (row.variant == HADAMARD and metric(row) == "kappa")]
    off = figure(HADAMARD, SQUARE, "kappa", "linear fitness", 0.5, 0.5)
    closed = figure(HADAMARD, SQUARE, "kappa", "closed form", 0.0)
    section = named(ranking_cases.run([*other, off, closed]), "quality of")
    assert list(section.blocks[0].frame.loc["HadamardLinear"])[:5] == ["0.500", "0", "0", "0.500", "NO"]
    section = named(ranking_cases.run([*other, off]), "quality of")
    assert list(section.blocks[0].frame.loc["HadamardLinear"])[2:5] == ["no form"] * 3
    assert list(section.blocks[0].frame.loc["FlippedLinear"])[:5] == ["65.000", "0.0184", "65.0", "0", "yes"]
    assert cell(section, "FlippedLinear", "dot variance") == "66.0"
    assert cell(section, "FlippedLinear", "correlation of layers") == "0"
    below = figure(HADAMARD, SQUARE, "kappa", "linear fitness", -0.9, -0.85, -0.95)
    for unseen, verdict in ((300.0, "unclear ["), (0.01, "NO")):
        pairs = figure(HADAMARD, SQUARE, "kappa", "unseen", unseen)
        section = named(ranking_cases.run([*other, below, closed, pairs]), "quality of")
        assert cell(section, "HadamardLinear", "holds").startswith(verdict)
        assert any("rare pairs" in note for note in section.footnotes) == (verdict != "NO")


def test_trained_network_has_a_cosine_for_each_sigma() -> None:
    """In the order of sigma, and beside them n_eff at the case's own."""
    section = named(ranking_cases.run(digits(SQUARE)), "trained network", "DigitsMLP")
    frame = section.blocks[0].frame
    columns = ["sigma=0.02", "sigma=0.1", "n_eff at 0.02", "95 % interval", "n_eff / n (%)"]
    assert list(frame.columns) == columns
    assert list(frame.loc["FlippedDigitsMLP"]) == ["0.225", "0.125", "128", "128 to 128", "12.5"]
    assert section.blocks[0].note.endswith("95 % intervals of the cosines: ±0 at most.")


def test_other_figures_of_a_workload_have_a_table() -> None:
    """In their units with intervals, or the reason; the metrics of the law are not among them."""
    run = ranking_cases.run(
        [
            figure(PLAIN, DIGITS, "accuracy", "test digits", 0.98, 0.98),
            figure(RIGL, DIGITS, "accuracy", "test digits", 0.97, 0.98, 0.96),
            figure(RIGL, DIGITS, "nonzero_count", "weights", 2587, 2587),
            figure(RIGL, DIGITS, "live_gradient_bytes", "step", 4e6),
            figure(RIGL, DIGITS, "live_gradient_bytes", "topology step", 5e6),
            skipped(ABSENT, DIGITS, phase="quality", reason="it has no digits"),
        ]
    )
    (section,) = quality_sections(run, "SparseDigits")
    assert section.title.endswith("figures")
    frame = section.blocks[0].frame
    gradients = ["live gradient (MB), step", "live gradient (MB), topology step"]
    assert list(frame.columns) == ["accuracy (%)", "nonzero", *gradients]
    assert list(frame.loc["TrainedSparseDigits(rule=rigl)"]) == ["97 ± 2", "2587", "4.00", "5.00"]
    assert cell(section, "DenseDigitsSparseDigits", "accuracy (%)") == "98.0"
    assert "it has no digits" in cell(section, "TrainedSparseDigits(rule=set)", "accuracy (%)")
    others = quality_sections(ranking_cases.run(rows()), "Linear")
    assert not [section for section in others if section.title.endswith("figures")]


def test_figures_are_a_block_of_the_readme(tmp_path: Path) -> None:
    """Cases by size; a run without figures of the operator is an error."""
    wide = msgspec.structs.replace(DIGITS, in_channels=128)
    found = [figure(PLAIN, case, "accuracy", "test digits", 0.98) for case in (wide, DIGITS)]
    page, file = Page(tmp_path), store(tmp_path, ranking_cases.run(found))
    text = page.figures(file, "SparseDigits")
    assert text.index("(10, 64): figures") < text.index("(10, 128): figures")
    with pytest.raises(ReadmeError, match="holds no such table"):
        page.figures(file, "Linear")


def test_quality_is_in_no_table_of_times() -> None:
    """A phase that is not timed has no grid; titles are unique; rankings come before times."""
    run = ranking_cases.run([*rows(), *digits(SQUARE)])
    for operator in ("Linear", "DigitsMLP"):
        assert all(
            grid.phase != "quality" for grid in [*grids(run, operator, ""), *grids(run, operator, "_ns")]
        )
    titles = [section.title for section in all_sections(run)]
    assert len(titles) == len(set(titles))
    assert titles.index("Linear (64, 64): n_eff per ms") < titles.index("Linear, step: time")
    cases = [linear(64, members=members) for members in (256, 1024)]
    run = ranking_cases.run([row for case in cases for row in rows(case)])
    titles = [section.title.partition(":")[0] for section in quality_sections(run, "Linear")]
    assert titles == 2 * ["Linear (64, 64) members=256", "Linear (64, 64) members=1024"]
    assert found_case(run).members == 256


def test_qualities_of_two_runs_are_compared() -> None:
    """As counts, by the values that tables show: n_eff by reciprocals, others by their mean."""
    here = ranking_cases.run()
    other = [row for row in rows() if metric(row) != "stable_rank"]
    changed = figure(DENSE, SQUARE, "stable_rank", "one perturbation", 3.0)
    found = compare(here, ranking_cases.run([*other, changed]))
    assert [(pair.key.metric, pair.a, pair.b) for pair in found.counts] == [("stable_rank", 17.5, 3.0)]
    (pair,) = compare(here, with_effective(100.0, 100.0, 400.0)).counts
    assert pair.a == pytest.approx(1024)
    assert pair.b == pytest.approx(3 / (2 / 100 + 1 / 400))
    odd = figure(DENSE, SQUARE, "kappa", "linear fitness", 0.0, 0.0, 3.0)
    other = [row for row in rows() if not (row.variant == DENSE and metric(row) == "kappa")]
    assert [pair.b for pair in compare(here, ranking_cases.run([*other, odd])).counts] == [1.0]
