"""The command `history`, and the page on the runs of a device in the reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from esbench.report.site import render_reports
from esbench.schema import Request
from tests import cli_runner
from tests.report.history_cases import a_run, over_days, rows, stored
from tests.synthetic import linear, variant

ROOT = Path(__file__).parents[2]
LEVELS = (3.0,) * 4 + (3.3,) * 4

Captured = pytest.CaptureFixture[str]


def run(results: Path, *arguments: str) -> int:
    """Run the command on a folder, with its plot beside it; return the exit code."""
    out = () if "--out" in arguments else ("--out", str(results.parent / "picture.svg"))
    return cli_runner.run("history", "--results", str(results), *arguments, *out)


def test_a_history_is_a_table_and_a_picture(tmp_path: Path, capsys: Captured) -> None:
    """The table stands on stdout, the picture's path on stderr."""
    results = stored(tmp_path, over_days(*LEVELS))
    assert run(results, "--out", str(tmp_path / "deep" / "h.svg")) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{tmp_path / 'deep' / 'h.svg'}\n"
    assert "2026-01-04 04abcde -> 2026-01-05 05abcde: +10.0 %" in captured.out
    assert (tmp_path / "deep" / "h.svg").is_file()
    assert not (tmp_path / "deep" / "h.png").exists()


def test_a_folder_gets_a_picture_of_each_case(tmp_path: Path, capsys: Captured) -> None:
    """A folder that exists, or a name without an ending, holds one file for each case."""
    both = [*rows(3.0), *rows(2.0, linear(512))]
    results = stored(tmp_path, [a_run(day, both) for day in (1, 2)])
    (tmp_path / "old.svg").mkdir()
    for name in ("new", "old.svg"):
        assert run(results, "--out", str(tmp_path / name)) == 0
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "history-linear-256-256.svg",
            "history-linear-512-512.svg",
        ]
    assert "history-linear-512-512.svg" in capsys.readouterr().err


def test_json_leaves_stdout_clean(tmp_path: Path, capsys: Captured) -> None:
    """One object on stdout, everything else on stderr."""
    results = stored(tmp_path, over_days(*LEVELS))
    assert run(results, "--json", "--metric", "latency_ns", "--variants", "Pert*") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == "latency_ns"
    assert [series["variant"] for series in found["series"]] == ["PerturbedLinear"]


