"""A run beside a stored one of the same device: what it refuses, and which multipliers it calls amber."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from esbench import store
from esbench.errors import UserError
from esbench.measure.environment import environment
from esbench.report import nightly
from esbench.schema import Measurement, Row, Run, RunEnd, Variant
from tests import report_cases, synthetic
from tests.synthetic import BASE, DENSE, NAIVE, conv2d, linear, time_row, variant
from tests.test_cli import run

ROUNDS = 12
FLIPPED = variant("Flipped")


def row(of: Variant, factor: float, noise: float = 0.001, **others: object) -> Measurement:
    """A time of about so many milliseconds in each of some rounds."""
    times = [factor * (1 + noise * (place % 5 - 2)) for place in range(ROUNDS)]
    return time_row(of, linear(), *times, **others)  # type: ignore[arg-type]  # fields of a row


def rows(dense: float = 3.0, flipped: float = 2.0, noise: float = 0.001, machine: float = 1.0) -> list[Row]:
    """Base, naive and two variants, as multiples of base, on a machine that is slower by a factor."""
    shares = ((NAIVE, 10.0), (DENSE, dense), (FLIPPED, flipped))
    others = [row(one, machine * share, noise) for one, share in shares]
    return [row(BASE, machine, 0.0), *others]


def a_run(found: Sequence[Row] | None = None, device_name: str = "Test CPU") -> Run:
    """A run of these rows that came to its end."""
    return synthetic.run(rows() if found is None else found, device_name=device_name)


def amber(then: Sequence[Row], now: Sequence[Row]) -> list[tuple[str, float]]:
    """Who has moved, and by which factor, rounded."""
    found = nightly.night(a_run(then), a_run(now))
    return [(shift.place.variant.scheme, round(shift.factor, 2)) for shift in found.shifts if shift.amber]


def test_the_same_again_is_no_news() -> None:
    """Every multiplier is counted, naive's among them; those of base to itself are not."""
    found = nightly.night(a_run(), a_run())
    assert nightly.text(found) == "no multiplier of 3 moved\n"


def test_a_slower_night_is_no_news() -> None:
    """Base and variants alike: this is what multipliers are for."""
    assert amber(rows(), rows(machine=7.0)) == []


def test_what_moved_beyond_margin_and_intervals_is_amber() -> None:
    """In either direction, the worst first."""
    assert amber(rows(), rows(dense=3.3, flipped=1.8)) == [("Perturbed", 1.1), ("Flipped", 0.9)]
    assert amber(rows(dense=3.3, flipped=1.8), rows()) == [("Flipped", 1.11), ("Perturbed", 0.91)]


@pytest.mark.parametrize("factor", [0.96, 1.04])
def test_what_moved_by_less_than_the_margin_is_not_shown(factor: float) -> None:
    """Processes of one revision differ by as much."""
    assert amber(rows(), rows(dense=3.0 * factor)) == []


def test_what_moved_within_its_intervals_is_not_shown() -> None:
    """Where rounds differ by more than the shift."""
    assert amber(rows(noise=0.2), rows(dense=3.3, noise=0.2)) == []


def test_one_sample_is_a_point() -> None:
    """Without an interval there is nothing for it to overlap with but itself."""
    then = [time_row(BASE, linear(), 1.0), time_row(DENSE, linear(), 3.0)]
    now = [time_row(BASE, linear(), 1.0), time_row(DENSE, linear(), 4.0)]
    assert amber(then, now) == [("Perturbed", 1.33)]
    assert amber(then, then) == []


def test_a_table_shows_what_moved() -> None:
    """Then, now and by how much, and how many there were; names stay in their line."""
    text = nightly.text(nightly.night(a_run(), a_run(rows(dense=3.6))))
    head, _, line, *rest = text.splitlines()
    assert head.split() == ["variant", "case", "phase", "method", "then", "now", "moved"]
    assert line.startswith("PerturbedLinear")
    assert line.endswith("+20.0 %")
    assert rest == ["", "AMBER: 1 of 3 multipliers against base moved"]


