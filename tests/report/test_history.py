"""The runs of a device as series: what stands in one, what is left out, and the tables of them."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.errors import UserError
from esbench.report.analysis import comparison as circumstances
from esbench.report.analysis.history import (
    History,
    change,
    comparable,
    devices,
    history,
    moment,
    nothing,
    percentage,
    phase_named,
)
from esbench.report.tables.history import as_json, markdown, text
from esbench.schema import Request, Run, RunEnd
from tests import synthetic
from tests.report.history_cases import EIGHT, SMALL, a_run, over_days, rows
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant

SPARSE = variant("SparsePerturbed", k=1)
LEVELS = (3.0,) * 4 + (3.3,) * 4


def values(found: History, place: int = 0) -> list[float]:
    """The figures of a series."""
    return [point.value for point in found.series[place].points]


def header(run: Run, **fields: object) -> Run:
    """The run with other values in its header."""
    return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, **fields))


def test_multipliers_are_taken_inside_each_run() -> None:
    """A machine that gets slower every day leaves the multipliers of its runs as they are; times grow."""
    runs = over_days(3.0, 3.0, 3.0)
    found = history(runs)
    assert [one.variant for one in found.series] == [DENSE]
    assert values(found) == pytest.approx([3.0, 3.0, 3.0])
    times = history(runs, metric="latency_ns")
    assert [one.variant for one in times.series] == [DENSE, BASE]
    assert values(times) == pytest.approx([3.3e6, 3.6e6, 3.9e6])


def test_a_figure_has_the_interval_of_its_rounds() -> None:
    """A multiplier has that of its ratio, a time that of its rounds' medians; one round has none."""
    (point,) = history(over_days(3.0)).series[0].points
    assert (point.low, point.high) == pytest.approx((3.0, 3.0))
    (point,) = history(over_days(3.0), metric="latency_ns").series[0].points
    assert (point.low, point.high) == pytest.approx((3.3e6 * min(EIGHT), 3.3e6 * max(EIGHT)))
    alone = a_run(1, [time_row(BASE, SMALL, 1), time_row(DENSE, SMALL, 2)])
    for metric in ("multiplier", "latency_ns"):
        (point,) = history([alone], metric=metric).series[0].points
        assert (point.low, point.high) == (None, None)


@given(st.permutations(range(5)))
def test_runs_stand_by_their_start(order: list[int]) -> None:
    """Whatever order runs are read in, a series has them by their start."""
    runs = over_days(1.0, 2.0, 3.0, 4.0, 5.0)
    assert values(history([runs[place] for place in order])) == pytest.approx([1, 2, 3, 4, 5])


def test_starts_are_compared_in_one_time_zone() -> None:
    """A start with an offset stands where it was in UTC, one without is taken to be in UTC."""
    first, second, third = over_days(1.0, 2.0, 3.0)
    first = header(first, started="2026-01-02T01:00:00+02:00")
    second = header(second, started="2026-01-02T00:00:00")
    assert values(history([third, second, first])) == pytest.approx([1, 2, 3])


@pytest.mark.parametrize("name", ["", "yesterday", "0001-01-01T00:00:00+14:00"])
def test_a_start_that_is_no_time_is_said(name: str) -> None:
    """A run whose header has no such time is left out with a line."""
    runs = over_days(1.0, 2.0)
    found, (line,) = comparable([header(runs[0], started=name), runs[1]])
    assert [run.header.run_id for run in found] == [runs[1].header.run_id]
    assert "for its start, which is no time" in line


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "has no end"),
        (RunEnd(status="interrupted", wall_s=1.0), "was interrupted"),
        (RunEnd(status="complete", wall_s=1.0, invalid=("throttled",)), "is invalid (throttled)"),
    ],
)
def test_unfinished_and_invalid_runs_are_left_out(end: RunEnd | None, words: str) -> None:
    """Their figures stand in no series, and a line says why."""
    runs = over_days(3.0, 9.0, 3.0)
    runs[1] = msgspec.structs.replace(runs[1], end=end)
    found = history(runs)
    assert values(found) == pytest.approx([3, 3])
    assert found.left_out == (f"run {runs[1].header.run_id} is left out, it {words}",)


