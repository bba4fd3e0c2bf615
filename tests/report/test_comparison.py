"""Comparisons of two runs; ``golden/examples.md`` has their tables."""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from esbench.cli import app
from esbench.errors import UserError
from esbench.report.analysis.comparison import Comparison, compare, differences, different_devices, disturbed
from esbench.report.tables.comparison import summary, text
from esbench.schema import Row, Run
from tests import synthetic
from tests.report.report_cases import store
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, replaced, skipped, time_row

SMALL, LARGE = linear(256), linear(512)
EVEN = (1.0,) * 8


def times(factor: float = 1.0) -> list[Row]:
    """Return two rows of eight rounds each."""
    return [time_row(v, SMALL, *(factor * value for value in EVEN)) for v in (BASE, DENSE)]


def stored(folder: Path, run: Run) -> str:
    """Write a run; return its file."""
    return str(folder / store(folder, run))


def side_by_side(a: Iterable[Row], b: Iterable[Row]) -> Comparison:
    """Compare runs of these rows on one device."""
    return compare(synthetic.run(a), synthetic.run(b))


def test_a_run_under_load_is_named() -> None:
    """If base takes at least twice as long in one run, the comparison says so; other variants may."""
    for factor, words in ((526.0, "526x as long in B as in A"), (0.25, "4x as long in A as in B"), (1.9, "")):
        assert words in disturbed(side_by_side(times(), times(factor)))
        assert bool(disturbed(side_by_side(times(), times(factor)))) == bool(words)
        assert disturbed(side_by_side(times()[1:], times(factor)[1:])) == ""


def test_rows_with_different_keys_do_not_match() -> None:
    """Rows of a different method, metric, phase, shape, dtype or variant are not paired."""
    changes: tuple[dict[str, object], ...] = (
        {"method": "graph"},
        {"metric": "host_latency_ns"},
        {"phase": "update"},
        {"case": LARGE},
        {"case": linear(dtype="tfloat32")},
        {"variant": NAIVE},
    )
    for fields in changes:
        comparison = side_by_side(times()[:1], replaced(times()[:1], **fields))
        assert comparison.pairs == (), fields
        assert (len(comparison.only_a), len(comparison.only_b)) == (1, 1), fields
        assert "The runs have no measured rows in common." in text(comparison)
        assert "Only in A: 1 row\n" in text(comparison)


def test_a_missing_row_has_the_reason_of_the_other_run() -> None:
    """Only reasons of the same method count; a failed variant has no value, and two reasons make no row."""
    comparison = side_by_side(times(), [*times()[:1], skipped(DENSE, SMALL, "no graph", method="graph")])
    assert [lone.reason for lone in comparison.only_a] == [""]
    failed = synthetic.failed(DENSE, SMALL, "wrong")
    comparison = side_by_side(times(), [*times(), failed])
    assert [pair.key.variant for pair in comparison.pairs] == [BASE]
    assert comparison.only_a[0].reason == "failed in the other: wrong"
    comparison = side_by_side([failed], [failed])
    assert (comparison.pairs, comparison.only_a, comparison.only_b) == ((), (), ())
    again = [time_row(BASE, SMALL, *EVEN), time_row(BASE, SMALL, 9.0, group=1)]
    assert [pair.a for pair in side_by_side(again, again).pairs] == [1e6]  # the first group is compared
    memory = [bytes_row(DENSE, SMALL, "process_bytes", 1000)]  # process_bytes is measured, not a count
    assert len(side_by_side(memory, memory).pairs) == 1
    few = [time_row(DENSE, SMALL, *[1.0] * 6)]
    (pair,) = side_by_side(few, times()[1:]).pairs
    assert (pair.ratio, pair.low, pair.high) == (1.0, None, None)


