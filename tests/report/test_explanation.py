"""Why time alone misleads: the README's ten lines, with the figures of a run."""

from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.report.readme import ReadmeError, render
from esbench.report.tables.recommendation import why_time_misleads
from esbench.schema import Row
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, LOW_RANK, STEPS, digits, rows, sweep
from tests.report.report_cases import readme, store
from tests.synthetic import DENSE, linear


def explained(found: list[Row], case: str = "*") -> str:
    """The explanation on one line."""
    return " ".join(why_time_misleads(ranking_cases.run(found), case).split())


def test_the_fast_one_that_throws_its_population_away_is_named() -> None:
    """Who falls furthest from the order by time is said, with what it keeps, and who is first instead."""
    text = explained(rows())
    assert "Test CPU, Linear(64, 64), d = 4096" in text
    assert "By time, `FlippedLinear` takes place 1 of 5, with 4.00 ms for a step." in text
    assert "By n_eff per ms it takes place 4: n_eff is 59.4 of 1024 members (5.80 %)." in text
    assert "`PerturbedLinear`, its own number for every weight of each member: n_eff is 1024 of" in text
    assert "4.00 GB of noise" in text
    assert "First by n_eff per ms: `HadamardLinear` with an n_eff per ms of 205" in text
    assert "40.0x the rate of `PerturbedLinear`" in text


def test_first_that_is_not_told_apart_is_said() -> None:
    """Beside the first stand those that its interval reaches."""
    text = explained(ranking_cases.without_forms(rows(steps={**STEPS, LOW_RANK: 5.0005})))
    assert "the rate of `PerturbedLinear`, tied with LowRankLinear(rank=1)." in text
    assert "tied" not in explained(rows())


def test_exact_estimate_is_first() -> None:
    """Whatever its time: it is said in words, and no multiple of it or over it is."""
    case = linear(64, members=4096)
    text = explained([*rows(case), *ranking_cases.orthogonal(case)])
    first = (
        "First by n_eff per ms: `OrthogonalLinear` with the exact gradient of a linear fitness in each step."
    )
    assert first in text
    only = [*ranking_cases.orthogonal(case), *(row for row in rows(case) if row.variant == FLIPPED)]
    assert "`OrthogonalLinear` with the exact gradient" in explained(only)


def test_what_cores_give_back_is_said() -> None:
    """Beside one core stands the same scheme with several; without one nothing is said of cores."""
    text = explained(rows())
    assert "`FlippedLinear(cores=8)` has kappa 8.12 instead of 65" in text
    assert "cores" not in explained([row for row in rows() if row.variant != CORES])


def test_loss_over_the_population_is_said() -> None:
    """Where the run has several populations of the case, it is said how much more a larger one loses."""
    assert "`FlippedLinear` is 49.6 % of 64, 5.80 % of 1024 members" in explained([*rows(), *sweep(64)])
    assert "A larger population" not in explained(rows())


def test_text_follows_the_figures() -> None:
    """Another run gives other names: where the fastest is the best, nobody has fallen."""
    steps = {**STEPS, HADAMARD: 0.5}
    kappas = {HADAMARD: 0.0, DENSE: 0.0}
    text = explained(rows(kappas=kappas, steps=steps))
    assert "By time, `HadamardLinear` takes place 1 of 2" in text
    assert "By n_eff per ms it takes place 1:" in text
    assert FLIPPED.scheme not in text


def test_largest_population_that_matches_is_explained() -> None:
    """Of the cases that match the glob, the one with the most members is taken; none is one line."""
    found = [*rows(linear(64, members=64)), *rows(linear(128, members=256)), *digits(linear())]
    assert "Linear(128, 128) members=256" in explained(found)
    assert "Linear(64, 64) members=64" in explained(found, "Linear(64*")
    with pytest.raises(UserError, match="holds no ranking of a case 'Conv"):
        explained(found, "Conv2d*")


def test_readme_is_written_from_a_run(tmp_path: Path) -> None:
    """The explanation and the ranking stand in a README through its generator, and a check is clean."""
    file = store(tmp_path, ranking_cases.run())
    calls = [f"page.why_time_misleads({file!r})", f"page.ranking({file!r}, 'Linear*', 'host')"]
    path = readme(tmp_path, *calls)
    render(path, check=False)
    text = path.read_text(encoding="utf-8")
    assert "- First by n_eff per ms: `HadamardLinear`" in text
    assert "### Linear (64, 64): n_eff per ms" in text
    assert max(map(len, text.split("[[[end]]]")[1].splitlines())) <= 115
    assert render(path, check=True) == ""


def test_readme_without_a_ranking_is_one_line(tmp_path: Path) -> None:
    """A run that holds no such case or method is named in the error."""
    file = store(tmp_path, ranking_cases.run())
    path = readme(tmp_path, f"page.ranking({file!r}, 'Conv2d*')")
    with pytest.raises(ReadmeError, match="holds no such table"):
        render(path, check=False)
