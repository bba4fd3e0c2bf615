"""A stored run as other tools read it: what stands there, under which name, and what is left out."""

import csv
import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.stats import Stats

from esbench import store
from esbench.errors import UserError
from esbench.report.formats.exporters import FORMATS, ExportRows, export, group, unit
from esbench.report.formats.exporters import pytest_benchmark_stats as stats
from esbench.schema import Measurement, Row, Run
from tests import synthetic
from tests.report.export_cases import CASE, HOSTILE, empty, failed, hostile, of_cuda
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, variant

ROOT = Path(__file__).parents[2]
COMMITTED = [path for path in sorted(ROOT.glob("results/*/*.jsonl.gz")) if path.stat().st_size < 2**16]
FRACTIONS = st.lists(st.integers(0, 2**30).map(lambda number: number / 2**20), min_size=1, max_size=40)
"""Samples in whose sums and quarters there is no rounding."""


def committed(path: Path) -> Run:
    """Read a run of this repository."""
    run, problems = store.read_run(path)
    assert run is not None
    assert not problems
    return run


def benchmarks(run: Run) -> list[dict[str, Any]]:
    """What pytest-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "pytest-benchmark").content)["benchmarks"]
    return found


def entries(run: Run) -> list[dict[str, Any]]:
    """What github-action-benchmark would read."""
    found: list[dict[str, Any]] = json.loads(export(run, "github-action").content)
    return found


def sheet(run: Run) -> list[dict[str, str]]:
    """What a spreadsheet would read."""
    return list(csv.DictReader(io.StringIO(export(run, "csv").content.decode(), newline="")))


def replaced(rows: list[Row], **fields: object) -> list[Row]:
    """The rows with other values in some fields."""
    return [msgspec.structs.replace(row, **fields) for row in rows]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_run_is_exported_in_every_format(path: Path) -> None:
    """Every row with a number is in the table, times are in both JSON formats, and names are unique."""
    run = committed(path)
    times = sum(unit(row.metric) == "ns" for row in run.measurements)
    bytes_ = sum(unit(row.metric) == "bytes" for row in run.measurements)
    assert len(sheet(run)) == len(run.rows)
    for found, count in ((benchmarks(run), times), (entries(run), times + bytes_)):
        assert len({one["name"] for one in found}) == len(found) == count


def test_an_unknown_format_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(UserError, match="no format 'xml'; there are: pytest-benchmark, github-action, csv"):
        export(synthetic.run([]), "xml")


@given(FRACTIONS)
def test_figures_are_those_of_pytest_benchmark(samples: list[float]) -> None:
    """Every figure of a benchmark is what the tool itself computes from the same samples."""
    theirs: Any = Stats()  # type: ignore[no-untyped-call]  # the tool has no hints
    for sample in samples:
        theirs.update(sample)
    found = stats(samples)
    assert found.pop("data") == samples
    assert found.pop("iterations") == 1
    for name, value in theirs.as_dict().items():
        assert found.pop(name) == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), name
    assert not found


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=20))
def test_seconds_are_exact_to_the_last_digit(nanoseconds: list[int]) -> None:
    """A sample in seconds is the nearest number to a billionth of what was read."""
    row = time_row(DENSE, CASE, *(1.0 for _ in nanoseconds))
    row = msgspec.structs.replace(row, samples=tuple((float(one),) for one in nanoseconds))
    (found,) = benchmarks(synthetic.run([row]))
    assert found["stats"]["data"] == [float(Fraction(one, 10**9)) for one in nanoseconds]


def test_machine_commit_and_date_are_the_runs() -> None:
    """What stands beside the benchmarks is what the run says of itself, and all of it is there."""
    run = synthetic.run(of_cuda())
    found = json.loads(export(run, "pytest-benchmark").content)
    here = run.header.environment
    assert found["datetime"] == run.header.started
    assert (found["commit_info"]["id"], found["commit_info"]["dirty"]) == ("0123456789abcdef", False)
    assert found["machine_info"]["esbench"] == json.loads(msgspec.json.encode(here))
    assert found["machine_info"]["cpu"]["brand_raw"] == "Test CPU"
    assert (found["machine_info"]["python_version"], found["machine_info"]["node"]) == ("3.12.0", "")


def test_method_and_metric_are_part_of_the_name() -> None:
    """Eager and replayed times, warm and cold ones, stand apart, each in a group of its own."""
    found = benchmarks(synthetic.run(of_cuda()))
    assert [one["name"] for one in found][:2] == [
        "forward[PerturbedLinear-Linear(128, 128) members=256-latency_ns-eager]",
        "forward[PerturbedLinear-Linear(128, 128) members=256-warm_latency_ns-eager]",
    ]
    assert len({one["group"] for one in found}) == 4
    assert [
        one["params"]["variant"] for one in found if one["group"].endswith("forward, latency_ns (eager)")
    ] == [
        "PerturbedLinear",
        "Base",
    ]


def test_bytes_and_launches_stand_beside_the_times() -> None:
    """A benchmark carries what else was read of its phase, its rounds and its labels."""
    rows = replaced(of_cuda()[:1], labels=("dispatch-bound: in 1 of 2 samples the device waited",))
    (first, *_) = benchmarks(synthetic.run([*rows, *of_cuda()[4:]], invalid=("somebody else",)))
    extra = first["extra_info"]
    assert (extra["peak_bytes"], extra["launches"], extra["rounds"]) == (4096.0, 3.0, 2)
    assert extra["labels"] == [
        "INVALID: somebody else",
        "dispatch-bound: in 1 of 2 samples the device waited",
    ]


def test_smaller_is_better_of_all_entries() -> None:
    """Times and bytes are there in the unit that they were stored in, and launches are not."""
    found = entries(synthetic.run(of_cuda()))
    assert [one["unit"] for one in found] == ["ns"] * 4 + ["bytes", "ns"]
    assert found[0]["value"] == 2e6
    assert found[0]["range"] == "p20 1.4e+06, p80 2.6e+06"
    assert "range" not in found[4]
    assert found[0]["extra"].startswith("samples: 2, rounds: 2\nTest CPU")


def test_the_range_is_the_interval_where_there_is_one() -> None:
    """Six rounds are enough for an interval of the median, and both formats show it."""
    run = synthetic.run([time_row(DENSE, CASE, 1, 2, 3, 4, 5, 6)])
    assert entries(run)[0]["range"] == "95 % interval 1e+06 to 6e+06"
    (row,) = sheet(run)
    assert (float(row["low"]), float(row["median"]), float(row["high"])) == (1e6, 3.5e6, 6e6)
    assert (row["rounds"], row["samples"], row["unit"], row["status"]) == ("6", "6", "ns", "measured")


def test_a_quality_has_the_interval_of_its_replicates() -> None:
    """Replicates are one round, and independent of each other."""
    row = Measurement(
        variant=DENSE,
        case=CASE,
        phase="quality",
        metric="kappa",
        method="linear fitness",
        samples=((-0.5, 0.25, 0.5, 0.75, 1.0, 1.25),),
    )
    (found,) = sheet(synthetic.run([row]))
    assert (found["median"], found["low"], found["high"], found["unit"]) == ("0.625", "-0.5", "1.25", "")


def test_baselines_of_every_company_stand_there_once() -> None:
    """The first company counts, for its times and for its reasons."""
    rows = [time_row(BASE, CASE, 1, 1), time_row(BASE, CASE, 5, 5, group=1)]
    reasons = [skipped(NAIVE, CASE, "draws no noise", "sample")] * 2
    run = synthetic.run([*rows, *reasons])
    assert [row["median"] for row in sheet(run)] == ["1000000.0", ""]
    assert [one["stats"]["median"] for one in benchmarks(run)] == [1e-3]


@pytest.mark.parametrize("phase", ["forward", None])
@pytest.mark.parametrize("form", FORMATS)
def test_what_failed_has_no_time(form: str, phase: str | None) -> None:
    """A variant that was found wrong after it was measured leaves its reason, and the summary counts it."""
    rows: list[Row] = [time_row(DENSE, CASE, 7, 7), time_row(BASE, CASE, 1, 1), failed(DENSE, CASE, phase)]
    content, summary = export(synthetic.run(rows), form)
    assert b"7000000" not in content
    assert b"0.007" not in content
    assert "1 of variants that failed" in summary


def test_a_failure_elsewhere_takes_nothing_away() -> None:
    """A reason is of its phase, case and method alone."""
    other = msgspec.structs.replace(failed(DENSE, CASE), method="graph")
    others = [failed(DENSE, CASE, "step"), failed(DENSE, linear(512)), other]
    rows: list[Row] = [time_row(DENSE, CASE, 7, 7), *others]
    assert len(benchmarks(synthetic.run(rows))) == 1


def test_the_summary_says_what_was_left_out() -> None:
    """Each kind of row that a format has no place for is counted; of a table that is none."""
    reasons = [skipped(NAIVE, CASE, "no"), failed(variant("Wrong"), CASE)]
    run = synthetic.run([*of_cuda(), *reasons, empty()])
    without = "2 without a number (1 failed), 1 without usable samples"
    assert [export(run, form).summary for form in FORMATS] == [
        f"rows of times: 5; left out: {without}, 2 that are not times",
        f"rows of times and bytes: 6; left out: {without}, 1 that are not times or bytes",
        "rows (2 without a number): 10",
    ]


def test_a_row_without_rounds_has_no_median() -> None:
    """It stands in the table with 0 rounds, and in no other format."""
    run = synthetic.run([empty()])
    (row,) = sheet(run)
    assert (row["median"], row["low"], row["rounds"], row["samples"]) == ("", "", "0", "0")
    assert benchmarks(run) == entries(run) == []


def test_reasons_stand_in_the_table() -> None:
    """Where a reason holds for all phases and methods, these cells are empty."""
    (row,) = sheet(synthetic.run([skipped(DENSE, CASE, "out of memory: tried, in vain")]))
    assert (row["status"], row["reason"]) == ("unavailable", "out of memory: tried, in vain")
    assert row["phase"] == row["metric"] == row["method"] == row["median"] == ""


def test_an_empty_run_is_empty_in_every_format() -> None:
    """A header alone gives valid files without anything in them."""
    run = Run(header=synthetic.header(), rows=())
    assert benchmarks(run) == entries(run) == sheet(run) == []


def test_hostile_names_stay_on_their_lines() -> None:
    """Each row of the table is one line, its cells are as many as the header's, and none is a formula."""
    run = hostile()
    lines = export(run, "csv").content.decode().split("\n")
    rows = list(csv.reader(lines))
    assert len(lines) == len(run.rows) + 2
    assert {len(row) for row in rows[:-1]} == {18}
    texts = [cell for row in sheet(run) for name, cell in row.items() if name not in {"median", "p20", "p80"}]
    assert not [text for text in texts if text.startswith(("=", "+", "-", "@"))]
    assert {"'=cmd|' /C calc'!A0", "''=1", "'-1"} <= set(texts)