def test_what_was_left_out_is_said(tmp_path: Path, capsys: Captured) -> None:
    """One line on stderr for each run, whatever is in its name; the rest is shown."""
    runs = over_days(3.0, 3.0, 3.0)
    runs[1] = msgspec.structs.replace(runs[1], end=None)
    results = stored(tmp_path, runs)
    assert run(results) == 0
    first, path = capsys.readouterr().err.splitlines()
    assert first == "run 20260102T000000Z-quick-0002 is left out, it has no end"
    assert path.endswith("picture.svg")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("odd.jsonl", "what?\n", "no valid JSON"),
        ("new.jsonl", '{"record":"run","schema":99}\n', "written with schema version 99"),
    ],
)
def test_a_file_that_cannot_be_read_is_exit_code_1(
    tmp_path: Path, capsys: Captured, name: str, content: str, words: str
) -> None:
    """The rest is shown, the file has its line."""
    results = stored(tmp_path, over_days(3.0, 3.0))
    (results / "test-cpu" / name).write_text(content, encoding="utf-8")
    assert run(results) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert "PerturbedLinear" in captured.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--phase quality", "no phase 'quality' is timed; there are: sample, forward, update, step"),
        ("--phase step", "no run of this device measured the phase step"),
        ("--metric nope", "no run of this device has a figure of 'nope' in forward above 0"),
        ("--variants nope", "no variant matches 'nope' in these runs; there are: Perturbed"),
        ("--cases nope", "no case matches 'nope' in these runs; there are: Linear(256, 256)"),
        ("--device nope", "no device 'nope' has runs in"),
        ("--out a.gif", "--out a.gif: expected a file that ends in .svg or .png or .pdf, or a folder"),
        ("--results no/such", "no folder no/such: measure with `esbench run`"),
        ("--nope", "No such option: --nope"),
    ],
)
def test_bad_usage_is_one_line(tmp_path: Path, capsys: Captured, arguments: str, words: str) -> None:
    """The line says what there is, the exit code is 2, and nothing is on stdout."""
    assert run(stored(tmp_path, over_days(3.0, 3.0)), *arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("esbench: ")
    assert words in captured.err


def test_one_run_and_none_are_no_history(tmp_path: Path, capsys: Captured) -> None:
    """Each is a line with what to do."""
    (tmp_path / "results").mkdir()
    assert run(tmp_path / "results") == 2
    assert "no runs in" in capsys.readouterr().err
    assert run(stored(tmp_path, over_days(3.0))) == 2
    assert "no case was measured in two runs" in capsys.readouterr().err


def test_of_several_devices_one_is_named(tmp_path: Path, capsys: Captured) -> None:
    """Without a name the devices are listed; with one, its runs alone are shown."""
    for name in ("GPU B", "GPU A"):
        stored(tmp_path, [a_run(day, rows(3.0), device_name=name) for day in (1, 2)])
    assert run(tmp_path / "results") == 2
    assert "name one with --device: gpu-a, gpu-b" in capsys.readouterr().err
    assert run(tmp_path / "results", "--device", "gpu-b") == 0
    assert capsys.readouterr().out.startswith("GPU B, 2 runs")


def test_variants_that_no_two_runs_share_are_no_picture(tmp_path: Path, capsys: Captured) -> None:
    """The table stands there alone, and a line says so."""
    results = stored(tmp_path, [a_run(day, rows(3.0, variant=variant(f"V{day}"))) for day in (1, 2)])
    assert run(results) == 0
    captured = capsys.readouterr()
    assert captured.err == "no plot: no variant was measured in two or more of these runs\n"
    assert "V1Linear" in captured.out
    assert not (tmp_path / "picture.svg").exists()


def test_without_ruptures_a_line_says_what_to_install(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with 2; the reports are written but for this page, and nothing counts as lost."""
    results = stored(tmp_path, over_days(*LEVELS))
    for module in [one for one in sys.modules if one.partition(".")[0] == "ruptures"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ruptures", None)
    assert run(results) == 2
    line = "change points need ruptures, which is not installed here: pip install ruptures"
    assert capsys.readouterr().err == f"esbench: {line}\n"
    written, (problem,) = render_reports(results, tmp_path / "reports")
    assert problem.message == f"is not written: {line}"
    assert not problem.lost
    assert tmp_path / "reports/test-cpu/quick/tables.md" in written


def test_reports_have_a_page_for_three_runs_of_a_case(tmp_path: Path) -> None:
    """Its tables, and runs that were left out; two runs have none."""
    runs = [a_run(day, [*rows(3.0), *(rows(2.0, linear(512)) if day == 1 else [])]) for day in (1, 2)]
    results, out = stored(tmp_path, runs), tmp_path / "reports"
    written, problems = render_reports(results, out)
    assert problems == []
    assert "history.md" not in {path.name for path in written}
    cut_off = msgspec.structs.replace(a_run(4, rows(3.0)), end=None)
    stored(tmp_path, [a_run(3, rows(3.0)), cut_off])
    written, _ = render_reports(results, out)
    assert {path.name for path in written if path.parent == out / "test-cpu"} == {
        "history.md",
    }
    page = (out / "test-cpu" / "history.md").read_text(encoding="utf-8")
    assert page.startswith("# Test CPU: the forward over its runs\n\n- ")
    assert "- run 20260104T000000Z-quick-0004 is left out, it has no end" in page
    assert "| PerturbedLinear | Linear(256, 256) |      3 |" in page
    assert page.count("Linear(512, 512)") == 1


def test_a_page_has_plots_of_cases_with_twenty_runs(tmp_path: Path) -> None:
    """Those of cases that no longer have so many are removed; other files stay."""
    results, out = stored(tmp_path, over_days(*[3.0] * 19)), tmp_path / "reports"
    folder = out / "test-cpu"
    folder.mkdir(parents=True)
    for name in ("history-old.svg", "history-old.png", "other.svg"):
        (folder / name).write_text("of an earlier run")
    render_reports(results, out)
    assert {path.name for path in folder.glob("*.*")} == {"history.md", "other.svg"}
    stored(tmp_path, [a_run(20, rows(3.0))])
    render_reports(results, out)
    page = (folder / "history.md").read_text(encoding="utf-8")
    assert page.startswith('# Test CPU: the forward over its runs\n\n<img src="history-linear-256-256.svg" ')
    assert (folder / "history-linear-256-256.svg").exists()


def test_a_part_of_a_suite_is_in_the_history_of_its_device(tmp_path: Path) -> None:
    """A run that no page of a suite shows may hold the case that counts."""
    runs = over_days(3.0, 3.0, 3.0)
    header = msgspec.structs.replace(runs[2].header, request=Request(cases="Linear*"))
    results = stored(tmp_path, [*runs[:2], msgspec.structs.replace(runs[2], header=header)])
    written, _ = render_reports(results, tmp_path / "reports")
    assert "history.md" in {path.name for path in written}


def test_same_runs_same_bytes(tmp_path: Path, capsys: Captured) -> None:
    """In two processes, the table, the JSON and the plots are equal to the byte."""
    results = stored(tmp_path, over_days(*LEVELS))
    outputs = [["--out", str(tmp_path / "{}.svg")], ["--out", str(tmp_path / "{}"), "--json"]]
    program = "from tests.report.test_history_command import run\nfrom pathlib import Path\n"
    program += f"r = Path({str(results)!r})\n"
    program += "".join(f"run(r, *{[one.format('b') for one in options]!r})\n" for options in outputs)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    for options in outputs:
        assert run(results, *[one.format("a") for one in options]) == 0
    assert capsys.readouterr().out == done.stdout
    for name in ("{}.svg", "{}/history-linear-256-256.svg"):
        one, other = ((tmp_path / name.format(run)).read_bytes() for run in "ab")
        assert one == other


def test_a_folder_in_place_of_the_picture_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    """What the file system refuses is said in one line."""
    results = stored(tmp_path, over_days(3.0, 3.0))
    (tmp_path / "file").write_text("")
    assert run(results, "--out", str(tmp_path / "file" / "h.svg")) == 2
    assert capsys.readouterr().err.count("\n") == 1