def test_a_part_of_a_suite_and_a_failed_variant_count() -> None:
    """What a run holds is comparable, whatever else was not asked for or failed there."""
    runs = over_days(3.0, 4.0)
    runs[1] = header(runs[1], request=Request(variants=("Perturbed",)))
    runs[0] = msgspec.structs.replace(runs[0], end=RunEnd(status="failed", wall_s=1.0))
    assert values(history(runs)) == pytest.approx([3, 4])


def test_another_machine_of_the_same_name_is_left_out() -> None:
    """The newest run says which device is shown; another number of threads or slice of a GPU is another."""
    runs = [
        a_run(1, rows(9.0), threads=64),
        a_run(2, rows(9.0), uuid="MIG-1"),
        a_run(3, rows(3.0), uuid="GPU-1"),
        a_run(4, rows(3.0), uuid="GPU-2"),
    ]
    found = history(runs)
    assert values(found) == pytest.approx([3, 3])
    assert found.left_out[0].endswith("it ran on threads 64, the newest one on threads 2")
    assert "it ran on kind MIG, the newest one on kind GPU" in found.left_out[1]
    assert circumstances.different_devices(runs[0], runs[3]).startswith("A ran on")


def test_a_second_run_of_a_name_is_left_out() -> None:
    """A copy of a run's file counts once."""
    runs = over_days(3.0, 4.0)
    found = history([*runs, runs[0]])
    assert values(found) == pytest.approx([3, 4])
    assert found.left_out[0].endswith("it has the name of another run")


def test_what_differs_is_another_series() -> None:
    """Another case, number format, method or phase stands in no series with the first."""
    half = linear(256, dtype="bfloat16")
    other = [msgspec.structs.replace(row, method="graph") for row in rows(5.0)]
    runs = [a_run(1, [*rows(3.0), *rows(7.0, half), *other]), a_run(2, rows(3.0, linear(512)))]
    found = history(runs)
    assert sorted((one.key.case.shape, one.key.case.dtype, one.key.method) for one in found.series) == [
        ("(256, 256)", "bfloat16", "host"),
        ("(256, 256)", "float32", "graph"),
        ("(256, 256)", "float32", "host"),
        ("(512, 512)", "float32", "host"),
    ]
    assert history(runs, phase="update").series == ()


def test_multiples_of_another_phase_are_another_series() -> None:
    """A step over base's forward and one over base's step are not compared."""
    step = [time_row(DENSE, SMALL, 6, 6, phase="step")]
    base = [time_row(BASE, SMALL, 2, 2, phase="step")]
    runs = [a_run(1, [*rows(3.0), *step]), a_run(2, [*rows(3.0), *step, *base])]
    found = history(runs, phase="step")
    assert [(one.key.against, values(found, place)) for place, one in enumerate(found.series)] == [
        ("Base", [3.0]),
        ("Base's forward", [pytest.approx(6.0)]),
    ]
    assert "time(variant) / time(Base's forward)" in text(found)


def test_a_missing_cell_leaves_a_gap() -> None:
    """A run without a number of a variant has no point, and the table says of how many runs there are."""
    runs = over_days(3.0, 3.0, 3.0)
    for place, row in ((0, skipped(SPARSE, SMALL, "no")), (1, time_row(SPARSE, SMALL, 5, 5))):
        runs[place] = msgspec.structs.replace(runs[place], rows=(*runs[place].rows, row))
    nan = msgspec.structs.replace(time_row(SPARSE, SMALL, 5), samples=((math.nan,), ()))
    runs[2] = msgspec.structs.replace(runs[2], rows=(*runs[2].rows, nan))
    found = history(runs)
    assert [point.run for point in found.series[1].points] == [1]
    assert "1 of 3" in text(found)


