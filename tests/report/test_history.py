"""The runs of a device as series: their points, the runs left out, and the tables."""

import math
import sys
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.report.analysis.history import History, history, moment, percentage
from esbench.report.tables.history import sections
from esbench.schema import Request, RunEnd
from tests.cli import cli_runner
from tests.report.history_cases import EIGHT, SMALL, a_run, over_days, rows, stored
from tests.report.report_cases import render_reports
from tests.synthetic import BASE, DENSE, NAIVE, changed, linear, skipped, time_row, variant

SPARSE = variant("SparsePerturbed", k=1)
LEVELS = (3.0,) * 4 + (3.3,) * 4


def values(series_of: History, index: int = 0) -> list[float]:
    """Return the values of a series."""
    return [point.value for point in series_of.series[index].points]


def text(shown_history: History) -> str:
    """Return the text for a terminal."""
    return "\n".join(section.text() for section in sections(shown_history))


def test_values_and_their_intervals() -> None:
    """Multipliers are computed inside each run, so that drift cancels; a single round has no interval."""
    runs = over_days(3.0, 3.0, 3.0)
    result = history(runs)
    assert [series.variant for series in result.series] == [DENSE]
    assert values(result) == pytest.approx([3.0, 3.0, 3.0])
    point = result.series[0].points[0]
    assert (point.low, point.high) == pytest.approx((3.0, 3.0))
    alone = a_run(1, [time_row(BASE, SMALL, 1), time_row(DENSE, SMALL, 2)])
    (point,) = history([alone]).series[0].points
    assert (point.low, point.high) == (None, None)
    both = a_run(1, [time_row(NAIVE, SMALL, *EIGHT), *rows(2.0)])
    assert [series.variant for series in history([both]).series] == [DENSE, NAIVE]  # baselines come last


def test_runs_that_cannot_be_compared_are_left_out() -> None:
    """Each unfinished or invalid run, or run of another machine, has a line; runs are ordered by id."""
    runs = over_days(3.0, 9.0, 9.0, 9.0, 4.0)
    assert values(history(runs[::-1])) == pytest.approx([3, 9, 9, 9, 4])
    ends = (
        (None, "has no end"),
        (RunEnd(status="interrupted", wall_s=1.0), "was interrupted"),
        (RunEnd(status="complete", wall_s=1.0, invalid=("throttled",)), "is invalid (throttled)"),
    )
    for index, (end, _) in enumerate(ends, start=1):
        runs[index] = changed(runs[index], end=end)
    shown = history(runs)
    assert values(shown) == pytest.approx([3, 4])
    assert shown.left_out == tuple(
        f"run {runs[index].header.run_id} is left out, it {words}"
        for index, (_, words) in enumerate(ends, start=1)
    )
    runs = over_days(3.0, 4.0)
    runs[1] = changed(runs[1], request=Request(variants=("Perturbed",)))
    runs[0] = msgspec.structs.replace(runs[0], end=RunEnd(status="failed", wall_s=1.0))
    assert values(history(runs)) == pytest.approx([3, 4])  # part of a suite, a failed variant
    runs = [
        a_run(1, rows(9.0), threads=64),
        a_run(2, rows(9.0), uuid="MIG-1"),
        a_run(3, rows(3.0), uuid="GPU-1"),
        a_run(4, rows(3.0), uuid="GPU-2"),
        msgspec.structs.replace(a_run(5, rows(9.0), threads=64), end=None),  # unfinished: not the newest
    ]
    shown = history(runs)
    assert values(shown) == pytest.approx([3, 3])
    assert shown.left_out[0].endswith("it ran on threads 64, the newest one on threads 2")
    assert "it ran on kind MIG, the newest one on kind GPU" in shown.left_out[1]


def test_different_cases_and_methods_are_different_series() -> None:
    """Different cases, dtypes, methods or baselines make different series."""
    half = linear(256, dtype="bfloat16")
    graph_rows = [msgspec.structs.replace(row, method="graph") for row in rows(5.0)]
    runs = [a_run(1, [*rows(3.0), *rows(7.0, half), *graph_rows]), a_run(2, rows(3.0, linear(512)))]
    result = history(runs)
    keys = sorted((line.key.case.shape, line.key.case.dtype, line.key.method) for line in result.series)
    of_small = (("bfloat16", "host"), ("float32", "graph"), ("float32", "host"))
    assert keys == [*(("(256, 256)", *key) for key in of_small), ("(512, 512)", "float32", "host")]
    assert all(f"lower is better (method {method})" in text(result) for method in ("host", "graph"))
    assert history(runs, phase="update").series == ()
    step = [time_row(DENSE, SMALL, 6, 6, phase="step")]
    base = [time_row(BASE, SMALL, 2, 2, phase="step")]
    result = history([a_run(1, [*rows(3.0), *step]), a_run(2, [*rows(3.0), *step, *base])], phase="step")
    assert [(series.key.against, values(result, index)) for index, series in enumerate(result.series)] == [
        ("Base", [3.0]),
        ("Base's forward", [pytest.approx(6.0)]),
    ]
    assert "time(variant) / time(Base's forward)" in text(result)