def test_hostile_names_are_unique_in_json() -> None:
    """Rows that differ have names that differ, of printable characters on one line."""
    run = hostile()
    names = [one["name"] for one in benchmarks(run)]
    assert len(set(names)) == len(names) == 4 * len(HOSTILE)
    assert all(name.isprintable() for name in names)
    assert [one["name"] for one in entries(run)] == names


def test_a_group_can_name_a_file() -> None:
    """However long a case's label, a group's text stays short, and two of them stay apart."""
    long = [msgspec.structs.replace(CASE, operator=f"{'🚀' * 200}{end}") for end in "ab"]
    groups = [group(time_row(DENSE, case, 1.0)) for case in long]
    assert len(set(groups)) == 2
    assert all(len(text.encode()) <= 150 for text in groups)


NEARLY = [0.02, 0.02000000001]


def test_names_that_read_alike_get_a_digest() -> None:
    """Cases that differ in the tenth digit have two names; which is whose does not hang on their order."""
    rows: list[Row] = [time_row(DENSE, msgspec.structs.replace(CASE, sigma=s), 1.0) for s in NEARLY]
    alike: list[Row] = [time_row(DENSE, msgspec.structs.replace(CASE, sigma=0.3 + s), 1.0) for s in NEARLY]
    assert " #" not in ExportRows(synthetic.run(rows)).name(rows[0])  # type: ignore[arg-type]  # rows of times
    names: dict[str, list[dict[str, Any]]] = {}
    for order in (alike, alike[::-1]):
        for one in benchmarks(synthetic.run(order)):
            names.setdefault(one["name"], []).append(one)
    assert len(names) == 2
    assert all(len(found) == 2 and " #" in name for name, found in names.items())


