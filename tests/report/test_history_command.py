"""The command `history`, and the reports' page on the runs of a device."""

import sys
from pathlib import Path

import pytest

from esbench.schema import Request
from tests.cli import cli_runner
from tests.report.history_cases import a_run, over_days, rows, stored
from tests.report.report_cases import render_reports
from tests.synthetic import changed, linear, variant

LEVELS = (3.0,) * 4 + (3.3,) * 4
Captured = pytest.CaptureFixture[str]


def run(results: Path, *arguments: str) -> int:
    """Run the command on a folder, with its plot in that folder; return the exit code."""
    out = () if "--out" in arguments else ("--out", str(results.parent / "plot.svg"))
    return cli_runner.run("history", "--results", str(results), *arguments, *out)


def test_a_history_is_a_table_and_a_plot(tmp_path: Path, capsys: Captured) -> None:
    """The table is on stdout, everything else on stderr."""
    results = stored(tmp_path, over_days(*LEVELS))
    plot = tmp_path / "deep/a.pdf"
    assert run(results, "--out", str(plot)) == 0
    assert plot.read_bytes().startswith(b"%PDF")
    captured = capsys.readouterr()
    assert captured.err == f"{plot}\n"
    assert "2026-01-04 04abcde -> 2026-01-05 05abcde: +10.0 %" in captured.out
    assert run(results, "--metric", "latency_ns", "--variants", "Pert*") == 0
    assert "Linear, forward: Time (method host)" in capsys.readouterr().out


def test_left_out_runs_and_read_errors_are_on_stderr(tmp_path: Path, capsys: Captured) -> None:
    """Each run left out has a line; a damaged file is exit code 1, but the rest is shown."""
    runs = over_days(3.0, 3.0, 3.0)
    runs[1] = changed(runs[1], end=None)
    results = stored(tmp_path, runs)
    assert run(results) == 0
    first, path = capsys.readouterr().err.splitlines()
    assert first == "run 20260102T000000Z-quick-0002 is left out, it has no end"
    assert path.endswith("plot.svg")
    (results / "test-cpu" / "odd.jsonl").write_text("what?\n", encoding="utf-8")
    assert run(results) == 1
    captured = capsys.readouterr()
    assert "odd.jsonl" in captured.err
    assert "PerturbedLinear" in captured.out
    lone = [a_run(day, rows(3.0, variant=variant(f"V{day}"))) for day in (1, 2)]
    assert run(stored(tmp_path / "lone", lone)) == 0
    captured = capsys.readouterr()
    assert captured.err == "no plot: no variant was measured in two or more of these runs\n"
    assert "V1Linear" in captured.out


def test_bad_usage_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    """The line lists what is available, the exit code is 2, and stdout is empty."""
    results = stored(tmp_path, over_days(3.0, 3.0))
    (tmp_path / "file").write_text("")
    single_run = stored(tmp_path / "one", over_days(3.0))
    dead = stored(tmp_path / "dead", [changed(over_days(3.0)[0], end=None)])
    lone = stored(tmp_path / "lone", [a_run(day, rows(3.0)[1:]) for day in (1, 2)])
    for name in ("GPU B", "GPU A"):
        several = stored(tmp_path / "several", [a_run(day, rows(3.0), device_name=name) for day in (1, 2)])
    for folder, arguments, words in (
        (results, "--phase quality", "the metric 'multiplier' in quality; available: none"),
        (results, "--metric nope", "the metric 'nope' in forward; available: multiplier, latency_ns"),
        (results, "--phase step", "the metric 'multiplier' in step; available: none"),
        (
            results,
            "--variants nope",
            "nothing matches variants nope and cases * in these runs; available",
        ),
        (results, "--device nope", "no device 'nope' has runs in"),
        (results, "--out a.gif", "--out a.gif: expected a file that ends in .svg, .png, .pdf"),
        (dead, "", "no run of this device can be shown: run 20260101T000000Z-quick-0001 is left out"),
        (results, f"--out {tmp_path}/file/h.svg", "file"),
        (single_run, "", "no case was measured in two runs"),
        (lone, "", "no run of this device has times of base and of another variant in forward"),
        (several, "", "name one with --device: gpu-a, gpu-b"),
    ):
        assert run(folder, *arguments.split()) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("esbench: ")
        assert words in captured.err
    assert run(several, "--device", "gpu-b") == 0
    assert "(GPU B, 2 runs from 2026-01-01" in capsys.readouterr().out


def test_without_ruptures_the_error_names_the_package(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command exits with 2; reports are written without this page, and no run counts as lost."""
    results = stored(tmp_path, over_days(*LEVELS))
    for module in [name for name in sys.modules if name.partition(".")[0] == "ruptures"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ruptures", None)
    assert run(results) == 2
    line = "change points need ruptures, which is not installed here: pip install ruptures"
    assert capsys.readouterr().err == f"esbench: {line}\n"
    written, (problem,) = render_reports(results, tmp_path / "reports")
    assert problem.message == f"is not written: {line}"
    assert not problem.lost
    assert tmp_path / "reports/test-cpu/quick/tables.md" in written


def test_reports_have_the_history_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case needs three runs, of which some may be parts of a suite; cases with many runs have a plot."""
    runs = [a_run(day, [*rows(3.0), *(rows(2.0, linear(512)) if day == 1 else [])]) for day in (1, 2)]
    results, out = stored(tmp_path, runs), tmp_path / "reports"
    written, problems = render_reports(results, out)
    assert problems == []
    assert "history.md" not in {path.name for path in written}
    partial_run = changed(a_run(3, rows(3.0)), request=Request(cases="Linear*"))
    stored(tmp_path, [partial_run, changed(a_run(4, rows(3.0)), end=None)])
    (out / "test-cpu/history.svg").write_text("of an earlier run")
    render_reports(results, out)
    assert {path.name for path in (out / "test-cpu").glob("*.*")} == {"history.md"}
    page = (out / "test-cpu/history.md").read_text(encoding="utf-8")
    assert page.startswith("# Test CPU: the forward over its runs\n\n- ")
    assert "- run 20260104T000000Z-quick-0004 is left out, it has no end" in page
    assert "| PerturbedLinear | Linear(256, 256) | 3 |" in page
    assert page.count("Linear(512, 512)") == 1
    monkeypatch.setattr("esbench.report.site.MIN_PLOTTED_RUNS", 3)
    render_reports(results, out)
    page = (out / "test-cpu/history.md").read_text(encoding="utf-8")
    assert page.startswith('# Test CPU: the forward over its runs\n\n<img src="history.svg" ')
    assert (out / "test-cpu/history.svg").exists()