def test_a_run_without_a_value_has_no_point() -> None:
    """Neither a reason nor samples that are not finite are a value."""
    runs = over_days(3.0, 3.0, 3.0)
    nan = msgspec.structs.replace(time_row(SPARSE, SMALL, 5), samples=((math.nan,), ()))
    for index, row in enumerate((skipped(SPARSE, SMALL, "no"), time_row(SPARSE, SMALL, 5, 5), nan)):
        runs[index] = msgspec.structs.replace(runs[index], rows=(*runs[index].rows, row))
    result = history(runs)
    assert [point.run for point in result.series[1].points] == [1]
    assert "1 of 3" in text(result)


def test_the_table_has_changes_and_their_commits() -> None:
    """Rows have the number of runs, the first and last value, and the change points."""
    runs = over_days(*LEVELS)
    result = history(runs)
    (series,) = result.series
    (step,) = series.change_points
    assert series.runs_around(step) == (3, 4)
    assert percentage(step.before, step.after) == "+10.0 %"
    shown = text(result)
    (row,) = [line for line in shown.splitlines() if line.startswith("PerturbedLinear")]
    where = "2026-01-04 04abcde -> 2026-01-05 05abcde"
    assert " ".join(row.split()) == f"PerturbedLinear Linear(256, 256) 8 3.00x 3.30x +10.0 % {where}: +10.0 %"
    assert "none" in text(history(over_days(*[3.0] * 6)))
    assert "too short" in text(history(over_days(*[3.0] * 5)))


def test_names_of_runs_and_changes() -> None:
    """Runs are named by date and commit, changes are percentages with a sign."""
    (run,) = over_days(1.0)
    assert moment(run) == "2026-01-01 01abcde"
    for fields, words in (({"dirty": True}, "01abcde+"), ({"commit": None}, "no commit")):
        assert moment(changed(run, **fields), "\n") == f"2026-01-01\n{words}"
    for before, after, words in (
        (1.0, 1.021, "+2.10 %"),
        (2.0, 1.0, "-50.0 %"),
        (3.0, 3.0000000001, "0 %"),
        (1e-300, 1e24, "n/a"),
    ):
        assert percentage(before, after) == words


def test_globs_choose_variants_and_cases() -> None:
    """Globs match variants by name or label, and cases by label; each case lists its number of runs."""
    both = [*rows(3.0), time_row(SPARSE, SMALL, *EIGHT), *rows(3.0, linear(512))]
    runs = [a_run(day, both) for day in (1, 2)]
    assert len(history(runs).series) == 3
    assert len(history(runs, variants=["SparsePerturbedLinear*"]).series) == 1
    assert len(history(runs, variants=["Sparse*", "Perturbed"], cases="*256*").series) == 2
    known = r"available: Linear\(256, 256\), Linear\(512, 512\)$"
    for variants, cases, words in (
        (["Sparse*"], "*512*", r"^no variant Sparse\* was measured on a case \*512\* in these runs$"),
        (["*"], "Nope", rf"^no case matches 'Nope' in these runs; {known}"),
        (
            ["Dense", "Spars"],
            "*",
            r"^no variant matches 'Dense', 'Spars' in these runs; available: Perturbed, Sp",
        ),
    ):
        with pytest.raises(UserError, match=words):
            history(runs, variants=variants, cases=cases)
    runs = over_days(3.0, 3.0)
    runs[1] = msgspec.structs.replace(runs[1], rows=(*runs[1].rows, *rows(2.0, linear(512))))
    result = history(runs, fewest=2)
    assert [series.key.case for series in result.series] == [SMALL]
    assert result.left_out == ("left out, measured in fewer than 2 runs: Linear(512, 512)",)


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
        (results, "--phase quality", "'quality' is not one of 'sample', 'forward', 'update', 'step'"),
        (results, "--phase step", "no run of this device has times of base and of another variant in step"),
        (results, "--variants nope", "no variant matches 'nope' in these runs; available: "),
        (results, "--device nope", "no device 'nope' has runs in"),
        (results, "--out a.gif", "--out a.gif: expected a file that ends in .svg, .png, .pdf"),
        (dead, "", "no run of this device can be shown: run 20260101T000000Z-quick-0001 is left out"),
        (results, f"--out {tmp_path}/file/h.svg", "file"),
        (single_run, "", "no case was measured in two runs"),
        (lone, "", "no run of this device has times of base and of another variant in forward"),
        (several, "", "name one with --device: gpu-a, gpu-b"),
    ):
        options = ("--results", str(folder), *arguments.split())
        assert words in cli_runner.refusal(capsys, "history", *options)
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