def test_rows_that_came_or_went_are_named() -> None:
    """They are no shift, and no failure either."""
    hostile = variant("Two\nlines | and ::more")
    then, now = [*rows(), row(variant("Gone"), 5.0)], [*rows(), row(hostile, 5.0)]
    text = nightly.text(nightly.night(a_run(then), a_run(now)))
    assert text == (
        "gone: GoneLinear, Linear(256, 256), forward, host\n\n"
        "new: Two lines | and ::moreLinear, Linear(256, 256), forward, host\n\n"
        "no multiplier of 3 moved\n"
    )


def test_base_is_that_of_the_same_company_case_and_method() -> None:
    """Another one was not resident at the same time, or is something else."""
    alone = [row(BASE, 1.0), row(DENSE, 3.0, company=1), row(FLIPPED, 3.0, method="graph")]
    elsewhere = time_row(NAIVE, conv2d(), *[1.0] * ROUNDS)
    found = nightly.night(a_run([*alone, elsewhere, row(NAIVE, 9.0)]), a_run())
    assert [shift.place.variant.scheme for shift in found.shifts] == ["Naive"]
    assert not found.gone


def test_base_is_its_forward_for_every_phase() -> None:
    """An update is shown as a multiple of it too."""
    both = [*rows(), row(DENSE, 6.0, phase="update"), row(BASE, 2.0, phase="update")]
    found = nightly.night(a_run(both), a_run(both))
    assert [round(shift.now.value) for shift in found.shifts if shift.place.phase == "update"] == [6]


def test_another_method_is_another_time() -> None:
    """It is not compared with."""
    graphs = [row(BASE, 1.0, method="graph"), row(DENSE, 3.0, method="graph")]
    with pytest.raises(UserError, match="timed by host then and by graph now"):
        nightly.night(a_run(), a_run(graphs))
    with pytest.raises(UserError, match="timed by host then and by nothing now"):
        nightly.night(a_run(), a_run([]))


def test_runs_without_a_multiplier_in_common_are_not_compared() -> None:
    """An empty comparison would look like a quiet night."""
    other = [row(BASE, 1.0), row(variant("Other"), 3.0)]
    with pytest.raises(UserError, match="have no multiplier in common"):
        nightly.night(a_run([row(BASE, 1.0), row(DENSE, 3.0)]), a_run(other))


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (lambda path: path, ""),
        (lambda path: path.with_name("renamed.jsonl"), "its name says renamed"),
        (lambda path: path.with_name("20260102T000000Z-quick-0001.jsonl"), "its name says 20260102"),
        (lambda path: path.parent.parent / "other-gpu" / path.name, "its name says other-gpu"),
        (lambda path: path.parent.parent / path.name, "its name says results"),
    ],
    ids=["in its place", "renamed", "another run's name", "another device's folder", "no device's folder"],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, move: Callable[[Path], Path], words: str
) -> None:
    """Renamed, moved or swapped with another: the line names both."""
    made = tmp_path / report_cases.store(tmp_path, a_run())
    path = move(made)
    path.parent.mkdir(exist_ok=True)
    made.rename(path)
    found, _ = store.read_run(path)
    assert found is not None
    if words:
        with pytest.raises(UserError, match="was the file swapped") as error:
            nightly.hold_to_place(path, found)
        assert str(path) in str(error.value)
        assert words in str(error.value)
    else:
        nightly.hold_to_place(path, found)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (a_run(device_name="Other CPU"), "is another device's: A ran on Other CPU"),
        (msgspec.structs.replace(a_run(), end=None), "it is not complete"),
        (
            msgspec.structs.replace(a_run(), end=RunEnd(status="interrupted", wall_s=1.0)),
            "it is not complete",
        ),
        (msgspec.structs.replace(a_run(), end=RunEnd(status="failed", wall_s=1.0)), "it is not complete"),
        (synthetic.run(rows(), invalid=("the clock throttled",)), "compared with: the clock throttled"),
        (a_run([row(DENSE, 3.0), row(NAIVE, 9.0)]), "has no multiplier against base"),
        (a_run([]), "has no multiplier against base"),
    ],
    ids=["device", "cut off", "interrupted", "failed", "invalid", "no base", "empty"],
)
def test_a_run_that_says_nothing_of_here_is_refused(stored: Run, words: str) -> None:
    """The line names the run and what is wrong with it."""
    with pytest.raises(UserError, match=f"^run {stored.header.run_id} ") as error:
        nightly.hold_to_stored(stored, a_run().header)
    assert words in str(error.value)
    nightly.hold_to_stored(a_run(), a_run().header)


