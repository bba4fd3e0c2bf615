"""Screening of candidates before `recommend` measures the best of them."""

from pathlib import Path

import msgspec
import pytest

from esbench import store
from esbench.cli.screening import KEPT, Screened, choose, small_case
from esbench.schema import Variant
from tests.cli import cli_runner
from tests.report.ranking_cases import SQUARE
from tests.synthetic import DENSE


def screened(count: int, *, step_s: float = 0.01, dense_s: float = 0.1) -> list[Screened]:
    """Return variants A0, A1, ..., best first, and dense noise last."""
    variants = [Screened(Variant(scheme=f"A{rank}"), 100.0 - rank, step_s) for rank in range(count)]
    return [*variants, Screened(DENSE, 1.0, dense_s)]


def test_the_best_variants_and_dense_noise_are_measured_if_there_is_time() -> None:
    """Dense noise takes a slot of its own; what there is no time for is named with its reason."""
    best = [f"A{rank}" for rank in range(KEPT)]
    assert choose({SQUARE: screened(12)}, 60.0) == (["Perturbed", *best], [])
    names, notes = choose({SQUARE: screened(12, dense_s=2.4)}, 60.0)
    assert names == best
    (note,) = notes
    assert note.startswith(f"{SQUARE.label}: Perturbed (dense noise) is left out, a step takes about 2.4 s")
    assert note.endswith("--budget 360 measures it")
    names, notes = choose({SQUARE: screened(12, step_s=0.5, dense_s=9.0)}, 30.0)  # 10 s each
    assert names == ["A0", "A1", "A2"]
    assert notes[1] == f"{SQUARE.label}: no time for A3, A4, A5 and 2 more: give a longer --budget"
    assert choose({SQUARE: screened(1, step_s=99.0)[:1]}, 30.0) == (["A0"], [])  # the best in any case
    assert choose({SQUARE: []}, 30.0) == ([], [])


def test_a_large_population_is_screened_at_a_small_one() -> None:
    """Dense noise has at most 2^23 entries, but at least 8 members; a smaller population stays."""
    for width, members, expected in ((64, 1024, 1024), (64, 2**20, 2048), (1024, 1024, 8), (8192, 1024, 8)):
        case = msgspec.structs.replace(SQUARE, out_channels=width, in_channels=width, members=members)
        assert small_case(case).members == expected


def test_many_candidates_are_screened_and_the_best_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run holds the best eight, base and dense noise; compiled variants are on request."""
    globs = [
        f"--variants={glob}" for glob in ("Perturbed", "Flipped*", "LowRank*", "Hadamard", "SparsePerturbed*")
    ]
    arguments = ("--linear", "16x16", "--members", "64", "--device", "cpu", "--results", str(tmp_path))
    assert cli_runner.run("recommend", *arguments, *globs) == 0
    captured = capsys.readouterr()
    ((run,), _) = store.read_results(tmp_path)
    names = {row.variant.name for row in run.measurements}
    assert {"Base", "Perturbed"} < names
    assert KEPT <= len(names) <= KEPT + 2
    assert "screening 18 variants on cpu" in captured.err
    assert captured.err.index("screening") < captured.err.index(f"measuring {len(names)} variants on cpu")
    assert "population = perturb(model, " in captured.out
