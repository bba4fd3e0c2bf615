"""Advice from a run: its order, its reasons, and the line that applies it."""

import ast

import msgspec
import pytest

from esbench.report.analysis.quality import Part
from esbench.report.analysis.ranking import RankedVariant, rankings
from esbench.report.tables.ranking import ranking_sections
from esbench.report.tables.recommendation import Advice, advise, applied, ranked_labels
from esbench.schema import Run, Variant
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, LOW_RANK, SQUARE, STEPS, rows
from tests.synthetic import DENSE, linear, variant


def advice(*runs: Run, variants: set[Variant] | None = None, limit_bytes: float | None = None) -> Advice:
    """The advice of runs, or of the usual one, on the usual case."""
    found, _ = advise(runs or (ranking_cases.run(),), SQUARE, variants=variants, limit_bytes=limit_bytes)
    assert found is not None
    return found


def winner(one: Variant, members: int = 64) -> RankedVariant:
    """A variant that was best."""
    return RankedVariant(one, msgspec.structs.replace(linear(members=members), sigma=0.05))


def test_its_ranking_is_the_tables() -> None:
    """Without a limit or a choice the advice is the page's own ranking, row by row and figure by figure."""
    run = ranking_cases.run()
    (table,) = ranking_sections(run, "Linear")
    (ranking,) = rankings(run, "Linear")
    found = advice(run)
    assert list(found.variants) == ranking.of(SQUARE)
    assert found.text().startswith(table.text())


def test_reasons_stand_below() -> None:
    """The best is named with what it gives over dense noise, and the fastest with what it loses."""
    text = " ".join(advice().text().split())
    assert "Best: HadamardLinear with an n_eff per ms of 205, 40.0x the rate of PerturbedLinear." in text
    assert "All members count (kappa 0); a step takes 5.00 ms, 5.00x base." in text
    assert (
        "FlippedLinear is faster, 4.00 ms, 4.00x base, but its n_eff is 5.80 % of its members (kappa 65)."
        in text
    )


def test_exact_estimate_is_best() -> None:
    """It is said in words, without a number of members that no estimate is worth."""
    case = linear(64, members=4096)
    found, _ = advise([ranking_cases.run([*rows(case), *ranking_cases.orthogonal(case)])], case)
    assert found is not None
    text = " ".join(found.text().split())
    assert (
        "Best: OrthogonalLinear with the exact gradient of a linear fitness in each step. It is exact" in text
    )
    assert "It is exact for a linear fitness (kappa -1); a step takes 50.0 ms, 50.0x base." in text


def test_layer_of_a_network_says_so() -> None:
    """The reasons name the network's d and the layer's own; alone nothing is said of a network."""
    found, _ = advise([ranking_cases.run()], SQUARE, part=Part(4096, 40960))
    assert found is not None
    text = " ".join(found.text().split())
    assert "has the network's d, 40960, of which a layer like this has 4096" in text
    assert "network" not in advice().text()


def test_fastest_that_is_best_is_not_said_twice() -> None:
    """Where the fastest is the best, no other is called faster."""
    found = advice(ranking_cases.run(rows(steps={**STEPS, HADAMARD: 0.5})))
    assert "is faster" not in found.text()


def test_best_that_is_not_told_apart_says_so() -> None:
    """Who may be as good stands below the best; where the intervals tell them apart nothing is said."""
    near = ranking_cases.without_forms(rows(steps={**STEPS, LOW_RANK: 5.0005}))
    text = " ".join(advice(ranking_cases.run(near)).text().split())
    assert "It is tied with LowRankLinear(rank=1): their intervals overlap." in text
    assert "tied" not in advice().text()


def test_memory_limit_rules_out_with_its_reason() -> None:
    """A variant above the limit by its noise or its peak goes behind the others, and its row says why."""
    found = advice(limit_bytes=1.5e6)
    assert [one.variant for one in found.ranked] == [HADAMARD, CORES, FLIPPED]
    text = found.text()
    assert "memory limit [" in text
    assert "memory limit: peak 2.00 MB above 1.50 MB" in text
    assert "memory limit: noise 4.00 GB and peak 4.00 GB above 1.50 MB" in text


def test_nothing_left_is_said() -> None:
    """Where memory rules everything out there is no best, and the text says so."""
    found = advice(limit_bytes=1.0)
    assert found.best is None
    assert "No recommendation" in found.text()


def test_choice_of_variants() -> None:
    """Only those asked for are ranked."""
    found = advice(variants={FLIPPED, CORES})
    assert [one.variant for one in found.variants] == [CORES, FLIPPED]