def test_one_and_one_point_nought_are_two_variants() -> None:
    """An option may mean a number by one and a share by the other: neither row hides the other."""
    rows: list[Row] = [time_row(variant("Sparse", k=k), CASE, 1.0 + k) for k in (1, 1.0, True)]
    found = benchmarks(synthetic.run(rows))
    assert len({one["name"] for one in found}) == 3


@given(st.lists(st.text(max_size=6), min_size=2, max_size=6, unique=True), st.randoms())
def test_names_are_unique_and_the_same_in_any_order(texts: list[str], rng: Any) -> None:
    """Whatever variants and methods are called, no name stands for two rows, or changes with their order."""
    rows: list[Row] = [time_row(variant(a), CASE, 1.0, method=b) for a in texts for b in texts]
    named = []
    for _ in range(2):
        run = ExportRows(synthetic.run(rows))
        named.append({run.name(row): (row.variant, row.method) for row in run.measured})
        rng.shuffle(rows)
    assert named[0] == named[1]
    assert len(named[0]) == len(rows)


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_reason_is_read_back(reasons: list[str]) -> None:
    """A csv reader finds as many rows as there are, whatever the texts hold."""
    rows = [skipped(variant(f"V{place}"), CASE, reason) for place, reason in enumerate(reasons)]
    found = sheet(synthetic.run(rows))
    assert [row["variant"] for row in found] == [f"V{place}Linear" for place in range(len(reasons))]
    assert not [row for row in found if "\n" in row["reason"] or row["reason"].startswith("=")]