def test_the_same_name_with_other_threads_is_another_device() -> None:
    """A multiplier depends on them."""
    here = a_run().header
    four = msgspec.structs.replace(here, environment=msgspec.structs.replace(here.environment, threads=4))
    with pytest.raises(UserError, match="another device's: A ran on threads 2, B on threads 4"):
        nightly.hold_to_stored(a_run(), four)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, and that of its results."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says where it measures nothing: one line, exit code 2."""
    capsys.readouterr()
    assert run("gate", "--device", "cpu", *arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()[-1:]
    assert line.startswith("esbench: ")
    assert captured.out == ""
    return line


def test_the_baseline_of_another_device_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured."""
    path = report_cases.store(results.parent, a_run(device_name="Other CPU"))
    assert "is another device's: A ran on Other CPU" in refused(capsys, "--against", path)
    assert len(list(results.rglob("*.jsonl"))) == 1


def test_a_file_that_was_swapped_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything else is said of it."""
    path = results.parent / report_cases.store(results.parent, a_run(device_name="Other CPU"))
    renamed = path.rename(path.with_name("yesterday.jsonl"))
    assert "its name says yesterday: was the file swapped?" in refused(capsys, "--against", str(renamed))


def test_a_method_that_is_not_had_here_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU replays no graph."""
    graphs = [row(BASE, 1.0, method="graph"), row(DENSE, 3.0, method="graph")]
    path = report_cases.store(results.parent, a_run(graphs))
    assert "graph" in refused(capsys, "--against", path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"", "no run"), (b"garbage\n", "no run"), (b'{"record":"end"}\n', "no run")],
)
def test_what_is_no_run_is_refused(
    results: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    """A missing file, an empty one, garbage: the line names it."""
    path = results / "cpu" / "run.jsonl"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    capsys.readouterr()
    assert run("gate", "--device", "cpu", "--against", str(path)) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert words in told


def test_a_run_that_cannot_be_read_whole_is_refused(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that was lost would be a row that is missing in silence."""
    path = Path(report_cases.store(results.parent, a_run()))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], b'{"record":"measurement","half', *lines[2:]]))
    assert "it could not be read whole" in refused(capsys, "--against", str(path))


@pytest.mark.parametrize(
    "other",
    [
        ("--base", "main"),
        ("--head", "worktree"),
        ("--suite", "gate"),
        ("--variants", "*"),
        ("--methods", "host"),
        ("--plugin", "impls"),
        ("--seed", "0"),
        ("--margin", "0.01"),
        ("--threads", "2"),
        ("--out", "elsewhere"),
        ("--silence", "5"),
        ("--all",),
    ],
    ids=lambda other: other[0],
)
def test_what_a_stored_run_has_decided_cannot_be_asked_for(
    other: tuple[str, ...], results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An explicit request is never dropped in silence."""
    del results
    line = refused(capsys, "--against", "results/cpu/run.jsonl", *other)
    assert line.endswith(f"leave out {other[0]}")


def test_a_run_is_measured_again_and_stored(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what was asked for then, in the same folder; what moved is shown, and is nothing to fail by."""
    what = ["--suite", "quick", "--cases", "Linear(128*", "--phases", "forward", "--variants", "Flipped"]
    assert run("run", *what, "--device", "cpu", "--out", str(results)) == 0
    (first,) = results.rglob("*.jsonl")
    assert first.parent.name == environment("cpu").slug
    capsys.readouterr()
    assert run("gate", "--device", "cpu", "--against", str(first)) in {0, 3}
    captured = capsys.readouterr()
    assert (
        "of 2 multiplier" in captured.out
        or "multiplier of 2 moved" in captured.out
        or "INVALID" in captured.err
    )
    second = max(results.rglob("*.jsonl"))
    assert second.parent == first.parent
    (one, _), (other, _) = store.read_run(first), store.read_run(second)
    assert one is not None
    assert other is not None
    assert one.header.request == other.header.request
    assert one.header.run_id != other.header.run_id
