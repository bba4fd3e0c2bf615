"""The scaling study: its cells, its efficiencies, the model of communication, its page and its command."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from esbench.errors import UserError
from esbench.registry import Entry
from esbench.schema import Recipe, Variant
from esbench.studies import scaling_run
from esbench.studies.scaling import (
    FILES,
    STRONG,
    WEAK,
    Cell,
    Link,
    Study,
    finding,
    points,
    render,
    sizes,
    step_bytes,
    step_s,
)
from esbench.studies.scaling_run import Plan, measure
from tests.cli.cli_runner import run
from tests.report.report_cases import render_reports
from tests.study_cases import HERE

RECIPE = Recipe(network="DigitsMLP", members=1024)
LINK = Link(bytes_per_s=50e9, latency_s=14e-6)
DENSE = Variant(scheme="Perturbed")


def cell(ranks: int, members: int, step_ns: float) -> Cell:
    """Return a cell of six rounds, of which each is slower than the one before."""
    steps = tuple((step_ns * drift, 1.1 * step_ns * drift, step_ns * drift) for drift in (1, 2, 3, 4, 5, 6))
    sent = () if ranks == 1 else step_bytes(members, 26_122, ranks)
    return Cell(ranks=ranks, members=members, steps=steps, waits=steps, collectives=sent)


CELLS = (cell(1, 1024, 4e8), cell(1, 256, 8e7), cell(2, 1024, 2.5e8), cell(2, 512, 1e8), cell(4, 1024, 2e8))


def study_of(*cells: Cell, **fields: Any) -> Study:
    """Return an invented study on two CPUs."""
    return Study(
        **{
            "schema": FILES.schema,
            "study_id": "study-0",
            "started": "2026",
            "wall_s": 3.0,
            "environment": HERE,
            "variant": DENSE,
            "recipe": RECIPE,
            "parameters": 26_122,
            "processors": 2,
            "link": LINK,
            "cells": cells,
            **fields,
        }
    )


def test_strong_and_weak_scaling_share_the_cell_of_the_most_ranks() -> None:
    """Strong scaling has all members on each number of ranks, weak scaling the same share on each rank."""
    assert sizes(1024, [4, 1, 2, 2]) == [(1, 1024), (1, 256), (2, 1024), (2, 512), (4, 1024)]
    assert sizes(512, [1]) == [(1, 512)]


def test_efficiency_is_the_ideal_time_over_the_time_within_a_round() -> None:
    """Drift between rounds cancels; more ranks than CPUs share them, and are no finding."""
    study = study_of(*CELLS)
    assert {(point.kind, point.cell.ranks): point.efficiency for point in points(study)} == {
        (STRONG, 1): 1,
        (STRONG, 2): pytest.approx(0.8),
        (STRONG, 4): pytest.approx(0.5),
        (WEAK, 1): 1,
        (WEAK, 2): pytest.approx(0.8),
        (WEAK, 4): pytest.approx(0.4),
    }
    assert finding(study) == "2 ranks on 2 CPUs keep 80.0 % (strong) and 80.0 % (weak) of the ideal speed"
    alone = study_of(*CELLS, processors=1)
    assert finding(alone) == "No two ranks had a processor each: parallel efficiency was not measured"
    assert {point.efficiency for point in points(study_of(*CELLS[2:]))} == {None}


def test_the_model_has_two_all_reduces_of_fitness_and_gradient() -> None:
    """2 log2(p) latencies and 2 (p - 1) / p times the bytes for each; members grow with the GPUs."""
    link = Link(bytes_per_s=1e9, latency_s=1e-3)
    assert link.all_reduce_s(1e9, 8) == pytest.approx(2 * 3 * 1e-3 + 2 * 7 / 8)
    assert step_bytes(512, 100, 2) == (8 * (1024 + 2), 400)
    sent = 8 * (2 * 256 * 64 + 64) + 4 * 10**6
    expected = 2 * 2 * 6 * 1e-3 + 2 * 63 / 64 * sent / 1e9
    assert step_s(study_of(*CELLS, link=link), 10**6, 64) == pytest.approx(expected)


def test_the_page_has_both_tables_and_a_plot_whose_title_is_the_finding(tmp_path: Path) -> None:
    """Ranks that share CPUs are labeled."""
    results, out = tmp_path / "results", tmp_path / "out"
    assert render(results, out) == []
    study = study_of(*CELLS)
    FILES.write(study, results)
    page, plot = render(results, out)
    text = page.read_text()
    assert text.count("ranks share CPUs") == 2
    for words in ("| strong    |       2 |    1024 |         875 |", "120,888", "100,000,000", "14 µs"):
        assert words in text
    assert "2 ranks on 2 CPUs keep 80.0 % (strong)" in plot.read_text()
    assert render(results, out)[1].read_bytes() == plot.read_bytes()
    assert render_reports(results, out) == ([out / "index.html", page, plot], [])


def test_the_command_trains_on_ranks_and_counts_what_they_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes send what the model says; every step has a time, and one rank sends nothing."""
    monkeypatch.chdir(tmp_path)
    options = "--device cpu --ranks 1 --ranks 2 --members 512 --batch 1 --rounds 2 --steps 3"
    assert run("scaling", *options.split()) == 0
    assert "ranks on" in capsys.readouterr().out
    (study,) = FILES.newest(Path("results"))
    assert [(cell.ranks, cell.members) for cell in study.cells] == [(1, 512), (1, 256), (2, 512)]
    assert study.parameters == 26_122
    for cell in study.cells:
        assert cell.collectives == (step_bytes(cell.members, 26_122, 2) if cell.ranks == 2 else ())
        assert [len(steps) for steps in cell.steps] == [3, 3]
        for steps, waits in zip(cell.steps, cell.waits, strict=True):
            assert all(wait < step for step, wait in zip(steps, waits, strict=True))
            assert all(bool(wait) == (cell.ranks == 2) for wait in waits)
    assert Path("build/reports/scaling.md").exists()


def test_bad_usage_and_an_error_of_a_rank_are_errors_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and nothing is stored."""
    monkeypatch.chdir(tmp_path)
    failed = ProcessRaisedException("Traceback\n\nValueError: 256 members cannot be split", 0, 1)
    monkeypatch.setattr(scaling_run, "start_processes", Mock(side_effect=failed))
    for arguments, words in (
        ("--bandwidth 0", "--bandwidth 0: expected a finite number above 0"),
        ("--latency nan", "--latency nan: expected a finite number above 0"),
        ("--variant Flipped*", "variants: name one, see `esbench list`"),
        ("--ranks 0", "--ranks"),
        ("--network Digits", "no network 'Digits'"),
        ("--members 256", "a rank failed: ValueError: 256 members cannot be split"),
    ):
        assert run("scaling", "--device", "cpu", *arguments.split()) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
    assert not list(Path().glob("results/*/scaling/*"))
    monkeypatch.setattr(scaling_run, "processors", lambda _: 1)
    untrainable = Entry(variant=DENSE, scheme=object(), source="", package="tests")
    plan = Plan("cuda", (), "Perturbed", RECIPE, sizes(512, [1, 2]), 1)
    with pytest.raises(UserError, match="Perturbed cannot be trained: its package registers no"):
        measure(untrainable, plan, LINK, HERE, Mock())
    monkeypatch.setattr(scaling_run, "trainer", Mock())
    with pytest.raises(UserError, match="--ranks 2: this machine has 1 GPU, and ranks cannot share one"):
        measure(untrainable, plan, LINK, HERE, Mock())