def test_case_that_nobody_ranked() -> None:
    """Without a ranking of the very case there is no advice; what there is can be listed."""
    run = ranking_cases.run([*rows(), *rows(linear(128))])
    assert advise([run], linear(32)) == (None, "")
    assert advise([run], msgspec.structs.replace(SQUARE, sigma=0.5)) == (None, "")
    assert ranked_labels([run]) == ["Linear(128, 128)", "Linear(64, 64)"]


def test_memory_that_nobody_read_is_not_within_a_limit() -> None:
    """A variant whose noise or peak the run does not hold goes behind the others, and its row says why."""
    kept = [
        row for row in rows() if not (row.variant == CORES and getattr(row, "metric", "") == "peak_bytes")
    ]
    run = ranking_cases.run(kept)
    assert CORES in [one.variant for one in advice(run).ranked]
    found = advice(run, limit_bytes=1.5e6)
    assert [one.variant for one in found.ranked] == [HADAMARD, FLIPPED]
    assert "memory unknown: the run holds no peak to compare with the limit" in found.text()


def test_line_for_one_scheme() -> None:
    """The line names the scheme with its options, and members and sigma as they were measured."""
    permuted = variant("Permuted", side="out", out_sparsity=0.5)
    text = applied({"": winner(permuted)}, {permuted: "impls"})
    assert text.splitlines() == [
        "from impls import Permuted, perturb",
        "",
        'population = perturb(model, Permuted(side="out", out_sparsity=0.5), members=64, sigma=0.05)',
    ]


def test_line_for_several_schemes_is_a_mapping() -> None:
    """Layers with different winners have patterns, the most frequent one stands last, for the rest."""
    winners = {"a": winner(LOW_RANK), "b": winner(HADAMARD), "c": winner(LOW_RANK)}
    text = applied(winners, {HADAMARD: "theirs", LOW_RANK: "impls"}, exclude=["table"])
    assert text.splitlines() == [
        "from impls import LowRank, perturb",
        "from theirs import Hadamard",
        "",
        "schemes = {",
        '    "b": Hadamard(),',
        '    "*": LowRank(rank=1),',
        "}",
        'population = perturb(model, schemes, members=64, sigma=0.05, exclude=["table"])',
    ]


def test_scheme_that_nothing_registered_is_not_said_to_be_anywhere() -> None:
    """Where it comes from is not guessed: the code says that its plugin has to be loaded."""
    lines = applied({"": winner(variant("Theirs"))}, {}).splitlines()
    assert lines[:2] == [
        "from impls import perturb",
        "# Theirs is not registered: name its plug-in with --plugin",
    ]


def test_names_are_no_patterns() -> None:
    """A layer's name that reads as a pattern matches that layer alone, in the mapping and in ``exclude``."""
    winners = {"a[0]": winner(HADAMARD), "a0": winner(LOW_RANK), "b*": winner(LOW_RANK)}
    text = applied(winners, {HADAMARD: "impls", LOW_RANK: "impls"}, exclude=["c?"])
    assert '"a[[]0]": Hadamard()' in text
    assert 'exclude=["c[?]"]' in text


def test_lazy_model_is_run_before_it_is_perturbed() -> None:
    """The code makes rows like the example's, and puts them through the model first."""
    text = applied({"": winner(HADAMARD)}, {HADAMARD: "impls"}, first_run="torch.zeros(1, 8)")
    lines = text.splitlines()
    assert lines[0] == "import torch"
    assert lines[-2].startswith("model.eval()(torch.zeros(1, 8))")
    assert lines[-1].startswith("population = perturb(")


def test_scheme_that_learns_from_rows_says_so() -> None:
    """How the record comes from the forward to the update stands below the line."""
    text = applied({"": winner(HADAMARD)}, {HADAMARD: "impls"}, from_rows=[HADAMARD])
    assert "y, record = population.call_with_activations(x, noise)" in text
    assert text.endswith("# population.update(noise, utilities, record)")
    assert "record" not in applied({"": winner(HADAMARD)}, {HADAMARD: "impls"}, from_rows=[LOW_RANK])


@pytest.mark.parametrize("layers", [1, 20])
def test_line_is_python_and_short(layers: int) -> None:
    """However many layers there are, the code parses and its lines stay short."""
    names = {f"block.{place}": winner(HADAMARD if place % 3 else DENSE) for place in range(layers)}
    text = applied(names, {HADAMARD: "impls", DENSE: "impls"})
    ast.parse(text)
    assert all(len(line) <= 110 for line in text.splitlines())