def test_different_devices_are_refused() -> None:
    """Name, processor, threads, memory and slice are compared, if known."""
    a, b = synthetic.run(times()), synthetic.run(times(), device_name="Other GPU")
    with pytest.raises(UserError, match=r"A ran on Test CPU, .*B on Other GPU"):
        compare(a, b)
    for field, value_a, value_b, shown in (
        ("cpu", "Zen 2", "Zen 5", "A ran on cpu Zen 2, B on cpu Zen 5"),
        ("threads", 2, 64, "A ran on threads 2, B on threads 64"),
        ("device_memory_bytes", 16, 32, "device_memory_bytes 16"),
        ("device_memory_bytes", None, 32, ""),
        ("uuid", "GPU-1", "GPU-2", ""),
        ("uuid", "GPU-1", "MIG-2", "kind GPU, B on kind MIG"),
    ):
        here, there = (synthetic.changed(a, **{field: value}) for value in (value_a, value_b))
        message = different_devices(here, there)
        assert shown in message
        assert bool(message) == bool(shown), field


def test_other_differences_are_listed() -> None:
    """Versions, seed, code, load and other processes are listed; the idle power of a device is not."""
    a = synthetic.run(times())
    fields = {"torch": "2.14.0", "dirty": True, "load": 3.0, "foreign": ("python",), "idle_w": 9.0}
    b = synthetic.changed(a, **fields, seed=7, code={"Perturbed": "ab", "Permuted": "cc"})
    a = synthetic.changed(a, seed=0, code={"Perturbed": "aa", "Flipped": "bb"})
    assert differences(a, b) == {
        "seed": (0, 7),
        "torch": ("2.13.0", "2.14.0"),
        "dirty": (False, True),
        "foreign": ((), ("python",)),
        "load": (None, 3.0),
        "code of Perturbed": ("aa", "ab"),
    }
    assert "torch: 2.13.0 in A, 2.14.0 in B" in text(compare(a, b))


def test_unusable_samples_are_no_numbers() -> None:
    """Missing, NaN and huge samples on either side make a table without NaN."""
    odd: tuple[tuple[tuple[float, ...], ...], ...] = (
        *((), ((math.nan,),), ((math.inf, 1.0),)),
        *(((ns,),) * 8 for ns in (0.0, 1e24)),
    )
    for samples in odd:
        sides = [times()[:1], replaced(times()[:1], samples=samples)]
        for a, b in (sides, reversed(sides)):
            comparison = side_by_side(a, b)
            assert len(comparison.pairs) == 1, samples
            assert not {"nan", "inf"} & set(text(comparison).split()), samples
    (pair,) = side_by_side(*(replaced(times()[:1], samples=((ns,),) * 8) for ns in (1e-300, 1e24))).pairs
    assert (pair.ratio, pair.low, pair.high) == (None, None, None)
    uneven = [time_row(DENSE, SMALL, *(1 + index / 8 for index in range(8)))]
    (pair,) = side_by_side(uneven, uneven).pairs
    assert pair.low is not None
    assert pair.low < 1
    assert pair.high == pytest.approx(1 / pair.low)


def test_command_shows_both_runs(tmp_path: Path) -> None:
    """The command prints a summary, or all tables and the coverage of its intervals."""
    files = [stored(tmp_path, synthetic.run(times(f), run_id=f"run-{f:g}")) for f in (1.0, 2.0)]
    short = CliRunner().invoke(app, ["compare", *files]).stdout
    assert len(short.splitlines()) <= 10
    assert "B / A of 2 times: median 2.00x; beyond both intervals 2 slower, 0 faster\n" in short
    assert "  2.00x  Perturbed, Linear 256 -> 256, forward: 1.00 ms -> 2.00 ms" in short
    shown = CliRunner().invoke(app, ["compare", *files, "--tables"])
    assert shown.exit_code == 0
    assert "not the differences between processes" in shown.stdout
    assert "2.00x to 2.00x" in shown.stdout


