"""Two runs side by side."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from esbench.cli import app
from esbench.errors import UserError
from esbench.report.analysis.comparison import Comparison, compare, differences, different_devices
from esbench.report.tables.comparison import as_json, text
from esbench.schema import Measurement, Row, Run
from esbench.store import Writer
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row

SMALL, LARGE = linear(256), linear(512)
EVEN = (1.0,) * 8


def times(factor: float = 1.0) -> list[Row]:
    """Two rows of eight rounds each."""
    return [time_row(v, SMALL, *(factor * value for value in EVEN)) for v in (BASE, DENSE)]


def side_by_side(a: Iterable[Row], b: Iterable[Row]) -> Comparison:
    """Runs of these rows on one device."""
    return compare(synthetic.run(a), synthetic.run(b))


def changed(rows: list[Row], **fields: object) -> list[Row]:
    """The rows with other values in some fields."""
    return [msgspec.structs.replace(row, **fields) for row in rows]


def with_header(run: Run, **fields: object) -> Run:
    """The run with other values in its header."""
    return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, **fields))


def elsewhere(run: Run, **fields: object) -> Run:
    """The run with other values in its environment."""
    return with_header(run, environment=msgspec.structs.replace(run.header.environment, **fields))


def test_rows_of_both_have_their_ratio() -> None:
    """A pair has both medians over rounds and B / A."""
    (base, dense) = side_by_side(times(), times(1.5)).pairs
    assert {base.key.variant, dense.key.variant} == {BASE, DENSE}
    assert (dense.a, dense.b, dense.ratio) == (1e6, 1.5e6, 1.5)


def test_interval_divides_the_ends_of_both() -> None:
    """The low end is the lowest of B by the highest of A; too few rounds have no interval."""
    a = [time_row(DENSE, SMALL, 1.0, 1.1, 1.0, 1.0, 0.9, 1.0, 1.0)]
    b = [time_row(DENSE, SMALL, 2.0, 2.2, 2.0, 2.0, 1.8, 2.0, 2.0)]
    (pair,) = side_by_side(a, b).pairs
    assert [pair.low, pair.ratio, pair.high] == [
        pytest.approx(1.8 / 1.1),
        pytest.approx(2.0),
        pytest.approx(2.2 / 0.9),
    ]
    few = [msgspec.structs.replace(row, samples=row.samples[:6]) for row in a]
    (pair,) = side_by_side(few, b).pairs
    assert (pair.low, pair.high) == (None, None)
    assert pair.ratio is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "graph"},
        {"metric": "host_latency_ns"},
        {"phase": "update"},
        {"case": LARGE},
        {"case": linear(dtype="tfloat32")},
        {"variant": NAIVE},
    ],
    ids=str,
)
def test_what_is_not_the_same_never_meets(fields: dict[str, object]) -> None:
    """Another method, metric, phase, shape, type or variant gives no pair: each is only in its run."""
    a = times()[:1]
    found = side_by_side(a, changed(a, **fields))
    assert found.pairs == ()
    assert (len(found.only_a), len(found.only_b)) == (1, 1)
    assert "No measured row is in both." in text(found)
    assert "Only in A: 1 rows" in text(found)


def test_missing_row_says_why() -> None:
    """A row that only one run has shows the reason that stands in the other."""
    found = side_by_side(times(), [*times()[:1], skipped(DENSE, SMALL, "out of memory")])
    (lone,) = found.only_a
    assert lone.reason == "unavailable in the other: out of memory"
    assert "PerturbedLinear, Linear(256, 256), forward, latency_ns, host: unavailable in the other" in text(
        found
    )


def test_reason_of_another_method_is_not_taken() -> None:
    """A graph that could not be captured does not explain a missing time of the host."""
    found = side_by_side(times(), [*times()[:1], skipped(DENSE, SMALL, "no graph", method="graph")])
    assert [lone.reason for lone in found.only_a] == [""]


def test_failed_variant_has_no_figure() -> None:
    """What was measured of a variant that failed is not compared."""
    failed = msgspec.structs.replace(skipped(DENSE, SMALL, "wrong"), status="failed")
    found = side_by_side(times(), [*times(), failed])
    assert [pair.key.variant for pair in found.pairs] == [BASE]
    assert found.only_a[0].reason == "failed in the other: wrong"


def test_counts_are_shown_where_they_differ() -> None:
    """Bytes and launches are compared to the unit, have no interval, and are silent where equal."""
    a = [bytes_row(v, SMALL, name, 1000) for name in ("peak_bytes", "launches") for v in (BASE, DENSE)]
    b = [*a[:1], bytes_row(DENSE, SMALL, "peak_bytes", 1001), *a[2:]]
    found = side_by_side(a, b)
    assert found.pairs == ()
    assert [(pair.key.variant, pair.a, pair.b) for pair in found.counts] == [(DENSE, 1000, 1001)]
    assert found.equal == 3
    assert "3 counts (bytes, launches) are the same in both." in text(found)


def test_memory_of_a_process_is_no_count() -> None:
    """What a whole process holds is read, not counted: it is shown as a figure though it is in bytes."""
    row = bytes_row(DENSE, SMALL, "process_bytes", 1000)
    assert len(side_by_side([row], [row]).pairs) == 1


def test_what_grew_most_comes_first() -> None:
    """Tables begin with the forward, and a table with the row that grew most."""
    a = [*changed(times(), phase="sample"), *times()]
    b = [*changed(times(3.0), phase="sample"), *times()[:1], *times(2.0)[1:]]
    order = [(pair.key.phase, pair.ratio) for pair in side_by_side(a, b).pairs]
    assert order == [("forward", 2.0), ("forward", 1.0), ("sample", 3.0), ("sample", 3.0)]


def test_different_devices_are_refused_unless_asked_for() -> None:
    """Two devices end in one line that names both and the option; with it they are compared."""
    a, b = synthetic.run(times()), synthetic.run(times(), device_name="Other GPU")
    with pytest.raises(UserError, match=r"A ran on Test CPU, .*B on Other GPU.*--across-devices"):
        compare(a, b)
    assert len(compare(a, b, across_devices=True).pairs) == 2


@pytest.mark.parametrize(
    ("field", "here", "there", "shown"),
    [
        ("cpu", "Zen 2", "Zen 5", "A ran on cpu Zen 2, B on cpu Zen 5"),
        ("threads", 2, 64, "A ran on threads 2, B on threads 64"),
        ("device_memory_bytes", 16, 32, "device_memory_bytes 16"),
        ("device_memory_bytes", None, 32, ""),
        ("uuid", "GPU-1", "GPU-2", ""),
        ("uuid", "GPU-1", "MIG-2", "kind GPU, B on kind MIG"),
    ],
)
def test_a_name_is_not_all_of_a_device(field: str, here: object, there: object, shown: str) -> None:
    """Devices of one name differ by processor, threads, memory or being a slice, as far as both are known."""
    a, b = (elsewhere(synthetic.run(times()), **{field: value}) for value in (here, there))
    found = different_devices(a, b)
    assert shown in found
    assert bool(found) == bool(shown)


def test_what_else_changed_is_said() -> None:
    """Versions, seed, code, load and other processes are listed; what an idle device draws is not."""
    a = with_header(synthetic.run(times()), code={"Perturbed": "aa", "Flipped": "bb"})
    b = elsewhere(a, torch="2.14.0", dirty=True, load=3.0, foreign=("python",), idle_w=9.0)
    b = with_header(b, seed=7, code={"Perturbed": "ab", "Permuted": "cc"})
    found = compare(a, b)
    assert differences(a, b) == {
        "seed": (0, 7),
        "torch": ("2.13.0", "2.14.0"),
        "dirty": (False, True),
        "foreign": ((), ("python",)),
        "load": (None, 3.0),
        "code of Perturbed": ("aa", "ab"),
    }
    assert "torch: 2.13.0 in A, 2.14.0 in B" in text(found)


def test_first_company_of_a_baseline_counts() -> None:
    """A baseline that was measured in several companies is compared by the first."""
    a = [time_row(BASE, SMALL, *EVEN), time_row(BASE, SMALL, 9.0, group=1)]
    (pair,) = side_by_side(a, a).pairs
    assert pair.a == 1e6


@pytest.mark.parametrize(
    "samples",
    [(), ((),), ((math.nan,),), ((0.0,),) * 8, ((1e24,),) * 8, ((1e-300,),) * 8, ((math.inf, 1.0),)],
)
@pytest.mark.parametrize("odd_side", [0, 1])
def test_odd_samples_end_in_a_labelled_cell(samples: tuple[tuple[float, ...], ...], odd_side: int) -> None:
    """No samples, no numbers and huge ones give a table and an object, never an error or a NaN."""
    sides = [times()[:1], changed(times()[:1], samples=samples)]
    found = side_by_side(*(sides if odd_side else reversed(sides)))
    assert len(found.pairs) == 1
    assert not {"nan", "inf"} & set(text(found).split())
    json.dumps(as_json(found), allow_nan=False)


def test_ratio_beyond_all_numbers_is_none() -> None:
    """The largest time over the smallest is shown as no number."""
    (pair,) = side_by_side(*(changed(times()[:1], samples=((ns,),) * 8) for ns in (1e-300, 1e24))).pairs
    assert (pair.ratio, pair.low, pair.high) == (None, None, None)


def test_invalid_run_is_said() -> None:
    """A run that must not be used says so in the words and in the object."""
    found = compare(synthetic.run(times(), invalid=("throttled",)), synthetic.run(times()))
    assert "A: INVALID: throttled." in text(found)
    assert as_json(found)["invalid"] == {"a": ("throttled",), "b": ()}


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[Run], str]:
    """A function that writes a run and returns the name of its file."""

    def write(run: Run) -> str:
        with Writer(tmp_path, run.header) as writer:
            for record in (*run.rows, *([run.end] if run.end else [])):
                writer.write(record)
        return str(writer.path)

    return write


def test_command_shows_both_runs(stored: Callable[[Run], str]) -> None:
    """The command prints the tables, says what its interval holds, and gives an object with --json."""
    files = [stored(synthetic.run(times(f), run_id=f"run-{f:g}")) for f in (1.0, 2.0)]
    shown = CliRunner().invoke(app, ["compare", *files])
    assert shown.exit_code == 0
    assert "not that between processes" in shown.stdout
    assert "2.00x to 2.00x" in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["compare", *files, "--json"]).stdout)
    assert (found["a"], found["b"]) == ("run-1", "run-2")
    assert found["rows"][0] | {"variant": ""} == {
        "variant": "",
        "case": "Linear(256, 256)",
        "phase": "forward",
        "metric": "latency_ns",
        "method": "host",
        "a": 1e6,
        "b": 2e6,
        "ratio": 2.0,
        "low": 2.0,
        "high": 2.0,
    }


def test_command_labels_different_devices(stored: Callable[[Run], str]) -> None:
    """Across devices the first line says which two they are; without the option the command refuses."""
    files = [stored(synthetic.run(times(), device_name=name)) for name in ("One GPU", "Other GPU")]
    refused = CliRunner().invoke(app, ["compare", *files])
    assert isinstance(refused.exception, UserError)
    shown = CliRunner().invoke(app, ["compare", *files, "--across-devices"])
    assert shown.stdout.startswith(
        "DIFFERENT DEVICES: A ran on One GPU, cpu One GPU, B on Other GPU, cpu Other GPU\n"
    )


def test_command_says_first_that_a_run_is_invalid(stored: Callable[[Run], str]) -> None:
    """The first line says which of both must not be used; beside an object it stands on stderr."""
    bad = synthetic.run(times(), invalid=("throttled",), run_id="bad")
    files = [stored(synthetic.run(times())), stored(bad)]
    line = "INVALID, do not use these figures: B: throttled\n"
    assert CliRunner().invoke(app, ["compare", *files]).stdout.startswith(line)
    shown = CliRunner().invoke(app, ["compare", *files, "--json"])
    assert shown.stderr == line
    assert json.loads(shown.stdout)["invalid"]["b"] == ["throttled"]


def test_command_fails_where_nothing_is_in_both(stored: Callable[[Run], str]) -> None:
    """Two runs without a common row are shown, and the exit code is 1."""
    files = [stored(synthetic.run([row], run_id=f"run-{n}")) for n, row in enumerate(times())]
    shown = CliRunner().invoke(app, ["compare", *files])
    assert shown.exit_code == 1
    assert "No measured row is in both." in shown.stdout


def test_names_break_no_line(stored: Callable[[Run], str]) -> None:
    """Line breaks and control characters in the names of a foreign run do not forge lines of their own."""
    odd = msgspec.structs.replace(DENSE, scheme="x\nFORGED\x1b[1m")
    rows = [time_row(odd, SMALL, *EVEN), bytes_row(odd, SMALL, "launches", 3)]
    lone = time_row(odd, LARGE, *EVEN)
    a = elsewhere(synthetic.run(rows, suite="s\nFORGED"), commit="c\nFORGED")
    b = synthetic.run([*rows[:1], bytes_row(odd, SMALL, "launches", 4), lone], run_id="b")
    shown = text(compare(a, b))
    assert not [line for line in shown.splitlines() if line.strip().startswith("FORGED")]
    assert "\x1b" not in shown
    files = [stored(elsewhere(run, cpu=f"{name}\nFORGED")) for name, run in (("a", a), ("b", b))]
    printed = CliRunner().invoke(app, ["compare", *files, "--across-devices"]).stdout
    assert not [line for line in printed.splitlines() if line.strip().startswith("FORGED")]


def test_medians_and_missing_intervals_are_explained() -> None:
    """The words under which the tables stand say which medians they show, and when there is no interval."""
    shown = text(side_by_side(times(), changed(times(), samples=((1e6,),) * 6)))
    assert "the median of the rounds' medians" in " ".join(shown.split())
    assert "n/a where A or B has fewer than 7 rounds" in " ".join(shown.split())
    (line, _) = [line for line in shown.splitlines() if line.startswith(("Base", "PerturbedLinear"))]
    assert line.endswith("n/a")
    (pair, _) = side_by_side(times(), changed(times(), samples=((1e6,),) * 7)).pairs
    assert pair.low is not None


@pytest.mark.parametrize("content", [None, b"", b"{}\n", b"\xff\xfe\n", b"[" * 2000])
def test_command_names_a_file_that_holds_no_run(
    stored: Callable[[Run], str], tmp_path: Path, content: bytes | None
) -> None:
    """A file that is missing, empty or foreign ends in one line with its name."""
    path = tmp_path / "odd.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["compare", stored(synthetic.run(times())), str(path)])
    assert isinstance(result.exception, UserError)
    assert "odd.jsonl" in str(result.exception)
    takes = "compare takes two runs' .jsonl files, such as results/<device>/<run>.jsonl"
    assert takes in str(result.exception)
    assert "\n" not in str(result.exception)


def test_command_reads_what_can_be_read(stored: Callable[[Run], str]) -> None:
    """A foreign line in a run's file is said, the rest is compared, and the exit code is 1."""
    file = stored(synthetic.run(times()))
    with Path(file).open("ab") as end:
        end.write(b'{"record":"measurement","samples":[[NaN]]}\n{"half')
    result = CliRunner().invoke(app, ["compare", file, file])
    assert result.exit_code == 1
    assert "2 lines" in result.stderr
    assert "1.00x" in result.stdout


def test_measurements_only() -> None:
    """The rows under comparison are measurements: a run of nothing but reasons has none."""
    found = side_by_side([skipped(DENSE, SMALL, "no")], [skipped(DENSE, SMALL, "no")])
    assert (found.pairs, found.only_a, found.only_b) == ((), (), ())
    assert not any(isinstance(row, Measurement) for row in found.a.rows)
