"""Everything that reads runs works on a GPU run, whose numbers are computed by a formula, not measured.

The run has features that CPU runs lack: two timing methods, warm and host times, launches, utilization, power
and energy, several dtypes, a peak for each, and reasons that hold for one method only.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from esbench.registry import REGISTRY, load_installed
from esbench.report.analysis.comparison import compare
from esbench.report.readme import Page
from esbench.report.site import console_tables
from esbench.report.tables import measured
from esbench.report.tables import roofline as roofline_tables
from esbench.schema import (
    PHASES,
    Case,
    Conditions,
    DevicePeak,
    Measurement,
    Phase,
    Row,
    Run,
    RunEnd,
    Variant,
    Work,
)
from esbench.store import read_run
from tests import synthetic
from tests.cli import cli_runner
from tests.report import ranking_cases, report_cases
from tests.synthetic import skipped

pytestmark = pytest.mark.xdist_group("gpu_reading")  # one worker makes what these tests share

load_installed()

SQUARE = "Linear(1024, 1024)"
SLUG = "nvidia-h200"
SLOWER = (1.0, 1.0, 1.2)
"""The factor of each day: the last run is slower."""

BASELINES = tuple(REGISTRY.entries[name].variant for name in ("Base", "Naive"))
FACTORS = {"Perturbed": 50.0, "LowRank(rank=1)": 1.4, "SparsePerturbed(k=1)": 1.5, "DropoutMask": 1.6}
"""The time of a variant as a multiple of base."""
ALL: Mapping[Phase, tuple[str, ...]] = dict.fromkeys(PHASES, ("eager", "graph"))
JITTER = (1.01, 0.99, 1.0, 1.02, 0.98, 1.005, 0.995, 1.0)
"""Each round's part of the median: eight rounds have an interval. Every variant has another order."""
SHARES: Mapping[Phase, float] = {"sample": 1.1, "forward": 1.0, "update": 1.2, "step": 3.5}
"""The time of each phase as a part of a forward's."""
NO_MEMORY = "out of memory: tried to allocate 146.00 GiB"
NO_GRAPH = "graph capture failed: operation not permitted when stream is capturing"
FLOPS_PER_NS = {"float32": 5e4, "bfloat16": 7.9e5}
BYTES_PER_NS = 4200.0
ACTIVITY = {
    "utilization_percent": (98.0, 99.0, 100.0),
    "power_w": (480.0, 500.0, 510.0),
    "clock_hz": (1.98e9, 1.95e9, 1.98e9),
    "temperature_c": (50.0, 51.0, 52.0),
    "throttled_percent": (0.0,),
    "energy_j": (0.012,),
    "net_energy_j": (0.010,),
}
"""What NVML reads while the forward is repeated."""
ENVIRONMENT = msgspec.structs.replace(
    synthetic.environment("NVIDIA H200"),
    device="cuda",
    cuda="13.0",
    driver="580.159.04",
    triton="3.6.0",
    device_memory_bytes=150_000_000_000,
    uuid="GPU-synthetic",
    clocks="unlocked, at most 1980 MHz",
    load=0.4,
    idle_w=75.0,
)
"""An H200 that does not exist."""


def readme_run(
    day: int = 1,
    *,
    slower: float = 1.0,
    operators: Sequence[str] = ("Linear", "Conv2d"),
    methods: Mapping[Phase, tuple[str, ...]] = ALL,
) -> Run:
    """Return a run of some cases of the suite ``readme``, one of them also in bfloat16.

    Args:
        day: day of January 2027; each day has its own commit.
        slower: factor on the times of all variants except baselines.
        operators: operators of its cases.
        methods: timing methods of each phase.
    """
    cases = REGISTRY.find_suite("readme").cases
    square = next(case for case in cases if case.label == SQUARE)
    convolution = next(case for case in cases if case.operator == "Conv2d")
    chosen = (square, msgspec.structs.replace(square, dtype="bfloat16"), convolution)
    rows = [
        row for case in chosen if case.operator in operators for row in rows_of_case(case, slower, methods)
    ]
    header = msgspec.structs.replace(
        synthetic.header(f"202701{day:02d}T000000Z-readme-synthetic", "readme"),
        started=f"2027-01-{day:02d}T00:00:00Z",
        environment=msgspec.structs.replace(ENVIRONMENT, commit=f"{day:04d}" * 10),
    )
    copy = DevicePeak(kind="copy", dtype="float32", amount=8.6e9, samples=(8.6e9 / BYTES_PER_NS,) * 5)
    products = (
        DevicePeak(kind="matmul", dtype=dtype, amount=1.1e12, samples=(1.1e12 / rate,) * 5)
        for dtype, rate in FLOPS_PER_NS.items()
    )
    end = RunEnd(status="complete", wall_s=270.0, spent_s={"rounds": 200.0, "set-up": 70.0})
    return Run(header=header, rows=tuple(rows), end=end, device_peaks=(copy, *products))


