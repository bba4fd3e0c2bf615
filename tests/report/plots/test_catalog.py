"""Plots by name, the options of a request, and the command that draws them."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from esbench.cli import main
from esbench.errors import UserError
from esbench.report.plots.catalog import PLOTS, PlotRequest, standard_figures
from tests import synthetic
from tests.cli.cli_runner import refusal
from tests.report.history_cases import stored
from tests.report.plots.figures import draw, multiplied
from tests.report.report_cases import a_run, store
from tests.synthetic import BASE, DENSE, linear, time_row

if TYPE_CHECKING:
    from esbench.schema import Phase

Captured = pytest.CaptureFixture[str]


def plot(arguments: str) -> int:
    """Run the command; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["esbench", "plot", *shlex.split(arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_the_newest_run_is_drawn() -> None:
    """A run with flaws is drawn only if no other run has the values."""
    old = multiplied()
    new = synthetic.run(old.rows, run_id="20270101T000000Z-quick-0002")
    cut = msgspec.structs.replace(new, end=None)
    for runs, drawn in (([old, new], "20270101"), ([old, cut], "20260101"), ([cut], "20270101")):
        assert drawn in draw("multipliers", runs).origin


def test_choices_narrow_what_is_drawn() -> None:
    """Options select cases by label or shape, variants and dtype; the plain layer is always drawn."""
    cases = [linear(), linear(512)]
    cases += [msgspec.structs.replace(case, dtype="float16") for case in cases]
    run = synthetic.run(time_row(variant, case, 1.0) for case in cases for variant in (BASE, DENSE))
    request = PlotRequest(cases="(512, 512)", variants=("PerturbedL*",), dtype="float16")
    origin = draw("multipliers", [run], request).origin
    assert "Linear 512 -> 512" in origin
    assert "float16" in origin
    assert "float32" in draw("multipliers", [run]).origin


def test_a_request_that_cannot_be_drawn_is_an_error() -> None:
    """The error has the request and lists what is available."""
    known = "in these runs; available:"
    for name, request, message in (
        ("nope", PlotRequest(), "no plot 'nope'; available: hero, pareto, multipliers, "),
        ("multipliers", PlotRequest(dtype="int3"), f"no dtype matches 'int3' {known} float32"),
        ("multipliers", PlotRequest(cases="no"), f"no case matches 'no' {known} Linear(256, 256)"),
        ("multipliers", PlotRequest(variants=("no",)), f"no variant matches 'no' {known} Base, Naive"),
        ("multipliers", PlotRequest(phase="update"), "nothing to draw with phase update: multipliers needs"),
        ("multipliers", PlotRequest(method="graph"), "nothing to draw with method graph: multipliers needs"),
        ("pareto", PlotRequest(phase="sample"), "the plot pareto has no choice of phase: leave --phase out"),
    ):
        with pytest.raises(UserError) as raised:
            draw(name, [multiplied()], request)
        assert message in str(raised.value)
    for name in PLOTS:
        for runs in ([], [msgspec.structs.replace(multiplied(), rows=())]):
            with pytest.raises(UserError, match=f"nothing to draw: {name} needs"):
                draw(name, runs, PlotRequest())


def test_the_page_of_a_run_has_its_standard_plots() -> None:
    """Each operator and plot has a file, with a second phase, method or dtype in its name."""
    stems = [stem for stem, _ in standard_figures(a_run())]
    assert stems == ["linear-multipliers", "conv2d-multipliers", "linear-time-population"]
    assert "linear-roofline" in {stem for stem, _ in standard_figures(multiplied())}
    phases: tuple[Phase, ...]
    for phases, expected in (
        (("step",), ["linear-multipliers"]),
        (("update", "step"), ["linear-multipliers", "linear-multipliers-step"]),
        (("forward", "step"), ["linear-multipliers"]),
        (("sample", "step"), []),
    ):
        rows = [time_row(v, linear(), 1, 2, phase=phase) for phase in phases for v in (DENSE, BASE)]
        assert [stem for stem, _ in standard_figures(synthetic.run(rows))] == expected
    rows = [
        time_row(v, linear(dtype=dtype), 1, 2, method=method)
        for dtype in ("float32", "bfloat16")
        for method in ("eager", "graph")
        for v in (DENSE, BASE)
    ]
    endings = ("", "-graph", "-bfloat16", "-graph-bfloat16")
    stems = [stem for stem, _ in standard_figures(synthetic.run(rows))]
    assert sorted(stems) == sorted(f"linear-multipliers{ending}" for ending in endings)


def test_the_command_draws_stored_runs(tmp_path: Path, capsys: Captured) -> None:
    """Options set width, format, device and file; stderr names the plot and damaged lines."""
    store(tmp_path, a_run("20260101T000000Z-quick-0001"))
    older = store(tmp_path, a_run("20250101T000000Z-readme-0002", suite="readme"))
    store(tmp_path, a_run("20240101T000000Z-quick-0003", device_name="GPU 1"))
    with (tmp_path / older).open("a") as file:
        file.write('{"record": "measurement"\n')
    results = f"--results {tmp_path / 'results'}"
    phase = "--phase update --cases 'Conv2d(16,*' --variants Perturbed --width column"
    png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (990).to_bytes(4, "big")  # pixels: 3.3 inches at 300 dpi
    for arguments, suffix, begins, message in (
        (f"--device test-cpu {results}", ".PDF", b"%PDF", "quick-0001"),
        (f"--run {tmp_path / older}", ".svg", b'width="496.8pt"', ".jsonl:"),
        (f"--device gpu-1 {results} {phase}", ".png", png, "Conv2d, update: Perturbed takes"),
    ):
        out = tmp_path / "deep" / f"a{suffix}"
        assert plot(f"multipliers {arguments} --out {out}") == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"{out}: " in captured.err
        assert message in captured.err
        assert begins in out.read_bytes()[:600]


def test_the_command_lists_all_plots(capsys: Captured) -> None:
    """Without a name all plots are listed with what they show."""
    assert plot("") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [tuple(line.split(maxsplit=1)) for line in lines] == [
        (name, entry.description) for name, entry in PLOTS.items()
    ]


def test_bad_usage_of_the_command_is_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error lists what is available, the exit code is 2, and nothing is written."""
    stored(tmp_path, [multiplied()])
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        ("", "--out is missing: esbench plot multipliers --out multipliers.svg"),
        ("--out a.gif", "--out a.gif: expected a file that ends in .svg, .png, .pdf"),
        ("--out a.svg --width poster", "'poster' is not one of 'column', 'page'"),
        ("--out a.svg --phase quality", "'quality' is not one of 'sample', 'forward', 'update', 'step'"),
        ("--out a.svg --phase update --method eager", "nothing to draw with phase update and method eager"),
        ("--out a.svg --device nope", "no device 'nope' has runs in"),
        ("--out a.svg --run no.jsonl", "--run takes a file, such as results/"),
    ):
        assert words in refusal(capsys, "plot", "multipliers", *arguments.split())
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