def test_zeros_are_left_out_and_said() -> None:
    """No bytes have no place on a logarithmic axis."""
    runs = [a_run(day, [bytes_row(DENSE, SMALL, "noise_bytes", day - 1)]) for day in (1, 2)]
    found = history(runs, metric="noise_bytes")
    assert values(found) == [1.0]
    assert found.left_out == ("1 figures of 0 are left out: a logarithmic axis has no place for them",)


def test_a_change_is_between_two_runs() -> None:
    """A step stands between the last run before and the first after it, with the change of the medians."""
    (one,) = history(over_days(*LEVELS)).series
    (step,) = one.change_points
    assert one.around(step) == (3, 4)
    assert percentage(step.before, step.after) == "+10.0 %"


def test_tables_say_what_changed_and_between_which_commits() -> None:
    """A row has runs, first, last and its change points; below stands what else changed there."""
    runs = over_days(*LEVELS)
    for place, run in enumerate(runs):
        old = place < 4
        changed = header(run, code={"Perturbed": "a" if old else "b", "Other": "a" if old else "b"})
        here = msgspec.structs.replace(changed.header.environment, torch="2.13.0" if old else "2.14.0")
        runs[place] = header(changed, environment=here)
    shown = text(history(runs))
    (row,) = [line for line in shown.splitlines() if line.startswith("PerturbedLinear")]
    change = "2026-01-04 04abcde -> 2026-01-05 05abcde"
    assert row.split(maxsplit=8) == [
        "PerturbedLinear",
        "Linear(256,",
        "256)",
        "8",
        "3.00x",
        "3.30x",
        "+10.0",
        "%",
        f"{change}: +10.0 %",
    ]
    assert f"  {change}: PerturbedLinear; torch 2.13.0 -> 2.14.0, code of Perturbed\n" in shown
    assert "none" in text(history(over_days(*[3.0] * 6)))
    assert "too short" in text(history(over_days(*[3.0] * 5)))


def test_a_run_is_called_by_date_and_commit() -> None:
    """Seven digits of the commit, a plus for uncommitted changes, and words where there is none."""
    (run,) = over_days(1.0)
    here = run.header.environment
    assert moment(run) == "2026-01-01 01abcde"
    for fields, words in (({"dirty": True}, "01abcde+"), ({"commit": None}, "no commit")):
        other = header(run, environment=msgspec.structs.replace(here, **fields))
        assert moment(other, "\n") == f"2026-01-01\n{words}"


def test_json_has_all_figures() -> None:
    """One object holds runs, points with their intervals, and change points between runs."""
    runs = over_days(*LEVELS)
    found = json.loads(json.dumps(as_json(history(runs)), allow_nan=False))
    names = [run.header.run_id for run in runs]
    assert [run["run"] for run in found["runs"]] == names
    (series,) = found["series"]
    assert [point["run"] for point in series["points"]] == names
    assert [point["value"] for point in series["points"]] == pytest.approx(list(LEVELS))
    (step,) = series["change_points"]
    assert (step["last_before"], step["first_after"]) == (names[3], names[4])
    assert step["change_percent"] == pytest.approx(10)
    assert (found["metric"], found["phase"], series["against"]) == ("multiplier", "forward", "Base")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (1.0, 1.021, "+2.10 %"),
        (2.0, 1.0, "-50.0 %"),
        (3.0, 3.0000000001, "0 %"),
        (1.0, 11.0, "+1000 %"),
        (1e-300, 1e24, "n/a"),
    ],
)
def test_a_change_has_its_sign(before: float, after: float, words: str) -> None:
    """Percent of the first figure, none where that is no number."""
    assert percentage(before, after) == words


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_a_change_is_undone_by_its_inverse(before: float, factor: float) -> None:
    """There and back again, two changes multiply to one."""
    there, back = change(before, before * factor), change(before * factor, before)
    assert there is not None
    assert back is not None
    assert (1 + there / 100) * (1 + back / 100) == pytest.approx(1)


