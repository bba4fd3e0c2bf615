"""What a run prints on the terminal."""

from esbench.report.site import console_tables
from tests.report import ranking_cases
from tests.report.ranking_cases import SQUARE, digits, rows
from tests.synthetic import DENSE


def test_run_of_quality_alone_prints_its_tables() -> None:
    """Without times there is nothing to rank: the law and a trained network stand for themselves."""
    found = [row for row in [*rows(), *digits(SQUARE)] if row.phase == "quality"]
    text = console_tables(ranking_cases.run(found))
    assert "Quality law: " in text
    assert "Linear (64, 64): quality of the gradient" in text
    assert "trained network" in text
    assert f"{DENSE.name}DigitsMLP" in text
    assert "n_eff per ms" not in text


def test_run_with_times_prints_its_ranking() -> None:
    """The law behind it stands on the page of the run."""
    text = console_tables(ranking_cases.run())
    assert "n_eff per ms" in text
    assert "Quality law: " not in text
