"""Everything that reads a run takes one of a GPU: with a synthetic one, before there is a true one."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from esbench.cli import main
from esbench.gate.decision import decide
from esbench.gate.records import MORE, SAME
from esbench.gate.report import text
from esbench.registry import REGISTRY
from esbench.report.readme import Page, render
from esbench.schema import PHASES
from tests import synthetic_gpu
from tests.gate import gate_cases
from tests.report import report_cases

SQUARE = "Linear(1024, 1024)"
SLOWER = (1.0, 1.0, 1.2)
"""The factor of each day: the last run is slower."""

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one synthetic run a day under ``results``."""
    folder = tmp_path_factory.mktemp("gpu")
    for day, slower in enumerate(SLOWER, start=1):
        run = synthetic_gpu.readme_run(day, slower=slower, operators=("Linear",))
        report_cases.store(folder, run)
    return folder


def file(folder: Path, day: int = len(SLOWER)) -> Path:
    """The file of a day's run."""
    return folder / "results" / synthetic_gpu.SLUG / f"202701{day:02d}T000000Z-readme-synthetic.jsonl"


def esbench(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run a command; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["esbench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def row(table: str, label: str) -> list[str]:
    """The cells of the first row of a Markdown table that has this label."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_readme_has_a_section_of_the_device(tmp_path: Path) -> None:
    """Multiples of base, times of host and device, published figures, phases and memory, and the ranking."""
    run = report_cases.store(tmp_path, synthetic_gpu.readme_run())
    calls = (
        f"page.device({run!r}, gtx, rtx)",
        f"page.best_of_each_shape({run!r})",
        f"page.ranking({run!r}, {SQUARE!r}, 'graph')",
        f"page.roofline({run!r}, 'Linear')",
        f"page.others({run!r}, 'Linear')",
        f"page.console({run!r})",
    )
    path = report_cases.readme(tmp_path, *calls)
    render(path, check=False)
    device, best, ranking, roofline, others, console = path.read_text().split("cog.out(")[1:]
    assert "## On a GPU: NVIDIA H200" in device
    for part in (
        "Linear: times in milliseconds, and speed against naive",
        "Linear: beside what others published for GeForce GTX 1080 Ti, GeForce RTX 2070",
        "Linear: drawing the noise, and the update",
        "Linear: memory",
        "Host time / device time (ms)",
        "Conv2d, forward",
    ):
        assert part in device
    assert row(device, "Base") == ["1.00x"]
    assert "out of memory" in device
    assert "Linear (1024, 1024) dtype=bfloat16, graph" in best
    assert len(row(ranking, "LowRankLinear(rank=1)")) == 10
    assert "-" not in row(ranking, "LowRankLinear(rank=1)")
    assert "matrix product in bfloat16 790 TFLOP/s" in roofline
    assert "above 100 %" not in roofline
    for part in (
        "Launches of one call",
        "Share of a window with a kernel running",
        "Power draw",
        "et energy",
    ):
        assert part in others
    assert "method graph" in console


def test_phases_timed_by_different_methods_are_compared_with_base(tmp_path: Path) -> None:
    """As the suite ``readme`` times them on a GPU; what was timed of base alone has no table."""
    methods = REGISTRY.find_suite("readme").methods
    assert methods["forward"] != methods["sample"]
    run = report_cases.store(tmp_path, synthetic_gpu.readme_run(operators=("Linear",), methods=methods))
    page = Page(tmp_path)
    for phase in PHASES:
        tables = page.phases(run, "Linear", phase)
        assert tables.count("### ") == 2  # a number format each
        assert tables.count(f"method {methods[phase][0]}.") == 2
        assert row(tables.partition("Time multiplier vs. base")[2], "LowRankLinear(rank=1)")[0].endswith("x")
    assert row(page.device(run), "LowRankLinear(rank=1)")[0].endswith("x")
    assert row(page.best_of_each_shape(run), "Linear (1024, 1024) dtype=bfloat16")[4].endswith("x")


def test_the_report_has_pages_tables_pictures_and_history(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each method and number format; the page of the device's history has a picture of each case."""
    out = stored / "reports"
    assert esbench(monkeypatch, "report", "--results", stored / "results", "--out", out) == 0
    folder = out / synthetic_gpu.SLUG / "readme"
    pictures = {path.stem for path in folder.glob("*.svg")}
    for plot in ("pareto", "multipliers", "roofline"):
        endings = ("", "-graph", "-bfloat16", "-graph-bfloat16")
        assert {f"linear-{plot}{ending}" for ending in endings} <= pictures
    tables = (folder / "tables.md").read_text()
    assert "graph capture failed: operation not permitted when stream is capturing" in tables
    assert all(picture in tables for picture in pictures)
    headings = [line for line in tables.splitlines() if line.startswith("#")]
    assert "## Linear, forward: time, bfloat16, method graph" in headings
    assert len(set(headings)) == len(headings)
    page = (out / "index.html").read_text()
    assert "NVIDIA H200" in page
    assert "readme-synthetic" in (out / "runs.md").read_text()
    assert (out / synthetic_gpu.SLUG / "history.md").exists()


def test_the_history_shows_where_a_variant_became_slower(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each method has its own series, which ends 1.2 times as high as before."""
    command = ("history", "--results", stored / "results", "--out", stored / "history.svg", "--json")
    only = ("--cases", SQUARE, "--variants", "LowRank(rank=1)", "--metric", "latency_ns")
    assert esbench(monkeypatch, *command, *only) == 0
    series = json.loads(capsys.readouterr().out)["series"]
    assert sorted(one["method"] for one in series) == ["eager", "graph"]
    for one in series:
        values = [point["value"] for point in one["points"]]
        assert len(values) == len(SLOWER)
        assert values[-1] > 1.1 * values[0]
    assert (stored / "history.svg").stat().st_size > 5000


@pytest.mark.parametrize("form", ["pytest-benchmark", "github-action", "csv"])
def test_a_run_is_exported(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, form: str
) -> None:
    """In every format, with both methods apart."""
    out = stored / f"export-{form}"
    assert esbench(monkeypatch, "export", file(stored), "--format", form, "--out", out) == 0
    content = out.read_text()
    assert "eager" in content
    assert "graph" in content
    assert "INVALID" not in capsys.readouterr().err


def test_two_runs_are_compared(stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Each row with that of the same method; base took the same time, the others 1.2 times as long."""
    assert esbench(monkeypatch, "compare", file(stored, 1), file(stored), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["only_in_a"]
    assert not found["only_in_b"]
    times = {
        (one["variant"], one["method"]): one["ratio"]
        for one in found["rows"]
        if (one["case"], one["phase"], one["metric"]) == (SQUARE, "forward", "latency_ns")
    }
    assert {method for _, method in times} == {"eager", "graph"}
    assert times["Base", "graph"] == pytest.approx(1.0)
    assert 1.1 < times["LowRankLinear(rank=1)", "graph"] < 1.2


def test_a_recommendation_is_made_from_a_stored_run(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """On the device of that run, without measuring: by the rate of its steps."""
    monkeypatch.setattr("esbench.measure.environment.resolve_device", lambda _: "cuda")
    monkeypatch.setattr("esbench.measure.environment.environment", lambda _: synthetic_gpu.environment())
    ask = ("recommend", "--linear", "1024x1024", "--offline", "--results", stored / "results")
    for dtype in ("float32", "bfloat16"):
        assert esbench(monkeypatch, *ask, "--dtype", dtype) == 0
        out = capsys.readouterr().out
        assert "NVIDIA H200" in out
        assert "LowRank" in out
        assert "population = perturb(" in out


@pytest.mark.parametrize(("slower", "verdict"), [(0.0, "PASS"), (0.05, "FAIL")])
def test_a_gate_decides_by_each_method(slower: float, verdict: str) -> None:
    """Cells and controls of eager and graph; a graph that is slower fails, by its name."""
    cells = [
        gate_cases.cell(name, method=method) for name in ("Able", "Baker") for method in ("eager", "graph")
    ]
    shares = {one.name: 0.0 for one in cells} | {cells[1].name: slower}
    controls = {
        f"{name} | {method}": share
        for name, share in ((SAME, 0.0), (MORE, 0.02))
        for method in ("eager", "graph")
    }
    found = gate_cases.evidence(
        shares, shares if slower else None, rows=gate_cases.surveys(cells), controls=controls
    )
    opening = msgspec.structs.replace(
        gate_cases.opening(), suite="gate_cuda", environment=synthetic_gpu.environment()
    )
    judgement = decide(opening, found, gate_cases.SETTINGS, wall_s=600.0, invalid=())
    assert judgement.invalid == ()
    assert (judgement.exit_code != 0) == (verdict == "FAIL")
    printed = text(judgement)
    failed = [one.cell for one in judgement.verdicts if one.status == "FAIL"]
    assert failed == ([cells[1].name] if slower else [])
    assert f"{verdict}: " in printed


def test_nothing_synthetic_is_committed() -> None:
    """Runs that are made up stay in the tests' own folders."""
    results = Path(__file__).parent.parent / "results"
    assert not list(results.glob("*/*synthetic*"))