def test_globs_choose_variants_and_cases() -> None:
    """Variants by name or label, cases by label; what matches nothing is refused with what there is."""
    both = [*rows(3.0), time_row(SPARSE, SMALL, *EIGHT), *rows(3.0, linear(512))]
    runs = [a_run(day, both) for day in (1, 2)]
    assert len(history(runs).series) == 3
    assert len(history(runs, variants=["SparsePerturbedLinear*"]).series) == 1
    assert len(history(runs, variants=["Sparse*", "Perturbed"], cases="*256*").series) == 2
    with pytest.raises(
        UserError, match="no variant matches 'Nope' in these runs; there are: Perturbed; Sparse"
    ):
        history(runs, variants=["Nope", "*"])
    with pytest.raises(UserError, match="no case matches 'Nope' in these runs; there are: Linear"):
        history(runs, cases="Nope")
    with pytest.raises(UserError, match="no case that was asked for was measured with"):
        history(runs, variants=["Sparse*"], cases="*512*")


def test_cases_of_too_few_runs_are_left_away() -> None:
    """A case that fewer runs hold is no series, and is named."""
    runs = over_days(3.0, 3.0)
    runs[1] = msgspec.structs.replace(runs[1], rows=(*runs[1].rows, *rows(2.0, linear(512))))
    found = history(runs, fewest=2)
    assert [one.key.case for one in found.series] == [SMALL]
    assert found.left_out == ("left out, measured in fewer than 2 runs: Linear(512, 512)",)


def test_nothing_to_show_says_what_there_is() -> None:
    """No run, no phase, no metric, no plain layer: each has words of its own."""
    dead = msgspec.structs.replace(over_days(3.0)[0], end=None)
    assert "no run of this device can be shown: run 2026" in nothing(history([dead]))
    runs = over_days(3.0, 3.0)
    assert nothing(history(runs, phase="step")) == "no run of this device measured the phase step"
    assert nothing(history(runs, metric="nope")) == (
        "no run of this device has a figure of 'nope' in forward above 0; there are: multiplier, latency_ns"
    )
    lone = [a_run(day, [time_row(DENSE, SMALL, 1)]) for day in (1, 2)]
    assert "with the plain layer beside it; there are: multiplier, latency_ns" in nothing(history(lone))
    assert nothing(history(over_days(3.0), fewest=2)) == (
        "no case was measured in two runs by multiplier in forward: measure again with `esbench run`"
    )


def test_only_timed_phases_have_a_history() -> None:
    """Another phase is refused with those that there are."""
    assert phase_named("update") == "update"
    with pytest.raises(
        UserError, match="no phase 'quality' is timed; there are: sample, forward, update, step"
    ):
        phase_named("quality")


def test_devices_are_folders() -> None:
    """Runs are kept apart by the name of their device's folder."""
    runs = [synthetic.run([], device_name=name) for name in ("B 1", "A", "b-1")]
    assert {name: len(found) for name, found in devices(runs).items()} == {"a": 1, "b-1": 2}


@pytest.mark.parametrize("render", [text, markdown])
def test_foreign_words_stay_words(render: object) -> None:
    """Long names, markup and line breaks of foreign runs stay in their cell."""
    odd = variant("<script>|[a](b)\n" + "x" * 200)
    runs = [a_run(day, rows(3.0, variant=odd), device_name="Test\nCPU") for day in range(1, 7)]
    shown = text(history(runs)) if render is text else markdown(history(runs))
    (row,) = [line for line in shown.splitlines() if "xxx" in line]
    assert "Test CPU" in shown
    if render is markdown:
        assert "\\<script\\>\\|\\[a\\](b)" in row


def test_naive_stands_behind_the_variants() -> None:
    """Baselines are the last rows of a case."""
    run = a_run(1, [time_row(NAIVE, SMALL, *EIGHT), *rows(2.0)])
    assert [one.variant for one in history([run]).series] == [DENSE, NAIVE]