def test_summary_lists_the_largest_changes_with_and_without_interval() -> None:
    """The largest two without interval are marked and keep their place, however many others there are."""
    variants = [synthetic.variant("SparsePerturbed", k=k) for k in range(1, 10)]

    def run(factor: float) -> Run:
        slow = [time_row(v, SMALL, *[1.0 + factor * (k + 1)] * 8) for k, v in enumerate(variants)]
        few = [time_row(v, SMALL, *[1.0 + 9 * factor] * 2) for v in (BASE, DENSE, NAIVE)]
        return synthetic.run([*slow, *few])

    lines = summary(compare(run(0.0), run(0.5))).splitlines()
    assert "beyond both intervals 9 slower, 0 faster; 3 without interval" in lines[-8]
    changes = lines[-7:-2]
    assert [line.split()[0] for line in changes] == ["5.50x", "5.50x", "5.50x", "5.00x", "4.50x"]
    assert sum(line.endswith("(no interval)") for line in changes) == 2
    assert max(map(len, lines)) <= 100


def test_command_warns_first(tmp_path: Path) -> None:
    """The first line warns of an invalid run; runs of different devices are an error."""
    files = [stored(tmp_path, synthetic.run(times(), device_name=name)) for name in ("One GPU", "Other GPU")]
    assert isinstance(CliRunner().invoke(app, ["compare", *files]).exception, UserError)
    bad = synthetic.run(times(), invalid=("throttled",), run_id="bad")
    files = [stored(tmp_path, synthetic.run(times())), stored(tmp_path, bad)]
    line = "INVALID, do not use these figures: B: throttled\n"
    shown = CliRunner().invoke(app, ["compare", *files])
    assert shown.stdout.startswith(line)


def test_names_break_no_line(tmp_path: Path) -> None:
    """Line breaks and control characters in the names of a run cannot fake lines of output."""
    odd = msgspec.structs.replace(DENSE, scheme="x\nFORGED\x1b[1m")
    rows = [time_row(odd, SMALL, *EVEN), bytes_row(odd, SMALL, "launches", 3)]
    a = synthetic.changed(synthetic.run(rows, suite="s\nFORGED"), commit="c\nFORGED")
    b = synthetic.run([*rows[:1], bytes_row(odd, SMALL, "launches", 4), time_row(odd, LARGE, *EVEN)])
    named = (synthetic.changed(run, device_name="\x1b[31mred\x07\nFORGED", cpu="one") for run in (b, b))
    files = [stored(tmp_path / f"{n}", run) for n, run in enumerate(named)]
    command = CliRunner().invoke(app, ["compare", *files]).output
    assert "red" in command
    for shown in (text(compare(a, b)), summary(compare(a, b)), command):
        assert not [line for line in shown.splitlines() if line.strip().startswith("FORGED")]
        assert not {"\x1b", "\x07"} & set(shown)


def test_command_fails_without_two_runs_to_compare(tmp_path: Path) -> None:
    """No common row or unreadable lines are exit code 1; a file without a run is an error."""
    files = [stored(tmp_path, synthetic.run([row], run_id=f"run-{n}")) for n, row in enumerate(times())]
    shown = CliRunner().invoke(app, ["compare", *files])
    assert shown.exit_code == 1
    assert "the runs have no times in common" in shown.stdout
    path = tmp_path / "odd.jsonl"
    for content in (None, b"{}\n", b"\xff\xfe\n"):
        if content is not None:
            path.write_bytes(content)
        message = str(CliRunner().invoke(app, ["compare", files[0], str(path)]).exception)
        assert "odd.jsonl" in message
        assert "compare takes two runs' .jsonl files, such as results/<device>/<run>.jsonl" in message
        assert "\n" not in message
    with Path(files[0]).open("ab") as end:
        end.write(b'{"record":"measurement","samples":[[NaN]]}\n{"half')
    result = CliRunner().invoke(app, ["compare", files[0], files[0]])
    assert result.exit_code == 1
    assert "2 lines" in result.stderr
    assert "1.00x" in result.stdout