def rows_of_case(case: Case, slower: float, methods: Mapping[Phase, tuple[str, ...]]) -> Iterator[Row]:
    """Return rows of two groups of variants, with the baselines measured again in the second."""
    for index, (name, factor) in enumerate(FACTORS.items()):
        yield from rows_of(REGISTRY.entries[name].variant, case, slower * factor, methods, group=index % 2)
    yield skipped(REGISTRY.entries["Orthogonal"].variant, case, NO_MEMORY)
    for group, variant in itertools.product((0, 1), BASELINES):
        yield from rows_of(variant, case, 1.0 if variant.mode == "base" else 800.0, methods, group)


def rows_of(
    variant: Variant, case: Case, factor: float, methods: Mapping[Phase, tuple[str, ...]], group: int
) -> Iterator[Row]:
    """Return times, memory, launches and quality of a variant; of a baseline only its forward."""
    is_plain = variant.mode != "batched"
    for phase, timed_methods in methods.items():
        # All phases are compared with the forward of base and naive timed by the same method.
        row_methods = dict.fromkeys(itertools.chain(*methods.values())) if is_plain else timed_methods
        if is_plain and phase != "forward":
            if group == 0:
                yield skipped(variant, case, "a plain layer draws no noise", phase)
            continue
        for method in row_methods:
            if method == "graph" and variant.scheme == "DropoutMask":
                yield skipped(variant, case, NO_GRAPH, phase, method)
            else:
                yield from times(variant, case, phase, method, factor, group)
        yield from (
            metric_row(variant, case, phase, "peak_bytes", "allocator", round(1e9 * factor), group=group),
            metric_row(variant, case, phase, "reserved_bytes", "allocator", 2**21, group=group),
            metric_row(variant, case, phase, "launches", "profiler", 3.0, group=group),
        )
    if not is_plain:
        yield metric_row(variant, case, "sample", "noise_bytes", "state", round(1e5 * factor))
        kappa = 0.0 if variant.scheme in {"Perturbed", "LowRank"} else 2.0 + len(variant.name)
        yield from ranking_cases.qualities(variant, case, kappa, spread=0.01)
    for metric, samples in ACTIVITY.items() if SQUARE in case.label else ():
        yield metric_row(variant, case, "forward", metric, "nvml", *samples, group=group)


def metric_row(  # noqa: PLR0913  one for each field of a row
    variant: Variant, case: Case, phase: Phase, metric: str, method: str, *values: float, group: int = 0
) -> Measurement:
    """Return a row of a metric that is read in one round."""
    return Measurement(
        variant=variant, case=case, phase=phase, metric=metric, method=method, samples=(values,), group=group
    )


def times(  # noqa: PLR0913, PLR0917  one for each field of a row
    variant: Variant, case: Case, phase: Phase, method: str, factor: float, group: int
) -> Iterator[Measurement]:
    """Return cold, warm and host times in the same rounds; eager calls wait for the host."""
    weights = case.out_channels * case.in_channels * math.prod(case.kernel_size)
    positions = math.prod(case.input_size)
    work = Work(
        flops=2.0 * weights * case.members * positions,
        moved_bytes=4.0 * (weights + case.members * (case.in_channels + case.out_channels) * positions),
        output_bytes=4.0 * case.members * case.out_channels,
    )
    min_ns = max(work.flops / FLOPS_PER_NS[case.dtype], work.moved_bytes / BYTES_PER_NS)
    cold_ns = 1e4 + factor * SHARES[phase] * min_ns
    shift = len(variant.name) % len(JITTER)
    jitter = JITTER[shift:] + JITTER[:shift]
    visit = Conditions(clock_hz=1.98e9, temperature_c=45.0, power_w=350.0)
    host_ns = 9e4 if method == "eager" else 6e3
    all_ns = {"latency_ns": cold_ns, "warm_latency_ns": 0.9 * cold_ns, "host_latency_ns": host_ns}
    for metric, ns in all_ns.items():
        yield Measurement(
            variant=variant,
            case=case,
            phase=phase,
            metric=metric,
            method=method,
            samples=tuple((ns * share, ns * share * 1.001) for share in jitter),
            group=group,
            stop="budget of 1 s",
            warm_up="flat after 6 calls",
            positions=tuple(range(len(JITTER))),
            conditions=((visit, visit),) * len(JITTER),
            work=work,
        )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one run per day into the folder ``results``."""
    folder = tmp_path_factory.mktemp("gpu")
    for day, slower in enumerate(SLOWER, start=1):
        report_cases.store(folder, readme_run(day, slower=slower, operators=("Linear",)))
    return folder


Captured = pytest.CaptureFixture[str]


def run_file(folder: Path, day: int = len(SLOWER)) -> Path:
    """Return the file of a day's run."""
    return folder / "results" / SLUG / f"202701{day:02d}T000000Z-readme-synthetic.jsonl"


