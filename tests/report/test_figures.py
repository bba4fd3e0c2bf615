"""The table of what a workload says of itself, beside the law of perturbations."""

from pathlib import Path

import msgspec
import pytest

from esbench.report.readme import Page, ReadmeError
from esbench.report.tables.quality import quality_sections
from esbench.schema import Case
from tests.report import ranking_cases
from tests.report.ranking_cases import cell, figure, rows
from tests.report.report_cases import store
from tests.synthetic import skipped, variant

CASE = Case(operator="SparseDigits", out_channels=10, in_channels=64, members=1)
DENSE, RIGL, ABSENT = variant("DenseDigits"), variant("Trained", rule="rigl"), variant("Trained", rule="set")


def test_figures_of_a_workload_have_a_table_in_their_units() -> None:
    """A mean with its interval, a number that is always the same, and the reason for none."""
    found = ranking_cases.run(
        [
            figure(DENSE, CASE, "accuracy", "test digits", 0.98, 0.98),
            figure(RIGL, CASE, "accuracy", "test digits", 0.97, 0.98, 0.96),
            figure(RIGL, CASE, "nonzero_count", "weights", 2587, 2587),
            figure(RIGL, CASE, "live_gradient_bytes", "step", 4e6),
            figure(RIGL, CASE, "live_gradient_bytes", "topology step", 5e6),
            skipped(ABSENT, CASE, phase="quality", reason="it has no digits"),
        ]
    )
    (section,) = quality_sections(found, "SparseDigits")
    assert section.title.endswith("figures")
    (block,) = section.blocks
    assert list(block.frame.columns) == [
        "accuracy (%)",
        "nonzero",
        "live gradient (MB), step",
        "live gradient (MB), topology step",
    ]
    assert cell(section, "TrainedSparseDigits(rule=rigl)", "accuracy (%)") == "97 ± 2"
    assert cell(section, "TrainedSparseDigits(rule=rigl)", "nonzero") == "2587"
    assert cell(section, "TrainedSparseDigits(rule=rigl)", "live gradient (MB), topology step") == "5.00"
    assert cell(section, "DenseDigitsSparseDigits", "accuracy (%)") == "98.0"
    assert "it has no digits" in cell(section, "TrainedSparseDigits(rule=set)", "accuracy (%)")


def test_the_law_of_perturbations_is_not_shown_twice() -> None:
    """What has tables of its own is no figure."""
    found = ranking_cases.run(rows())
    assert not [section for section in quality_sections(found, "Linear") if section.title.endswith("figures")]


def test_figures_of_an_operator_are_a_block_of_the_readme(tmp_path: Path) -> None:
    """Its cases by size; where a run has no figures of it, that is an error."""
    wide = msgspec.structs.replace(CASE, in_channels=128)
    rows = [figure(DENSE, case, "accuracy", "test digits", 0.98) for case in (wide, CASE)]
    page, file = Page(tmp_path), store(tmp_path, ranking_cases.run(rows))
    text = page.figures(file, "SparseDigits")
    assert text.index("(10, 64): figures") < text.index("(10, 128): figures")
    with pytest.raises(ReadmeError, match="holds no such table"):
        page.figures(file, "Linear")