def esbench(*arguments: str | Path) -> int:
    """Run a command; return its exit code."""
    return cli_runner.run(*map(str, arguments))


def table_row(table: str, label: str) -> list[str]:
    """Return the cells of the first row with this label in a Markdown table."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_tables_of_a_gpu(tmp_path: Path) -> None:
    """Host times are next to device times; methods, dtypes and metrics have their own tables."""
    gpu_run = readme_run()
    run, page = report_cases.store(tmp_path, gpu_run), Page(tmp_path)
    forward = page.phases(run, "Linear", "forward")
    assert "Host time / device time (ms)" in forward
    assert table_row(forward.partition("Time multiplier")[2], "Base") == ["1.00x"]
    assert "out of memory" in forward
    ranking = page.ranking(run, SQUARE, "graph")
    assert len(table_row(ranking, "LowRankLinear(rank=1)")) == 10
    assert "-" not in table_row(ranking, "LowRankLinear(rank=1)")
    roofline = "".join(section.markdown() for section in roofline_tables.sections(gpu_run, "Linear"))
    assert "matrix product in bfloat16 790 TFLOP/s" in roofline
    assert "above 100 %" not in roofline
    others = "".join(section.markdown() for section in measured.other_sections(gpu_run, "Linear"))
    running = "Share of a window with a kernel running"
    assert all(words in others for words in ("Launches of one call", running, "Power draw", "et energy"))
    assert "method graph" in console_tables(gpu_run)


def test_phases_timed_by_different_methods_are_compared_with_base(tmp_path: Path) -> None:
    """Phases use the methods of suite ``readme``; a phase of base alone has no table."""
    methods = REGISTRY.find_suite("readme").methods
    assert methods["forward"] != methods["sample"]
    run = report_cases.store(tmp_path, readme_run(operators=("Linear",), methods=methods))
    page = Page(tmp_path)
    for phase in PHASES:
        tables = page.phases(run, "Linear", phase)
        assert tables.count("### ") == 2  # one per dtype
        assert tables.count(f"method {methods[phase][0]}.") == 2
        multipliers = tables.partition("Time multiplier vs. base")[2]
        assert table_row(multipliers, "LowRankLinear(rank=1)")[0].endswith("x")
    assert table_row(page.best_schemes(run), "Linear 1024 -\\> 1024")[3].endswith("x")


def test_the_report_has_pages_tables_pictures_and_history(stored: Path) -> None:
    """Each method and dtype has tables; the device's history has a picture for each case."""
    out = stored / "reports"
    assert esbench("report", "--results", stored / "results", "--out", out) == 0
    folder = out / SLUG / "readme"
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
    assert (out / SLUG / "history.md").exists()


def test_commands_show_each_method(stored: Path, capsys: Captured) -> None:
    """Rows are exported, compared and shown over time by method; base did not become slower."""
    assert esbench("export", run_file(stored), "--format", "csv") == 0
    captured = capsys.readouterr()
    assert all(f",{method}," in captured.out for method in ("eager", "graph"))
    assert "INVALID" not in captured.err
    out = ("history", "--results", stored / "results", "--out", stored / "history.svg")
    assert esbench(*out, "--cases", SQUARE, "--variants", "LowRank(rank=1)") == 0
    history = capsys.readouterr().out
    assert all(f"(method {method})" in history for method in ("eager", "graph"))
    (earlier, _), (later, _) = read_run(run_file(stored, 1)), read_run(run_file(stored))
    assert earlier is not None
    assert later is not None
    compared = compare(earlier, later)
    assert not compared.only_a
    assert not compared.only_b
    times = {
        (pair.key.variant.name, pair.key.method): pair.ratio
        for pair in compared.pairs
        if (pair.key.case.label, pair.key.phase, pair.key.metric) == (SQUARE, "forward", "latency_ns")
    }
    assert {method for _, method in times} == {"eager", "graph"}
    assert times["Base", "graph"] == pytest.approx(1.0)
    assert 1.1 < (times["LowRank(rank=1)", "graph"] or 0) < 1.2


def test_a_recommendation_is_made_from_a_stored_run(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The recommendation is for the run's device and ranks by the rate of steps, without measuring."""
    monkeypatch.setattr("esbench.measure.environment.resolve_device", lambda _: "cuda")
    monkeypatch.setattr("esbench.measure.environment.environment", lambda _: ENVIRONMENT)
    ask = ("recommend", "--linear", "1024x1024", "--offline", "--results", stored / "results")
    for dtype in ("float32", "bfloat16"):
        assert esbench(*ask, "--dtype", dtype) == 0
        out = capsys.readouterr().out
        assert "NVIDIA H200" in out
        assert "LowRank" in out
        assert "population = perturb(" in out
